"""The events of a storm: each does something to a ring that is going, and waits for what has to come of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.ftar.storm_proxy import FAULTS

if TYPE_CHECKING:
    from tests.ftar.storm import Member, Storm

FORMING_S = 0.01  # in which a ring forms, more or less


def kill(storm: Storm) -> None:
    """One or two die in the middle of sums; all others hear of it, and sum again."""
    victims = _some(storm, 2)
    killed = [storm.kill(v) for v in victims][-1]
    survivors = _others(storm, victims)
    for message in storm.ended(survivors).values():
        storm.seconds["kill to raise"].append(message["t"] - killed)
    _bury(storm, victims)
    if survivors:
        storm.start(survivors)
        storm.seconds["kill to three sums, all told at once"].append(time.monotonic() - killed)
    _again(storm, victims)


def kill_forming(storm: Storm) -> None:
    """One dies while a ring forms."""
    storm.tell_ring(storm.pick_ring())
    victims = _some(storm, 1)
    time.sleep(storm.chance.uniform(0, FORMING_S))
    for victim in victims:
        storm.kill(victim)
    storm.ended(_others(storm, victims))
    _bury(storm, victims)
    _again(storm, victims)


def kill_idle(storm: Storm) -> None:
    """One dies while its ring has nothing to do."""
    storm.calm()
    victims = _some(storm, 1)
    for victim in victims:
        storm.kill(victim)
    if storm.chance.random() < 0.5:
        _bury(storm, victims)
        storm.start(_others(storm, victims) or None)
    else:
        storm.tell_ring(storm.ring)  # nobody knows yet
        storm.ended(_others(storm, victims))
        _bury(storm, victims)
    _again(storm, victims)


def pause(storm: Storm) -> None:
    """One stops for less than the timeout: nothing happens."""
    (member,) = _some(storm, 1)
    member.signal(signal.SIGSTOP)
    time.sleep(storm.chance.uniform(0.0, 0.2))
    member.signal(signal.SIGCONT)
    storm.undisturbed()


def stop(storm: Storm) -> None:
    """One stops for longer than the timeout: the others go on without it, and it comes back late."""
    if len(storm.ring) < 2:
        return
    (member,) = _some(storm, 1)
    old = storm.epoch
    member.stopped = True
    member.signal(signal.SIGSTOP)
    others = _others(storm, [member])
    right = [m["suspect"] == member.number for m in storm.ended(others).values()]
    storm.outcomes["the stopped one is suspected"] += sum(right)
    storm.outcomes["another one is suspected"] += len(right) - sum(right)
    storm.start(others)
    storm.resume(member)
    storm.hear(member, "ended", old)
    if storm.chance.random() < 0.5:  # it wants into the ring that was formed without it
        names = [(m.number, m.address) for m in [member, *others]]
        member.tell(do="ring", epoch=storm.epoch, members=names, ops=1, seed="late")
        storm.hear(member, "ended", storm.epoch)
    storm.undisturbed()


def hurt(storm: Storm) -> None:
    """The network does something to the connections of one member."""
    proxied = [m for m in storm.ring if m.proxy is not None and len(storm.ring) > 1]
    if not proxied:
        return
    proxy = storm.chance.choice(proxied).proxy
    fault, which = storm.chance.choice(FAULTS), storm.chance.choice(("control", "data"))
    delay_s = storm.chance.uniform(0.0, 0.3)
    storm.trace(f"{fault} {which}")
    count = storm.proxies.call(lambda: proxy.hurt(fault, which, delay_s))
    if count and (fault in ("cut", "half") or (which, fault) == ("data", "stall")):
        storm.ended(storm.ring)
    else:
        storm.undisturbed()


def hurt_forming(storm: Storm) -> None:
    """The network does something to a ring that forms: it forms, or all know that it does not."""
    members = storm.pick_ring()
    proxied = [m for m in members if m.proxy is not None]
    if not proxied:
        return
    proxy = storm.chance.choice(proxied).proxy
    fault = storm.chance.choice(FAULTS)
    storm.trace(f"{fault} while forming")
    storm.proxies.call(lambda: proxy.later(fault))
    _forms_or_not(storm, storm.tell_ring(members))


def overtake(storm: Storm) -> None:
    """A newer epoch comes before the last one is formed."""
    for _ in range(storm.chance.randint(1, 3)):
        storm.tell_ring(storm.pick_ring())
        time.sleep(storm.chance.choice((0.0, storm.chance.uniform(0, FORMING_S))))
    storm.start()


def keep(storm: Storm) -> None:
    """Rings that have nothing to do are followed by others that share edges with them."""
    for _ in range(storm.chance.randint(1, 4)):
        storm.calm()
        if storm.chance.random() < 0.5:
            rest = [m for m in storm.members.values() if m not in storm.ring]
            at = storm.chance.randint(0, len(storm.ring))
            if rest and storm.chance.random() < 0.5:
                storm.ring = [*storm.ring[:at], storm.chance.choice(rest), *storm.ring[at:]]
            elif len(storm.ring) > 1:
                storm.ring = storm.ring[: at - 1] + storm.ring[at:] if at else storm.ring[1:]
    storm.start(storm.ring)


def leave(storm: Storm) -> None:
    """One leaves in the middle of sums, and holds nothing any more."""
    (member,) = _some(storm, 1)
    storm.close_one(member)
    storm.ended(_others(storm, [member]))
    storm.open(member)


def abort(storm: Storm) -> None:
    """One gives the ring up: all hear of it."""
    asked = time.monotonic()
    storm.chance.choice(storm.ring).tell(do="abort")
    for message in storm.ended(storm.ring).values():
        storm.seconds["abort to raise"].append(message["t"] - asked)


@dataclass(frozen=True, slots=True)
class Event:
    """What it does, and how often it comes beside the others."""

    do: Callable[[Storm], None]
    weight: float


EVENTS = {
    event.__name__: Event(event, weight)
    for event, weight in (
        *((kill, 4.0), (kill_forming, 2.0), (kill_idle, 1.0), (pause, 1.0), (stop, 1.0), (hurt, 4.0)),
        *((hurt_forming, 1.0), (overtake, 1.0), (keep, 1.5), (leave, 1.0), (abort, 1.0)),
    )
}


def _some(storm: Storm, most: int) -> list[Member]:
    """Members of the ring, not all unless it has but one."""
    return storm.chance.sample(storm.ring, storm.chance.randint(1, max(1, min(most, len(storm.ring) - 1))))


def _others(storm: Storm, but: list[Member]) -> list[Member]:
    return [m for m in storm.ring if m not in but]


def _bury(storm: Storm, victims: list[Member]) -> None:
    for victim in victims:
        storm.bury(victim)


def _again(storm: Storm, victims: list[Member]) -> None:
    for victim in victims:
        storm.fork(victim.number)


def _forms_or_not(storm: Storm, epoch: int) -> None:
    heard = storm.hear_all(storm.ring, ("going", "ended"), epoch)
    if any("ended" in m for m in heard.values()):
        storm.ended([m for m in storm.ring if "going" in heard[m.number]])
