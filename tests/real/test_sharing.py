"""Parts of a role that hand items on, and roles that take turns on a device; real processes, killed while they work."""

from __future__ import annotations

import dataclasses

import pytest
from tests.real.jobs import Run, job, role, run_job

from rota.spec.events import Committed, InstanceLost
from rota.spec.job import Edge, JobSpec, Near, StreamSpec
from rota.spec.states import JobState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def separated() -> JobSpec:
    roles = (
        role("rollout.prefill", "sharing:Prefill"),
        role("rollout.decode", "sharing:Decode", 2, collocate=(Near(role="rollout.prefill", level="node"),)),
        role("loop", "sharing:generate"),
    )
    edges = (
        Edge(source="prompts", target="rollout.prefill.fill", kind="stream"),
        Edge(source="rollout.prefill.fill", target="rollout.decode.run", kind="handoff"),
        Edge(source="rollout.decode.run", target="answers", kind="stream"),
    )
    streams = (StreamSpec(name="prompts", source="sharing:prompts"), StreamSpec(name="answers", cap=8))
    return dataclasses.replace(job(*roles), edges=edges, streams=streams)


@pytest.mark.usefixtures("registry")
def test_prefill_hands_caches_to_decode_past_the_loop_though_a_decoder_is_killed(engine) -> None:
    async def body(run: Run) -> None:
        await run.until_committed(2)
        run.kill("rollout.decode/0")
        assert (await run.end()).state is JobState.SUCCEEDED, run.story()
        assert run.events(Committed)[-1].metrics == {"total": sum(range(24))}
        assert [one.role for one in run.events(InstanceLost)] == ["rollout.decode"], run.story()

    run_job(engine, separated(), body)


def test_two_roles_take_turns_on_a_device_and_sleep_between_though_one_is_killed(engine) -> None:
    async def body(run: Run) -> None:
        await run.until_committed(2)
        killed = str(run.kill("ref/0"))
        assert (await run.end()).state is JobState.SUCCEEDED, run.story()
        lines = (run.output / "turns.txt").read_text().split("\n")[:-1]
        holder, asleep = "", set[str]()
        for line in lines:
            name, pid, what = line.split()
            asleep = asleep | {name} if what == "sleep" else asleep - {name}
            if what == "begin":
                other = "ref" if name == "actor" else "actor"
                assert other in asleep and name not in asleep, (line, lines)
                assert holder in ("", killed), (line, lines)  # the killed one may have been at work
                holder = pid
            elif what == "end":
                holder = ""
        assert sum(line.endswith("end") for line in lines) >= 12

    share = (Near(role="actor", share="lease"),)
    roles = (role("actor", "sharing:Sharer"), role("ref", "sharing:Sharer", collocate=share))
    run_job(engine, job(*roles, role("loop", "sharing:turns")), body)
