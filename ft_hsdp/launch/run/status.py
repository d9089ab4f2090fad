"""What a job does at the moment: `status --json`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx

from ft_hsdp import secret, tls
from ft_hsdp.config import load
from ft_hsdp.control.lighthouse_client import urls_of_run
from ft_hsdp.errors import ConfigError, LighthouseUnreachable
from ft_hsdp.launch.run.directory import Row, RunDir, alive, newest_live, read_json, read_jsonl
from ft_hsdp.tls import Trusted
from lighthouse.http.access import page_link

Status = dict[str, Any]


def find(runs_dir: Path, name: str | None) -> RunDir:
    """The run called `name` (a name under `runs_dir`, or a path), or else the newest one that runs.

    Raises ConfigError for a name that does not exist, LighthouseUnreachable where nothing runs.
    """
    if name is None:
        run = newest_live(runs_dir)
        if run is None:
            raise LighthouseUnreachable(f"no job runs under {runs_dir}")
        return run
    run = named(runs_dir, name)
    if not (alive(read_json(run.supervisor)) or alive(read_json(run.lighthouse))):
        raise LighthouseUnreachable(f"the job in {run.path} does not run")
    return run


def named(runs_dir: Path, name: str) -> RunDir:
    """The run directory called `name`, finished or not. Raises ConfigError where there is none."""
    for path in (Path(name), runs_dir / name):
        if (path / "config.yaml").is_file():
            return RunDir(path.resolve())
    raise ConfigError("run", name, f"a run directory, or the name of one under {runs_dir}")


def status(run: RunDir) -> Status:
    """The state of a running job; what the lighthouse cannot say is taken from the run's own files."""
    config = load(run.config)
    at = read_json(run.lighthouse) or {"pid": None, "url": None}
    urls = urls_of_run(at)
    trusted = tls.trusted(config.network)
    answer = next(filter(None, (_ask(run, url, trusted) for url in urls)), None)
    told: dict[int, Row] = {row["replica"]: row for row in (answer or {}).get("replicas", [])}
    replicas = [_replica(run, n, told.get(n)) for n in range(config.slots)]
    newest = max((row["step"] for row in replicas), default=0)
    several = {"lighthouses": [{"url": url, "role": _role(url, trusted)} for url in urls]} if len(urls) > 1 else {}
    target = (answer or {}).get("target", config.replicas)
    scaled = {"target": target} if target != config.replicas else {}
    return {
        "job": config.job.name,
        "step": answer["step"] if answer else newest,
        "epoch": answer["epoch"] if answer else None,
        "lighthouse": {"pid": at["pid"], "url": at["url"]},
        **several,
        **scaled,
        "replicas": replicas,
    }


def lines(run: RunDir, picture: Status) -> list[str]:
    """The same for people, and where the page is."""
    at = picture["lighthouse"]
    found = [
        f"{picture['job']}: step {picture['step']}, epoch {picture['epoch']}, "
        f"lighthouse {at['url']} (pid {at['pid']})"
    ]
    found += [f"  scaled to {picture['target']} replicas"] if "target" in picture else []
    found += [f"  lighthouse {one['url']}  {one['role']}" for one in picture.get("lighthouses", ())]
    for replica in picture["replicas"]:
        ranks = ", ".join(f"rank {r['rank']} pid {r['pid']}{_away(r)} {r['state']}" for r in replica["ranks"])
        step = replica["step"]
        found.append(f"  replica {replica['replica']}  {replica['state']:<12} step {step}  {ranks}")
    if at["url"]:
        found.append(f"  page {page_link(at['url'], secret.current(run.token))}")
    return found


def _replica(run: RunDir, replica: int, told: Row | None) -> Row:
    listed = read_json(run.processes(replica)) or {"ranks": []}
    ranks = [
        {"rank": r["rank"], "pid": r["pid"], "host": r["host"], "state": r["state"] if _lives(r) else "exited"}
        for r in listed["ranks"]
    ]
    if told is not None:
        return {"replica": replica, "state": told["state"], "step": told["step"], "ranks": ranks}
    commits = read_jsonl(run.commits(replica))
    runs = any(r["state"] == "running" for r in ranks)
    step = commits[-1]["step"] if commits else 0
    return {"replica": replica, "state": "running" if runs else "exited", "step": step, "ranks": ranks}


def _away(rank: Row) -> str:
    """On which machine a rank is, if it is not this one."""
    return "" if rank["host"] == socket.gethostname() else f" on {rank['host']}"


def _lives(rank: Row) -> bool:
    """Whether a rank runs, as far as can be seen from this machine."""
    return rank["host"] != socket.gethostname() or alive({"pid": rank["pid"]})


def _role(url: str, trusted: Trusted) -> str:
    """What one of several lighthouses does: leader, standby, or away."""
    try:
        response = httpx.get(f"{url}/healthz", timeout=1.0, trust_env=False, verify=trusted)
        return str(response.raise_for_status().json()["role"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return "away"


def _ask(run: RunDir, url: str, trusted: Trusted) -> Row | None:
    """The lighthouse's answer; None where it does not give one."""
    try:
        headers = {"Authorization": f"Bearer {secret.current(run.token)}"}
        response = httpx.get(f"{url}/v1/status", headers=headers, timeout=2.0, trust_env=False, verify=trusted)
        answer = response.raise_for_status().json()
        return answer if isinstance(answer, dict) else None
    except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None
