"""docs/timeouts.md says what the models say, and every wait of the configuration is waited by somebody."""

import ast
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ft_hsdp.config import Config, TimeoutsConfig, dump, parse
from ft_hsdp.config.config import BOUNDS
from ft_hsdp.config.timeouts import Derived
from ft_hsdp.errors import EXIT_CONFIG, ConfigError, Retryable
from ft_hsdp.launch.backend.forkserver import ForkServer
from ft_hsdp.launch.lighthouse_process import LighthouseFailed, LighthouseProcess
from ft_hsdp.launch.render.settings import REACH_S, spread
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.train.state.checkpointing import CheckpointSaver
from ft_hsdp.train.state.snapshots import SnapshotWriter

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/timeouts.md").read_text()
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("| `") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 4
}
DERIVED = TimeoutsConfig.derived()
PRESETS = re.findall(r"^### (.+?)\n.*?```yaml\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
ELSEWHERE = ("ftar.timeout_s", "quorum.lease_s", "quorum.catchup_wait_s", "lighthouse.etcd_lease_s")
WAITS = [
    *(f"timeouts.{key}" for key in TimeoutsConfig.model_fields if key != "factor"),
    *(f"restart.{key}" for key in type(Config().restart).model_fields if key.endswith("_s")),
    *ELSEWHERE,
]


def _default(key: str) -> float | None:
    section, name = key.split(".")
    value: float | None = getattr(getattr(Config(), section), name)
    return value


def test_every_wait_has_its_row_and_its_default_from_the_shortest_to_the_longest() -> None:
    assert {key: row[0] for key, row in ROWS.items()} == {
        key: "null" if (value := _default(key)) is None else f"{value:g}" for key in WAITS
    }
    assert all(len(row) == 3 and all(row[:2]) for row in ROWS.values())
    seconds = [float("inf") if row[0] == "null" else float(row[0]) for row in ROWS.values()]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda b: f"{b.key}-{b.other}")
def test_what_is_enforced_is_said(bound: Any) -> None:
    least, times, key = re.fullmatch(r"(less than|at most) (.* x )?(\S+)", bound.words()).groups()  # type: ignore[union-attr]
    assert f"{least} {times or ''}`{key}`" in ROWS[bound.settable().name][2]


def test_nothing_else_is_said_to_be_enforced() -> None:
    said = sum(len(re.findall(r"less than |at most ", row[2])) for row in ROWS.values())
    assert said == len(BOUNDS) + 1  # backoff_s


def test_a_wait_follows_its_key_and_the_page_says_how() -> None:
    told = [f"`timeouts.{rule.base}` {rule.times:.3g}" for rule in DERIVED.values()]
    assert sorted(told) == sorted(
        f"{base} {multiple.split()[0]}"
        for base, multiples in re.findall(r"^\| (`\S+`) \| ([^|]+) \|$", PAGE, re.MULTILINE)
        for multiple in multiples.split("; ")
    )
    assert all(rule.why for rule in DERIVED.values())
    changed = parse({"timeouts": {"stop_s": 25}}).timeouts
    assert (changed.gone_s, changed.together_s, changed.save_s) == (75.0, 75.0, 60.0)


@pytest.mark.parametrize(("name", "rule"), DERIVED.items())
def test_a_wait_that_nobody_sets_is_refused_with_its_key(name: str, rule: Derived) -> None:
    for document, overrides in (({"timeouts": {name: 9}}, []), ({}, [f"--timeouts.{name}=9"])):
        with pytest.raises(ConfigError, match=rf"x timeouts\.{rule.base}; .* or timeouts\.factor") as caught:
            parse(document, overrides)
        assert (caught.value.key, caught.value.exit_code) == (f"timeouts.{name}", EXIT_CONFIG)


def test_the_factor_is_in_every_wait_once() -> None:
    usual, config = Config().timeouts, parse({"timeouts": {"factor": 3, "silence_s": 1.5}})
    assert config.timeouts.silence_s == 4.5
    for name in (*TimeoutsConfig.model_fields, *DERIVED):
        if name not in ("factor", "start_wait_s") and TimeoutsConfig.key_of(name).name != "silence_s":
            assert getattr(config.timeouts, name) == pytest.approx(3 * getattr(usual, name))
    assert parse(yaml.safe_load(dump(config))) == config
    assert parse({"timeouts": {"factor": 3, "start_wait_s": 2}}).timeouts.start_wait_s == 6.0
    assert spread(parse({"timeouts": {"factor": 3}})).timeouts.reach_s == 3 * REACH_S
    for factor in (0.5, 1.1, 3.3, 12):  # alone, it contradicts nothing
        parse({"timeouts": {"factor": factor}})


@pytest.mark.parametrize(("name", "text"), PRESETS, ids=[name for name, _ in PRESETS])
def test_a_preset_can_be_used_as_it_is(name: str, text: str) -> None:
    assert len(PRESETS) == 4
    assert parse(yaml.safe_load(text)) != Config()


@pytest.mark.parametrize("key", [*WAITS, *(f"timeouts.{name}" for name in DERIVED)])
def test_a_wait_is_read_by_somebody(key: str) -> None:
    """Outside the configuration and the preflight, which only check it."""
    assert key.split(".")[1] in _read()


def _read(found: set[str] = set()) -> set[str]:  # noqa: B006 - the tree is parsed once
    """Attributes that any module of ours reads of something called like a section of the configuration."""
    if not found:
        files = [*(ROOT / "ft_hsdp").rglob("*.py"), *(ROOT / "lighthouse").rglob("*.py")]
        for file in files:
            if not {"config", "doctor"} & set(file.relative_to(ROOT).parts):
                nodes = ast.walk(ast.parse(file.read_text()))
                found |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and _section(n.value)}
    return found


def _section(value: ast.expr) -> bool:
    name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
    return name in ("timeouts", "restart", "policy", "ftar", "quorum", "lighthouse", "options")


# By behaviour, where the wait is short to show.


async def test_imports_may_take_boot_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_import.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ForkServer(tmp_path, preload=("slow_import",), boot_s=0.3)
    with pytest.raises(Retryable, match=r"did not load within 0\.3 s"):
        await server.start()
    await server.close()


async def test_a_lighthouse_listens_within_listen_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "silent_lighthouse.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = parse({"timeouts": {"load_s": 6.0, "return_wait_s": 0.0}})
    one = LighthouseProcess(RunDir(tmp_path), config, lambda _: None, module="silent_lighthouse")
    with pytest.raises(LighthouseFailed, match=r"does not listen after 0\.3 s"):
        await one.start()
    await one.stop()


def test_a_checkpoint_is_finished_within_save_s() -> None:
    class Hanging:
        """A copy that never ends, and a writer that says how long it may take."""

        left: float | None = None
        wait = SnapshotWriter.wait

        def after(self, _: object) -> None:
            pass

        def close(self, deadline_s: float) -> None:
            self.left = deadline_s

    hanging: Any = Hanging()
    began = time.monotonic()
    CheckpointSaver(hanging, hanging, 0, lambda _: None).close(0.2)
    assert time.monotonic() - began >= 0.2
    assert hanging.left == 0.0
