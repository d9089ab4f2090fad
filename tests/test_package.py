import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
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


def _shared(pytestconfig: pytest.Config) -> Any:
    """The module tests/conftest.py."""
    shared = str(Path(__file__).with_name("conftest.py"))
    plugins = pytestconfig.pluginmanager.get_plugins()
    return next(each for each in plugins if getattr(each, "__file__", "") == shared)


@pytest.mark.parametrize(
    ("expression", "always", "perhaps", "selects"),
    [
        ("not proof and not multiproc", set(), set(), True),
        ("not proof and not multiproc", set(), {"multiproc"}, True),
        ("not proof and not multiproc", {"multiproc"}, {"proof"}, False),
        ("not proof and multiproc", set(), {"proof"}, False),
        ("not proof and multiproc", {"multiproc"}, {"proof"}, True),
        ("proof and not soak", set(), {"proof", "soak"}, True),
        ("proof or not proof", set(), set(), True),
        ("anyio and soak", set(), {"soak"}, True),
    ],
)
def test_files_are_left_out_of_which_no_test_can_be_selected(
    pytestconfig: pytest.Config, expression: str, always: set[str], perhaps: set[str], selects: bool
) -> None:
    assert _shared(pytestconfig).selectable(expression, always, perhaps) == selects


@pytest.mark.parametrize(
    ("why", "counts"),
    [
        ("wandb is not installed", True),
        ("this is for root", True),
        (f"{INAPPLICABLE}two members of one host", False),
        ("CUDA is not available", False),
    ],
)
def test_in_continuous_integration_what_is_skipped_has_failed(pytestconfig, why, counts) -> None:
    conftest = _shared(pytestconfig)
    for strict in (True, False):
        for said in (("a.py", 1, f"Skipped: {why}"), f"Skipped: {why}"):
            report = SimpleNamespace(skipped=True, outcome="skipped", longrepr=said)
            conftest.unskipped(report, strict)
            assert report.outcome == ("failed" if strict and counts else "skipped")


def test_continuous_integration_has_the_packages_that_tests_would_skip_without() -> None:
    document = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    dev = " ".join(document["project"]["optional-dependencies"]["dev"])
    assert [each for each in ("pyarrow", "wandb", "ray[default]", "triton", "playwright") if each not in dev] == []


# The wheel, as somebody installs it who has no checkout.


ROOT = Path(__file__).parents[1]
SYSTEMS = "ft_hsdp/analysis/systems.json"


def said(*command: object, cwd: Path) -> str:
    """What a program that ends well says on stdout."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_installs_and_its_command_runs(tmp_path: Path) -> None:
    source, home = tmp_path / "source", tmp_path / "venv"
    for name in said("git", "ls-files", cwd=ROOT).splitlines():
        if name.startswith(("ft_hsdp/", "lighthouse/", "ftar_kernels/")) or name in (
            "pyproject.toml",
            "README.md",
            "LICENSE",
        ):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():  # a link to a folder
                (source / name).symlink_to((ROOT / name).resolve())
            else:
                (source / name).write_bytes((ROOT / name).read_bytes())
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation")
    said(*build, "--outdir", tmp_path / "dist", source, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("ft_hsdp-*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    for name in ("ft_hsdp/py.typed", "lighthouse/dashboard/index.html", "ftar_kernels/__init__.py", SYSTEMS):
        assert name in inside
    assert not [name for name in inside if name.startswith(("tests/", "docs/", "configs/"))]

    venv.create(home, with_pip=False)
    python, ft_hsdp_command = home / "bin" / "python", home / "bin" / "ft-hsdp"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    said(*pip, wheel, cwd=tmp_path)
    # The packages that it depends on come from this environment, without the checkout that is installed in it.
    seen = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages" / "zz_seen.pth"
    paths = [p for p in sys.path if p.endswith("site-packages")] or [sysconfig.get_path("purelib")]
    seen.write_text("".join(f"{path}\n" for path in paths))
    assert "ft-hsdp" in said(ft_hsdp_command, "--help", cwd=tmp_path)
    where = "import ft_hsdp, lighthouse, ftar_kernels; print(ft_hsdp.__file__)"
    assert said(python, "-c", where, cwd=tmp_path).startswith(str(home))
    refused = subprocess.run([ft_hsdp_command, "bench", "ftar"], cwd=tmp_path, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (64, "", 1)
    assert "python launcher.py bench ftar" in refused.stderr
    for command, file in ((["schema"], "schema.json"), (["example", "quickstart"], "quickstart.yaml")):
        assert said(ft_hsdp_command, *command, cwd=tmp_path) == (ROOT / "configs" / file).read_text()
