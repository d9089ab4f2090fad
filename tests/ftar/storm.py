"""Storm: random kills, stops, cuts, stalls and changes of rings of light members; what must hold.

    python tests/ftar/storm.py --events 1000 --seed 7

Every all-reduce ends in time; one that succeeded is right at every member that says so; inputs stay as they are;
without a new fault the next ring forms and sums; a member that has closed holds nothing any more.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this file is a command, too

from ft_hsdp.ftar.settings import Settings
from tests.support.forked import Forked
from tests.support.ftar import storm_worker
from tests.support.tcp_proxy import FAULTS, Proxies, Proxy

POOL = 5  # members
ERA = 20  # events with the same settings
TRIES = 3  # of a ring on a machine that is busy with other things
DEADLINE_S = 30.0  # after which something hangs
ENDLESS = 1 << 30
FORMING_S = 0.01  # in which a ring forms, more or less
TOKEN = "5a" * 32


Message = dict[str, Any]


class Broken(AssertionError):
    """Something that must hold does not."""


class Member(Forked):
    """A forked member as the driver sees it."""

    def __init__(self, number: int, log: Path) -> None:
        super().__init__(storm_worker.member, number, str(log))
        self.number = number
        self.log = log
        self.said: list[Message] = []
        self.listening = ""
        self.address = ""
        self.proxy: Proxy | None = None
        self.stopped = False
        self.alive = True

    def tell(self, **command: Any) -> None:
        with suppress(BrokenPipeError):
            self.pipe.send(command)


class Storm:
    """The driver. ``members`` are all that live; ``ring`` those of the present epoch."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance = random.Random(seed)
        self.seed = seed
        self.members: dict[int, Member] = {}
        self.ring: list[Member] = []
        self.epoch = 0
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.outcomes: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()
        self.settings: list[Settings] = []
        self.folder = folder
        self.proxies = Proxies()
        self._forks = 0
        self._trace: list[str] = []

    # Members.

    def era(self) -> None:
        """New settings for all members; those that lived under the old ones must leave nothing behind."""
        self.close_all()
        chance = self.chance
        sizes: dict[str, Any] = {
            "chunk_bytes": chance.choice((None, None, 4096, 65536, 1 << 18)),
            **chance.choice(({}, {}, {"chunks": 1}, {"chunks": 2}, {"chunks": 5, "connections": 3})),
        }
        ways: tuple[Any, ...] = chance.choice(
            (("tcp",), ("tcp",), ("shm",), ("auto",), ("auto", "tcp"), ("c10d",))
        )
        self.trace(f"era {sizes} {ways}")
        patience = min(6.0, max(1.0, os.getloadavg()[0] / 4))  # others may need the machine too
        self.settings = [
            Settings(transport=w, timeout_s=0.8 * patience, connect_timeout_s=2 * patience, **sizes) for w in ways
        ]
        for number in range(POOL):
            if number not in self.members:
                self.fork(number)
            else:
                self.open(self.members[number])

    def fork(self, number: int) -> Member:
        self._forks += 1
        self.members[number] = member = Member(number, self.folder / f"{self._forks}-member-{number}.log")
        self.open(member)
        return member

    def open(self, member: Member) -> None:
        """Give it a communicator and perhaps a proxy."""
        settings = self.chance.choice(self.settings)
        member.tell(do="open", settings=asdict(settings), token=TOKEN)
        member.listening = self.hear(member, "opened")["opened"]
        if self.chance.random() < 0.6:
            member.proxy = self.proxies.add(member.listening)
        member.address = member.proxy.address if member.proxy else member.listening

    def unproxy(self, member: Member) -> None:
        if member.proxy is not None:
            self.proxies.drop(member.proxy)
            member.proxy = None

    def kill(self, member: Member) -> float:
        now = time.monotonic()
        member.signal(signal.SIGKILL)
        return now

    def bury(self, member: Member) -> None:
        member.close()
        self.unproxy(member)
        del self.members[member.number]

    def resume(self, member: Member) -> None:
        member.signal(signal.SIGCONT)
        member.stopped = False

    def close_one(self, member: Member) -> None:
        """Close its communicator: nothing may be left."""
        member.tell(do="close")
        left = self.hear(member, "closed")["closed"]
        self.unproxy(member)
        if left:
            raise Broken(f"member {member.number} still holds after close: {left}")

    def close_all(self) -> None:
        for member in self.chance.sample(list(self.members.values()), len(self.members)):
            self.close_one(member)

    # Hearing.

    def hear(self, member: Member, what: str, epoch: int | None = None) -> Message:
        """Its next message with ``what``."""
        return self.hear_all([member], (what,), epoch)[member.number]

    def hear_all(
        self, members: Collection[Member], whats: tuple[str, ...], epoch: int | None = None
    ) -> dict[int, Message]:
        """From each of ``members`` one message of ``whats`` (of ``epoch``); what was said before it counts too."""
        found: dict[int, Message] = {}
        end = time.monotonic() + DEADLINE_S
        while True:
            for m in members:
                if m.number not in found and (message := self._pick(m, whats, epoch)) is not None:
                    found[m.number] = message
            if len(found) == len(members):
                return found
            self.pump(
                0.2, end, f"{whats} of epoch {epoch} from {[m.number for m in members if m.number not in found]}"
            )

    @staticmethod
    def _pick(member: Member, whats: tuple[str, ...], epoch: int | None) -> Message | None:
        for message in member.said:
            for what in whats:
                if what in message and (epoch is None or message[what] == epoch):
                    member.said.remove(message)
                    return message
        return None

    def pump(self, wait_s: float, end: float, what: str) -> None:
        """Read what members say for a moment."""
        living = [m for m in self.members.values() if m.alive]
        heard = connection.wait([m.pipe for m in living], wait_s)
        for member in living:
            if member.pipe not in heard:
                continue
            try:
                message = member.pipe.recv()
            except (EOFError, ConnectionResetError):
                member.alive = False
                continue
            self._note(member, message)
            member.said.append(message)
        if time.monotonic() > end:
            self.dump()
            raise Broken(f"no {what} within {DEADLINE_S:g} s")

    def _note(self, member: Member, message: Message) -> None:
        if "formed" in message and message["formed"] is not False and "took" in message:
            self.seconds["reconfigure"].append(message["took"])
        if "problem" in message:
            raise Broken(f"member {member.number}: {message['problem']}")
        if "ended" in message:
            self.outcomes[f"{message['why']}"] += 1

    def dump(self) -> None:
        """Have every member write its stacks to its log."""
        for member in self.members.values():
            if member.alive:
                if member.stopped:
                    self.resume(member)
                member.signal(signal.SIGUSR1)
        time.sleep(0.5)

    def trace(self, line: str) -> None:
        """What was done, for whoever has to understand a failure."""
        self._trace.append(f"{time.monotonic():.4f} {line}")

    @property
    def last(self) -> str:
        return "\n".join(self._trace[-25:])

    # Rings.

    def tell_ring(self, members: list[Member], ops: int = ENDLESS) -> int:
        """A new epoch for ``members``."""
        self.epoch += 1
        self.ring = members
        names = [(m.number, m.address) for m in members]
        for member in self.chance.sample(members, len(members)):
            member.tell(do="ring", epoch=self.epoch, members=names, ops=ops, seed=str(self.seed))
        self.trace(f"ring {self.epoch}: {[m.number for m in members]} ops {ops}")
        return self.epoch

    def pick_ring(self) -> list[Member]:
        """Some of the members, in any order."""
        ready = [m for m in self.members.values() if m.alive and not m.stopped]
        return self.chance.sample(ready, self.chance.randint(min(2, len(ready)), len(ready)))

    def start(self, members: list[Member] | None = None) -> None:
        """A ring without faults: it has to form and sum."""
        self._succeed(members or self.pick_ring(), ENDLESS, "going")

    def calm(self) -> None:
        """A ring that sums some times and then waits, so that the next one can keep its edges."""
        self._succeed(self.ring, self.chance.randint(1, 6), "done")

    def _succeed(self, members: list[Member], ops: int, what: str) -> None:
        """Without a fault only a machine that has no time for us may break a ring, and not again and again."""
        for _ in range(TRIES):
            epoch = self.tell_ring(members, ops)
            heard = self.hear_all(self.ring, (what, "ended"), epoch)
            bad = {n: m for n, m in heard.items() if "ended" in m}
            if not bad:
                return
            if not any(m["why"] == "PeerTimeout" or "not connected within" in m["text"] for m in bad.values()):
                break
            self.outcomes["late without a fault"] += 1
            self.trace(f"late: {bad}")
            if what == "going":
                self.ended(m for m in self.ring if m.number not in bad)
        raise Broken(f"epoch {epoch} failed without a fault: {bad}")

    def ended(self, members: Iterable[Member]) -> dict[int, Message]:
        return self.hear_all(list(members), ("ended",), self.epoch)

    def undisturbed(self) -> None:
        before = self.progress()
        end = time.monotonic() + DEADLINE_S
        while any(now <= before[n] for n, now in self.progress().items()):
            self.pump(0.01, end, "progress after a harmless event")

    def progress(self) -> dict[int, int]:
        """How many sums each member of the ring has."""
        for member in self.ring:
            member.tell(do="ping")
        heard = self.hear_all(self.ring, ("pong",))
        if bad := {m.number: w for m in self.ring for w in m.said if w.get("ended") == self.epoch}:
            raise Broken(f"a harmless event broke epoch {self.epoch}: {bad}")
        return {n: m["pong"] for n, m in heard.items()}

    def clear(self) -> None:
        """After an event: the proxies heal, old words go."""
        for member in list(self.members.values()):
            if member.proxy is not None:
                proxy = member.proxy
                self.proxies.call(proxy.heal)
        for member in list(self.members.values()):
            if not member.alive:
                raise Broken(f"member {member.number} is gone; see {member.log}")
            member.said.clear()

    def close(self) -> None:
        """End all, also after a failure."""
        for member in list(self.members.values()):
            self.kill(member)
            self.bury(member)
        self.proxies.close()

    def run(self, events: int) -> None:
        """The storm.

        Raises:
            Broken: something that must hold did not; its text says after which events.
        """
        try:
            for number in range(events):
                if number % ERA == 0:
                    self.era()
                self.start()
                name, event = self.chance.choices(list(EVENTS.items()), [e.weight for e in EVENTS.values()])[0]
                self.trace(f"event {number}: {name}")
                self.happened[name] += 1
                event.do(self)
                self.clear()
            self.start()
            self.close_all()
        except Exception as error:
            raise Broken(f"{error}\nseed {self.seed}, logs in {self.folder}\n{self.last}") from error

    def report(self) -> str:
        """What happened, and how long things took."""
        lines = [f"events: {dict(self.happened.most_common())}", f"errors: {dict(self.outcomes.most_common())}"]
        for name, taken in sorted(self.seconds.items()):
            ms = sorted(1e3 * t for t in taken)
            lines.append(f"{name}: n {len(ms)}, p50 {statistics.median(ms):.1f}, max {ms[-1]:.1f} ms")
        return "\n".join(lines)


# The events: each does something to a ring that is going, and waits for what has to come of it.


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


def main() -> None:
    """Run a storm from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    storm = Storm(arguments.seed, folder)
    start = time.monotonic()
    try:
        storm.run(arguments.events)
    finally:
        storm.close()
        print(f"{time.monotonic() - start:.1f} s; logs in {folder}")
        print(storm.report())


if __name__ == "__main__":
    main()
