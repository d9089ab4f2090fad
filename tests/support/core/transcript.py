"""Transcripts: a replica's core driven by lines of text, its effects as lines of text.

A transcript is a sequence of blocks ``event -> effects``::

    # for humans
    reduced
    ----
    send token: e1s1 pass 1 yes
    = voted on zero, prepared for e1s1

States are named ``zero`` or after the record that leads to them: ``e1s2`` is step 2 by epoch 1, ``e1s2a1`` its
second attempt. After a deliberate change of the core, ``python tests/core/transcript.py`` writes all anew.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ft_hsdp.core import effects, events, state_id
from ft_hsdp.core import replica as core
from ft_hsdp.core.commit import AttemptId, CommitRecord, CommitToken, Contribution
from ft_hsdp.core.grant import Answer, CatchUp, Continue, Finish, Grant, Member, Refused, Role
from ft_hsdp.core.replica_state import Replica, ReplicaPolicy
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import Places

FOLDER = Path(__file__).parents[2] / "core" / "transcripts"
ZERO = state_id.initial("config", "weights")
Words = dict[str, str]


def numbers(text: str) -> tuple[int, ...]:
    """``0,2`` as (0, 2)."""
    return tuple(int(n) for n in text.split(",") if n)


def fence_of(text: str) -> AttemptId:
    """``e1s2a1`` as a fence."""
    head, _, attempt = text.partition("a")
    epoch, step = head[1:].split("s")
    return AttemptId(int(epoch), int(step), int(attempt or 0))


def short(fence: AttemptId) -> str:
    """A fence as ``e1s2a1``."""
    return f"e{fence.epoch}s{fence.step}" + (f"a{fence.attempt}" if fence.attempt else "")


@dataclass
class Driver:
    """One replica, the records that it has heard of, and the names of states."""

    replica: Replica | None = None
    states: dict[str, StateId] = field(default_factory=lambda: {"zero": ZERO})

    def feed(self, line: str) -> list[str]:
        """What happens on ``line``: effects, then the state after."""
        verb, *rest = line.split()
        words: Words = {key: value for key, _, value in (w.partition("=") for w in rest)}
        if verb == "replica":
            me = int(words["me"])
            rules = ReplicaPolicy(
                checkpoint_every=int(words.get("every", "0")),
                catchup_log_steps=int(words.get("log", "64")),
                poison=words.get("poison", "exclude_contributor"),  # type: ignore[arg-type]
                keep_last="keep_last" in words,
            )
            self.replica = Replica(me, f"{me}-0", int(words["steps"]), ZERO, ZERO, rules)
            event: events.Event = events.Started()
        else:
            event = self._event(verb, words)
        self.replica, due = core.transition(self.me, event)
        return [*(self._effect(e) for e in due), f"= {self._state()}"]

    @property
    def me(self) -> Replica:
        assert self.replica is not None
        return self.replica

    def _event(self, verb: str, words: Words) -> events.Event:
        match verb:
            case "grant":
                return events.Answered(self._grant(words))
            case "shown":
                return events.GrantShown(self._grant(words))
            case "continue" | "catch_up" | "finish" | "refused":
                return events.Answered(self._answer(verb, words))
            case "unanswered":
                return events.Unanswered()
            case "lease_ended":
                return events.LeaseEnded()
            case "broken":
                suspect = int(words["suspect"]) if "suspect" in words else None
                return events.RingBroken(int(words["epoch"]), suspect)
            case "reduced":
                fence = fence_of(words["of"]) if "of" in words else self.me.fence
                return events.Reduced(fence, self._record(fence, words), words.get("digest", ""))
            case "token":
                return events.TokenArrived(self._token(words))
            case "fetched":
                return events.Fetched(self.states[words["base"]])
            case "fetch_failed":
                return events.FetchFailed(self.states[words["base"]], "checksum")
            case "written":
                return events.CheckpointWritten(self.states[words["state"]])
            case "unwritten":
                return events.CheckpointFailed(self.states[words["state"]], "the disk is full")
            case "unsaved":
                return events.CheckpointOverdue()
            case "overdue":
                return events.LeaveOverdue()
            case "leave":
                return events.LeaveRequested(words.get("how", "told"))  # type: ignore[arg-type]
        raise ValueError(f"no such event: {verb}")

    def _grant(self, words: Words) -> Grant:
        """Members are replica ids, with "b" (behind), "s" (stands by) and "!" (its next incarnation).

        "units=4,3" gives their units, "placesN=0+3/6+1" the first places of member N as first+count.
        """
        named = words["members"].split(",")
        units = [int(n) for n in words["units"].split(",")] if "units" in words else [1] * len(named)
        members = tuple(_member(m, n, words) for m, n in zip(named, units, strict=True))
        base = self.states[words["base"]] if words["base"] in self.states else self._name(words["base"])
        void = tuple(fence_of(v) for v in words.get("void", "").split(",") if v)
        term = int(words.get("term", "1"))
        shared = "shared" in words
        return Grant(
            term, int(words["epoch"]), base, members, 3, "the lighthouse says so", void, sum(units), shared
        )

    def _name(self, name: str) -> StateId:
        """A state that this replica has not seen."""
        fence = fence_of(name)
        return self.states.setdefault(name, StateId(fence.epoch, fence.step, f"unseen {name}"))

    def _answer(self, verb: str, words: Words) -> Answer:
        if verb == "continue":
            demanded = int(words.get("checkpoint", "0"))
            return Continue(int(words["epoch"]), int(words["step"]), "leave" in words, demanded)
        if verb == "finish":
            return Finish()
        if verb == "refused":
            return Refused("fenced", int(words["code"]), "forget" in words)
        base = self.states[words["base"]] if words["base"] in self.states else self._name(words["base"])
        return CatchUp(base, tuple(Member(d, f"{d}-0", "contribute") for d in numbers(words["donors"])))

    def _record(self, fence: AttemptId, words: Words) -> CommitRecord:
        """The record that an honest reduction of ``fence`` has, unless ``words`` say otherwise."""
        grant = self.me.grant
        assert grant is not None
        named = (m.replica for m in grant.members if m.role == "contribute")
        able = tuple(r for r in named if r not in self.me.excluded)
        by = numbers(words["by"]) if "by" in words else able
        put = tuple(
            Contribution(r, 1, 0, 9 * fence.step + r) if grant.shared else Contribution(r, 1, r, fence.step - 1)
            for r in by
        )
        poisoned = numbers(words.get("poisoned", ""))
        record = CommitRecord(
            fence.epoch,
            fence.attempt,
            fence.step,
            self.me.ring_state.lineage,
            grant.ring,
            grant.total,
            put,
            words.get("sum", "sum"),
            poisoned=poisoned,
            spoiled=self.me.spoiled,
            retries=self.me.policy.poison_retries if self.me.spoiled else 0,
        )
        self.states[short(fence) + ("'" if "sum" in words else "")] = record.state_id
        return record

    def _token(self, words: Words) -> CommitToken:
        fence = fence_of(words["of"]) if "of" in words else self.me.fence
        claimed = self._record(fence, words).state_id.lineage
        return CommitToken(
            fence,
            "verdict" in words,
            "yes" in words,
            claimed,
            numbers(words.get("equal", "")),
            numbers(words.get("leaving", "")),
            tuple((int(d[0]), d[2:]) for d in words.get("digests", "").split(",") if d),
            numbers(words.get("lagging", "")),
            numbers(words.get("unwritable", "")),
            checkpoint=int(words.get("checkpoint", "0")),
            writing=numbers(words.get("writing", "")),
            stop="stop" in words,
        )

    # How it reads.

    def _called(self, state: StateId) -> str:
        return next((name for name, known in self.states.items() if known == state), str(state))

    def _effect(self, effect: effects.Effect) -> str:
        match effect:
            case effects.RequestGrant(r, pause):
                extra = [f"in epoch {r.epoch}"] if r.epoch else []
                extra += [f"after {r.after}"] if r.after else []
                extra += [f"prepared for {self._called(r.prepared.state_id)}"] if r.prepared else []
                extra += [f"void {short(r.void)}"] if r.void else []
                extra += [f"in doubt about {self._called(r.doubt)}"] if r.doubt else []
                extra += _lists(r, "equal", "leaving", "lagging", "diverged", "suspects")
                extra += [f"saved step {r.saved}"] if r.saved else []
                extra += ["departs"] if r.departs else []
                extra += ["still writing"] if r.writing else []
                extra += ["a moment later"] if pause else []
                return ", ".join([f"ask for step {r.step}: holds {self._called(r.state)}", *extra])
            case effects.Configure(grant):
                return f"configure epoch {grant.epoch}: ring {list(grant.ring)}"
            case effects.StopRing(epoch, reason):
                return f"stop ring {epoch}: {reason}"
            case effects.Reduce(fence, role, prev, places):
                on = next((name for name, s in self.states.items() if s.lineage == prev), prev)
                return f"reduce {short(fence)} on {on}: {role}{_places(places)}"
            case effects.SendToken(t):
                extra = _lists(t, "equal", "leaving")
                extra += ["digests " + ", ".join(f"{r}:{d}" for r, d in t.digests)] if t.digests else []
                extra += _lists(t, "lagging", "unwritable", "writing")
                extra += [f"checkpoint {t.checkpoint}"] if t.checkpoint else []
                extra += ["stop"] if t.stop else []
                extra += [t.reason] if t.reason else []
                said = f"{'verdict' if t.verdict else 'pass 1'} {'yes' if t.yes else 'no'}"
                return ", ".join([f"send token of {short(t.fence)}: {said}", *extra])
            case effects.Commit(record):
                how = ", skipped" if record.skipped else ""
                how += f", without units {list(record.spoiled)}" if record.spoiled else ""
                return f"commit {self._called(record.state_id)}: {list(record.contributors)}{how}"
            case effects.BufferUpdate(record):
                return f"log {self._called(record.state_id)}: {list(record.contributors)}"
            case effects.DropGradient(reason):
                full = ": " + reason.split(":")[1].strip() if "newer base" in reason else ""
                return f"discard the local gradient{full}"
            case effects.InstallSnapshot(base):
                return f"install {self._called(base)}"
            case effects.RunBatch(step, places, following):
                after = f", then {following}" if _places(places) else ""
                return f"feed step {step}{_places(places)}{after}"
            case effects.Fetch(base, donors):
                return f"fetch {self._called(base)} from {[d.replica for d in donors]}"
            case effects.Keep(state):
                return f"keep {self._called(state)} for others"
            case effects.WriteCheckpoint(state):
                return f"write a checkpoint of {self._called(state)}"
            case effects.DropSnapshots():
                return "forget all snapshots"
            case effects.DropCopies(replicas):
                return f"forget copies of {list(replicas)}"
            case effects.Exit(code, reason, done, for_all):
                return f"exit {code}{', done' if done else ''}{' for all' if for_all else ''}: {reason}"

    def _state(self) -> str:
        s = self.me
        text = [f"{s.phase.value} on {self._called(s.ring_state)}"]
        text += [f"holds {self._called(s.state)}"] if not s.verified else []
        text += [f"fetching {self._called(s.fetching)}"] if s.fetching else []
        text += [f"log {[self._called(r.state_id) for r in s.log]}"] if s.log else []
        text += [f"prepared for {self._called(s.prepared.state_id)}"] if s.prepared else []
        text += [f"without {list(s.excluded)}"] if s.excluded else []
        text += [f"writing {self._called(s.writing)}"] if s.writing else []
        text += [f"writers {[r for r, _ in s.writers]}"] if s.writers else []
        text += ["no ring"] if not s.intact else []
        return ", ".join(text)


def replay(text: str) -> str:
    """``text`` with what really happens in the place of what is expected."""
    return "".join(_blocks(text))


def _blocks(text: str) -> Iterator[str]:
    driver = Driver()
    for block in text.strip().split("\n\n"):
        given = block.split("----")[0].strip("\n")
        event = next((line for line in given.splitlines() if not line.startswith("#")), None)
        if event is None:
            yield f"{given}\n\n"
            continue
        yield f"{given}\n----\n" + "\n".join(driver.feed(event)) + "\n\n"


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.txt")):
        path.write_text(replay(path.read_text()).rstrip("\n") + "\n")


def _member(word: str, units: int, words: Words) -> Member:
    number = word.strip("bs!")
    role: Role = "behind" if "b" in word else "standby" if "s" in word else "contribute"
    runs = (run.split("+") for run in words.get(f"places{number}", "").split("/") if run)
    places = tuple((int(first), int(count)) for first, count in runs)
    return Member(int(number), f"{number}-{int('!' in word)}", role, units=units, places=places)


def _lists(of: object, *names: str) -> list[str]:
    """Say which replicas these are, of those that are any."""
    return [f"{name} {list(getattr(of, name))}" for name in names if getattr(of, name)]


def _places(places: Places) -> str:
    """Say which places these are, unless it is the first one alone."""
    return "" if places in ((), ((0, 1),)) else " at " + "/".join(f"{first}+{count}" for first, count in places)
