"""Flame graphs of CPU time: which Python functions the threads of a process spend it in.

Every `PERIOD_S` a thread looks where each of the others is, and counts the CPU time that it has taken since the
look before. So waits do not count, and what C does counts for the function that called it. What is shorter than
`PERIOD_S` counts for where its thread is afterwards: of a thread that computes in bursts only the total is right.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from html import escape
from pathlib import Path
from types import FrameType

PERIOD_S = 0.01
WIDTH, ROW = 1600, 17  # pixels
LEAST = 0.4  # pixels of what is drawn


class Sampler(threading.Thread):
    """Samples this process from `start` until `stop`."""

    def __init__(self) -> None:
        super().__init__(name="sampler", daemon=True)
        self._ended = threading.Event()
        self.found: Counter[str] = Counter()  # microseconds, by stack: "thread;outermost;...;innermost"

    def stop(self) -> dict[str, int]:
        self._ended.set()
        self.join()
        return dict(self.found)

    def run(self) -> None:
        before: dict[int, int] = {}
        while not self._ended.wait(PERIOD_S):
            frames = sys._current_frames()
            for thread in threading.enumerate():
                if thread is self or thread.ident not in frames or thread.native_id is None:
                    continue
                try:
                    text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
                except OSError:  # it has ended
                    continue
                now = int(text.split()[0]) // 1000
                spent = now - before.setdefault(thread.native_id, now)
                before[thread.native_id] = now
                if not spent:
                    continue
                calls: list[str] = []
                frame: FrameType | None = frames[thread.ident]
                while frame is not None:
                    code = frame.f_code
                    calls.append(f"{frame.f_globals.get('__name__', '?')}.{code.co_qualname}".replace(";", ","))
                    frame = frame.f_back
                self.found[";".join([re.sub(r"[-_]\d+", "", thread.name), *calls[::-1]])] += spent


def draw(stacks: Mapping[str, float], title: str) -> str:
    """Return an SVG of milliseconds by stack. A rectangle says its share when the mouse is over it."""
    total, places = sum(stacks.values()) or 1.0, dict[tuple[str, ...], tuple[float, float]]()
    for stack, value in sorted(stacks.items()):
        calls = tuple(stack.split(";"))
        for depth in range(1, len(calls) + 1):
            begin, width = places.get(calls[:depth], (-1.0, 0.0))
            if begin < 0:
                above = calls[: depth - 1]
                begin = places[above][0] if above else 0.0
                begin += sum(w for c, (_, w) in places.items() if len(c) == depth and c[:-1] == above)
            places[calls[:depth]] = begin, width + value
    deepest = max(map(len, places), default=0)
    lines = [f'<text x="4" y="{ROW - 4}">{escape(title)}: {total:.0f} ms</text>']
    for calls, (begin, width) in places.items():
        x, wide, y = WIDTH * begin / total, WIDTH * width / total, ROW * (deepest - len(calls) + 1)
        if wide < LEAST:
            continue
        hue = sum(calls[-1].encode()) % 60
        says = f"{escape(calls[-1])}: {width:.1f} ms, {100 * width / total:.1f} %"
        name = escape(calls[-1].rpartition(".")[2][: int(wide / 7)])
        box = f'x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW - 1}" fill="hsl({hue},80%,70%)"'
        lines.append(f'<g><title>{says}</title><rect {box}/><text x="{x + 2:.1f}" y="{y + 12}">{name}</text></g>')
    size = f'width="{WIDTH}" height="{ROW * (deepest + 2)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="11">'
    return "\n".join([head, *lines, "</svg>\n"])
