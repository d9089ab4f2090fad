import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ft_hsdp
from tests.support.programs import INAPPLICABLE


def test_importing_the_package_and_the_configuration_imports_no_torch() -> None:
    code = (
        "import sys, ft_hsdp, ft_hsdp.config, ft_hsdp.errors, ft_hsdp.train.tokens; "
        "sys.exit('torch' in sys.modules or ft_hsdp.Config().replicas != 3)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_public_names_are_listed_and_strangers_refused() -> None:
    assert set(ft_hsdp.__all__) <= set(dir(ft_hsdp))
    assert ft_hsdp.ConfigError.exit_code == 64
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = ft_hsdp.no_such_name


@pytest.mark.parametrize(
    ("why", "counts"),
    [
        ("wandb is not installed", True),
        ("this is for root", True),
        (f"{INAPPLICABLE}two members of one host", False),
        ("CUDA is not available", False),
    ],
)
def test_in_continuous_integration_what_is_skipped_has_failed(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, why: str, counts: bool
) -> None:
    shared = str(Path(__file__).with_name("conftest.py"))
    plugins = pytestconfig.pluginmanager.get_plugins()
    conftest: Any = next(each for each in plugins if getattr(each, "__file__", "") == shared)
    for strict in (True, False):
        monkeypatch.setattr(conftest, "SKIP_NOTHING", strict)
        for said in (("a.py", 1, f"Skipped: {why}"), f"Skipped: {why}"):
            report = SimpleNamespace(skipped=True, outcome="skipped", longrepr=said)
            conftest._unskipped(report)
            assert report.outcome == ("failed" if strict and counts else "skipped")


def test_continuous_integration_has_the_packages_that_tests_would_skip_without() -> None:
    document = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    dev = " ".join(document["project"]["optional-dependencies"]["dev"])
    assert [each for each in ("pyarrow", "wandb", "ray[default]", "triton", "playwright") if each not in dev] == []
