class Meter:
    """Stands where `state.pacing.SpanMeter` stands, without a page."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self) -> None:
        """Write down that a communication begins."""
        self.told.append("begin")

    def end(self) -> None:
        """Write down that a communication has ended."""
        self.told.append("end")
