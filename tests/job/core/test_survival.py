"""Where the state of a commit is found again: memory of its host, a copy on another machine, disk, in this order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.job.core.conftest import Driven
from tests.job.core.test_shutdown import failures_of
from tests.makers import admitted, at, loop, mesh, replay, service, spec, submitted
from tests.makers import fail as contract

from rota.job.core import survival
from rota.job.core.desired import wanted
from rota.spec.commands import Assemble, CopyCommit
from rota.spec.events import (
    CheckpointSaved,
    CommitCopied,
    Committed,
    Continued,
    InstanceLost,
    JobQueued,
    PreemptAsked,
    RolledBack,
)
from rota.spec.ids import Epoch, JobId, RoleName
from rota.spec.job import Checkpoint, JobSpec, WeightsEdge
from rota.spec.reasons import Reason
from rota.spec.states import JobState

AT_ONCE = PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, grace_s=0.0)


def job(*state: str) -> JobSpec:
    return spec(mesh("actor", 2, fail=contract(state=state)), loop())


def commit(driven: Driven, n: int) -> None:
    driven.feed(Committed(n=n, loop_epoch=driven.ctx.loop_epoch, cursor={"cut": {"at": n}}))


def copying(driven: Driven) -> CopyCommit | None:
    return next((one for one in wanted(driven.ctx) if isinstance(one, CopyCommit)), None)


def copied(driven: Driven, *hosts: str) -> None:
    """The copy that is wanted now is made, on these hosts in turn; none: it failed."""
    command = copying(driven)
    assert command is not None
    copies = tuple(
        (part.owner.role, part.owner.rank, host, driven.ctx.instances[part.owner].epoch)
        for part, host in zip(command.parts, hosts * 2, strict=False)
    )
    event = CommitCopied(n=command.n, loop_epoch=command.loop_epoch, copies=copies, cursor=dict(driven.ctx.cursor))
    driven.feed(event)


def admit_on(driven: Driven, *hosts: str) -> list[Assemble]:
    """Admit the next attempt; how its instances with state are set up."""
    driven.feed(admitted(driven.ctx.spec, driven.ctx.attempt + 1, int(driven.ctx.epoch_max) + 1, hosts))
    before = len(driven.done)
    driven.settle()
    assert driven.ctx.state is JobState.RUNNING
    formed = [one for one in driven.done[before:] if isinstance(one, Assemble)]
    return [one for one in formed if one.instance.role == "actor"]


def rollbacks(driven: Driven) -> list[tuple[int, int]]:
    found = [record.event for record in driven.records if isinstance(record.event, RolledBack)]
    return [(one.from_commit, one.to_commit) for one in found if one.from_commit != one.to_commit]


def test_one_copy_is_under_way_at_a_time_and_it_is_of_the_last_commit_then(driven):
    driven.run(job("peer"), "h0", "h1", "h0")
    assert copying(driven) is None
    commit(driven, 1)
    first = copying(driven)
    assert first is not None and (first.n, first.hosts) == (1, ("h0", "h1"))
    assert [(str(part.owner), str(part.process)) for part in first.parts] == [("actor/0",) * 2, ("actor/1",) * 2]
    commit(driven, 2)
    assert copying(driven).id == first.id, "it is begun once"
    driven.feed(CommitCopied(n=1, loop_epoch=first.loop_epoch, copies=(("actor", 0, "h1", 1), ("actor", 1, "h0", 1))))
    assert (driven.ctx.copied_n, copying(driven).n) == (1, 2)
    assert replay(driven.ctx.job, driven.records) == driven.ctx


def test_weights_that_the_state_of_a_commit_does_not_give_again_are_copied_with_it(driven):
    edge = WeightsEdge(source=RoleName("actor"), target=RoleName("ref"), every=2)
    driven.run(spec(mesh("actor", 2, fail=contract(state=("peer",))), service("ref", 1), loop(), weights=(edge,)), "h0")
    for n, published, wanted_versions in ((1, 0, []), (2, 2, []), (3, 2, [(edge.name, "actor/0", 2)])):
        cursor = {"weights": {edge.name: [1, published]}}
        driven.feed(Committed(n=n, loop_epoch=driven.ctx.loop_epoch, cursor=cursor))
        command = copying(driven)
        found = [(part.owner, str(part.process), part.n) for part in command.parts if part.n is not None]
        assert found == wanted_versions and len(command.parts) == 2 + len(found)
        copies = (("actor", 0, "h1", 1), ("actor", 1, "h1", 1))
        driven.feed(CommitCopied(n=n, loop_epoch=command.loop_epoch, copies=copies))
        assert driven.ctx.copied_n == n


def test_a_job_without_peers_copies_nothing(driven):
    driven.run(job("shadow", "checkpoint"), "h0", "h1")
    commit(driven, 1)
    assert copying(driven) is None and not survival.waits_for_copy(driven.ctx, 1)


def test_the_loop_is_at_most_one_commit_ahead_of_the_copies_and_a_failing_copy_holds_nobody_up(driven):
    driven.run(job("peer"), "h0", "h1")
    commit(driven, 1)
    assert not survival.waits_for_copy(driven.ctx, 1)
    commit(driven, 2)
    assert survival.waits_for_copy(driven.ctx, 2)
    copied(driven)
    assert (driven.ctx.copy_fails, driven.ctx.copied_n) == (1, 0) and not survival.waits_for_copy(driven.ctx, 2)
    copied(driven, "h1")
    assert (driven.ctx.copy_fails, driven.ctx.copied_n) == (0, 2)


def test_a_job_that_stops_at_once_and_comes_up_elsewhere_enters_at_the_commit_that_a_peer_has(driven):
    driven.run(job("peer"))
    commit(driven, 1)
    driven.feed(CheckpointSaved(n=1, path="/c", cursor=dict(driven.ctx.cursor)))
    commit(driven, 2)
    copied(driven, "h5")
    commit(driven, 3)
    driven.feed(AT_ONCE)
    driven.settle()
    formed = admit_on(driven, "h9")
    assert rollbacks(driven) == [(3, 2)] and driven.ctx.cursor == {"cut": {"at": 2}}
    assert {(one.restore, one.source, one.source_epoch) for one in formed} == {(2, "h5", 1)}
    assert survival.missing(driven.ctx) == (), "what it fetched is in the memory of its own host now"
    driven.feed(AT_ONCE)
    driven.settle()
    assert {one.source for one in admit_on(driven, "h9")} == {""} and rollbacks(driven) == [(3, 2)]


@pytest.mark.parametrize("holder", ["h1", "h5"])
def test_a_machine_that_is_lost_takes_its_copies_along(driven, holder: str):
    driven.free = ["h9"]
    driven.run(job("peer"), "h0", "h1", "h0")
    commit(driven, 1)
    copied(driven, holder)
    one = driven.ctx.instances[at("actor/1")]
    driven.feed(InstanceLost(role=one.id.role, rank=one.id.rank, epoch=one.epoch, reason=Reason.NODE_LOST))
    driven.settle()
    assert (driven.ctx.committed, rollbacks(driven)) == ((1, []) if holder == "h5" else (0, [(1, 0)]))


def test_the_list_of_failures_names_the_peer_also_when_the_rollback_comes_before_the_new_place(driven):
    driven.free = ["h9"]
    driven.run(job("peer"), "h0", "h1", "h0")
    commit(driven, 1)
    copied(driven, "h5")
    one = driven.ctx.instances[at("actor/1")]
    driven.feed(InstanceLost(role=one.id.role, rank=one.id.rank, epoch=one.epoch, reason=Reason.NODE_LOST))
    driven.settle()
    assert failures_of(driven) == [(Reason.NODE_LOST, 1, "peer", 0)]


def test_a_host_that_was_started_anew_has_no_memory_and_the_copy_of_its_peer_is_read(driven):
    driven.run(job("peer"), "h0")
    commit(driven, 1)
    copied(driven, "h5")
    driven.feed(AT_ONCE)
    driven.settle()
    driven.feed(admitted(driven.ctx.spec, 2, int(driven.ctx.epoch_max) + 1, ("h0",)))
    driven.settle(hold="assemble")
    before = len(driven.done)
    for one in list(driven.ctx.of_role("actor")):
        assert survival.source_for(driven.ctx, one.id) is None, "the memory of its host is looked at first"
        driven.feed(InstanceLost(role=one.id.role, rank=one.id.rank, epoch=one.epoch, reason=Reason.STATE_LOST))
    driven.settle()
    formed = [one for one in driven.done[before:] if isinstance(one, Assemble) and one.instance.role == "actor"]
    assert driven.ctx.state is JobState.RUNNING and rollbacks(driven) == []
    assert {(one.restore, one.source) for one in formed[-2:]} == {(1, "h5")}


def test_a_copy_that_is_not_where_it_should_be_is_not_asked_for_again(driven):
    driven.run(job("peer"))
    commit(driven, 1)
    copied(driven, "h5")
    driven.feed(AT_ONCE)
    driven.settle()
    driven.feed(admitted(driven.ctx.spec, 2, int(driven.ctx.epoch_max) + 1, ("h9",)))
    driven.settle(hold="assemble")
    for one in list(driven.ctx.of_role("actor")):
        lost = InstanceLost(role=one.id.role, rank=one.id.rank, epoch=one.epoch, reason=Reason.STATE_LOST)
        driven.feed(lost)
    driven.settle()
    assert driven.ctx.state is JobState.RUNNING and rollbacks(driven) == [(1, 0)]


@pytest.mark.parametrize("late", ["part", "rolled back", "older loop"])
def test_what_is_not_the_whole_state_of_a_commit_that_counts_is_not_a_copy(driven, late: str):
    driven.run(job("peer"), "h0", "h1")
    commit(driven, 1)
    command = copying(driven)
    whole = tuple((part.owner.role, part.owner.rank, "h5", Epoch(1)) for part in command.parts)
    event = CommitCopied(n=1, loop_epoch=command.loop_epoch, copies=whole)
    if late == "part":
        event = CommitCopied(n=1, loop_epoch=command.loop_epoch, copies=whole[:1])
    elif late == "older loop":
        event = CommitCopied(n=1, loop_epoch=Epoch(0), copies=whole)
    else:
        event = CommitCopied(n=2, loop_epoch=command.loop_epoch, copies=whole)
    driven.feed(event)
    assert (driven.ctx.copied_n, driven.ctx.copies, driven.ctx.copy_tries) == (0, (), 1)


@pytest.mark.parametrize(("last", "found"), [(3, 1), (4, 0)])
def test_memory_has_no_commit_older_than_those_that_it_keeps(driven, last: int, found: int):
    """The critic is not copied: its memory has the newest three commits, and the copy of the actor is of the first."""
    driven.run(spec(mesh("actor", 1, fail=contract(state=("peer",))), mesh("critic", 1), loop()), "h0", "h1", "h2")
    commit(driven, 1)
    copied(driven, "h5")
    for n in range(2, last + 1):
        commit(driven, n)
    actor = next(one for one in driven.ctx.plan.instances if one.role == "actor")
    assert (driven.ctx.copied_n, survival.surviving(driven.ctx, [actor])) == (1, found)


PLACES = st.sampled_from(["h0", "h1", "h2"])
ACTS = st.lists(
    st.one_of(
        st.just("commit"),
        st.just("save"),
        st.tuples(st.just("copy"), PLACES, PLACES),
        st.tuples(st.just("stop"), PLACES, PLACES),
    ),
    min_size=5,
    max_size=20,
)


@pytest.mark.slow
@given(ACTS)
def test_a_job_never_goes_back_below_the_newest_commit_that_reached_disk_or_a_peer(acts):
    """Stopped at once at any moment, and admitted anywhere."""
    driven, n, safe = Driven(), 0, 0
    driven.run(job("peer"), "h0", "h1")
    for act in acts:
        match act:
            case "commit":
                n += 1
                commit(driven, n)
            case "save":
                driven.feed(CheckpointSaved(n=n, path="/c", cursor=dict(driven.ctx.cursor)))
                safe = n
            case ("copy", *hosts) if copying(driven) is not None:
                copied(driven, *hosts)
                safe = max(safe, driven.ctx.copied_n)
            case ("stop", *hosts):
                driven.feed(AT_ONCE)
                driven.settle()
                attempt = admitted(driven.ctx.spec, driven.ctx.attempt + 1, int(driven.ctx.epoch_max) + 1, hosts)
                driven.feed(attempt)
                driven.settle()
                assert driven.ctx.state is JobState.RUNNING
                assert safe <= driven.ctx.committed <= n
                assert driven.ctx.committed == 0 or driven.ctx.cursor == {"cut": {"at": driven.ctx.committed}}
                n = driven.ctx.committed
            case _:
                pass


def test_copies_of_commits_that_were_given_up_are_not_those_of_later_ones_of_their_number(driven):
    driven.free = ["h9"]
    driven.run(job("peer"), "h0", "h1", "h0")
    commit(driven, 1)
    copied(driven, "h0", "h1")
    one = driven.ctx.instances[at("actor/1")]
    driven.feed(InstanceLost(role=one.id.role, rank=one.id.rank, epoch=one.epoch, reason=Reason.NODE_LOST))
    driven.settle()
    assert rollbacks(driven) == [(1, 0)], "the copy of actor/1 was on its own machine"
    commit(driven, 1)
    driven.feed(AT_ONCE)
    driven.settle()
    assert {one.source for one in admit_on(driven, "h7", "h9")} == {""} and rollbacks(driven)[1:] == [(1, 0)]


def test_a_paused_job_enters_at_the_checkpoint_that_its_user_chose_and_gives_up_later_ones(driven):
    driven.run(replace(job("shadow"), checkpoint=Checkpoint(keep=2)), "h0", "h1")
    for n in (1, 2, 3):
        commit(driven, n)
        driven.feed(CheckpointSaved(n=n, path=f"/c{n}", cursor=dict(driven.ctx.cursor)))
    commit(driven, 4)
    assert [one.n for one in driven.ctx.checkpoints] == [3, 2], "as many as the job keeps"
    driven.feed(PreemptAsked(reason=Reason.PAUSED, grace_s=0.0))
    driven.settle()
    driven.feed(JobQueued(from_commit=2))
    assert {one.restore for one in admit_on(driven, "h0", "h1")} == {2}
    assert rollbacks(driven) == [(4, 2)] and driven.ctx.cursor == {"cut": {"at": 2}}
    assert (driven.ctx.checkpoint_n, driven.ctx.checkpoint_path, driven.ctx.resume_from) == (2, "/c2", None)
    commit(driven, 3)
    driven.feed(AT_ONCE)
    driven.settle()
    assert driven.ctx.checkpoints[0].n == 2 == driven.ctx.checkpoint_n, "what lay on disk of the old commit 3 is gone"
    assert replay(driven.ctx.job, driven.records) == driven.ctx


def test_a_new_job_begins_with_the_commit_of_an_ended_one_under_later_epochs(driven):
    earlier = Continued(job=JobId("old-1"), commit=7, path="/c7", epoch=Epoch(5), cursor={"cut": {"at": 7}})
    first, *rest = submitted(job("shadow"))
    driven.feed(replace(first, continues=earlier), *rest, admitted(job("shadow"), hosts=("h0",)))
    driven.master().settle()
    formed = [one for one in driven.done if isinstance(one, Assemble) and one.instance.role == "actor"]
    assert {(one.restore, one.epoch) for one in formed} == {(7, 6)}
    assert (driven.ctx.state, driven.ctx.committed, driven.ctx.checkpoint_n) == (JobState.RUNNING, 7, 7)
    commit(driven, 8)
    assert driven.ctx.committed == 8
