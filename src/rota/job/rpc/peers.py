"""Table of peers that a master gives to its instances: who is where, who is ready; and where a job lives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, TypedDict

from rota.job.core.context import InstanceRecord, JobContext
from rota.job.core.ledger import FlowCut
from rota.job.core.survival import CUT, WEIGHTS
from rota.runtime.environ import Home
from rota.runtime.launcher import Handle, handle_of, instance_name, master_name
from rota.runtime.output import log_name
from rota.spec.codec import JsonObject, JsonValue
from rota.spec.ids import NO_EPOCH, Epoch, InstanceId, JobId, NodeId, RoleName
from rota.spec.job import JobSpec
from rota.spec.states import InstanceState



@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace(JsonValue):
    """Where a job lives, as its master and every instance get it.

    ``launcher`` is the import path of a function that opens the launcher inside a process of the job.
    """

    home: str
    job: JobId
    workdir: str
    launcher: str
    owner: str = ""
    """Who submitted the job: whose secrets it may open."""

    def log_path(self, instance: InstanceId) -> str:
        """The log of one instance."""
        return str(Home.of(self.home).job(self.job).logs / log_name(instance.role, instance.rank))


def checkpoint_dir(spec: JobSpec, place: JobPlace) -> str:
    """Where the checkpoints of a job go."""
    given = spec.checkpoint.dir if spec.checkpoint else None
    return given or str(Path(place.home) / "checkpoints" / place.job)


def folder_of(root: Path, n: int, epoch: Epoch) -> Path:
    """Where the checkpoint of commit ``n`` by a loop epoch lies; no two epochs write into one folder."""
    return root / f"step-{n}.e{epoch}"


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


class CommitCheckpoint(TypedDict):
    """Folder of a complete checkpoint, and how long it took."""

    path: str
    seconds: float


class CommitDone(TypedDict):
    """The master's answer to a durable commit; ``save``: the next one goes to disk, ``stop``: it was the last one."""

    answer: Literal["done"]
    table: JsonObject
    save: bool
    stop: bool


class CommitRefused(TypedDict):
    """The master's answer to a commit of a loop that is over."""

    answer: Literal["refused"]
    text: str


class CommitAgain(TypedDict):
    """The answer of a master that fails before the commit is in its log: the next master is asked the same."""

    answer: Literal["again"]
    text: str


def cursor_with(cursor: JsonObject, n: int, published: Mapping[str, int], cut: FlowCut | None) -> JsonObject:
    """The cursor of commit ``n``: the cut of its loop; for each edge published with it the writer's epoch and ``n``.

    The epoch distinguishes a committed version from one of the same number that a rollback took back.
    """
    weights = {**cursor.get(WEIGHTS, {}), **{edge: [epoch, n] for edge, epoch in published.items()}}
    found = {**cursor, WEIGHTS: weights, CUT: dict(cut or {})}
    return {name: found[name] for name in sorted(found)}  # sorted as a store gives it back: replays compare them


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
