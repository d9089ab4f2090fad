"""The result of every bench as tables that are readable at 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape

from ft_hsdp.bench.goals import JUDGES, TORCHFT_FETCHES, Row, times_as_fast, times_as_long, where
from ft_hsdp.bench.results import size_name
from ft_hsdp.bench.table_parts import LIMITS, figures_of, interval_of, print_table
from ft_hsdp.bench.width.figures import width_figures

ANCHORS = ("gloo", "torchft", "openmpi")
TAIL = ("p50_ms", "p99_ms", "max_ms")
SPANS = {
    "next": "{signal} to the next commit",
    "less_one": "the same less one step",
    "stall": "all of the step hit, less one",
    "repeat": "new grant to commit, computed",
    "rejoin": "{signal} to contributing again",
    "rejoin_wait": "the others' waits for that",
}
RETURNS = ("a step", "less one", "p99", "max", "all of it", "contributes", "of")
TOKENS = {
    "gradient": "gradient, weight: tokens",
    "loss": "loss, weight: tokens",
    "one_batch": "gradient of one big batch in fp32",
    "mean_over_units": "gradient, mean over units",
}
LAST_PHASE = "step"
STARTS = {
    "warm": "a process that waits, its model built",
    "cold": "forked from one that has imported torch",
    "torchft": "from nothing: interpreter, torch, torchft",
}
"""What a killed replica begins with: the contenders are not equal here, and a user meets them as they are."""


def show(bench: str, result: Row, stream: TextIO) -> None:
    """Print a result: where and with what it was measured, the figures, the goals, the notes."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    if bench == "driver":
        _driver(result, console)
        return
    machine = result["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items() if value)
    console.print(
        escape(
            f"{result['date']}, {machine['cpu']}, {machine['cores']} cores, load {machine['load_1min_before']} "
            f"before; {versions}; TCP congestion control {machine['tcp_congestion_default']} by default"
        )
    )
    _FIGURES[bench](result, console)
    if found := list(JUDGES[bench](result)):
        goals = []
        for verdict in found:
            met = "[green]met[/]" if verdict.met else "[red]missed[/]"
            wanted = f"{verdict.bound} {verdict.limit:g}"
            goals.append((verdict.text, where(verdict), wanted, f"{verdict.seen:.3g}", met))
        print_table(console, "Goals", ("goal", "", "wanted", "seen", ""), goals)
    for note in result["notes"]:
        console.print(escape(f"note: {note}"))


def _median_and_most(span: Mapping[str, float]) -> str:
    return " / ".join(figures_of(span, ("p50_ms", "max_ms")))


def _contenders(result: Row, console: Console, key: str = "contenders", width: int = 8) -> None:
    for name, text in result[key].items():
        console.print(f"  {name:<{width}} {text}")


def _ftar(result: Row, console: Console) -> None:
    _contenders(result, console)
    for members in dict.fromkeys(row["members"] for row in result["bandwidth"]):
        _bandwidth([row for row in result["bandwidth"] if row["members"] == members], members, console)
    if result["spin"]:
        title = "Beside a spinning Python thread: median ms (share of idle speed)"
        print_table(
            console, title, ("", "N", "size", "idle", "in a rank", "own process"), map(_spin, result["spin"])
        )
    if result["kill"]:
        spans = ("to the raise", "to the next sum", "less one sum")
        title = "SIGKILL of a member: p50 / max ms"
        print_table(console, title, ("", "N", "size", "kills", *spans), map(_ring_kill, result["kill"]))
    if result["reconfigure"]:
        heads = ("", "N", "order", "time")
        print_table(console, "Reconfigure: p50 / max ms", heads, map(_reconfigured, result["reconfigure"]))
    for row in result.get("link", ()):
        _link(row, console)


def _bandwidth(rows: Sequence[Row], members: int, console: Console) -> None:
    names = list(rows[0]["contenders"])
    heads = ("", *(size_name(row["bytes"]) for row in rows))
    times = [(name, *(f"{row['contenders'][name]['p50_ms']:.3g}" for row in rows)) for name in names]
    print_table(console, f"All-reduce of fp32, {members} members: median ms of {rows[0]['rounds']}", heads, times)
    for anchor in (anchor for anchor in ANCHORS if anchor in names and len(names) > 1):
        others = [name for name in names if name != anchor]
        times = [(name, *(f"{row['times_as_fast'][name][anchor]:.2f}" for row in rows)) for name in others]
        print_table(console, f"Times as fast as {anchor}, {members} members", heads, times)


def _spin(row: Row) -> Sequence[str]:
    modes, share = row["modes"], row["share_of_idle"]
    spinning = (f"{modes[mode]['p50_ms']:.3g} ({share[mode]:.2f})" for mode in ("thread", "process"))
    idle = f"{modes['idle']['p50_ms']:.3g}"
    return row["contender"], str(row["members"]), size_name(row["bytes"]), idle, *spinning


def _ring_kill(row: Row) -> Sequence[str]:
    spans = (_median_and_most(row[key]) for key in ("raise", "next", "next_less_one"))
    return row["contender"], str(row["members"]), size_name(row["bytes"]), str(row["kills"]), *spans


def _reconfigured(row: Row) -> Sequence[str]:
    return row["contender"], str(row["members"]), row["change"], _median_and_most(row)


def _link(row: Row, console: Console) -> None:
    shape = f"{row['members']} replicas of {row['ranks']} ranks, links of {row['rate']}"
    rows = []
    for name, found in row["crews"].items():
        cost = f"{row['cost_ms'][name]:.0f}" if name in row["cost_ms"] else ""
        sent = f"{found['link_bytes_per_step'] / 1e6:.1f}"
        rows.append((name, f"{found['step']['p50_ms']:.0f}", cost, f"{found['cpu_ms_per_step']:.0f}", sent))
    heads = ("", "step, ms", "cost, ms", "CPU, ms", "MB sent")
    print_table(console, f"A step of {shape}: median of {row['rounds']}", heads, rows)
    own = row["ft_hsdp"]
    console.print(
        f"ft_hsdp's exchange takes {own['exchange_ms']:.0f} ms (the link alone: {row['least_exchange_ms']:.0f}); "
        f"{own['exposed_ms']:.0f} of it\nare left after backward, then {own['commit_ms']:.0f} to commit"
    )


def _quorum(result: Row, console: Console) -> None:
    _contenders(result, console, "kinds")
    for row in result["rounds"]:
        title = f"{row['members']} members ask at once: {row['rounds']['torchft']['count']} rounds of each"
        rows = []
        for kind, each in row["rounds"].items():
            times = "" if kind == "torchft" else f"{times_as_long(row, kind):.2f}"
            rows.append((kind, *figures_of(each, LIMITS), times, f"{row['cpu_ms'][kind]:.2f}"))
        print_table(console, title, ("", "p50, ms", "min", "max", "times torchft", "server's CPU, ms"), rows)


def _fetch(result: Row, console: Console) -> None:
    _contenders(result, console, width=10)
    for row in (*result["large"], *result["small"]):
        title = f"{size_name(row['bytes'])} in {row['tensors']} tensors: median of {row['rounds']}"
        anchors = [name for name in ("raw", *TORCHFT_FETCHES) if name in row["contenders"]]
        rows = []
        for name, found in row["contenders"].items():
            times = ["" if name == anchor else f"{times_as_fast(row, name, anchor):.2f}" for anchor in anchors]
            memory = row["memory"][name]
            took = f"{memory['times_state']:.2f} ({memory['growth_times_state']:.2f})"
            rows.append((name, f"{found['p50_ms']:.4g}", f"{row['gb_per_s'][name]:.2f}", *times, took))
        heads = ("", "ms", "GB/s", *(f"times {name}" for name in anchors), "memory, times state (growth)")
        print_table(console, title, heads, rows)


def _recovery(result: Row, console: Console) -> None:
    for row in result["kill"]:
        _killed(row, result["torchft"], console, "SIGKILL")
    if not result["kill"]:
        for row in result["torchft"]:
            _spans(f"torchft, {row['setting']}", row, console, "SIGKILL")
    for row in result["stop"]:
        _killed(row, result["torchft_stop"], console, "SIGSTOP")
    for row in result["rejoin"]:
        _spans("ft_hsdp, long steps", row, console, "SIGKILL")
    for row in result["return"]:
        _return(row, console)
    for row in result["readers"]:
        crowd = ", ".join(f"{count} {kind}" for kind, count in row["readers"].items())
        rows = [(name, *figures_of(each, LIMITS, 4), str(each["count"])) for name, each in row["steps"].items()]
        title = f"A step beside readers of state ({crowd}), ms"
        print_table(console, title, ("", "p50", "min", "max", "steps"), rows)
        console.print(interval_of(row["times"]))
    if result["local"]:
        heads = ("size", "agent: write", "read", "file: write", "read", "times as fast")
        rows = []
        for row in result["local"]:
            times = (f"{row['times'][key]['p50_ms']:.3g}" for key in ("stage", "agent", "save", "file"))
            rows.append((size_name(row["bytes"]), *times, f"{row['times_as_fast']:.3g}"))
        print_table(console, "A killed rank's state on its host: median ms", heads, rows)


def _killed(row: Row, peers: Sequence[Row], console: Console, signal: str) -> None:
    _spans("ft_hsdp", row, console, signal)
    for peer in peers:
        _spans(f"torchft, {peer['setting']}", peer, console, signal)
    if row["phases"]:
        rows = [(name, *figures_of(span, TAIL)) for name, span in row["phases"].items()]
        print_table(console, "Where it goes until the last survivor's commit, ms", ("", "p50", "p99", "max"), rows)


def _spans(who: str, row: Row, console: Console, signal: str) -> None:
    title = f"{who}: {row['kills']} {signal}s, {row['replicas']} replicas, steps of {row['step_ms']:.3g} ms"
    known = [(text.format(signal=signal), row[key]) for key, text in SPANS.items() if row.get(key)]
    rows = [(text, *figures_of(span, TAIL), str(span["count"])) for text, span in known]
    print_table(console, title, ("ms", "p50", "p99", "max", "of"), rows)


def _return(row: Row, console: Console) -> None:
    contenders: Mapping[str, Row] = row["contenders"]
    rows = []
    for who, found in contenders.items():
        less_one = [f"{found['less_one'][key] / 1e3:.2f}" for key in TAIL]
        others = [f"{found[key]['p50_ms'] / 1e3:.2f}" for key in ("commit", "contribute")]
        rows.append((who, f"{found['step_ms'] / 1e3:.2f}", *less_one, *others, str(found["kills"])))
    title = f"SIGKILL to the victim's own next commit, s: {row['model']}, {row['replicas']} replicas"
    print_table(console, title, ("", *RETURNS), rows)
    for who, found in contenders.items():
        starts = ", ".join(f"{count} {how}" for how, count in found["starts"].items())
        console.print(f"{who:<8} {STARTS[who]}{starts and f' ({starts})'}")
    names = dict.fromkeys(name for found in contenders.values() for name in found["phases"])
    rows = []
    for name in sorted(names, key=lambda name: name == LAST_PHASE):
        spans = [found["phases"].get(name) for found in contenders.values()]
        rows.append((name, *(f"{span['p50_ms']:.3g}" if span else "" for span in spans)))
    print_table(console, "Where it goes until that commit, median ms", ("", *contenders), rows)
    for who, times in row["times"].items():
        console.print(f"{who}: " + interval_of(times, " times torchft's"))


def _overhead(result: Row, console: Console) -> None:
    for row in result["steady"]:
        _steps(f"A step of {_shape(row)}", row["crews"], row, console)
    for row in result["snapshot"]:
        title = f"A step of {_shape(row)}, {row['step']}, with a snapshot and without"
        _steps(title, row["modes"], row, console)
    for row in result["ray"]:
        title = f"A step of {_shape(row)}, that mostly waits: medians of {row['steps']} steps"
        _steps(title, row["launchers"], row, console, "turns")
    for row in result["link"]:
        _link(row, console)


def _steps(title: str, steps: Mapping[str, Row], row: Row, console: Console, what: str = "steps") -> None:
    rows = []
    for name, step in steps.items():
        times = row["times"].get(name)
        shares = (f"{times['ratio']:.3f}", f"{times['low']:.3f} to {times['high']:.3f}") if times else ("", "")
        rows.append((name, *figures_of(step, LIMITS, 4), str(step["count"]), *shares))
    print_table(console, title, ("", "p50, ms", "min", "max", what, "times", "95 %"), rows)


def _shape(row: Row) -> str:
    return f"{row['replicas']} replicas of {row['ranks']} ranks"


def _units(result: Row, console: Console) -> None:
    heads: Sequence[str]
    if result["constant"]:
        heads = ("refill", "data", "steps", "without 1", "wanted", "at the loss", "short")
        keys = ("refill", "assignment", "steps", "away", "wanted", "at_loss")
        table = [[*(str(row[key]) for key in keys), str(len(row["others"]))] for row in result["constant"]]
        print_table(console, "Units of a step, constant batch; other steps that are short", heads, table)
    for row in result["rate"]:
        rows = [(name, *figures_of(each, LIMITS, 4), str(each["count"])) for name, each in row["unit"].items()]
        title = f"Time of a unit, {row['survivors']} survivors of {row['replicas']} replicas"
        print_table(console, title, ("batch", "p50, ms", "min", "max", "turns"), rows)
        console.print(interval_of(row["times"]["constant"]))
    for row in result["refill"]:
        title = f"same_step: the step of a loss beyond its units' own time, {row['kills']} kills"
        steps = figures_of(row["steps"], ("p50", "min", "max"))
        beyond = ("ms", *figures_of(row["beyond"], LIMITS))
        print_table(
            console, title, ("", "p50", "min", "max"), [beyond, (f"steps of {row['step_ms']:.0f} ms", *steps)]
        )
    for row in result["loss"]:
        _losses(row, console)
    for row in result["tokens"]:
        rows = [(text, f"{row[key]:.2g}") for key, text in TOKENS.items()]
        print_table(
            console, f"Relative difference to one big batch in fp64, {row['steps']} steps", ("", "most"), rows
        )
    if result["kills"]:
        heads = ("batch", "kills", "steps", "units", "twice", "skipped", "replay", "breaches")
        keys, equal = ("batch", "kills", "steps", "trained", "twice", "skipped"), {True: "equal", False: "DIFFERS"}
        table = [
            [*(str(row[key]) for key in keys), equal[row["replayed"]], str(len(row["breaches"]))]
            for row in result["kills"]
        ]
        print_table(console, "SIGKILL of random ranks at random moments", heads, table)


def _losses(row: Row, console: Console) -> None:
    """Print where the curves end."""
    runs = {f"seed {seed}, no failure": run for seed, run in row["clean"].items()}
    runs |= {f"{name}, seed {row['seed']}": run for name, run in row["with_failures"].items()}
    rows = []
    for name, run in runs.items():
        out = [f"{run[key]:.4f}" for key in ("outside_last", "outside_most") if key in run] or ["", ""]
        rows.append((name, f"{run['last']:.4f}", *out, str(run["units"])))
    title = f"Mean loss of the last {row['of_last']} of {row['steps']} steps, and how far outside of the seeds"
    print_table(console, title, ("", "loss", "outside", f"any {row['block']}", "units"), rows)


def _adopt(result: Row, console: Console) -> None:
    for row in result["step"]:
        title = f"A step of an adopted Llama ({row['model']}), {row['step']}: {_shape(row)}"
        _steps(title, row["crews"], row, console)
    if result["kill"]:
        rows = []
        for row in result["kill"]:
            units = (str(row[key]) for key in ("trained", "twice", "skipped"))
            times = (f"{row['step_ms']:.3g}", *figures_of(row["less_one"], ("p50_ms", "max_ms")))
            rows.append((row["trainer"], str(row["kills"]), *times, figures_of(row["stall"], TAIL)[0], *units))
        heads = ("", "kills", "step, ms", "p50", "max", "all of it", "units", "twice", "skipped")
        print_table(console, "SIGKILL to the others' next commit, less one step, ms", heads, rows)


def _memory(result: Row, console: Console) -> None:
    for row in result["step"]:
        _steps(
            f"A step of {_shape(row)} on {row['hosts']} hosts, {row['step']}, with copies",
            row["modes"],
            row,
            console,
        )
        console.print(
            f"votes wait {100 * row['exposed']:.2f} % of a step for {row['copied_bytes'] / 1e6:.1f} MB of copies"
            f"\nand a host keeps {row['host_bytes'] / 1e6:.1f} MB, {row['of_plan']:.3f} of what plan says"
        )
    for row in result["none"]:
        console.print(
            f"{_shape(row)}, no copies needed, {row['steps']} steps:\n{row['bytes']} bytes, "
            f"{row['threads']} threads and {row['orders']} orders for copies"
        )
    for row in result["plan"]:
        compared = ", ".join(f"{count} {how}" for how, count in row["compared"].items())
        console.print(
            f"plan of {row['hosts']} hosts, {row['copies']} copies: {row['took']['p50_ms']:.4g} ms\n"
            f"of its figures, {compared}: {row['not_exact']} are not exact"
        )
    for row in result["gaps"]:
        title = f"A step of {_shape(row)} on {row['hosts']} hosts, links of {row['rate']}, by their copies"
        _steps(title, row["modes"], row, console, "blocks")
        shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in row["idle_share"].items())
        console.print(f"of the copies' bytes, left in idle spans: {shares or 'not known'}")
        by_plan = ", ".join(f"{name} {100 * share:.0f} %" for name, share in row["planned_share"].items())
        console.print(f"of the blocks, with a plan in force (CopiesPaced): {by_plan}")
    for row in result["lost"]:
        rows = []
        for name, found in row["places"].items():
            again = f"{found['lost_steps']['p50']:g} / {found['lost_steps']['max']}"
            steps = (f"{found['step_ms']:.4g}", *figures_of(found["new"], LIMITS, 4))
            rows.append((name, str(found["kills"]), *steps, again))
        heads = ("state from", "hosts", "step", "p50", "min", "max", "steps again, p50 / max")
        print_table(console, "A host is killed, to the next new step, ms", heads, rows)
    for row in result["union"]:
        rungs = ", ".join(f"{count} from {rung}" for rung, count in row["rungs"].items())
        console.print(
            f"two replicas lose a host each at once, {row['losses']} times:\n{row['new']['p50_ms']:.4g} ms to a "
            f"new step, {row['lost_steps']} steps lost at most; restored: {rungs}"
        )
    for row in result["flips"]:
        console.print(f"bytes flipped in a shard of {row['chunks']} chunks, found, and the next rung used:")
        for kind, asked in row["asked"].items():
            console.print(f"  {row['found'][kind]} of {asked} in {kind}")
        console.print("restored: " + ", ".join(f"{count} from {rung}" for rung, count in row["rungs"].items()))


def _strangers(result: Row, console: Console) -> None:
    names = {"sink": "an idle sink", "job": "the job"}
    for row in result["strangers"]:
        listeners = ", ".join(f"{count} {kind}" for kind, count in row["listeners"].items())
        console.print(f"  {row['per_s']} hostile first frames a second, in turn to {listeners}")
        rows = [
            (names[name], *figures_of(each, LIMITS, 4), str(row["calls"][name]))
            for name, each in row["steps"].items()
        ]
        print_table(console, "a step", ("strangers call", "p50, ms", "min", "max", "calls"), rows)
        console.print(f"  {interval_of(row['times'])}")


def _tls(result: Row, console: Console) -> None:
    speeds = result["cipher"]["gb_per_s"]
    console.print(f"  AES-128-GCM on one thread: {speeds['seal']:.2f} GB/s to seal, {speeds['open']:.2f} to open")
    for name, text in (("ring", "all-reduce of 64 MiB, 2 members"), ("fetch", "fetch of a state")):
        found = [each for row in result[name] for each in row["contenders"].items()]
        rows = [(who, *figures_of(each, LIMITS, 4)) for who, each in found]
        print_table(console, text, ("contender", "p50, ms", "min", "max"), rows)


def _driver(result: Row, console: Console) -> None:
    from ft_hsdp.bench.driver import BATCH, GROWTH_MIB, WARM

    console.print(
        f"driver, {result['steps']} steps of {result['replicas']} replicas: {result['grown_mib']:+.2f} MiB"
        f" after {WARM} steps (goal {GROWTH_MIB:g}); a look at {BATCH} steps {result['look_ms_first']:.2f} ms"
        f" at first, {result['look_ms_last']:.2f} ms at last; the summary {result['finish_s']:.1f} s"
    )


_FIGURES: Mapping[str, Callable[[Any, Console], None]] = {
    "ftar": _ftar,
    "quorum": _quorum,
    "fetch": _fetch,
    "recovery": _recovery,
    "overhead": _overhead,
    "units": _units,
    "adopt": _adopt,
    "memory": _memory,
    "width": width_figures,
    "strangers": _strangers,
    "tls": _tls,
}
