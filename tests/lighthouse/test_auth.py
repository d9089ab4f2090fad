"""The tokens: who has one comes in with its role, whatever else the header says; two of each may be in use."""

from __future__ import annotations

import hmac
import logging
import os

import pytest

from ft_hsdp.errors import ConfigError
from lighthouse.http import access as auth
from lighthouse.http.access import ADMIN_VARIABLE, TOKEN_VARIABLE, Keys, may, view_key
from tests.support.lighthouse.lighthouse_helpers import ADMIN, TOKEN

NEXT = "7a" * 32
KEYS = Keys(TOKEN, ADMIN)


def role(keys, token):
    return keys.role(f"Bearer {token}".encode())


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Bearer  {TOKEN} "])
def test_the_token_lets_in(header):
    assert KEYS.role(header.encode()) == "worker"


@pytest.mark.parametrize(
    "header",
    [
        *("", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}0"),
        *(f"Bearer {TOKEN} {TOKEN}", f"Bearer {TOKEN.upper()}", "Bearer \xdc\xe9", "Bearer\x00"),
    ],
)
def test_anything_else_does_not(header):
    assert KEYS.role(header.encode("latin-1")) is None
    assert KEYS.role(None) is None


def test_each_token_has_one_role():
    assert role(KEYS, ADMIN) == "admin"
    assert role(KEYS, view_key(TOKEN)) == "viewer"
    assert role(KEYS, view_key(ADMIN)) is None
    allowed = {
        (known, wanted) for known in ("viewer", "worker", "admin") for wanted in ("viewer", "worker", "admin")
    }
    allowed -= {("viewer", "worker"), ("viewer", "admin"), ("worker", "admin"), ("admin", "worker")}
    assert {(k, w) for k, w in allowed if may(k, w)} == allowed
    assert not may("viewer", "worker")
    assert not may("worker", "admin")
    assert not may("admin", "worker")


def test_digests_are_compared_in_constant_time(monkeypatch):
    compared = []
    real = hmac.compare_digest

    def spy(a, b):
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    keys = Keys(TOKEN, ADMIN)
    for credential in ("x", "y" * 1000, TOKEN):
        role(keys, credential)
    assert [(len(a), len(b)) for a, b in compared] == [(32, 32)] * 9
    assert not {TOKEN.encode(), ADMIN.encode()} & {side for pair in compared for side in pair}


def test_without_a_token_everybody_is_a_worker_and_nobody_an_admin():
    assert Keys("").role(None) == "worker"
    assert Keys("", ADMIN).role(None) == "worker"
    assert role(Keys("", ADMIN), ADMIN) == "admin"
    assert role(Keys(TOKEN), ADMIN) is None
    assert role(Keys(TOKEN), "") is None


def test_two_lines_are_two_tokens_and_the_first_is_the_current_one():
    keys = Keys(f"{NEXT}\n{TOKEN}\n", f"{ADMIN}\n{NEXT[:-1]}1")
    assert keys.worker == NEXT
    assert keys.admin == ADMIN
    assert [role(keys, t) for t in (NEXT, TOKEN, ADMIN, NEXT[:-1] + "1")] == ["worker", "worker", "admin", "admin"]
    assert [role(keys, view_key(t)) for t in (NEXT, TOKEN)] == ["viewer", "viewer"]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "admin_token").write_text(ADMIN)
    return tmp_path


def look(keys):
    """As if a second had passed."""
    keys._due = 0.0


def test_files_are_read_again_when_they_change(files):
    keys = Keys.read(files / "token", files / "admin_token")
    assert role(keys, TOKEN) == "worker"
    (files / "admin_token").write_text(f"{NEXT}\n{ADMIN}\n")
    assert role(keys, NEXT) is None  # not before it has looked
    look(keys)
    assert (role(keys, NEXT), role(keys, ADMIN)) == ("admin", "admin")
    (files / "part").write_text(f"{NEXT}\n")
    os.replace(files / "part", files / "admin_token")
    look(keys)
    assert (role(keys, NEXT), role(keys, ADMIN)) == ("admin", None)


@pytest.mark.parametrize("content", [b"", b"a b c", b"\xff\xfe" * 10, b"short", b"x" * 300])
def test_a_change_that_cannot_be_used_changes_nothing(files, content, caplog):
    keys = Keys.read(files / "token", files / "admin_token")
    (files / "token").write_bytes(content)
    look(keys)
    with caplog.at_level(logging.ERROR):
        assert role(keys, TOKEN) == "worker"
        look(keys)
        assert role(keys, TOKEN) == "worker"
    assert len(caplog.records) == 1  # said once, not every second
    assert "the tokens stay as they are: token: got" in caplog.text
    assert content.decode("latin-1") not in caplog.text or not content


def test_a_job_with_a_token_does_not_become_open(files, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    keys = Keys.read(files / "token", files / "admin_token")
    (files / "token").unlink()
    look(keys)
    assert keys.role(None) is None
    assert role(keys, TOKEN) == "worker"


def test_what_was_proved_is_forgotten_with_its_token_and_bounded(files):
    keys = Keys.read(files / "token", files / "admin_token")
    for n in range(100):
        assert keys.role(b"Bearer" + b" " * (n + 1) + TOKEN.encode()) == "worker"
        assert keys.role(b"Bearer %d" % n) is None
    assert len(keys._proved) == 16
    (files / "token").write_text(NEXT)
    look(keys)
    assert role(keys, TOKEN) is None
    assert role(keys, NEXT) == "worker"


def test_without_files_the_environment_counts(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setenv(ADMIN_VARIABLE, ADMIN)
    keys = Keys.read(tmp_path / "token", tmp_path / "admin_token")
    assert (role(keys, TOKEN), role(keys, ADMIN), keys.role(None)) == ("worker", "admin", None)


@pytest.mark.parametrize("content", [b"", b"\n", b"a b c", b"\xff" * 64, b"short"])
def test_a_file_that_cannot_be_used_is_one_line_that_does_not_show_it(files, content):
    (files / "token").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Keys.read(files / "token", files / "admin_token")
    assert str(caught.value).startswith("token: got ")
    assert "short" not in str(caught.value).replace(str(files), "")


def test_the_files_are_looked_at_once_a_second(files, monkeypatch):
    keys = Keys.read(files / "token", files / "admin_token")
    looks = []
    monkeypatch.setattr(auth.os, "stat", lambda path, real=os.stat: looks.append(path) or real(path))
    for _ in range(1000):
        role(keys, TOKEN)
    assert len(looks) <= 4
