"""Jobs over several real raylets: nodes die or are drained, worlds and roles change their size, spares take over."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.examples.test_sft_stdlib import result, torchrun
from tests.real.jobs import Run, deep, example, job, role, run_job
from tests.real.nodes import NodesRun, Raylets, raylets_of, run_on

from rota.job.core.resize import held
from rota.service.jobfile.reader import read_job
from rota.spec.events import (
    CheckpointSaved,
    Committed,
    FailoverEnded,
    FailoverStarted,
    GangAsked,
    InstanceReady,
    JobQueued,
    JobRequeued,
    MasterStarted,
    NodeMarked,
    PreemptAsked,
    RolledBack,
    ScaleAsked,
    StopAsked,
)
from rota.spec.ids import NodeId, RoleName
from rota.spec.job import Checkpoint, Fail, JobSpec, Near, RoleSpec, WeightsEdge
from rota.spec.reasons import Reason
from rota.spec.resources import Health, Res
from rota.spec.states import JobState, Level

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
THREE = {"a": 2.0, "b": 2.0, "c": 2.0}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
APART = (Near(role="self", level="node"),)
GAP_MAX_S = 1.0
"""Longest pause in the answers of a role while one of its members is replaced on a machine that others use too."""


@pytest.fixture(scope="module")
def raylets(engine: Any) -> Iterator[Raylets]:
    with raylets_of(engine) as found:
        yield found


def steady(n: int = 2, **fields: Any) -> JobSpec:
    """Workers that are called without a pause by a loop that ends when the file ``go`` exists."""
    return job(role("worker", "steady:Worker", n, **fields), role("loop", "steady:steady"))


async def succeed(run: Run) -> None:
    (run.output / "go").touch()
    ended = await run.end()
    assert (ended.state, ended.reason) == (JobState.SUCCEEDED, Reason.COMPLETED), run.story()
    commits = [one.n for one in run.events(Committed)]
    assert commits == list(range(1, len(commits) + 1)), "no commit twice, none lost"


async def more_commits(run: Run, n: int = 5) -> None:
    await run.until_committed(run.context().committed + n)


def changed(before: dict[str, int], run: Run) -> set[str]:
    return {name for name, pid in run.pids().items() if pid != before.get(name)}


def moves(run: Run) -> list[tuple[Level, Level | None, Reason | None]]:
    return [(one.level, one.moved_from, one.move_reason) for one in run.events(FailoverStarted)]


def master_node(run: Run) -> str:
    """The node of the engine on which the master runs: every process of a node inherits the mark."""
    return psutil.Process(run.events(MasterStarted)[-1].pid).environ()["ROTA_ENGINE"].rpartition("/")[2]


async def healed(run: Run, n: int = 1) -> None:
    await run.until(lambda: len(run.events(FailoverEnded)) >= n and run.context().state is JobState.RUNNING)


def test_a_lost_node_is_left_for_another_and_who_was_elsewhere_keeps_its_process(raylets: Raylets) -> None:
    async def body(run: NodesRun) -> None:
        await run.until_committed(5)
        before, homes = run.pids(), {name: run.node_of(name) for name in run.pids()}
        victim = next(name for name in ("worker/0", "worker/1") if homes[name] != homes["loop/0"])
        run.kill_node(homes[victim])
        await run.until(lambda: run.starts(victim) == 2)
        await healed(run)
        await succeed(run)
        assert changed(before, run) == {victim}, run.story()
        assert run.node_of(victim) != homes[victim]
        (started,) = run.events(FailoverStarted)
        assert (started.level, started.reason, [one[:2] for one in started.scope]) == (
            Level.NODE,
            Reason.NODE_LOST,
            [("worker", int(victim[-1]))],
        )
        (asked,) = run.events(GangAsked)
        assert (asked.avoid, asked.lost) == ((homes[victim],), True)
        assert run.marks() == [(homes[victim], Health.SUSPECT)], "and it takes no new work"

    run_on(raylets, THREE, steady(apart=APART), body)


@deep
def test_the_master_on_the_lost_node_comes_back_elsewhere_and_knows_that_the_node_is_gone(raylets: Raylets) -> None:
    async def body(run: NodesRun) -> None:
        await run.until_committed(5)
        before, homes = run.pids(), {name: run.node_of(name) for name in run.pids()}
        victim = next(name for name in ("worker/0", "worker/1") if homes[name] != homes["loop/0"])
        if master_node(run) != homes[victim]:
            run.kill_master()  # both at once is the same to whoever comes after
        run.kill_node(homes[victim])
        await run.until(lambda: run.starts(victim) == 2)
        await healed(run)
        await succeed(run)
        assert changed(before, run) == {victim}, run.story()
        assert {(one.level, one.reason) for one in run.events(FailoverStarted)} == {(Level.NODE, Reason.NODE_LOST)}

    run_on(raylets, THREE, steady(apart=APART), body)


@deep
def test_two_deaths_at_once_on_two_nodes_and_one_more_during_the_recovery_all_heal(raylets: Raylets) -> None:
    async def body(run: NodesRun) -> None:
        await run.until_committed(5)
        before, homes = run.pids(), {name: run.node_of(name) for name in run.pids()}
        far = next(name for name in ("worker/0", "worker/1") if homes[name] != homes["loop/0"])
        near = next(name for name in ("worker/0", "worker/1") if name != far)
        run.kill(near)
        await run.until(lambda: run.events(FailoverStarted))
        run.kill_node(homes[far])
        await run.until(lambda: len(run.events(FailoverStarted)) == 2)
        run.kill("loop/0")
        await run.until(lambda: run.starts(far) == run.starts("loop/0") == 2)
        await healed(run)
        await more_commits(run)
        await succeed(run)
        assert changed(before, run) == {"worker/0", "worker/1", "loop/0"}, run.story()

    run_on(raylets, THREE, steady(apart=APART), body)


# -- state ------------------------------------------------------------------------------------------------------------


@deep
@pytest.mark.usefixtures("registry")
def test_state_in_the_memory_of_a_lost_node_comes_back_from_the_checkpoint_with_the_same_numbers(
    raylets: Raylets,
) -> None:
    async def body(run: NodesRun) -> None:
        from tests.real.test_state_real import TOTAL

        from rota import tensors

        await run.until(lambda: (run.output / "paused-3").exists() and run.events(CheckpointSaved))
        before, homes = run.pids(), {name: run.node_of(name) for name in run.pids()}
        victim = next(name for name in ("learner/0", "learner/1") if homes[name] != homes["loop/0"])
        gone = {name for name, home in homes.items() if home == homes[victim]}
        run.kill_node(homes[victim])
        # The other raylets are on this machine too, so its memory must be taken away by hand.
        tensors.connect(home=run.home.root, keep=True).delete(f"shadow/{run.job}/{victim}")
        await run.until(lambda: run.starts(victim) == 2)
        (run.output / "go").touch()
        ended = await run.end()
        assert ended.state is JobState.SUCCEEDED, run.story()
        assert changed(before, run) == gone, run.story()
        assert moves(run)[0] == (Level.NODE, Level.NODE, Reason.STATE_LOST)
        assert [(one.from_commit, one.to_commit) for one in run.events(RolledBack)] == [(3, 2)]
        assert [one.n for one in run.events(Committed)] == [1, 2, 3, 3, 4, 5, 6]
        assert run.context().metrics["total"] == pytest.approx(TOTAL, abs=1e-6)

    learner = role("learner", "learning:Learner", 2, mesh=(("dp", 2),), apart=APART, fail=Fail(restart="process"))
    edge = WeightsEdge(source=RoleName("learner"), target=RoleName("reader"))
    roles = (learner, role("reader", "learning:Reader"), role("loop", "learning:training"))
    spec = job(*roles, weights=(edge,), STEPS="6", PAUSE_AT="4")
    run_on(raylets, THREE, dataclasses.replace(spec, checkpoint=Checkpoint(every="2 commits", keep=2)), body)


# -- sizes ------------------------------------------------------------------------------------------------------------


def world(low: int, high: int, **fields: Any) -> RoleSpec:
    return RoleSpec(
        name=RoleName("main"),
        run=("python tiny_train.py --steps 100000",),
        shell=True,
        replicas_min=low,
        replicas_max=high,
        mesh=(("dp", low),),
        elastic_axis="dp",
        res=Res(cpus=1.0),
        **fields,
    )


def worlds(run: Run) -> list[int]:
    """The number of members that came up together, by epoch."""
    epochs: dict[int, int] = {}
    for one in run.events(InstanceReady):
        epochs[one.epoch] = epochs.get(one.epoch, 0) + 1
    return [n for _, n in sorted(epochs.items())]


@deep
def test_a_world_goes_on_with_fewer_when_a_node_dies_and_grows_back_when_there_is_another(raylets: Raylets) -> None:
    async def body(run: NodesRun) -> None:
        await run.until(lambda: run.context().state is JobState.RUNNING)
        before, homes = run.pids(), {name: run.node_of(name) for name in run.pids()}
        assert worlds(run) == [2] and set(homes.values()) == {"a", "b"}
        victim = next(name for name in homes if homes[name] != master_node(run))
        stays = next(name for name in homes if name != victim)
        run.kill_node(homes[victim])
        await healed(run)
        assert worlds(run) == [2, 1], run.story()
        assert changed(before, run) == set(), "who lives keeps its process"
        assert run.raylets is not None
        run.raylets.ensure("d")
        run.join("d")
        await run.until(lambda: worlds(run) == [2, 1, 2], 150.0)  # no more often than once in a minute
        await run.until(lambda: run.context().state is JobState.RUNNING)
        assert run.pids()[stays] == before[stays]
        assert run.node_of(victim) == "d"
        reasons = [(one.reason, len(one.leave), len(one.join)) for one in run.events(FailoverStarted)]
        assert reasons == [(Reason.NODE_LOST, 1, 0), (Reason.RESIZED, 0, 1)]

    run_on(raylets, {"a": 1.0, "b": 1.0}, JobSpec(name="world", roles=(world(1, 2),), grace_s=2.0), body)


@deep
def test_the_sft_example_goes_from_two_ranks_to_one_and_back_and_its_losses_are_those_of_a_fixed_world(
    raylets: Raylets, tmp_path: Path
) -> None:
    import torch

    async def body(run: NodesRun) -> None:
        sizes, saved = run.output / "worlds.txt", Path(run.home.root) / "checkpoints" / run.job / "sft.pt"
        await run.until(sizes.exists)
        homes = {name: run.node_of(name) for name in run.pids()}
        victim = next(name for name in homes if homes[name] != master_node(run))
        run.kill_node(homes[victim])
        await run.until(lambda: " 1\n" in sizes.read_text())
        assert run.raylets is not None
        run.raylets.ensure("d")
        run.join("d")
        await run.until(lambda: sizes.read_text().splitlines()[-1].endswith(" 2"), 150.0)
        run.append(StopAsked(grace_s=2.0))
        await run.end()
        worlds = [int(line.split()[1]) for line in sizes.read_text().splitlines()]
        assert [n for n, before in zip(worlds, [0, *worlds], strict=False) if n != before] == [2, 1, 2]
        kept, wanted = torch.load(saved), result(tmp_path)["curve"]
        assert len(kept["curve"]) == kept["step"] >= len(wanted) == 60, "each step once"
        assert kept["curve"][:60] == pytest.approx(wanted, rel=1e-2)
        assert kept["curve"][-1] < wanted[-1]

    file = EXAMPLES / "sft_stdlib" / "job.yaml"
    (train,) = read_job(file.read_text(), filename=file.name).roles
    line = "python train.py --steps 1000000 --save-every 10 --bytes 2000000"
    assert torchrun(tmp_path).wait(120) == 0
    run_on(raylets, {"a": 0.5, "b": 0.5}, example(file, roles=(dataclasses.replace(train, run=(line,)),)), body)


def test_a_spare_takes_over_within_a_second_and_the_dead_one_comes_back_as_the_next_spare(engine: Any) -> None:
    async def body(run: Run) -> None:
        await run.until_committed(3)
        await run.until(lambda: any((one.role, one.rank) == ("worker", 2) for one in run.events(InstanceReady)))
        before = run.pids()
        (run.output / "from-here").touch()
        await more_commits(run)
        run.kill("worker/0")
        await run.until(lambda: len(run.events(FailoverEnded)) == 1)
        await more_commits(run)
        gap_s, pids = run.context().metrics["gap_s"], run.context().metrics["pids"]
        assert gap_s < GAP_MAX_S, run.story()
        assert before["worker/2"] in pids
        await run.until(lambda: run.starts("worker/0") == 2 and run.context().state is JobState.RUNNING)
        await succeed(run)
        assert changed(before, run) == {"worker/0"}
        assert [one.id.rank for one in run.context().instances.values() if one.spare] == [0]

    run_job(engine, steady(2, fail=Fail(standby=1)), body)


@deep
def test_a_role_is_scaled_up_and_down_while_it_is_called(raylets: Raylets) -> None:
    async def body(run: NodesRun) -> None:
        await run.until_committed(3)
        before = run.pids()
        run.append(ScaleAsked(role=RoleName("worker"), n=3))
        await run.until(lambda: len(run.context().metrics["pids"]) == 3)
        run.append(ScaleAsked(role=RoleName("worker"), n=1))
        await run.until(lambda: len(run.context().metrics["pids"]) == 1)
        (run.output / "from-here").touch()
        await more_commits(run)
        assert run.context().metrics["pids"] == [before["worker/0"]]
        await succeed(run)
        assert run.events(FailoverStarted) == [], "a wanted size is no failure"

    spec = steady(1)
    spec = dataclasses.replace(spec, roles=(dataclasses.replace(spec.roles[0], replicas_max=3), *spec.roles[1:]))
    run_on(raylets, THREE, spec, body)


@deep
def test_degrade_goes_on_with_fewer_over_the_limit_and_takes_the_replacement_in_on_another_node(
    raylets: Raylets,
) -> None:
    async def body(run: NodesRun) -> None:
        await run.until_committed(3)
        home = run.node_of("worker/0")
        run.kill("worker/0")
        await run.until(lambda: run.starts("worker/0") == 2)
        await run.until(lambda: len(run.context().metrics["pids"]) == 2)
        await succeed(run)
        assert moves(run) == [(Level.PROCESS, Level.PROCESS, Reason.RESIZED_DEGRADED)]
        assert run.node_of("worker/0") != home

    run_on(raylets, THREE, steady(apart=APART, fail=Fail(restart="process", degrade=1, limit_n=0)), body)


# -- levels -----------------------------------------------------------------------------------------------------------


@deep
def test_over_its_limit_a_process_moves_to_another_node_and_back_where_there_is_none(raylets: Raylets) -> None:
    async def body(run: NodesRun) -> None:
        await run.until_committed(3)
        home = run.node_of("worker/0")
        run.kill("worker/0")
        await run.until(lambda: run.starts("worker/0") == 2)
        await healed(run)
        assert run.node_of("worker/0") != home
        run.kill("worker/0")
        await run.until(lambda: run.starts("worker/0") == 3)
        await healed(run, 2)
        await succeed(run)
        assert moves(run)[:2] == [
            (Level.NODE, Level.PROCESS, Reason.BUDGET_PROCESS),
            (Level.NODE, Level.PROCESS, Reason.BUDGET_PROCESS),
        ]
        assert moves(run)[2:] == [(Level.PROCESS, Level.NODE, Reason.NO_NODE)], "both nodes were left once"

    run_on(raylets, {"a": 2.0, "b": 2.0}, steady(1, fail=Fail(restart="process", limit_n=0)), body)


@deep
def test_a_paused_job_gives_everything_back_and_goes_on_from_its_last_commit(raylets: Raylets) -> None:
    async def body(run: NodesRun) -> None:
        await run.until_committed(5)
        run.append(PreemptAsked(reason=Reason.PAUSED, grace_s=2.0))
        await run.until_state(JobState.PAUSED)
        assert (await run.launcher.find(run.job)).instances == ()
        committed = run.context().committed
        run.append(JobQueued())
        await run.until_committed(committed + 5)
        await succeed(run)
        assert run.events(JobRequeued)[0].counts is False

    run_on(raylets, {"a": 2.0, "b": 2.0}, steady(1), body)


@deep
@pytest.mark.usefixtures("registry")
def test_a_node_that_is_lost_and_comes_back_still_has_the_last_commit_in_its_memory(raylets: Raylets) -> None:
    async def body(run: NodesRun) -> None:
        assert run.raylets is not None
        await run.until_committed(5)
        run.kill_node("a")
        await run.until(lambda: run.events(FailoverStarted))
        reached = run.context().committed
        run.raylets.ensure("a")
        run.join("a")
        await run.until_committed(reached + 5)
        await succeed(run)
        assert run.events(CheckpointSaved) == [] or run.events(JobRequeued), run.story()
        assert all(one.from_commit == one.to_commit for one in run.events(RolledBack)), run.story()
        assert run.context().retries == 0 and not [one for one in run.context().charges if not one.platform]

    roles = (role("counter", "counting:Counter"), role("loop", "counting:counting"))
    run_on(raylets, {"a": 6.0}, job(*roles), body)


GRACE_S = 20.0
"""Far more than a commit and a small file take."""


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("reason", [Reason.PREEMPTED_PRIORITY, pytest.param(Reason.PAUSED, marks=deep)])
def test_a_job_with_state_that_gives_its_devices_back_enters_on_another_machine_where_it_stopped(
    raylets: Raylets, reason: Reason
) -> None:
    async def body(run: NodesRun) -> None:
        from rota import tensors

        await run.until_committed(5)
        left = NodeMarked(node=NodeId("a"), health=Health.SUSPECT, by="test")  # so that it comes up elsewhere
        run.log.append([left], writer=run.writer)
        run.append(PreemptAsked(reason=reason, grace_s=GRACE_S))
        await run.until_state(JobState.PAUSED if reason is Reason.PAUSED else JobState.QUEUED)
        assert (await run.launcher.find(run.job)).instances == ()
        # Both raylets are on this machine: the memory of the first must be taken away by hand.
        memory = tensors.connect(home=run.home.root, keep=True)
        memory.delete(f"shadow/{run.job}/counter/0")
        stopped = run.context().committed
        run.raylets.ensure("b")
        run.join("b")
        if reason is Reason.PAUSED:
            run.append(JobQueued())
        await run.until_committed(stopped + 5)
        await succeed(run)
        assert {run.node_of("counter/0"), run.node_of("loop/0")} == {"b"}
        assert run.events(RolledBack) == [], run.story()
        saved = [(one.n, Path(one.path).is_dir()) for one in run.events(CheckpointSaved)]
        assert saved == [(stopped, True)], "at the stop, though the job has no cadence"

    roles = (role("counter", "counting:Counter"), role("loop", "counting:counting"))
    run_on(raylets, {"a": 4.0}, job(*roles), body)


# -- nodes that are drained -------------------------------------------------------------------------------------------


def drain(run: NodesRun, node: str, notice_s: float) -> None:
    gone = NodeMarked(node=NodeId(node), health=Health.DRAINED, by="test", notice_s=notice_s)
    run.log.append([gone], writer=run.writer)


@deep
def test_who_is_on_a_drained_node_moves_at_a_commit_and_who_is_elsewhere_keeps_its_process(raylets: Raylets) -> None:
    async def body(run: NodesRun) -> None:
        await run.until_committed(5)
        before, homes = run.pids(), {name: run.node_of(name) for name in run.pids()}
        victim = next(name for name in ("worker/0", "worker/1") if homes[name] != homes["loop/0"])
        (run.output / "from-here").touch()
        drain(run, homes[victim], 60.0)
        await run.until(lambda: run.starts(victim) == 2)
        await healed(run)
        await more_commits(run)
        assert run.context().metrics["gap_s"] < 5 * GAP_MAX_S, "it starts elsewhere, and the others go on"
        assert not psutil.pid_exists(before[victim]), "nothing of it is on the node"
        await succeed(run)
        assert changed(before, run) == {victim}, run.story()
        assert run.node_of(victim) not in homes.values()
        assert [(one.level, one.reason) for one in run.events(FailoverStarted)] == [(Level.NODE, Reason.MIGRATED_DRAIN)]
        assert run.events(RolledBack) == [], "and no commit was taken back"

    run_on(raylets, THREE, steady(apart=APART), body)


@deep
def test_without_another_node_a_drained_one_is_left_when_the_notice_is_over(raylets: Raylets) -> None:
    async def body(run: NodesRun) -> None:
        await run.until_committed(5)
        home = run.node_of("worker/0")
        drain(run, home, 2.0)
        await run.until_state(JobState.QUEUED)
        assert (await run.launcher.find(run.job)).instances == ()
        committed = run.context().committed
        run.log.append([NodeMarked(node=NodeId(home), health=Health.HEALTHY, by="test")], writer=run.writer)
        await run.until_committed(committed + 5)
        await succeed(run)
        requeued = run.events(JobRequeued)[0]
        assert (requeued.reason, requeued.counts) == (Reason.MIGRATED_DRAIN, False)

    run_on(raylets, {"a": 4.0}, steady(1), body)


@pytest.mark.usefixtures("registry")
def test_state_on_a_drained_node_goes_along_and_no_commit_is_repeated(raylets: Raylets) -> None:
    async def body(run: NodesRun) -> None:
        await run.until_committed(3)
        home = run.node_of("counter/0")
        drain(run, home, 120.0)
        await run.until(lambda: run.starts("counter/0") == 2)
        await healed(run)
        await more_commits(run)
        await succeed(run)
        assert run.node_of("counter/0") != home
        assert all(one.from_commit == one.to_commit for one in run.events(RolledBack)), run.story()
        assert run.events(CheckpointSaved), "it was asked for before the node was left, though the job has no cadence"

    roles = (role("counter", "counting:Counter"), role("loop", "counting:counting"))
    run_on(raylets, {"a": 0.5, "b": 0.5, "c": 0.5}, job(*roles), body)


@deep
@pytest.mark.usefixtures("registry")
def test_a_mesh_on_a_drained_node_moves_with_its_state_and_repeats_no_commit(raylets: Raylets) -> None:
    async def body(run: NodesRun) -> None:
        await run.until(lambda: [*run.output.glob("paused-*")])
        homes = {name: run.node_of(name) for name in run.pids()}
        victim = next(name for name in ("learner/0", "learner/1") if homes[name] != homes["loop/0"])
        drain(run, homes[victim], 120.0)
        await run.until(lambda: held(run.context()))
        (run.output / "go").touch()
        await run.until(lambda: run.starts(victim) == 2)
        await healed(run)
        ended = await run.end()
        assert ended.state is JobState.SUCCEEDED, run.story()
        assert run.node_of(victim) not in homes.values()
        assert [one.n for one in run.events(Committed)] == list(range(1, 21))
        assert all(one.from_commit == one.to_commit for one in run.events(RolledBack))
        assert run.events(CheckpointSaved), "it was asked for before the node was left, though the job has no cadence"
        assert run.context().metrics["total"] == pytest.approx(sum(range(21)) * 14.0, rel=1e-6)

    learner = role("learner", "learning:Learner", 2, mesh=(("dp", 2),), apart=APART, fail=Fail(restart="process"))
    edge = WeightsEdge(source=RoleName("learner"), target=RoleName("reader"))
    roles = (learner, role("reader", "learning:Reader"), role("loop", "learning:training"))
    run_on(raylets, THREE, job(*roles, weights=(edge,), STEPS="20", PAUSE_AT="5"), body)


# -- the kills of the master that test_job_real.py has not -----------------------------------------------------------


async def master_killed(run: Run) -> None:
    masters = len(run.events(MasterStarted))
    run.kill_master()
    await run.until(lambda: len(run.events(MasterStarted)) > masters)


@deep
@pytest.mark.parametrize("moment", ["stopping", "scaling", "gang"])
def test_kill_9_of_the_master_while_stopping_scaling_or_asking_for_another_node(raylets: Raylets, moment: str) -> None:
    async def body(run: NodesRun) -> None:
        await run.until_committed(5)
        before = run.pids()
        (run.output / "from-here").touch()
        if moment == "stopping":
            psutil.Process(before["worker/0"]).suspend()  # so that stopping takes its time
            run.append(StopAsked(grace_s=3.0))
            await run.until_state(JobState.STOPPING)
            await master_killed(run)
            assert (await run.end()).state is JobState.CANCELLED, run.story()
            assert run.pids() == before
        elif moment == "scaling":
            run.append(ScaleAsked(role=RoleName("worker"), n=3))
            await run.until(lambda: run.events(GangAsked))
            await master_killed(run)
            await run.until(lambda: len(run.context().metrics["pids"]) == 3)
            assert all(run.pids()[name] == pid for name, pid in before.items()), run.story()
            assert run.context().metrics["gap_s"] < GAP_MAX_S
            await succeed(run)
        else:
            homes = {name: run.node_of(name) for name in before}
            victim = next(name for name in ("worker/0", "worker/1") if homes[name] != homes["loop/0"])
            run.kill_node(homes[victim])
            await run.until(lambda: run.events(FailoverStarted))
            await master_killed(run)
            await run.until(lambda: run.starts(victim) == 2)
            await healed(run)
            await succeed(run)
            assert changed(before, run) == {victim}, run.story()
        assert run.events(MasterStarted)[-1].master_epoch > run.events(MasterStarted)[0].master_epoch

    n = 2 if moment == "gang" else 1
    spec = steady(n, apart=APART if n == 2 else ())
    run_on(raylets, THREE, spec, body)
