"""Gradient edges over a launcher of functions: any two meshes learn what one process learns, in any micro-batches."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from tests.job.test_rpc_client import Launcher
from tests.makers import JOB, at, loop, op, service, spec

from rota.job.instance.handles import gradient_edges
from rota.job.instance.operations import PHASE, Replicas, Tape
from rota.job.rpc.client import Request, RpcClient
from rota.job.rpc.peers import Peer, PeerTable
from rota.runtime.clock import SystemClock
from rota.spec.errors import BadInput
from rota.spec.ids import Epoch, NodeId, RoleName
from rota.spec.job import Bound, Edge, JobSpec, WeightsEdge

torch = pytest.importorskip("torch")
ROWS, WIDTH = 12, 5


class Tower:
    """One member of a tower: a linear layer, its tape, and the most activations that it ever kept."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net, self.tape, self.kept = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64), Tape(), 0

    def encode(self, rows: Any) -> dict[str, Any]:
        return {"x": self.net(rows).tanh(), "rows": torch.arange(len(rows))}

    def read(self, made: dict[str, Any], wanted: Any) -> dict[str, float]:
        loss = (self.net(made["x"]) - wanted).square().sum()
        loss.backward()
        return {"loss": loss.item() / len(wanted)}


class World:
    """Two towers of some members each, joined by a gradient edge."""

    def __init__(self, sources: int, targets: int, micro: int, inflight: int = 2) -> None:
        shard: Any = {"send": "Shard(dp,none)", "retry": "commit"}
        self.spec: JobSpec = spec(
            service("vision", sources, op("encode", recv="Concat(dp)", **shard), mesh=(("dp", sources),), state=True),
            service("speller", targets, op("read", recv="Mean", **shard), mesh=(("dp", targets),), state=True),
            loop(),
            edges=(Edge(source="vision.encode", target="speller.read", kind="grad", micro=micro, inflight=inflight),),
        )
        sizes = {"vision": sources, "speller": targets}
        self.towers = {f"{role}/{rank}": Tower(len(role)) for role, n in sizes.items() for rank in range(n)}
        self.launcher = Launcher(self._answer)
        rpc = RpcClient(
            job=JOB,
            spec=self.spec,
            launcher=self.launcher,  # type: ignore[arg-type]
            clock=SystemClock(),
            caller=at("loop/0"),
        )
        peers = [self._peer(role, rank) for role, n in sizes.items() for rank in range(n)]
        rpc.update(PeerTable(version=1, peers=tuple(peers)))
        self.edges = gradient_edges(self.spec, partial(rpc.call, loop_epoch=Epoch(1)), 1)

    def _peer(self, role: str, rank: int) -> Peer:
        who = RoleName(role)
        return Peer(
            role=who, rank=rank, epoch=Epoch(1), started_epoch=Epoch(1), node=NodeId("n"), pid=rank + 1, ready=True
        )

    async def _answer(self, instance: str, request: Request) -> Any:
        tower, kwargs = self.towers[instance], dict(request.kwargs)
        found = await tower.tape.run(kwargs.pop(PHASE), getattr(tower, request.op), request.args)
        tower.kept = max(tower.kept, len(tower.tape._waiting))
        return found

    def learn(self, rows: Any, wanted: Any) -> dict[str, float]:
        return asyncio.run(self.edges["vision.encode"].run(rows, (wanted,)))

    def gradient(self, role: str) -> Any:
        """Sum over the members, as an all-reduce would make it."""
        return sum(tower.net.weight.grad for name, tower in self.towers.items() if name.startswith(role))


def batch() -> tuple[Any, Any]:
    chance = torch.Generator().manual_seed(1)
    rows, wanted = torch.randn((2, ROWS, WIDTH), generator=chance, dtype=torch.float64)
    return rows, wanted


def one_process() -> tuple[Tower, Tower, float]:
    vision, speller = Tower(len("vision")), Tower(len("speller"))
    rows, wanted = batch()
    return vision, speller, speller.read(vision.encode(rows), wanted)["loss"]


@pytest.mark.parametrize(("sources", "targets", "micro"), [(1, 1, 1), (2, 2, 3), (2, 1, 2), (1, 2, 3), (3, 2, 2)])
def test_gradients_of_both_towers_are_those_of_one_process(sources: int, targets: int, micro: int) -> None:
    vision, speller, loss = one_process()
    world = World(sources, targets, micro)
    assert world.learn(*batch())["loss"] == pytest.approx(loss, abs=1e-12)
    for role, tower in (("vision", vision), ("speller", speller)):
        torch.testing.assert_close(world.gradient(role), tower.net.weight.grad, rtol=0, atol=1e-12)
    assert not any(tower.tape._waiting for tower in world.towers.values())


def test_no_more_than_inflight_micro_batches_wait_for_their_gradients() -> None:
    world = World(1, 1, micro=6, inflight=2)
    world.learn(*batch())
    assert world.towers["vision/0"].kept <= 2
    sent = [(instance, call.kwargs[PHASE][0]) for instance, call in world.launcher.calls]
    assert sent.count(("vision/0", "forward")) == sent.count(("vision/0", "back")) == 6
    assert sent.index(("vision/0", "back")) < 6 + 3, "they overlap: the first is back before the last has begun"


def test_a_step_without_backward_and_rows_that_do_not_divide_are_named() -> None:
    world = World(1, 1, micro=5)
    with pytest.raises(BadInput, match=r"vision\.encode -> speller\.read: 12 rows do not divide over 5"):
        world.learn(*batch())
    silent = World(1, 1, micro=1)
    silent.towers["speller/0"].read = lambda made, wanted: {"loss": 0.0}  # type: ignore[method-assign]
    with pytest.raises(BadInput, match="no gradient came"):
        silent.learn(*batch())


class At:
    """A clock that is set."""

    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


def replicas(**lag: Any) -> tuple[Replicas, At]:
    clock, bound = At(), Bound(**lag) if lag else None
    edge = WeightsEdge(source=RoleName("actor"), target=RoleName("serve"), lag=bound)
    return Replicas([edge], clock), clock  # type: ignore[arg-type]


def states(found: Replicas) -> tuple[str, int, int, float]:
    ((_, state, held, behind, behind_s),) = found.read()
    return state, held, behind, behind_s


def test_a_replica_is_stale_until_it_has_loaded_and_suspect_when_it_is_too_far_behind() -> None:
    found, clock = replicas(versions=2, seconds=5.0)
    assert states(found) == ("STALE", 0, 0, 0.0)
    found.learn({"actor-serve": (1, 1)}, Epoch(1))
    assert states(found) == ("STALE", 0, 1, 0.0)
    (one,) = found.missing({"actor-serve": (1, 1)})
    one.syncing = True
    assert states(found)[0] == "SYNCING"
    one.syncing, one.held = False, (1, 1)
    assert states(found) == ("SYNCED", 1, 0, 0.0) and found.missing({"actor-serve": (1, 1)}) == []
    found.learn({"actor-serve": (1, 3)}, Epoch(1))
    clock.now_s = 4.0
    assert states(found) == ("STALE", 1, 2, 4.0)
    clock.now_s = 6.0
    assert states(found)[0] == "SUSPECT", "5 s"
    one.held = (1, 3)
    found.learn({"actor-serve": (1, 6)}, Epoch(1))
    assert states(found) == ("SUSPECT", 3, 3, 0.0), "two versions"


def test_after_a_rollback_what_is_newer_than_the_commit_counts_as_nothing() -> None:
    found, _ = replicas()
    found.learn({"actor-serve": (1, 9)}, Epoch(1))
    found.of["actor-serve"].held = (1, 9)
    found.learn({"actor-serve": (1, 8)}, Epoch(1))
    assert found.missing({"actor-serve": (1, 8)}) == [], "an older call of the same loop needs no older weights"
    found.learn({"actor-serve": (1, 6)}, Epoch(2))
    assert [one.edge.name for one in found.missing({"actor-serve": (1, 6)})] == ["actor-serve"]
    found.of["actor-serve"].held = (1, 6)
    found.learn({"actor-serve": (1, 9)}, Epoch(1))
    assert states(found) == ("SYNCED", 6, 0, 0.0), "a late word of the loop before"
