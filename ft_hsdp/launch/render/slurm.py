"""A Slurm array, a small job for the lighthouse, and a job that ends the lighthouse.

`bash FILE` submits all three. An element is one node: that of a replica, or a machine with an agent, which gets
ranks of any replica. It starts when there is room for it; meanwhile the others train. A node that is lost takes no
other one with it, as it would in an allocation of several. Elements find the lighthouse through the run directory,
which is on a file system that all nodes share.
"""

from __future__ import annotations

import contextlib
import math
import shlex
from pathlib import Path

from ft_hsdp.config import Config
from ft_hsdp.config.entry import is_function, locate
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.render.settings import COMMAND, Shape, Site, check, dump, shape, spread, what_runs
from ft_hsdp.mounts import Ability, need, need_store

NOTICE_S = 60  # Slurm checks time limits only this often

_HEAD = """\
#!/usr/bin/env bash
# {name}: {replicas} replicas of {ranks} ranks{entry}; each {part} is an element of the array.
#
#   bash FILE                submit the lighthouse, the array, and the job that ends the lighthouse after the array
#   sbatch FILE              submit the array only; its lighthouse uses the same folder of runs and runs elsewhere
#   sbatch --array=2 FILE    submit one {part} again
#
{directives}
set -u

name={name}
runs={runs}
python={python}
budget={budget}   # restart.budget

settings() {{
    cat <<'FT_HSDP_SETTINGS'
{settings}FT_HSDP_SETTINGS
}}
"""

_SUBMIT = """
# On a login node.
if [ -z "${SLURM_ARRAY_TASK_ID-}${FT_HSDP_PART-}" ]; then
    set -e
    mkdir -p "$runs"
    # The lighthouse does not need the resources of the array's directives. It has a time limit as well.
    lighthouse=$(sed '/^#SBATCH/d' "$0" | sbatch --parsable --export=ALL,FT_HSDP_PART=lighthouse \\
        --job-name="$name-lighthouse" --ntasks=1 --cpus-per-task=1 --mem=2G --requeue --signal=B:USR1@60 \\
        --open-mode=append --output="$runs/$name-slurm-lighthouse.log"@SITE@@TIME@)
    array=$(sbatch --parsable --dependency="after:${lighthouse%%;*}" "$0")
    # The lighthouse ends after the last element, requeued ones included. At that time it may be in the queue.
    sbatch --parsable --dependency="afterany:${array%%;*}" --job-name="$name-end" --ntasks=1 --cpus-per-task=1 \\
        --mem=100M --time=5 --output=/dev/null@SITE@ \\
        --wrap="while squeue --noheader --jobs=${lighthouse%%;*} | grep -q .; do
            scancel --batch --signal=TERM ${lighthouse%%;*}; scancel --state=PENDING ${lighthouse%%;*}; sleep 5
        done" >/dev/null
    echo "lighthouse ${lighthouse%%;*}, array ${array%%;*}; logs in $runs/$name-slurm-*.log"
    exit
fi

child=
notice=

# USR1 announces the time limit, TERM is scancel or preemption. The command leaves at a step boundary.
# shellcheck disable=SC2317,SC2329  # traps call it
leave() {
    notice=$1
    [ -z "$child" ] || tell
}
# shellcheck disable=SC2317,SC2329
tell() { kill -TERM "$child" 2>/dev/null; }
trap 'leave clock' USR1
trap 'leave told' TERM

# Run a command until it has ended, also if signals come; its exit code is in $code.
run() {
    "$@" &
    child=$!
    while kill -0 "$child" 2>/dev/null; do wait "$child"; done
    wait "$child"
    code=$?
    # If a signal comes just as the command ends, bash reports -1; the command was told to end as well.
    [ "$code" -ge 0 ] || code=143
    child=
}

again() {
    echo "$who: $1; requeued"
    scontrol requeue "$job" && run sleep 60   # Slurm ends this script
    exit 75
}
"""

_LIGHTHOUSE = """
if [ "${FT_HSDP_PART-}" = lighthouse ]; then
    who=lighthouse
    job=$SLURM_JOB_ID
    settings > "$runs/$name-slurm-lighthouse.yaml"
    rm -f "$runs/$name/lighthouse.json"   # an earlier lighthouse, maybe on another machine, wrote it
    while [ -z "$notice" ]; do   # each restart uses the same port
        run "$python" @COMMAND@ lighthouse "$runs/$name-slurm-lighthouse.yaml" @HOST@--network.port=@PORT@
        [ "$code" -ne 64 ] || exit 64
        [ -n "$notice" ] || sleep 1
    done
    [ "$notice" = told ] || again "its time limit is reached"
    exit 0
fi
"""

_ELEMENT = """
element=$SLURM_ARRAY_TASK_ID
who="@PART@ $element"
job=${SLURM_ARRAY_JOB_ID}_$element   # SLURM_JOB_ID of one element can be the id of the whole array
settings > "$runs/$name-slurm-$element.yaml"
"""

_START = {
    "replica": """run "$python" @COMMAND@ replica "$runs/$name-slurm-$element.yaml" --replica "$element"
""",
    "machine": """\
export FT_HSDP_NODE="${SLURMD_NODENAME:-$(hostname -s)}"   # elements may share a node: then they are lost together
export FT_HSDP_HOST="$FT_HSDP_NODE-$element"
run "$python" @COMMAND@ host "$runs/$name-slurm-$element.yaml"
""",
}

_VERDICT = """
if [ "$code" -eq 0 ]; then exit 0; fi
if [ "$notice" = clock ]; then again "its time limit is reached"; fi
if [ -n "$notice" ]; then exit "$code"; fi
if compgen -G "$runs/$name/replicas/*/final.json" >/dev/null; then
    echo "$who: the others are done"
    exit "$code"
fi
case $code in
    64) echo "$who: the configuration was refused, see above" ;;
    76) echo "$who: the node is broken; sbatch --array=$element --exclude=$(hostname -s) FILE" ;;
    *) if [ "${SLURM_RESTART_COUNT:-0}" -lt "$budget" ]; then again "exit $code"; fi ;;
esac
exit "$code"
"""


def slurm(config: Config, site: Site) -> str:
    """Return the script of a job.

    Raises:
        ConfigError: Slurm or its nodes cannot run this configuration.
    """
    check(site)
    layout = shape(config, site)
    config = _absolute(spread(config, layout))
    runs = Path(config.job.runs_dir)
    if not config.lighthouse.etcd:
        need_store(runs)
    with contextlib.suppress(OSError):  # it is elsewhere: its lighthouse checks it
        need(runs, "job.runs_dir", Ability.LOCKS, Ability.RENAME)
    command = " ".join(COMMAND)
    # The node of the lighthouse is known only when it starts, so the script gives its name then.
    host = '--network.host="$(hostname)" ' if config.network.host == "0.0.0.0" else ""
    port = str(config.network.port or '"$((30000 + SLURM_JOB_ID % 10000))"')
    lighthouse = _LIGHTHOUSE.replace("@HOST@", host).replace("@PORT@", port)
    body = _submit(site) + lighthouse + _ELEMENT + _START[layout.part] + _VERDICT
    head = _HEAD.format(
        name=config.job.name,
        replicas=config.slots,
        ranks=config.ranks_per_replica,
        part=layout.part,
        entry=what_runs(config),
        directives="".join(f"#SBATCH {line}\n" for line in _directives(config, site, layout)),
        runs=shlex.quote(config.job.runs_dir),
        python=shlex.quote(site.python),
        budget=config.restart.budget,
        settings=dump(config),
    )
    return head + body.replace("@COMMAND@", command).replace("@PART@", layout.part)


def _directives(config: Config, site: Site, layout: Shape) -> list[str]:
    notice = max(NOTICE_S, math.ceil(config.timeouts.stop_s) + 30)
    folder = config.job.runs_dir.replace("%", "%%")
    asked = {
        "job-name": config.job.name,
        "array": f"0-{layout.count - 1}",
        "nodes": 1,
        "ntasks-per-node": 1,
        "cpus-per-task": layout.cpus,
        "gpus-per-node": layout.gpus or None,
        "mem": site.memory_gib and f"{site.memory_gib}G",
        "partition": site.partition,
        "account": site.account,
        "time": site.time,
        "signal": f"B:USR1@{notice}",
        "open-mode": "append",
        "output": f'"{folder}/{config.job.name}-slurm-%a.log"',
    }
    return ["--requeue", *(f"--{key}={value}" for key, value in asked.items() if value is not None)]


def _submit(site: Site) -> str:
    """Return the part that runs on a login node, with the partition, account and time limit of the small jobs."""
    asked = {"partition": site.partition, "account": site.account}
    where = "".join(f" --{key}={value}" for key, value in asked.items() if value is not None)
    time = "" if site.time is None else f" --time={site.time}"
    return _SUBMIT.replace("@SITE@", where).replace("@TIME@", time)


def _absolute(config: Config) -> Config:
    """Return `config` with absolute paths, which mean the same on every node.

    Raises:
        ConfigError: job.runs_dir has characters that a directive of Slurm cannot contain, or there is no script as
            `entry` says.
    """
    runs = str(Path(config.job.runs_dir).resolve())
    if set(runs) & set('"\\\n'):
        raise ConfigError("job.runs_dir", runs, "a folder whose name has no quotes, backslashes or new lines")
    job = config.job.model_copy(update={"runs_dir": runs})
    data, evaluated, checkpoint = config.data, config.eval, config.checkpoint
    if data.path != "stdlib":
        data = data.model_copy(update={"path": str(Path(data.path).resolve())})
    if evaluated.data is not None and evaluated.data != "stdlib":
        evaluated = evaluated.model_copy(update={"data": str(Path(evaluated.data).resolve())})
    entry = config.entry
    if entry is not None and not is_function(entry):
        entry = str(locate(entry).resolve())
    if checkpoint.dir is not None:
        checkpoint = checkpoint.model_copy(update={"dir": str(Path(checkpoint.dir).resolve())})
    texts = {"data": data, "eval": evaluated}
    return config.model_copy(update={"job": job, "entry": entry, "checkpoint": checkpoint, **texts})
