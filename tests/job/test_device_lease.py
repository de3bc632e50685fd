"""Device leases over a launcher of functions: one role at a time, sleep before wake, first come, first served."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from tests.job.core.test_graph_and_gangs import near, problems
from tests.job.test_rpc_client import Launcher
from tests.makers import JOB, at, loop, op, service, spec

from rota.job.instance.handles import DeviceLease
from rota.job.rpc.client import Request, RpcClient
from rota.job.rpc.peers import Peer, PeerTable
from rota.runtime.clock import SystemClock
from rota.spec.ids import Epoch, NodeId, RoleName
from rota.spec.job import Edge, JobSpec, StreamSpec

EPOCH = Epoch(1)


def role(name: str, **fields: Any) -> Any:
    return service(name, 2, op("work", send="Same"), op("sleep"), op("wake"), **fields)


SPEC: JobSpec = spec(
    role("actor"), role("ref", collocate=(near("actor", share="lease"),)), service("free", 1, op("work")), loop()
)


class World:
    """What the instances are asked, in order; ``work`` takes some turns of the event loop."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.launcher = Launcher(self._answer)
        self.rpc = RpcClient(
            job=JOB,
            spec=SPEC,
            launcher=self.launcher,  # type: ignore[arg-type]
            clock=SystemClock(),
            caller=at("loop/0"),
        )
        self.table(1)
        self.turns = DeviceLease(SPEC, self.rpc, partial(self.rpc.call, loop_epoch=EPOCH))

    def table(self, version: int, **epochs: int) -> None:
        peers = [
            Peer(
                role=RoleName(name),
                rank=rank,
                epoch=Epoch(epochs.get(name, 1)),
                started_epoch=EPOCH,
                node=NodeId("n"),
                pid=1,
                ready=True,
            )
            for name in ("actor", "ref", "free")
            for rank in range(1 if name == "free" else 2)
        ]
        self.rpc.update(PeerTable(version=version, peers=tuple(peers)))

    async def _answer(self, instance: str, request: Request) -> Any:
        self.asked.append(f"{instance}.{request.op}")
        for _ in range(60 if request.op == "work" else 5):
            await asyncio.sleep(0)
        self.asked.append(f"{instance}.{request.op} done")

    async def work(self, name: str) -> None:
        of = SPEC.role(name)
        found = of.interface.op("work") if of.interface else None
        assert found is not None
        async with self.turns.of(of):
            await self.rpc.call(of, found, (), {}, loop_epoch=EPOCH)

    def begun(self) -> list[str]:
        """Roles and operations in the order of their first member."""
        return [line.replace("/0", "") for line in self.asked if "/0." in line and "done" not in line]


def test_a_role_sleeps_before_the_other_wakes_and_works() -> None:
    world = World()

    async def main() -> None:
        await world.work("actor")
        await world.work("actor")
        await world.work("ref")
        await world.work("free")

    asyncio.run(main())
    first = ["ref.sleep", "actor.wake", "actor.work", "actor.work"]
    assert world.begun() == [*first, "actor.sleep", "ref.wake", "ref.work", "free.work"]
    at_last = world.asked.index("ref/0.wake")
    assert {"actor/0.sleep done", "actor/1.sleep done"} <= set(world.asked[:at_last]), "every member sleeps first"


def test_calls_at_once_never_overlap_and_are_served_in_their_order() -> None:
    world = World()

    async def main() -> None:
        await asyncio.gather(*(world.work(name) for name in ("ref", "actor", "actor", "ref")))

    asyncio.run(main())
    works = [line for line in world.begun() if line.endswith("work")]
    assert works == ["ref.work", "actor.work", "actor.work", "ref.work"]
    working: set[str] = set()
    for line in world.asked:
        name, _, what = line.partition(".")
        if what == "work":
            working.add(name)
        elif what == "work done":
            working.discard(name)
        else:
            assert not working, f"{line} while {working} work"
        assert len({one.split("/")[0] for one in working}) <= 1, world.asked


def test_a_successor_that_comes_up_out_of_turn_is_put_to_sleep() -> None:
    world = World()

    async def main() -> None:
        await world.work("actor")
        world.table(2, ref=2)
        await world.work("actor")

    asyncio.run(main())
    assert world.begun() == ["ref.sleep", "actor.wake", "actor.work", "ref.sleep", "actor.work"]


def test_a_turn_that_is_cut_short_leaves_the_devices_to_the_next() -> None:
    world = World()

    async def main() -> None:
        await world.work("actor")
        cut = asyncio.create_task(world.work("ref"))
        while world.begun()[-1] != "actor.sleep":
            await asyncio.sleep(0)
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)
        await world.work("actor")

    asyncio.run(main())
    assert world.begun()[-2:] == ["actor.wake", "actor.work"]


def test_what_works_all_the_time_cannot_take_turns() -> None:
    item = service("ref", 1, op("work", send="Each"), collocate=(near("actor", share="lease"),))
    edge = Edge(source="items", target="ref.work", kind="stream")
    job = spec(service("actor", 1, op("work")), item, loop(), streams=(StreamSpec(name="items"),), edges=(edge,))
    assert "items -> ref.work: items come at any time, but ref takes turns with actor" in problems(job)["TURNS"]


@pytest.mark.parametrize("share", ["fraction", None])
def test_roles_that_are_resident_together_take_no_turns(share: str | None) -> None:
    both = (service("a", 1, op("work")), service("b", 1, op("work"), collocate=(near("a", share=share),)))
    assert DeviceLease(spec(*both), World().rpc, None)._devices == {}  # type: ignore[arg-type]
