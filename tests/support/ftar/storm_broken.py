"""What a storm may find."""


class Broken(AssertionError):
    """Something that must hold does not."""


class Disturbed(Broken):
    """A ring has ended at somebody, after an event that is harmless."""
