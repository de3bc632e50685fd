"""``rota resume JOB --from COMMIT``: which commits there are, what is refused, and the new job of one that ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from standing import Standing
from test_cli import own_home, with_cli

from rota.job import checkpoint
from rota.job.place import folder_of
from rota.spec.events import (
    CheckpointSaved,
    Committed,
    GangReleased,
    InstanceStopped,
    JobEnded,
    JobRequeued,
    PreemptAsked,
)
from rota.spec.ids import Epoch, GangId, InstanceId, RoleName
from rota.spec.reasons import Reason
from rota.spec.states import JobState

assert own_home  # the fixture of every test here, too

LOOP = "async def main(f):\n    while True:\n        await f.commit()\n"
SOURCE = "name: sums\nroles: {loop: {workload: 'loops:main'}}\n"


async def paused(service: Standing, folder: Path) -> None:
    """A job that made four commits, of which 2 and 3 are saved, and gave its devices back."""
    folder.mkdir()
    (folder / "loops.py").write_text(LOOP)
    await service.submit(SOURCE, workdir=str(folder))
    await service.until("sums-1", JobState.ADMITTED)
    await service.play_start("sums-1", "loop/0")
    root, first = service.app.home.checkpoints / "sums-1", Epoch(1)
    for n in range(1, 5):
        service.as_master("sums-1", Committed(n=n, loop_epoch=first, cursor={"cut": {"at": n}}))
        if n in (2, 3):
            path = folder_of(root, n, first)
            checkpoint.write(path, InstanceId(RoleName("loop"), 0), {"n": n})
            service.as_master("sums-1", CheckpointSaved(n=n, path=str(path), cursor={"cut": {"at": n}}))
    number = service.as_master(
        "sums-1",
        PreemptAsked(reason=Reason.PAUSED, grace_s=0.0),
        InstanceStopped(role=RoleName("loop"), rank=0, epoch=first),
        GangReleased(gang=GangId("all"), epoch=first),
        JobRequeued(attempt=1, reason=Reason.PAUSED, counts=False),
    )
    await service.seen(number)


def test_a_paused_job_is_resumed_from_a_saved_commit_and_another_is_refused_with_those_there_are(
    tmp_path: Path,
) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await paused(service, tmp_path / "code")
        assert "resume from  0, 2, 3, 4" in (await ask("show", "sums-1")).out
        wrong = await ask("resume", "sums-1", "--from", "1")
        assert (wrong.status, "sums-1 has no saved commit 1" in wrong.err) == (2, True)
        assert "there are: 0, 2, 3, 4 (0 is the start)" in wrong.err
        done = await ask("resume", "sums-1", "--from", "2", "--json")
        assert (done.status, done.document["items"][0]["done"]) == (0, True), done.err
        ctx = service.app.loop.installation.find("sums-1").ctx
        assert (ctx.resume_from, ctx.committed) == (2, 4)
        await service.until("sums-1", JobState.ADMITTED)
        assert service.app.loop.installation.find("sums-1").ctx.rollback_to == 2
        late = await ask("resume", "sums-1", "--from", "3")
        assert (late.status, "rota pause sums-1" in late.err) == (2, True)

    with_cli(tmp_path / "service", test)


def test_an_ended_job_stays_ended_and_a_new_one_begins_with_its_commit(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await paused(service, tmp_path / "code")
        number = service.as_master("sums-1", JobEnded(state=JobState.CANCELLED, reason=Reason.STOPPED_BY_USER))
        await service.seen(number)
        plain = await ask("resume", "sums-1")
        assert (plain.status, "rota resume sums-1 --from 3 begins a new job" in plain.err) == (2, True)
        done = await ask("resume", "sums-1", "--from", "3")
        assert (done.status, done.out.startswith("sums-2 ")) == (0, True), done.err
        assert (await service.get("/jobs/sums-1"))["state"] == "CANCELLED"
        ctx = service.app.loop.installation.find("sums-2").ctx
        assert (ctx.committed, ctx.cursor, ctx.epoch_max) == (3, {"cut": {"at": 3}}, 1)
        root = service.app.home.checkpoints / "sums-2"
        found = checkpoint.find(root, InstanceId(RoleName("loop"), 0), 3)
        assert found is not None and checkpoint.read(found) == {"n": 3}
        path, sent = "/api/v1/jobs/sums-1:resume", {"json": {"from_commit": 2}, "headers": {"Idempotency-Key": "k"}}
        twice = [await service.http.post(path, **sent) for _ in range(2)]
        assert [(one.status_code, one.json()["id"]) for one in twice] == [(201, "sums-3"), (200, "sums-3")]

    with_cli(tmp_path / "service", test)
