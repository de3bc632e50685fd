"""What others see of a context: the table of peers pushed to the instances, and the views behind show and failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rota.job.core.context import Failover, Instance, JobContext, Loss
from rota.job.core.diagnosis import kind_of
from rota.job.core.settling import reserved
from rota.spec.ids import Epoch, RoleName
from rota.spec.states import InstanceState


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One row: to call this instance, use the process of ``started_epoch`` and stamp the call with ``epoch``."""

    rank: int
    epoch: Epoch
    started_epoch: Epoch
    ready: bool
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTable:
    """Who can be called. A receiver keeps the table with the highest ``(master_epoch, version)``."""

    master_epoch: Epoch
    version: int
    roles: dict[RoleName, tuple[Peer, ...]]
    committed: int


def peers(ctx: JobContext) -> PeerTable:
    """The present table; its version grows whenever a row changed."""
    if ctx.graph is None:
        return PeerTable(master_epoch=ctx.master_epoch, version=0, roles={}, committed=0)
    return PeerTable(
        master_epoch=ctx.master_epoch,
        version=ctx.table_version,
        roles={role: tuple(_peer(one) for one in ctx.of_role(role)) for role in ctx.graph.ranks},
        committed=ctx.committed,
    )


def _peer(one: Instance) -> Peer:
    return Peer(
        rank=one.id.rank,
        epoch=one.epoch,
        started_epoch=one.process.epoch if one.process else Epoch(0),
        ready=one.state is InstanceState.READY,
        ended=one.ended,
    )


def story(ctx: JobContext) -> dict[str, Any]:
    """Everything ``show`` and ``failures`` print, as plain values."""
    return {
        "job": ctx.job,
        "state": ctx.state.value,
        "phase": phase(ctx),
        "attempt": ctx.attempt,
        "retries": ctx.retries,
        "committed": ctx.committed,
        "metrics": dict(ctx.metrics),
        "checkpoint": {"n": ctx.checkpoint_n, "path": ctx.checkpoint_path} if ctx.checkpoint_path else None,
        "reason": ctx.end_reason.value if ctx.end_reason else None,
        "instances": [_instance_row(one) for one in ctx.instances.values()],
        "failovers": [_failover_row(one) for one in ctx.failovers],
    }


def phase(ctx: JobContext) -> str:
    """What the job is waiting for, in words; finer than its state."""
    if ctx.state.terminal or ctx.graph is None:
        return ""
    if ctx.ending is not None:
        left = [str(one.id) for one in ctx.instances.values() if one.doomed]
        if left:
            return f"stopping {_some(left)}"
        return "giving reservations back" if ctx.gangs else "recording the end"
    if ctx.placement is None:
        return ""
    if ctx.losses:
        return f"judging the loss of {_some([str(loss.instance) for loss in ctx.losses])}"
    if not reserved(ctx):
        return "reserving its gang"
    waits = [one for one in ctx.instances.values() if not one.settled]
    for state, verb in (
        (InstanceState.PLANNED, "waiting to start"),
        (InstanceState.STARTING, "starting"),
        (InstanceState.STALE, "setting up"),
    ):
        names = [str(one.id) for one in waits if one.state is state]
        if names:
            return f"{verb} {_some(names)}"
    return ""


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _instance_row(one: Instance) -> dict[str, Any]:
    process = one.process
    return {
        "instance": str(one.id),
        "role": one.id.role,
        "rank": one.id.rank,
        "state": one.state.value,
        "epoch": one.epoch,
        "started_epoch": process.epoch if process else None,
        "node": process.node if process else None,
        "pid": process.pid if process and process.pid else None,
        "restarts": one.restarts,
        "ended": one.ended,
        "error": _loss_row(one.error) if one.error else None,
    }


def _loss_row(loss: Loss) -> dict[str, Any]:
    return {
        "instance": str(loss.instance),
        "epoch": loss.epoch,
        "kind": kind_of(loss),
        "reason": loss.reason.value,
        "text": loss.text,
        "traceback": loss.traceback,
        "at_s": loss.at_s,
    }


def _failover_row(one: Failover) -> dict[str, Any]:
    return {
        "failover": one.number,
        "level": one.level.value,
        "moved_from": one.moved_from.value if one.moved_from else None,
        "move_reason": one.move_reason.value if one.move_reason else None,
        "cause": _loss_row(one.cause),
        "scope": [str(member) for member in one.scope],
        "replaced": [str(member) for member in one.replaced],
        "restore": one.restore,
        "started_s": one.started_s,
        "seconds": one.seconds,
        "superseded_by": one.superseded_by,
    }
