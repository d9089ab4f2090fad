"""`status`: the state of a running job, from its lighthouse, or from the run's files if that does not answer."""

from __future__ import annotations

import socket
from typing import Any

import httpx

from ft_hsdp import secret, tls
from ft_hsdp.config import load
from ft_hsdp.control.lighthouse_client import get_proved, urls_of_run
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.launch.run.directory import Row, RunDir, alive, read_json, read_jsonl, runs_here
from ft_hsdp.tls import Trusted
from lighthouse.http.access import page_link

Status = dict[str, Any]
ANSWER_S = 2.0


def status(run: RunDir) -> Status:
    """Return the state of a running job: the document of `status --json`.

    What the lighthouse does not say is read from the run's files.

    Raises:
        LighthouseUnreachable: it does not answer, and nothing of the job runs on this machine.
    """
    config = load(run.config)
    leader = read_json(run.lighthouse) or {"pid": None, "url": None}
    urls = urls_of_run(leader)
    trusted = tls.trusted(config.network)
    answer = next(filter(None, (_ask(run, f"{url}/v1/status", trusted) for url in urls)), None)
    if answer is None and not runs_here(run):
        raise LighthouseUnreachable(f"the job in {run.path} may have ended: {', '.join(urls)} does not answer")
    reported: dict[int, Row] = {row["replica"]: row for row in (answer or {}).get("replicas", [])}
    placed = (answer or {}).get("hosts", [])
    elsewhere = set[int]() if run.supervisor.exists() else {row["replica"] for row in placed}
    replicas = [_replica(run, n, reported.get(n), n in elsewhere) for n in range(config.slots)]
    for row in replicas:
        if 0 < len(row["ranks"]) < config.ranks_per_replica and config.memory.shrink_to is not None:
            row["of_ranks"] = config.ranks_per_replica
    newest = max((row["step"] for row in replicas), default=0)
    several: Row = {}
    if len(urls) > 1:
        roles = [_ask(run, f"{url}/healthz", trusted).get("role", "away") for url in urls]
        several = {"lighthouses": [{"url": url, "role": role} for url, role in zip(urls, roles, strict=True)]}
    target = (answer or {}).get("target", config.replicas)
    share: Row = {key: answer[key] for key in ("units", "units_wanted") if key in answer} if answer else {}
    scaled = {"target": target} if target != config.replicas else {}
    return {
        "job": config.job.name,
        "step": answer["step"] if answer else newest,
        "epoch": answer["epoch"] if answer else None,
        **share,
        **({"protection": answer["protection"]} if answer and answer.get("protection") else {}),
        "lighthouse": {"pid": leader["pid"], "url": leader["url"]},
        **several,
        **scaled,
        **({"hosts": placed} if placed else {}),
        "replicas": replicas,
    }


def lines(run: RunDir, document: Status) -> list[str]:
    """Return the document of `status` as lines of text, with the link of the job's page."""
    leader = document["lighthouse"]
    units = f"{document['units']} of {document['units_wanted']} units a step, " if "units" in document else ""
    word = document.get("protection", {}).get("word")
    protected = f"{word}, " if word else ""
    found = [
        f"{document['job']}: step {document['step']}, epoch {document['epoch']}, {units}{protected}"
        f"lighthouse {leader['url']} (pid {leader['pid']})"
    ]
    found += [f"  unprotected: {document['protection']['why']}"] if word == "unprotected" else []
    found += [f"  scaled to {document['target']} replicas"] if "target" in document else []
    found += [f"  lighthouse {one['url']}  {one['role']}" for one in document.get("lighthouses", ())]
    for replica in document["replicas"]:
        ranks = ", ".join(f"rank {r['rank']} pid {r['pid']}{_host(r)} {r['state']}" for r in replica["ranks"])
        pause = f"  pauses: {replica['pause']}" if replica.get("pause") else ""
        step = replica["step"]
        few = f"{len(replica['ranks'])} of {replica['of_ranks']} ranks: " if "of_ranks" in replica else ""
        found.append(f"  replica {replica['replica']}  {replica['state']:<12} step {step}  {few}{ranks}{pause}")
    for row in document.get("hosts", ()):
        line = f"  host {row['host']}  {row['state']}" + (f": {row['why']}" if row.get("why") else "")
        if row.get("ranks"):
            numbers = ", ".join(map(str, row["ranks"]))
            word = "rank" if len(row["ranks"]) == 1 else "ranks"
            found.append(f"{line}  replica {row['replica']}, {word} {numbers}")
        elif row["state"] != "used":
            found.append(line)
    if leader["url"]:
        found.append(f"  page {page_link(leader['url'], secret.current(run.token))}")
    return found


def _replica(run: RunDir, replica: int, reported: Row | None, placed: bool) -> Row:
    """Return the part of the document on one replica, with the lighthouse's word on it if there is one.

    Its processes are listed here only if this folder has all of them: it is not ``placed`` on other machines.
    """
    listed = ({} if placed else read_json(run.processes(replica))) or {"ranks": []}
    ranks = [
        {"rank": r["rank"], "pid": r["pid"], "host": r["host"], "state": r["state"] if _runs(r) else "exited"}
        for r in listed["ranks"]
    ]
    if reported is not None:
        more = {key: reported[key] for key in ("pause", "hosts") if reported.get(key)}
        return {"replica": replica, "state": reported["state"], "step": reported["step"], **more, "ranks": ranks}
    commits = read_jsonl(run.commits(replica))
    runs = any(r["state"] == "running" for r in ranks)
    step = commits[-1]["step"] if commits else 0
    return {"replica": replica, "state": "running" if runs else "exited", "step": step, "ranks": ranks}


def _host(rank: Row) -> str:
    """Return the host of a rank in words; "" for this machine."""
    return "" if rank["host"] == socket.gethostname() else f" on {rank['host']}"


def _runs(rank: Row) -> bool:
    """Return whether a rank runs; a rank of another machine cannot be looked up, and counts as running."""
    return rank.get("machine", rank["host"]) != socket.gethostname() or alive({"pid": rank["pid"]})


def _ask(run: RunDir, url: str, trusted: Trusted) -> Row:
    """Return the object with which a lighthouse answers; {} if it gives none."""
    try:
        response = get_proved(url, secret.current(run.token), ANSWER_S, trusted)
        answer = response.raise_for_status().json()
    except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}
