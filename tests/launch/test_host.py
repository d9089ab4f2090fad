"""The agent of a host, beside a made-up lighthouse and a real fork server."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import pytest

from ft_hsdp.config.timeouts import TimeoutsConfig
from ft_hsdp.errors import EXIT_CONFIG, EXIT_OK, EXIT_RETRYABLE, InvalidArgument, Retryable
from ft_hsdp.launch import agent
from ft_hsdp.launch.run.directory import RunDir, read_json
from ft_hsdp.secret import current, worker_token
from tests.support.launch.host_scene import Scene
from tests.support.launch.launch_helpers import Plan
from tests.support.waiting import async_until


@pytest.fixture
async def scene(run_dir: RunDir) -> AsyncIterator[Scene]:
    made = Scene(run_dir)
    await async_until(lambda: made.open, "a report")
    yield made
    made.running.cancel()
    await asyncio.gather(made.running, return_exceptions=True)


async def test_what_is_assigned_starts_once_its_end_is_told_and_the_rest_is_killed(scene, run_dir, plan) -> None:
    plan({"0": {"0": {"2": ["raise", "key", "oh"]}}, "1": {"1": {"0": ["final", True]}}})
    first = scene.reports[-1]
    one, other = scene.assigned("0-a-0", 1, 2, of=4), scene.assigned("1-a-1", 0, of=1)
    scene.answers(one, other)
    ends = (2, EXIT_RETRYABLE, False), (1, -signal.SIGKILL, True)  # without one rank the others commit nothing
    said = await scene.reported("0-a-0", (), *ends)
    assert (said.ended[0].cause, "KeyError" in said.ended[0].why) == ("script", True)
    assert "GPU 1 of A,B" in run_dir.rank_log(0, 2).read_text()
    assert (await scene.reported("1-a-1", (), (0, 0, False))).done
    assert scene.reports[-1].address != first.address == other.master  # one port for each rank 0
    assert {report.life for report in scene.reports} == {first.life}
    scene.answers(one, scene.assigned("0-a-1", 1, 2, of=4))
    await scene.waiting("0-1-1", "0-1-2")
    await scene.reported("0-a-0", (), *ends)
    assert scene.of("1-a-1") is None  # it is over, and not assigned
    for _ in range(2):
        scene.answers(scene.assigned("0-a-1", 1, 2, of=4))
        await async_until(lambda: scene.reports[-1].seen == str(scene.number), "it knows")
    await async_until(lambda: scene.of("0-a-0") is None, "the next report")
    scene.answers(one, scene.assigned("0-a-1", 1, 2, of=4))
    await scene.reported("0-a-0", (), *ends)
    await scene.reported("0-a-1", (1, 2))
    scene.answers()
    await scene.reported("0-a-1", (), (1, -signal.SIGKILL, True), (2, -signal.SIGKILL, True))


async def test_state_agents_hear_that_their_replicas_have_a_place_on_the_host(run_dir) -> None:
    visits: asyncio.Queue[tuple[str, int, str]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def visited(*about: Any) -> None:
        loop.call_soon_threadsafe(visits.put_nowait, about)
        raise ConnectionRefusedError  # none is there

    with mock.patch.object(agent, "visit", visited), mock.patch.object(agent, "VISITS", 10_000):
        scene = Scene(run_dir)
        for replica in (1, 0):
            await async_until(lambda: scene.open, "a report")
            scene.answers(placed=(replica,))
            async with asyncio.timeout(20):
                while (visit := await visits.get())[1] != replica:
                    pass
        assert visit == (worker_token(current(run_dir.token)), 0, scene.agent.name)
        scene.running.cancel()
        await asyncio.gather(scene.running, return_exceptions=True)


async def test_the_host_of_rank_0_says_which_units_were_in_flight_when_its_ranks_ended(
    scene, run_dir, plan
) -> None:
    rows = {"fed": {"step": 7, "shard": 1, "index": 4, "units": 2}, "commits": {"step": 6, "role": "contribute"}}
    for replica in (0, 1):
        run_dir.replica(replica).mkdir(parents=True)
        for name, row in rows.items():
            said = {**row, "incarnation": f"{replica}-a-0"}
            (run_dir.replica(replica) / f"{name}.jsonl").write_text(f"{json.dumps(said)}\n")
    plan({"0": {"0": {"1": ["exit", 3]}}, "1": {"0": {"1": ["exit", 3]}}})
    scene.answers(scene.assigned("0-a-0", 0, 1), scene.assigned("1-a-0", 1, fatal=((0, 5, 2),)))
    assert (await scene.reported("1-a-0", (), (1, 3, False))).fed is None
    assert "[[0, 5, 2]]" in run_dir.rank_log(1, 1).read_text()
    said = await scene.reported("0-a-0", (), (1, 3, False), (0, -signal.SIGKILL, True))
    assert (said.fed, said.usable) == ((1, 4, 2), True)


async def test_ranks_that_are_to_leave_are_told_and_killed_if_they_do_not(scene: Scene, plan: Plan) -> None:
    plan({"0": {"0": {"1": ["deaf"]}}})
    scene.answers(scene.assigned("0-a-0", 0, 1))
    await scene.waiting("0-0-0", "0-0-1")
    scene.answers(scene.assigned("0-a-0", 0, 1, leaves=True))
    await scene.reported("0-a-0", (1,), (0, -signal.SIGTERM, False))
    await scene.reported("0-a-0", (), (0, -signal.SIGTERM, False), (1, -signal.SIGKILL, True))


async def test_the_kernels_log_is_read_while_no_rank_ends(scene: Scene) -> None:
    with mock.patch.object(scene.ranks.kernel_log, "evidence") as read:
        await async_until(lambda: read.called, "a look")


async def test_a_rank_that_cannot_be_started_ends_the_others_here(scene: Scene, run_dir: RunDir) -> None:
    run_dir.replica(3).parent.mkdir()
    run_dir.replica(3).write_text("in the way")
    scene.answers(scene.assigned("3-a-0", 0, 1))
    assert "3" in (await scene.reported("3-a-0", ())).failed


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ({"finished": True}, EXIT_OK),
        ({"halted": "no"}, EXIT_RETRYABLE),
        ({"halted": "no", "wrong": True}, EXIT_CONFIG),
        ({}, 143),
    ],
)
async def test_the_agent_ends_once_no_rank_is_left_and_says_so(scene: Scene, answer: Any, code: int) -> None:
    scene.answers(ranks := scene.assigned("0-a-0", 0, 1))
    await scene.waiting("0-0-0", "0-0-1")
    if answer:
        scene.answers(ranks, **answer)
        if "finished" in answer:  # of a job that is halted the ranks leave at once
            scene.answers(scene.assigned("0-a-0", 0, 1, leaves=True), **answer)
    else:
        scene.agent.stop(signal.SIGTERM)
    assert await scene.running == code
    await scene.reported("0-a-0", (), (0, -signal.SIGTERM, False), (1, -signal.SIGTERM, False))
    assert (scene.reports[-1].leaving, scene.reports[-1].seen) == (True, "")


@pytest.mark.parametrize("final", [True, False])
async def test_a_script_has_the_time_of_a_pause_after_the_last_step_and_is_not_cut_off_in_silence(
    run_dir: RunDir, final: bool
) -> None:
    scene = Scene(run_dir, timeouts={"stop_s": 1.0, "pause_s": 2.0})
    await async_until(lambda: scene.open, "a report")
    scene.answers(ranks := scene.assigned("0-a-0", 0, 1))
    await scene.waiting("0-0-0", "0-0-1")
    with mock.patch.object(TimeoutsConfig, "save_s", 0.5):
        run_dir.final(0).write_text(json.dumps({"incarnation": "0-a-0" if final else "0-a-9"}))
        scene.answers(ranks, finished=True)
        if final:
            with pytest.raises(Retryable, match=r"0-a-0 still ran 3 s .*timeouts\.pause_s"):
                await scene.running
        else:  # it has not heard of the end
            assert await scene.running == EXIT_OK


async def test_a_host_that_is_refused_ends_its_ranks_and_itself(scene: Scene) -> None:
    scene.answers(scene.assigned("0-a-0", 0, 1))
    await scene.waiting("0-0-0", "0-0-1")
    scene.answers(refused="another host has its name")
    with pytest.raises(Retryable, match="another host has its name"):
        await scene.running


async def test_a_host_with_another_configuration_is_refused_for_good(scene: Scene) -> None:
    assert scene.reports[0].seen == ""
    scene.answers(refused="train.seed is 1 here, and 2 in the job", wrong=True)
    with pytest.raises(InvalidArgument, match=r"train\.seed"):
        await scene.running


async def test_ranks_go_on_without_a_lighthouse_and_the_next_one_hears_what_happened(scene, plan, run_dir) -> None:
    plan({"0": {"0": {"0": ["exit-when", "go", 7]}}})
    scene.answers(scene.assigned("0-a-0", 0, 1))
    await scene.waiting("0-0-1")
    scene.down = True
    (run_dir.path / "go").touch()
    await async_until(lambda: not scene.open, "the report to be given up")
    scene.down = False
    await scene.reported("0-a-0", (), (0, 7, False), (1, -signal.SIGKILL, True))


@pytest.mark.parametrize(("code", "ends_with"), [(64, 64), (76, 76), (1, EXIT_RETRYABLE)])
async def test_a_scheduler_is_told_what_to_do(run_dir: RunDir, plan: Plan, code: int, ends_with: int) -> None:
    """76 wants another machine, 75 another try. A host for one replica has a warm spare for its next start."""
    plan({"1": {"0": {"0": ["exit", 1]}, "1": {"1": ["exit", code]}}})
    scene = Scene(run_dir, replica=1, ranks_per_replica=2, spares=2)
    await async_until(lambda: [e for e in scene.events if e["event"] == "SpareWarmed"], "a spare")
    scene.answers(scene.assigned("1-a-0", 0, 1))
    await scene.reported("1-a-0", (), (0, 1, False), (1, -signal.SIGKILL, True))
    assert (scene.reports[-1].replica, scene.reports[-1].path.endswith("-r1")) == (1, True)
    made = (run_dir.path / "spares-made").read_text().split()
    assert {str(each["pid"]) for each in read_json(run_dir.processes(1))["ranks"]} == set(made), (
        "no spare was used"
    )
    scene.answers(scene.assigned("1-a-1", 0, 1))
    await scene.reported("1-a-1", (), (1, code, False), (0, -signal.SIGKILL, True))
    scene.answers(halted="replica 1 is given up")
    assert await scene.running == ends_with
