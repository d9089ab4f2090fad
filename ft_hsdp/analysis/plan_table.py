"""The document of `plan` as lines of text for people, at most 100 characters wide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ft_hsdp.analysis.costs import ASSUMED, option
from ft_hsdp.memory.blocks import runs_in_words
from ft_hsdp.memory.copies import SLOTS

_PROTECTION = {True: "protected", False: "UNPROTECTED: ", None: "not known if protected: "}
SHOWN = 8  # hosts and shards in the table; --json has all
MIB = 2**20

Document = dict[str, Any]


def lines(document: Document) -> list[str]:
    replicas, spare = document["replicas"], sum(row["replica"] is None for row in document["hosts"])
    each = (len(document["hosts"]) - spare) // replicas
    spares = f", {_count(spare, 'spare host')}" if spare else ""
    found = [
        f"{document['job']}: {_count(replicas, 'replica')} of {_count(document['ranks_per_replica'], 'rank')} on "
        f"{_count(each, 'host')}{spares}",
        f"state: {document['parameters'] / 1e6:,.1f} M parameters, {size_of(document['state_bytes'])}; "
        f"{size_of(document['shard_bytes'])} a rank",
        f"copies: {document['copies']} of each shard, each on another {document['apart']}, {_often(document)}",
        _PROTECTION[document["protected"]] + document["why"],
        "",
        *_table(["host", "ranks", "copies of", "memory"], [_host_line(row) for row in document["hosts"]]),
        "",
        *_table(
            ["shard", "on", "copied to"],
            [[str(row["rank"]), _names(row["holders"]), _names(row["copies"])] for row in document["shards"]],
        ),
        "",
        *_table(["", "with copies", "replicas alone"], [*_comparison(document)], SHOWN * 4),
        *_fewer_ranks(document),
        "",
        "assumed:",
    ]
    assumed = document["assumptions"]
    found += [f"  {option(n):<25} {assumed[n]:<6g} {each.metadata['help']}" for n, each in ASSUMED.items()]
    found.append(f"  {'checkpoint.every':<25} {assumed['steps_between_checkpoints']:<6} steps; none: all steps")
    return found


def _comparison(document: Document) -> Iterator[list[str]]:
    sides = document["with_copies"], document["replicas_alone"]
    for kept in zip(*(side["lost_hosts"] for side in sides), strict=True):
        yield [f"survives {_count(kept[0]['lost'], 'lost host')}", *(_share(row["state_lost"]) for row in kept)]
    until = [side["hosts_until_loss"] for side in sides]
    yield ["hosts lost until a state is", *("not counted" if n is None else f"{n:,.4g}" for n in until)]
    for level in sides[0]["lost_domains"]:
        both = [side["lost_domains"][level] for side in sides]
        text = [f"{one['fatal']:,} of {one['known']:,}" if one["known"] else "unknown" for one in both]
        yield [f"{level}s whose loss takes a state", *text]
    yield ["states lost per month", *(f"{side['losses_per_month']:.3g}" for side in sides)]
    yield ["a lost host costs (DeadPool)", *(f"{side['failure_costs_s']:,.1f} s" for side in sides)]
    yield ["a lost host wastes (GEMINI)", *(f"{side['wasted_s']:,.1f} s" for side in sides)]
    yield ["effective time, by the clock", *(f"{100 * side['effective_ratio']:.4f} %" for side in sides)]
    yield ["effective time, renewal", *(f"{100 * side['effective_ratio_renewal']:.4f} %" for side in sides)]
    alone = max((SLOTS * len(row["ranks"]) * document["shard_bytes"] for row in document["hosts"]), default=0)
    yield ["memory of the fullest host", size_of(document["host_bytes"]), size_of(alone)]
    yield ["copied per step, all hosts", size_of(document["copied_bytes_per_step"]), size_of(0)]
    yield ["the busiest host receives for", f"{document['copy_s']:.3g} s", "0 s"]


def _fewer_ranks(document: Document) -> Iterator[str]:
    """Yield the lines about `memory.shrink_to`; none without it."""
    part = document["fewer_ranks"]
    if part is None:
        return
    yield ""
    yield f"fewer ranks (memory.shrink_to: {part['shrink_to']}), one replica loses hosts:"
    rows = [["all", f"{part['units_per_s']:.4g}", "", size_of(document["shard_bytes"]), "", ""]]
    for row in part["widths"]:
        empty = row["without_rows"]
        cut = "not known" if empty is None else f"{_count(empty, 'rank')} empty" if empty else "yes"
        rate, step = f"{row['units_per_s']:.4g}", f"{row['step_s']:.4g} s"
        rows.append([str(row["ranks"]), rate, step, size_of(row["rank_bytes"]), str(row["copies"]), cut])
    rows.append(["none", f"{part['units_per_s_without']:.4g}", "", "", "", ""])
    yield from _table(["ranks", "units/s", "step", "state of a rank", "copies", "can be cut"], rows)
    if not part["widths"]:
        yield "with a host less there are too few ranks: the replica waits"
        return
    yield ""
    lost = [
        [
            f"{each['away_s']:,.6g} s",
            f"{each['units_lost_waiting']:,.0f}",
            f"{each['units_lost_shrinking']:,.0f}",
        ]
        for each in part["away"]
    ]
    yield from _table(["a host is away for", "units lost, waiting", "with fewer ranks"], lost)
    after = part["break_even_s"]
    yield (
        "fewer ranks train no more units per second than none: waiting never loses more"
        if after is None
        else f"fewer ranks lose less if a host is away for more than {after:,.6g} s (timeouts.place_s and a start)"
    )


def _often(document: Document) -> str:
    every = document["every"]
    return "of every step" if every == 1 else f"of each {every}th step"


def _host_line(row: Document) -> list[str]:
    ranks = f"r{row['replica']}: {_ranges(row['ranks'])}" if row["replica"] is not None else "spare"
    copied: dict[int, list[int]] = {}
    for replica, rank in row["copies"]:
        copied.setdefault(replica, []).append(rank)
    text = ", ".join(f"r{replica}: {_ranges(ranks)}" for replica, ranks in copied.items()) or "-"
    return [row["host"], ranks, text, size_of(row["bytes"])]


def _ranges(numbers: Sequence[int]) -> str:
    shown = runs_in_words(numbers)
    return ", ".join(shown if len(shown) <= 6 else [*shown[:5], f"... ({len(numbers)})"])


def _names(hosts: Sequence[str]) -> str:
    most = 4 if sum(map(len, hosts)) < 40 else 2
    more = f", ... ({len(hosts)})" if len(hosts) > most + 1 else ""
    return ", ".join(hosts[: most if more else most + 1]) + more or "-"


def _table(head: list[str], rows: list[list[str]], shown: int = SHOWN) -> list[str]:
    cut = rows if len(rows) <= shown + 1 else rows[:shown]
    widths = [max(len(row[i]) for row in (head, *cut)) for i in range(len(head))]
    found = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *cut)
    ]
    left = len(rows) - len(cut)
    return [line.rstrip() for line in found] + ([f"... and {left:,} more; --json has all"] if left else [])


def _share(state_lost: float | None) -> str:
    """Return a probability of survival, so that one near 1 is told from 1."""
    if state_lost is None:
        return "not counted"
    if state_lost in (0, 1):
        return "0 %" if state_lost else "100 %"
    return f"{100 * (1 - state_lost):.2f} %" if state_lost > 1e-3 else f"1 - {state_lost:.2g}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size_of(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 10 * 2**30 else f"{size / MIB:,.1f} MiB"
