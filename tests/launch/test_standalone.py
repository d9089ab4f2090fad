"""What a replica that is told where its lighthouse is does with a run directory."""

import re
from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from ft_hsdp.config import Config, load, parse
from ft_hsdp.errors import ConfigError, LighthouseUnreachable, Retryable
from ft_hsdp.http_proof import HEADER, keys_of
from ft_hsdp.jsonl import replace_json
from ft_hsdp.launch import backend, host, standalone
from ft_hsdp.launch.run.directory import RunDir, make_run, read_json, write_job_files
from ft_hsdp.lifetime import identity
from lighthouse.quorum.state import Policy
from lighthouse.store import SqliteStore
from tests.support.answering import Answering, serving

NOBODY = "http://127.0.0.1:1"
GOOD = "a" * 64


class Strict(Answering):
    """A lighthouse that knows the token `GOOD`."""

    def do_GET(self) -> None:
        _, name, *_, asked = self.headers.get("Authorization", "- - -").split()
        proof = keys_of(GOOD).answer(asked.encode(), b"challenge", 200, b"").decode()
        self.answer(200, headers={HEADER: f"challenge {proof}"} if name == keys_of(GOOD).key_id else {})


HOLDER = 0  # the descriptor of one that nobody asks for anything here


@pytest.fixture
def url() -> Iterator[str]:
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Strict)) as found:
        yield found


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Of a job; what would run is replaced."""

    async def supervise(*_: object) -> int:
        return 7

    for module, name, stand_in in (
        (standalone, "REFUSED_S", 0.2),
        (host, "prepare_data", lambda _: None),
        (host, "serve", supervise),
        (standalone, "follow", SimpleNamespace(start=lambda _: None)),
    ):
        monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr("os.execve", lambda *_: None)
    return parse({"job": {"name": "job", "runs_dir": str(tmp_path)}, "timeouts": {"reach_s": 0.3}})


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Each file with its time, but not the claim, which lives, and the store, which a lock protects."""
    files = [p for p in folder.rglob("*") if p.is_file() and not re.search("owner|store", p.name)]
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


def test_nothing_is_written_before_the_lighthouse_has_taken_the_token(config, url, tmp_path, monkeypatch) -> None:
    def refused(secret: str, where: str, error: type[Exception], line: str) -> None:
        monkeypatch.setenv("FT_HSDP_TOKEN", secret)
        before = content(tmp_path)
        with pytest.raises(error, match=line):
            host.replica(config, 0, where, HOLDER)
        assert content(tmp_path) == before

    refused(GOOD, NOBODY, LighthouseUnreachable, "does not answer within")
    refused("b" * 64, url, ConfigError, f"FT_HSDP_TOKEN: .*whose lighthouse is at {url}")
    refused(" ", url, ConfigError, "FT_HSDP_TOKEN: .*set and blank")
    assert not (tmp_path / "job").exists()
    monkeypatch.setenv("FT_HSDP_TOKEN", GOOD)
    assert host.replica(config, 0, url, HOLDER) == 7
    run = RunDir(tmp_path / "job")
    assert (run.token.read_text(), read_json(run.lighthouse)["urls"]) == (GOOD, [url])
    made = content(tmp_path)
    assert host.replica(config, 0, url, HOLDER) == 7
    assert content(tmp_path) == made, "all pods of a job may have one folder: it is not written again"
    refused(GOOD, NOBODY, LighthouseUnreachable, "does not answer within")
    refused("b" * 64, url, ConfigError, "FT_HSDP_TOKEN")
    monkeypatch.setenv("FT_HSDP_TOKEN", GOOD)
    for spoil in (Path.unlink, lambda f: f.write_text(""), lambda f: f.write_bytes(b"\xff" * 9)):
        spoil(run.token)
        assert host.replica(config, 0, url, HOLDER) == 7
        assert run.token.read_text() == GOOD


@pytest.mark.parametrize("pid", [1, 0])
def test_another_name_of_a_lighthouse_is_added_to_what_that_wrote(config, url, tmp_path, monkeypatch, pid) -> None:
    """It may be on another machine, where its pid is known. What a replica wrote, pid 0, is written anew."""
    run = RunDir(tmp_path / "job")
    make_run(run, config, GOOD).release()
    said = {**identity(), "pid": pid, "host": "node7", "boot": "another", "url": NOBODY}
    replace_json(run.lighthouse, said)
    monkeypatch.setenv("FT_HSDP_TOKEN", GOOD)
    assert host.replica(config, 0, url, HOLDER) == 7
    added, anew = {**said, "urls": [NOBODY, url]}, {"pid": 0, "url": url, "urls": [url]}
    assert read_json(run.lighthouse) == (added if pid else anew)


def test_a_replica_of_another_job_leaves_a_run_that_lives_alone(config, url, tmp_path, monkeypatch) -> None:
    run = RunDir(tmp_path / "job")
    claim = make_run(run, config, "c" * 64)
    before = content(tmp_path)
    monkeypatch.setenv("FT_HSDP_TOKEN", GOOD)
    with pytest.raises(ConfigError, match=r"job\.name: .*job job has it since"):
        host.replica(config, 0, url, HOLDER)
    assert content(tmp_path) == before
    claim.release()
    assert host.replica(config, 0, url, HOLDER) == 7, "its owner has ended"
    assert len(list(tmp_path.glob("job.*Z"))) == 1


def test_an_edited_file_is_refused_and_does_not_replace_the_configuration(config, url, tmp_path) -> None:
    run = RunDir(tmp_path / "job")
    make_run(run, config, GOOD).release()
    replace_json(run.lighthouse, {"url": url})
    SqliteStore(run.path / "lighthouse/store.sqlite").close()
    before, train = content(tmp_path), config.train.model_copy(update={"seed": 9})
    edited = config.model_copy(update={"train": train})
    for begin in (lambda: host.replica(edited, 0, None, HOLDER), lambda: standalone.lighthouse(edited)):
        with pytest.raises(ConfigError, match=r"train\.seed: got .*another job\.name is another run"):
            begin()
        assert content(tmp_path) == before
    assert host.replica(config, 0, None, HOLDER) == 7
    assert content(tmp_path) == before, "nothing but what it starts is written"


def test_a_lighthouse_that_is_started_again_goes_on_with_the_run_and_its_token_or_not_at_all(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "job")
    make_run(run, config, GOOD).release()
    SqliteStore(run.path / "lighthouse/store.sqlite").close()
    for spoil in (run.config.unlink, lambda: run.config.write_bytes(b"\xff["), lambda: None):
        spoil()
        standalone.lighthouse(config)
        assert (load(run.config), run.token.read_text()) == (config, GOOD)
    run.token.unlink()
    with pytest.raises(Retryable, match="token is missing, and the run was made with a token"):
        standalone.lighthouse(config)
    monkeypatch.setenv("FT_HSDP_TOKEN", GOOD)
    standalone.lighthouse(config)
    assert run.token.read_text() == GOOD
    assert not list(tmp_path.glob("job.*Z")), "no new run was begun"
    monkeypatch.setenv("FT_HSDP_TOKEN", "")
    with pytest.raises(ConfigError, match=r"FT_HSDP_TOKEN: .*blank"):
        standalone.lighthouse(parse({"job": {"name": "new", "runs_dir": str(tmp_path)}}))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("finished", [False, True])
def test_a_lighthouse_goes_on_with_a_run_until_its_store_says_that_it_has_ended(
    config: Config, tmp_path: Path, finished: bool
) -> None:
    """The first replica that is done writes its final state while the others still train."""
    run = RunDir(tmp_path / "job")
    write_job_files(run, config)
    token = run.token.read_text()
    run.final(0).parent.mkdir(parents=True)
    replace_json(run.final(0), {"step": config.train.steps})
    run.replica(1).mkdir(parents=True)
    store = SqliteStore(run.path / "lighthouse/store.sqlite")
    store.save(replace(store.load(Policy(slots=2, steps=10)), finished=finished))
    store.close()
    standalone.lighthouse(config)
    assert (run.token.read_text() == token) is not finished
    assert run.final(0).exists() is not finished


def test_a_rank_of_torchrun_needs_no_holder(config: Config, url: str, tmp_path: Path, monkeypatch) -> None:
    """The other ranks and GPUs of its replica are elsewhere."""
    there = parse({**config.model_dump(), "train": {"device": "cuda"}, "ranks_per_replica": 16})
    make_run(RunDir(tmp_path / "job"), there, GOOD).release()
    for name, value in {"FT_HSDP_TOKEN": GOOD, "RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(backend, "entry", SimpleNamespace(main=lambda *_: 76), raising=False)
    assert host.replica(there, 1, url, None) == 76
