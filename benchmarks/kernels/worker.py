"""One member of a ring as a process of its own; `processes` starts it and passes its task as JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from benchmarks.kernels import reference
from benchmarks.kernels.checks import empty, fresh, programs
from benchmarks.kernels.ring import Broken, KernelRingMember, PinnedSegment, RingMemoryLayout


def say(**what: Any) -> None:
    """Write one line of JSON for the parent."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(task: dict[str, Any]) -> None:
    """Run all-reduces on fresh data until `repeat` are done or the ring breaks."""
    torch.set_num_threads(1)
    device = torch.device(task["device"])
    position, members, elements = task["position"], task["members"], task["elements"]
    layout = RingMemoryLayout(members, task["chunk_bytes"], task["slots"])
    segment = PinnedSegment(layout.nbytes, task["fd"])
    if device.type == "cuda":
        segment.pin()
    member = KernelRingMember(
        segment.bytes, layout, position, device, 16 * -(-elements // 4) + 16, programs=programs(),
        timeout_s=task["timeout_s"],
    )  # fmt: skip
    member.plane.warm_up((torch.float32,))
    say(ready=True)
    sys.stdin.readline()
    out = empty(elements, torch.float32, device)
    times = []
    same = True
    try:
        for number in range(task["repeat"]):
            torch.manual_seed(task["seed"] + number)
            inputs = [fresh(elements, torch.float32, device) for _ in range(members)]
            begin = time.perf_counter()
            member.all_reduce(inputs[position], out)
            times.append(time.perf_counter() - begin)
            want = reference.ring_all_reduce(inputs, out, layout.chunk_bytes // 4, layout.slots)
            same = same and torch.equal(out, want[position])
            say(done=number)
    except Broken as error:
        say(broken=str(error), at=time.monotonic(), ok=same)
        return
    member.close()
    say(finished=True, ok=same, ms=1e3 * sorted(times)[len(times) // 2])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
