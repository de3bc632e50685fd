"""Calls from an instance to the instances of a role: epoch, deadline, retry class; waiting uses no CPU.

A call names the epoch of the instance it is for and, for calls of the loop, the epoch of the loop; the callee refuses
older ones. A call of a loop that is over is not sent at all: a callee that came back has not heard of the newer loop.
What happens when a callee dies or its operation raises is decided by the retry class alone: ``safe`` is run
again, elsewhere or after the recovery; ``commit`` waits for the rollback that must follow, and is never repeated;
``never`` raises to the caller.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rota.job import dispatch
from rota.job.peers import Peer, PeerTable
from rota.job.waiting import Waiting, size_of
from rota.runtime.clock import Clock
from rota.runtime.launch import Call, CallTimeout, Launcher, ProcessGone
from rota.spec.dispatch import FirstRule, OpSpec, Rank, Shard
from rota.spec.errors import CallFailed, CallLost, RoleDown, RolledBack, TimedOut
from rota.spec.ids import Epoch, InstanceId, JobId
from rota.spec.job import JobSpec, RoleSpec

ROLLBACK_MAX_S = 900.0
"""Longest wait of a lost ``commit`` call for the rollback that cancels it."""
REFUSED_S = 1.0
"""An instance that refused a call is asked again after this long, if the table still says it is ready."""
ASYNC_INFLIGHT_MAX = 16
"""Items of one caller that an instance with an async operation has at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of one operation on one instance."""

    call_id: str
    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    epoch: Epoch
    loop_epoch: Epoch
    weights: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Versions of weights edges that the callee must have: edge -> (epoch of the writer, commit)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """``ok`` with a value; ``stale``: refused, nothing ran; ``failed``: the operation raised."""

    kind: Literal["ok", "stale", "failed"]
    value: Any = None
    text: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class _Lost:
    """No answer came: the callee died (``traceback`` empty) or its operation raised."""

    text: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class _Limits:
    """Until when a call may be sent: the deadline on the clock, and the epoch of the loop that asked for it."""

    deadline_s: float | None
    loop_epoch: Epoch


class Courier:
    """Sends calls by the newest table of peers; belongs to one event loop."""

    def __init__(
        self,
        *,
        job: JobId,
        spec: JobSpec,
        launcher: Launcher,
        clock: Clock,
        caller: InstanceId,
        waiting: Waiting | None = None,
    ) -> None:
        self.waiting = waiting or Waiting(clock)
        self.table = PeerTable()
        self.loop_epoch = Epoch(0)
        """Of the loop in this process; set by ``enter``."""
        self.calls_open = 0
        self._job, self._spec, self._launcher, self._clock, self._caller = job, spec, launcher, clock, caller
        self._changed = asyncio.Event()
        self._numbers = itertools.count(1)
        self._down: set[tuple[InstanceId, Epoch]] = set()
        self._load: dict[InstanceId, int] = {}

    def update(self, table: PeerTable) -> None:
        """Take a newer table; wakes everybody who waits for one."""
        if table.version <= self.table.version:
            return
        self.table = table
        present = {(peer.id, peer.epoch) for peer in table.peers}
        self._down &= present
        self.wake()

    def enter(self, loop_epoch: Epoch) -> None:
        """The loop is entered under a new epoch: calls of an older one that still wait are refused."""
        self.loop_epoch = loop_epoch
        self.wake()

    def wake(self) -> None:
        """Let everybody who waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def call(
        self,
        role: RoleSpec,
        op: OpSpec,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        loop_epoch: Epoch | None = None,
    ) -> Any:
        """Call an operation on the members that its send rule names; one merged result.

        ``loop_epoch`` is the one of the loop that calls, the present one when left out. Raises RoleDown when nobody
        could take it before the deadline, CallLost, CallFailed, TimedOut, BadInput; RolledBack when the loop is over.
        """
        limits = self._limits(op, loop_epoch)
        world = len(self.table.of_role(role.name)) or role.replicas_min
        send, recv = op.send_rule, op.recv_rule
        parts = dispatch.split(args[0] if args else None, send, mesh=role.mesh, world=world)
        calls = {
            rank: self._member_call(role, rank, op, ((part.value, *args[1:]) if args else ()), kwargs, limits)
            for rank, part in parts.items()
        }
        if isinstance(recv, FirstRule):
            return await _first(list(calls.values()))
        answers = await _all(list(calls.values()))
        results = dict(zip(calls, answers, strict=True))
        if isinstance(send, Rank) and not isinstance(recv, Rank):
            return results[send.rank]
        axis = send.axis if isinstance(send, Shard) else None
        return dispatch.merge(results, parts, recv, axis=axis, mesh=role.mesh)

    async def each(
        self,
        role: RoleSpec,
        op: OpSpec,
        items: Sequence[Any],
        rest: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        loop_epoch: Epoch | None = None,
    ) -> list[Any]:
        """Every item to the least loaded ready instance; results in the order of the items."""
        results: list[Any] = [None] * len(items)
        async for index, value in self.stream(role, op, items, rest, kwargs, loop_epoch=loop_epoch):
            results[index] = value
        return results

    async def stream(
        self,
        role: RoleSpec,
        op: OpSpec,
        items: Sequence[Any],
        rest: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        loop_epoch: Epoch | None = None,
    ) -> AsyncGenerator[tuple[int, Any], None]:
        """Like ``each``, but (index, result) pairs as they finish."""
        limits = self._limits(op, loop_epoch)
        waiting = iter(enumerate(items))
        done: asyncio.Queue[tuple[int, Any] | BaseException] = asyncio.Queue(len(items))

        async def take() -> None:
            try:
                for index, item in waiting:
                    done.put_nowait((index, await self._item_call(role, op, (item, *rest), kwargs, limits)))
            except Exception as error:  # noqa: BLE001 - handed to the consumer below, which raises it
                done.put_nowait(error)

        lanes = _room(op) * max(role.replicas_max, len(self.table.of_role(role.name)))
        tasks = [asyncio.create_task(take()) for _ in range(min(lanes, len(items)))]
        try:
            for _ in items:
                found = await done.get()
                if isinstance(found, BaseException):
                    raise found
                yield found
        finally:
            await _cancel(tasks)

    # -- one member ---------------------------------------------------------------------------------------------------

    async def _member_call(
        self,
        role: RoleSpec,
        rank: int,
        op: OpSpec,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        limits: _Limits,
    ) -> Any:
        call_id = self._call_id()
        while True:
            peer = await self._ready(role, lambda rank=rank: self._member(role, rank), limits)
            found = await self._attempt(peer, op, call_id, args, kwargs, limits)
            if isinstance(found, Reply):
                return found.value
            await self._after_loss(peer, op, found, limits.deadline_s)

    async def _item_call(
        self, role: RoleSpec, op: OpSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any], limits: _Limits
    ) -> Any:
        call_id = self._call_id()
        while True:
            peer = await self._ready(role, lambda: self._free(role, op), limits)
            self._load[peer.id] = self._load.get(peer.id, 0) + 1
            try:
                found = await self._attempt(peer, op, call_id, args, kwargs, limits)
            finally:
                self._load[peer.id] -= 1
                self.wake()
            if isinstance(found, Reply):
                return found.value
            await self._after_loss(peer, op, found, limits.deadline_s)

    async def _attempt(
        self,
        peer: Peer,
        op: OpSpec,
        call_id: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        limits: _Limits,
    ) -> Reply | _Lost:
        """Send once. A refused call ran nowhere and is sent again when the table has changed."""
        request = Request(
            call_id=call_id,
            op=op.name,
            args=args,
            kwargs=kwargs,
            epoch=peer.epoch,
            loop_epoch=limits.loop_epoch,
            weights={
                edge.name: self.table.weights[edge.name]
                for edge in self._spec.weights
                if edge.target == peer.role and edge.name in self.table.weights
            },
        )
        call = Call(method="call", args=(request,), timeout_s=self._left(limits.deadline_s))
        self.calls_open += 1
        wait = self.waiting.begin(str(peer.id), "call", op.name)
        answered = False
        size = size_of(args)
        try:
            reply: Reply = await self._launcher.call(peer.handle(self._job), call)
            answered = reply.kind == "ok"
            size += size_of(reply.value)
        except ProcessGone as error:
            self._down.add((peer.id, peer.epoch))
            return _Lost(str(error))
        except CallTimeout:
            raise TimedOut(
                f"{peer.role}.{op.name} gave no answer within its deadline of {op.deadline_s} s",
                role=peer.role,
                rank=peer.rank,
                op=op.name,
            ) from None
        finally:
            self.calls_open -= 1
            self.waiting.end(wait, ok=answered, size=size)
        if reply.kind == "ok":
            return reply
        self._down.add((peer.id, peer.epoch))
        if reply.kind == "failed":
            return _Lost(reply.text, reply.traceback)
        asyncio.get_running_loop().call_later(REFUSED_S, self._forgive, peer)
        return _Lost("")

    def _forgive(self, peer: Peer) -> None:
        self._down.discard((peer.id, peer.epoch))
        self.wake()

    async def _after_loss(self, peer: Peer, op: OpSpec, lost: _Lost, deadline_s: float | None) -> None:
        """Return when the call may be sent again; else raise, or wait for the rollback."""
        refused = not lost.text
        if refused or op.retry == "safe":
            return
        fields = {"role": peer.role, "rank": peer.rank, "op": op.name}
        if op.retry == "commit":
            await self.wait_rollback(deadline_s)
            raise CallLost(f"{peer.id}.{op.name} was lost and no rollback followed: {lost.text}", **fields)
        if lost.traceback:
            raise CallFailed(f"{peer.id}.{op.name}: {lost.text}", traceback=lost.traceback, **fields)
        raise CallLost(f"{peer.id}.{op.name}: {lost.text}", **fields)

    async def wait_rollback(self, deadline_s: float | None = None) -> None:
        """Wait until the loop is cancelled by the rollback of its job; returns only when that does not happen."""
        left_s = self._left(deadline_s)
        await self._clock.sleep(ROLLBACK_MAX_S if left_s is None else min(left_s, ROLLBACK_MAX_S))

    async def _ready(self, role: RoleSpec, choose: Any, limits: _Limits) -> Peer:
        since_s = self._clock.monotonic_s()
        while True:
            changed = self._changed
            if limits.loop_epoch < self.loop_epoch:
                raise RolledBack(f"loop epoch {limits.loop_epoch} of {self._job} is over, it is at {self.loop_epoch}")
            peer: Peer | None = None if self._loop_is_over(limits.loop_epoch) else choose()
            if peer is not None:
                return peer
            left_s = self._left(limits.deadline_s)
            try:
                with self.waiting.on(role.name, "ready"):
                    async with asyncio.timeout(left_s):
                        await changed.wait()
            except TimeoutError:
                raise self._role_down(role, since_s) from None

    def _loop_is_over(self, epoch: Epoch) -> bool:
        """True when the master gave the loop a newer epoch: it is about to be cancelled, and sends nothing more."""
        own = self.table.find(self._caller.role, self._caller.rank)
        return own is not None and epoch < own.epoch

    def _role_down(self, role: RoleSpec, since_s: float) -> RoleDown:
        causes = sorted({peer.cause for peer in self.table.of_role(role.name) if peer.cause})
        cause = "; ".join(causes) or "no instance of it is ready"
        waited_s = self._clock.monotonic_s() - since_s
        return RoleDown(
            f"role {role.name} took no call for {waited_s:.1f} s: {cause}",
            role=role.name,
            cause=cause,
            since_s=round(waited_s, 3),
        )

    # -- who can take a call ------------------------------------------------------------------------------------------

    def _usable(self, peer: Peer) -> bool:
        return peer.ready and (peer.id, peer.epoch) not in self._down

    def _member(self, role: RoleSpec, rank: int) -> Peer | None:
        peer = self.table.find(role.name, rank)
        return peer if peer is not None and self._usable(peer) else None

    def _free(self, role: RoleSpec, op: OpSpec) -> Peer | None:
        """The least loaded ready instance that has room, the lowest rank among equals."""
        able = [peer for peer in self.table.of_role(role.name) if self._usable(peer)]
        free = [peer for peer in able if self._load.get(peer.id, 0) < _room(op)]
        return min(free, key=lambda peer: (self._load.get(peer.id, 0), peer.rank), default=None)

    def _call_id(self) -> str:
        return f"{self._caller}/{self.loop_epoch}/{next(self._numbers)}"

    def _limits(self, op: OpSpec, loop_epoch: Epoch | None) -> _Limits:
        deadline_s = None if op.deadline_s is None else self._clock.monotonic_s() + op.deadline_s
        return _Limits(deadline_s, self.loop_epoch if loop_epoch is None else loop_epoch)

    def _left(self, deadline_s: float | None) -> float | None:
        return None if deadline_s is None else max(0.0, deadline_s - self._clock.monotonic_s())


def _room(op: OpSpec) -> int:
    """Items of one caller at one instance; of a plain operation the second waits there, which hides its way."""
    return ASYNC_INFLIGHT_MAX if op.is_async else 2


async def _cancel(tasks: Any) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _all(calls: list[Any]) -> list[Any]:
    """All results; when one raises, the others are cancelled and it is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _first(calls: list[Any]) -> Any:
    """The first result; the others are cancelled. Raises when every call did."""
    tasks = {asyncio.ensure_future(call) for call in calls}
    pending = tasks
    try:
        while True:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            good = [task for task in done if task.exception() is None]
            if good or not pending:
                return (good or list(done))[0].result()
    finally:
        await _cancel(tasks)
