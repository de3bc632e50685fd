"""Table of peers that a master sends to its instances: address, epoch and readiness of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from rota.job.core.context import InstanceRecord, JobContext
from rota.job.core.survival import WEIGHTS
from rota.runtime.launcher import Handle, handle_of, instance_name, master_name
from rota.spec.codec import JsonValue
from rota.spec.ids import NO_EPOCH, Epoch, InstanceId, JobId, NodeId, RoleName
from rota.spec.states import InstanceState


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One instance as others see it. ``started_epoch`` names its process; ``ready`` = takes calls under ``epoch``."""

    role: RoleName
    rank: int
    epoch: Epoch
    started_epoch: Epoch
    node: NodeId
    pid: int
    ready: bool
    cause: str = ""
    """Why it is not ready, as far as known."""
    address: str = ""
    """Where its process is called from other machines, ``host:port``."""
    seat: int | None = None
    """Its number in the names of its process, where that is not its rank among those that take part."""

    @cached_property
    def id(self) -> InstanceId:
        """Role and seat: the name that its process and its events have."""
        return InstanceId(self.role, self.rank if self.seat is None else self.seat)

    def handle(self, job: JobId) -> Handle:
        """Where to send calls."""
        name = instance_name(job, self.id, self.started_epoch)
        return handle_of(name, pid=self.pid, node=self.node, address=self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTable(JsonValue):
    """The instances of a job at one moment; a higher ``version`` is newer, also across masters.

    ``weights`` maps a weights edge to the version every reader must have: (epoch of its writer, commit).
    """

    version: int = 0
    master_epoch: Epoch = NO_EPOCH
    committed: int = 0
    loop_epoch: Epoch = NO_EPOCH
    weights: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    peers: tuple[Peer, ...] = ()

    def of_role(self, role: str) -> tuple[Peer, ...]:
        """Instances of a role in rank order."""
        return tuple(peer for peer in self.peers if peer.role == role)

    def find(self, role: str, rank: int) -> Peer | None:
        """One instance, or None when the job has none of that name."""
        return next((peer for peer in self.peers if peer.role == role and peer.rank == rank), None)

    def same(self, other: PeerTable) -> bool:
        """True when it says the same as another table, whatever the versions are."""
        return replace(self, version=other.version, loop_epoch=other.loop_epoch) == other


def table_of(ctx: JobContext) -> PeerTable:
    """The table of the present state; its version is the number of the last event that is in it."""
    return PeerTable(
        version=ctx.seq,
        master_epoch=ctx.master_epoch,
        committed=ctx.committed,
        loop_epoch=ctx.loop_epoch,
        weights={edge: (epoch, n) for edge, (epoch, n) in ctx.cursor.get(WEIGHTS, {}).items()},
        peers=tuple(_peers(ctx)),
    )


def _peers(ctx: JobContext) -> Iterator[Peer]:
    """Those that take part, numbered without gaps in each role: spares and those that left are skipped."""
    ranks: dict[RoleName, int] = {}
    for one in ctx.instances.values():
        if one.active:
            rank = ranks.setdefault(one.id.role, 0)
            ranks[one.id.role] = rank + 1
            yield _peer(one, rank)


def _peer(one: InstanceRecord, rank: int) -> Peer:
    process = one.process
    ready = one.state is InstanceState.READY and process is not None
    cause = "" if ready else (f"{one.error.reason}: {one.error.text}" if one.error else one.state.value)
    return Peer(
        role=one.id.role,
        rank=rank,
        seat=None if rank == one.id.rank else one.id.rank,
        epoch=one.epoch,
        started_epoch=process.epoch if process else Epoch(0),
        node=process.node if process else NodeId(""),
        pid=process.pid if process else 0,
        address=process.address if process else "",
        ready=ready,
        cause=cause,
    )


def master_handle(job: JobId) -> Handle:
    """Where the master of a job takes calls; the same across its restarts."""
    return handle_of(master_name(job))
