import os
import stat

import pytest

from ft_hsdp import secret
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.backend.processes import environment
from tests.support.refused import refused


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_secret_replaces_what_stood_there_and_is_never_written_through_it(tmp_path) -> None:
    """Somebody who may write in the folder puts a link, or a file that all can read, in the way."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / "open").touch(0o666)
    with (tmp_path / "open").open() as reader:
        for name in ("link", "open", "new"):
            secret.write_private(tmp_path / name, "token")
            assert (tmp_path / name).read_text() == "token"
            assert not (tmp_path / name).is_symlink()
            assert mode(tmp_path / name) == 0o600
        assert reader.read() == "", "who had opened it before reads the secret"
    assert elsewhere.read_text() == "kept"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "link", "new", "open"]


def test_the_checkpoint_key_is_made_once_and_private(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first = secret.make_checkpoint_key(None)
    assert len(first) == 64
    assert secret.make_checkpoint_key(None) == secret.checkpoint_key(None) == first
    assert mode(secret.key_file()) == 0o600
    assert mode(secret.key_file().parent) == 0o700
    own = tmp_path / "own"
    assert secret.make_checkpoint_key(str(own)) not in (first, b"")
    monkeypatch.setenv(secret.KEY_VARIABLE, "of the environment".replace(" ", "_"))
    assert secret.checkpoint_key(str(own)) == b"of_the_environment"


def test_the_copy_in_the_run_comes_before_this_hosts_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / secret.RUN_KEY).write_text("the_operators\n")
    assert secret.run_key(tmp_path, None) == b"the_operators"
    assert not secret.key_file().exists()
    refused(lambda: secret.run_key(tmp_path / "none", None), r"checkpoint\.key")
    assert not secret.key_file().exists(), "who reads makes none"
    assert secret.make_checkpoint_key(None) == secret.run_key(tmp_path / "none", None)


def test_a_key_that_is_lost_is_not_replaced_where_it_has_signed(tmp_path, monkeypatch) -> None:
    key, folder = tmp_path / "key", tmp_path / "checkpoints"
    first = secret.make_checkpoint_key(str(key), folder)
    (folder / "step-4-epoch-1-0-a-0").mkdir(parents=True)
    (folder / "step-4-epoch-1-0-a-0" / "manifest.json").touch()
    assert secret.make_checkpoint_key(str(key), folder) == first
    key.unlink()
    with pytest.raises(ConfigError, match=r"checkpoint\.key: .*the key that signed .*put it back"):
        secret.make_checkpoint_key(str(key), folder)
    assert not key.exists()
    monkeypatch.setenv(secret.KEY_VARIABLE, " ")
    refused(lambda: secret.make_checkpoint_key(str(tmp_path / "new")), r"CHECKPOINT_KEY: .*set and blank")
    assert not (tmp_path / "new").exists()
    monkeypatch.setenv(secret.KEY_VARIABLE, first.decode())
    assert secret.make_checkpoint_key(str(key), folder) == first


@pytest.mark.parametrize("text", ["", "short", "two words here\n", "x" * 300, "ä" * 20])
def test_what_is_no_key_gets_one_line(tmp_path, text) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    refused(lambda: secret.checkpoint_key(str(path)), r"checkpoint\.key")


def test_a_key_that_others_can_read_is_refused(tmp_path) -> None:
    path = tmp_path / "key"
    path.write_text("k" * 64)
    path.chmod(0o644)
    refused(lambda: secret.checkpoint_key(str(path)), "others cannot read")
    refused(lambda: secret.make_checkpoint_key(str(path / "below")), "can be read or made")
    assert os.environ.get(secret.KEY_VARIABLE) is None


def test_a_child_inherits_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FT_HSDP_TOKEN", secret.KEY_VARIABLE, "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "a_secret")
    assert "a_secret" not in environment().values()
