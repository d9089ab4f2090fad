"""Ray Train v2 (Ray 2.60) on ft_hsdp: a trainer whose workers are replicas that may be lost one by one.

docs/ray-train.md has an example.

Ray Train's own worker group does not fit: each call of ``ray.train.report`` waits for all workers, and its replica
groups have one worker each. So `FtHsdpTorchTrainer.fit` does one of two things (docs/adr/0032-ray-train.md):

    the script was started by a user   it runs `launcher.py submit` with this script as the job's entry, and waits
    the script runs in a rank          it runs the train loop, with the functions of ``ray.train`` that mean
                                       something there, and ends the process

To Ray Train one replica is the world: ranks, sizes and barriers are those of a replica.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pandas
import ray
import torch.distributed as dist
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, set_train_fn_utils
from ray.train.v2.api.config import RunConfig, ScalingConfig
from ray.train.v2.api.context import LocalTrainContext
from ray.train.v2.api.result import Result
from ray.train.v2.torch.torch_trainer import TorchTrainer
from torch.utils.data import DataLoader

from ft_hsdp.config import Config, load
from ft_hsdp.config.entry import is_function
from ft_hsdp.errors import ConfigError, FtHsdpError
from ft_hsdp.integrations.epochs import EpochLoader, open_epochs
from ft_hsdp.train.data.loader import Loader
from ft_hsdp.train.job import Job
from ft_hsdp.train.join import expected_launch, joined_job
from ft_hsdp.train.loop.user_loop import log_measured

# Arguments of Ray's trainers that have no meaning here, and what takes their place.
_INSTEAD = {
    "torch_config": "none: the backend follows from train.device",
    "datasets": "none: give a map-style dataset to job.loader in the train loop",
    "dataset_config": "none: give a map-style dataset to job.loader in the train loop",
    "validation_config": "none: evaluate in the train loop, within job.pause",
    "metadata": "none: use train_loop_config",
    "resume_from_checkpoint": "none: use checkpoint.dir of the job, which resumes by itself",
}
_INSTEAD_OF_SCALING = {
    "resources_per_worker": "none: use ray.resources of the job",
    "placement_strategy": "none: use ray.strategy of the job",
    "label_selector": "none: use ray.labels of the job",
    "accelerator_type": "none: use ray.labels of the job",
}
_INSTEAD_OF_RUN = {
    "storage_path": "none: use job.runs_dir and checkpoint.dir of the job",
    "failure_config": "none: use the section restart of the job",
    "checkpoint_config": "none: use the section checkpoint of the job",
    "callbacks": "none: use job.on_commit in the train loop",
    "worker_runtime_env": "none: use ray.runtime_env of the job",
}
_UNNAMED = "ray_train_run-"  # how names begin that RunConfig makes
# The launcher, as a process that dies with the one that started it.
_SUBMIT = """
import sys
from ft_hsdp.lifetime import die_with
die_with(int(sys.argv.pop(1)))
from ft_hsdp.launch.cli import main
sys.exit(main())
"""


class FtHsdpTorchTrainer(TorchTrainer):
    """Ray Train's `TorchTrainer` for a job of several replicas, each of which may be lost and come back."""

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        job_config: str | os.PathLike[str],
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        **others: Any,
    ) -> None:
        """Note the arguments; `fit` checks them.

        Args:
            train_loop_per_worker: What each rank runs. It calls `ft_hsdp.join`.
            job_config: File of the job's configuration. If it has no `entry`, the entry is the script that runs.
            train_loop_config: Argument of the train loop.
            scaling_config: Its ``num_workers`` is the number of ranks of all replicas.
            run_config: Its ``name``, if there is one, takes the place of `job.name`.
            others: Other arguments of `TorchTrainer`; `fit` refuses them.

        Raises:
            TypeError: `TorchTrainer` has no such argument.
        """
        if unknown := sorted(set(others) - set(_INSTEAD)):
            raise TypeError(f"FtHsdpTorchTrainer has no argument {', '.join(unknown)}")
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            scaling_config=scaling_config,
            run_config=run_config,
        )
        self._file = Path(job_config)
        self._others = others

    def fit(self) -> Result:
        """Run the job on the Ray cluster until all replicas are done, and show its progress. Blocks.

        The cluster is the one that this process is connected to, else that of ``RAY_ADDRESS`` or of this machine.
        In a rank this runs the train loop, and does not return: what follows runs once, where the script was
        started. If the job does not end well, this process ends with the exit code of `launcher.py submit`; if an
        argument cannot be used, with one line and 64.

        Returns:
            ``metrics`` are the values that were reported last, ``metrics_dataframe`` all of them by step, ``path``
            is the run's directory. There is no checkpoint and no return value.

        Raises:
            SystemExit: The end of a rank, or of a job that failed.
        """
        try:
            launch = expected_launch()
            if launch is None:
                return self._submit()
            self._check(launch.config)
            set_train_fn_utils(RankUtils(launch.config))
        except FtHsdpError as error:
            sys.stderr.write(f"{error}\n")
            raise SystemExit(error.exit_code) from None
        self._run_loop()
        raise SystemExit(0)

    def _run_loop(self) -> None:
        loop: Any = self.train_loop_per_worker
        needed = [p for p in inspect.signature(loop).parameters.values() if p.default is p.empty]
        loop(self.train_loop_config or {}) if needed else loop()

    def _check(self, config: Config) -> None:
        """Compare the arguments with the configuration of the job. Raises ConfigError."""
        for name, value in self._others.items():
            if value is not None:
                raise ConfigError(f"FtHsdpTorchTrainer({name})", value, _INSTEAD[name])
        scaling, run = self.scaling_config, self.run_config
        ranks = config.replicas * config.ranks_per_replica
        if scaling.num_workers != ranks:
            allowed = f"replicas x ranks_per_replica of the job, which is {ranks}"
            raise ConfigError("ScalingConfig(num_workers)", scaling.num_workers, allowed)
        if scaling.use_gpu != (config.train.device == "cuda"):
            allowed = f"what train.device of the job means, which is {config.train.device}"
            raise ConfigError("ScalingConfig(use_gpu)", scaling.use_gpu, allowed)
        plain = ScalingConfig(num_workers=ranks, use_gpu=scaling.use_gpu)
        _check_default(scaling, plain, _INSTEAD_OF_SCALING)
        _check_default(run, RunConfig(name=run.name), _INSTEAD_OF_RUN)

    def _submit(self) -> Result:
        """Run the launcher, and return what it leaves. Raises ConfigError."""
        name = self.run_config.name or _UNNAMED
        overrides = [] if name.startswith(_UNNAMED) else [f"--job.name={json.dumps(name)}"]
        config = load(self._file, overrides)
        overrides += _entry(config)
        self._check(config)
        where = ["--ray-address", ray.get_runtime_context().gcs_address] if ray.is_initialized() else []
        code = _run(["submit", str(self._file), *where, *overrides])
        if code:
            raise SystemExit(code)
        return _result(Path(config.job.runs_dir).resolve() / config.job.name)


def prepare_data_loader(job: Job, dataloader: DataLoader[Any] | Loader[Any]) -> EpochLoader:
    """Make a DataLoader the data that is trained: each sample counts once an epoch, whatever is lost.

    It takes the place of ``ray.train.torch.prepare_data_loader``, which is for other data, such as that of an
    evaluation: there each replica reads it all, its ranks a part each.

    Args:
        job: What `ft_hsdp.join` has returned.
        dataloader: Over a map-style dataset; or what `Job.loader` has returned.

    Returns:
        The batches of this rank, on its device; each pass is an epoch. ``epochs(n)`` numbers them.

    Raises:
        ConfigError: The job cannot read it.
    """
    return open_epochs(job, dataloader)


class RankContext(LocalTrainContext):
    """What ``ray.train.get_context()`` returns in a rank: its place in its replica."""

    def __init__(self, config: Config) -> None:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        super().__init__(
            experiment_name=config.job.name,
            world_size=ranks,
            world_rank=rank,
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            local_world_size=local_ranks,
            node_rank=int(os.environ.get("GROUP_RANK", rank // local_ranks)),
        )

    def get_storage(self) -> NoReturn:
        """Refuse Ray Train's storage. Raises ConfigError."""
        raise ConfigError("get_context().get_storage", "a call", "checkpoint.dir of the job")


class RankUtils(LocalTrainFnUtils):
    """What the functions of ``ray.train`` do in a rank."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.job.name)
        self._context = RankContext(config)

    def report(self, metrics: dict[str, Any], checkpoint: object = None, *_: Any, **__: Any) -> None:
        """Have the job write values of the committed step, once (`Job.log`); nothing waits for the other ranks.

        Raises:
            ConfigError: There is a checkpoint, or this rank has no batch yet.
        """
        if checkpoint is not None:
            allowed = "none: use checkpoint.dir and checkpoint.every of the job, which resumes by itself"
            raise ConfigError("ray.train.report(checkpoint)", checkpoint, allowed)
        job = joined_job()
        if job is None:
            raise ConfigError("ray.train.report", metrics, "a call after ft_hsdp.join(), in the loop over batches")
        log_measured(job, metrics)

    def get_dataset_shard(self, dataset_info: Any) -> NoReturn:
        """Refuse Ray Data, whose shards are of a fixed number of workers. Raises ConfigError."""
        raise ConfigError("ray.train.get_dataset_shard", dataset_info.dataset_name, _INSTEAD["datasets"])

    def barrier(self) -> None:
        """Wait for the other ranks of the replica. Blocks.

        Raises:
            ConfigError: There is no process group yet.
        """
        if not dist.is_initialized():
            raise ConfigError("ray.train.collective.barrier", "a call", "one after ft_hsdp.join()")
        dist.barrier()

    def broadcast_from_rank_zero(self, data: Any) -> NoReturn:
        """Refuse to send objects from rank to rank, which would have to be unpickled. Raises ConfigError."""
        raise ConfigError(
            "ray.train.collective.broadcast_from_rank_zero", data, "torch.distributed.broadcast of a tensor"
        )


def _check_default(given: Any, plain: Any, instead: dict[str, str]) -> None:
    """Check that no field of ``given`` was set which is not used here. Raises ConfigError."""
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if value != getattr(plain, field.name):
            key = f"{type(given).__name__}({field.name})"
            raise ConfigError(key, value, instead.get(field.name, "none: it has no meaning in a job"))


def _entry(config: Config) -> list[str]:
    """Return the overrides that make ranks run this script as it was called. Raises ConfigError."""
    script, args = getattr(sys.modules["__main__"], "__file__", None), sys.argv[1:]
    overrides = []
    if config.entry is None:
        if script is None:
            raise ConfigError("entry", None, "the script that makes the trainer: a notebook cannot run in a rank")
        overrides.append(f"--entry={json.dumps(script)}")
    elif script is not None and not is_function(config.entry) and not _same(config.entry, script):
        raise ConfigError("entry", config.entry, f"{script}, the script that calls fit(), or no entry")
    if args and not config.args:
        overrides.append(f"--args={json.dumps(args)}")
    elif args != list(config.args):
        raise ConfigError("args", list(config.args), f"{args}, with which this script was called, or none")
    return overrides


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _run(words: list[str]) -> int:
    """Run the launcher to its end, pass on SIGINT and SIGTERM, and return its exit code."""
    command = [sys.executable, "-c", _SUBMIT, str(os.getpid()), *words]
    child = subprocess.Popen(command, start_new_session=True)  # so that it gets each signal once, from here
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda n, _: child.send_signal(n)) for number in numbers}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _result(run: Path) -> Result:
    """Return what a job has left in its run's directory."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "logged" in row]
    return Result(
        metrics=rows[-1]["logged"] if rows else {},
        checkpoint=None,
        error=None,
        path=str(run),
        metrics_dataframe=pandas.DataFrame([{"step": row["step"], **row["logged"]} for row in rows]),
    )
