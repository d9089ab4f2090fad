"""What a job does at the moment: `status --json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from ft_hsdp.config import load
from ft_hsdp.errors import ConfigError, LighthouseUnreachable
from ft_hsdp.launch.rundir import Row, RunDir, alive, newest_live, read_json, read_jsonl

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
    answer = _ask(run, at["url"])
    told: dict[int, Row] = {row["replica"]: row for row in (answer or {}).get("replicas", [])}
    replicas = [_replica(run, n, told.get(n)) for n in range(config.replicas)]
    newest = max((row["step"] for row in replicas), default=0)
    return {
        "job": config.job.name,
        "step": answer["step"] if answer else newest,
        "epoch": answer["epoch"] if answer else None,
        "lighthouse": {"pid": at["pid"], "url": at["url"]},
        "replicas": replicas,
    }


def lines(picture: Status) -> list[str]:
    """The same for people."""
    at = picture["lighthouse"]
    found = [
        f"{picture['job']}: step {picture['step']}, epoch {picture['epoch']}, "
        f"lighthouse {at['url']} (pid {at['pid']})"
    ]
    for replica in picture["replicas"]:
        ranks = ", ".join(f"rank {r['rank']} pid {r['pid']} {r['state']}" for r in replica["ranks"])
        step = replica["step"]
        found.append(f"  replica {replica['replica']}  {replica['state']:<12} step {step}  {ranks}")
    return found


def _replica(run: RunDir, replica: int, told: Row | None) -> Row:
    listed = read_json(run.processes(replica)) or {"ranks": []}
    ranks = [
        {"rank": r["rank"], "pid": r["pid"], "state": r["state"] if alive({"pid": r["pid"]}) else "exited"}
        for r in listed["ranks"]
    ]
    if told is not None:
        return {"replica": replica, "state": told["state"], "step": told["step"], "ranks": ranks}
    commits = read_jsonl(run.commits(replica))
    runs = any(r["state"] == "running" for r in ranks)
    step = commits[-1]["step"] if commits else 0
    return {"replica": replica, "state": "running" if runs else "exited", "step": step, "ranks": ranks}


def _ask(run: RunDir, url: str | None) -> Row | None:
    """The lighthouse's answer; None where it does not give one."""
    try:
        headers = {"Authorization": f"Bearer {run.token.read_text().strip()}"}
        response = httpx.get(f"{url}/v1/status", headers=headers, timeout=2.0, trust_env=False)
        answer = response.raise_for_status().json()
        return answer if isinstance(answer, dict) else None
    except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None
