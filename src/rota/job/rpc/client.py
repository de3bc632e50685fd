"""RPC client: calls from an instance to the instances of a role; epoch, deadline, retry class; waiting uses no CPU.

A call names the epoch of the instance it is for and, for calls of the loop, the epoch of the loop; the callee refuses
older ones. A call of a loop that is over is not sent at all: a callee that came back has not heard of the newer loop.
What happens when a callee dies or its operation raises is decided by the retry class alone: ``safe`` is run
again, elsewhere or after the recovery; ``commit`` waits for the rollback that must follow, and is never repeated;
``never`` raises to the caller.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from rota.job.rpc import dispatch
from rota.job.rpc.payload import unpicklable_at
from rota.job.rpc.peers import Peer, PeerTable, master_handle
from rota.job.rpc.tracing import Waiting, size_of
from rota.runtime.clock import Clock, backoff
from rota.runtime.launcher import Call, CallTimeout, Handle, Launcher, NotPicklable, ProcessGone
from rota.spec.dispatch import FirstRule, OpSpec, Rank, Shard
from rota.spec.errors import BadInput, CallFailed, CallLost, RoleDown, RolledBack, TimedOut
from rota.spec.ids import Epoch, InstanceId, JobId
from rota.spec.job import JobSpec, RoleSpec

T = TypeVar("T")

ROLLBACK_MAX_S = 900.0
"""Longest wait of a lost ``commit`` call for the rollback that cancels it."""
REFUSED_S = 1.0
"""An instance that refused a call is asked again after this long, if the table still says it is ready."""
SENDABLE = (
    "send numbers, texts, arrays, and lists, tuples and dicts of them; locks, files, sockets and generators stay where"
    " they were made"
)
ALIVE_ANSWER_S = 5.0
"""Limit of the answer of the master to whether a process lives."""
RECONNECT_S = (0.05, 1.0)
"""Pause before a call is sent again over a new connection: first, and at most."""
ASYNC_INFLIGHT_MAX = 16
"""Items of one caller that an instance with an async operation has at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of one operation on one instance."""

    call_id: str
    op: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    epoch: Epoch
    loop_epoch: Epoch
    weights: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Versions of weights edges that the callee must have: edge -> (epoch of the writer, commit)."""
    report: bool = True
    """What the operation raises is a failure of the instance; False for an item, which may be to blame itself."""

    def to_call(self, timeout_s: float | None) -> Call:
        """As a call of ``Instance.call``; all but the user's is one list of plain values."""
        weights = {edge: list(version) for edge, version in self.weights.items()}
        head = [self.call_id, self.op, self.epoch, self.loop_epoch, weights, self.report]
        return Call(method="call", head=(head,), args=self.args, kwargs=self.kwargs, timeout_s=timeout_s)

    @staticmethod
    def of_call(head: Sequence[object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Request:
        """Inverse of ``to_call``."""
        plain: Sequence[Any] = head
        call_id, op, epoch, loop_epoch, found, report = plain
        return Request(
            call_id=call_id,
            op=op,
            args=args,
            kwargs=kwargs,
            epoch=epoch,
            loop_epoch=loop_epoch,
            weights={edge: (writer, n) for edge, (writer, n) in found.items()},
            report=report,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The answer instead of a value; ``stale``: nothing ran; ``failed``: the operation raised."""

    kind: Literal["stale", "failed"]
    text: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """A call that brought no value: refused (``text`` empty), or its instance died (``traceback`` empty) or raised."""

    text: str
    traceback: str = ""


class _Sending(NamedTuple):
    """What is sent, under one call id, until when (on the clock), for the loop of which epoch; its size in bytes."""

    call_id: str
    op: OpSpec
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    deadline_s: float | None
    loop_epoch: Epoch
    size: int = 0
    report: bool = True


class _Route(NamedTuple):
    """What the calls to one member have in common until the table changes."""

    peer: Peer
    handle: Handle
    target: str
    weights: dict[str, tuple[int, int]]


class HomeLoop(Protocol):
    """Runs a coroutine in the event loop of a client."""

    def __call__(self, work: Coroutine[object, object, T], /) -> Awaitable[T]: ...


async def _here(work: Coroutine[object, object, T]) -> T:
    return await work


class RpcClient:
    """Sends calls by the newest table of peers.

    It belongs to one event loop, where ``home`` runs a coroutine; only ``call`` may come from any loop. It sends from
    there, without a change of threads, what can be sent at once; waiting, losses and repeats happen at home.
    """

    def __init__(
        self,
        *,
        job: JobId,
        spec: JobSpec,
        launcher: Launcher,
        clock: Clock,
        caller: InstanceId,
        waiting: Waiting | None = None,
        home: HomeLoop = _here,
    ) -> None:
        self.waiting = waiting or Waiting(clock)
        self.table = PeerTable()
        self.loop_epoch = Epoch(0)
        """Of the loop in this process; set by ``enter``."""
        self._home = home
        self._peers: dict[tuple[str, int], Peer] = {}
        self._worlds: Counter[str] = Counter()
        self._routes: dict[tuple[str, int], _Route] = {}
        self._job, self._spec, self._launcher, self._clock, self._caller = job, spec, launcher, clock, caller
        self._changed = asyncio.Event()
        self._numbers = itertools.count(1)
        self._down: set[tuple[InstanceId, Epoch]] = set()
        self._load: dict[InstanceId, int] = {}

    def update(self, table: PeerTable) -> None:
        """Use a newer table; wakes all waiters."""
        if table.version <= self.table.version:
            return
        older, self.table = self.table, table
        self._peers = {(peer.role, peer.rank): peer for peer in table.peers}
        self._worlds = Counter(peer.role for peer in table.peers)
        self._routes = {}
        present = {(peer.id, peer.epoch) for peer in table.peers}
        self._down &= present
        processes = {(peer.id, peer.started_epoch) for peer in table.peers}
        for peer in older.peers:  # the master gave it up: a machine that is silent closes no connection
            if peer.pid and (peer.id, peer.started_epoch) not in processes:
                self._launcher.hang_up(peer.handle(self._job))
        self.wake()

    def enter(self, loop_epoch: Epoch) -> None:
        """The loop is entered under a new epoch: calls of an older one that still wait are refused."""
        self.loop_epoch = loop_epoch
        self.wake()

    def wake(self) -> None:
        """Wake all waiters."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def call(
        self,
        role: RoleSpec,
        op: OpSpec,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        *,
        loop_epoch: Epoch | None = None,
    ) -> object:
        """Call an operation on the members that its send rule names; one merged result.

        ``loop_epoch`` is the one of the loop that calls, the present one when left out. Raises RoleDown when no
        instance took it before the deadline, CallLost, CallFailed, TimedOut, BadInput; RolledBack when the
        loop is over.
        """
        epoch, deadline_s = self._limits(op, loop_epoch)
        world = self._worlds[role.name] or role.replicas_min
        send, recv = op.send_rule, op.recv_rule
        parts = dispatch.split(args[0] if args else None, send, mesh=role.mesh, world=world)
        calls: dict[int, Coroutine[object, object, object]] = {}
        given, size, last = (), 0, None
        for rank, part in parts.items():
            if part is not last:  # members that get the same share one part
                given, last = (part.value, *args[1:]) if args else (), part
                size = size_of(given)
            sending = _Sending(self._call_id(), op, given, kwargs, deadline_s, epoch, size)
            calls[rank] = self._member_call(role, rank, sending)
        if isinstance(recv, FirstRule):
            return await _first(list(calls.values()))
        answers = await all_results(list(calls.values()))
        results = dict(zip(calls, answers, strict=True))
        if isinstance(send, Rank) and not isinstance(recv, Rank):
            return results[send.rank]
        axis = send.axis if isinstance(send, Shard) else None
        return dispatch.merge(results, parts, recv, axis=axis, mesh=role.mesh)

    async def stream(
        self,
        role: RoleSpec,
        op: OpSpec,
        items: Sequence[object],
        rest: tuple[object, ...],
        kwargs: Mapping[str, object],
        *,
        loop_epoch: Epoch | None = None,
    ) -> AsyncGenerator[tuple[int, object], None]:
        """Every item to the least loaded ready instance; (index, result) pairs as they finish."""
        epoch, deadline_s = self._limits(op, loop_epoch)
        waiting = iter(enumerate(items))
        done: asyncio.Queue[tuple[int, object] | BaseException] = asyncio.Queue(len(items))

        async def take() -> None:
            try:
                for index, item in waiting:
                    given = (item, *rest)
                    sending = _Sending(self._call_id(), op, given, kwargs, deadline_s, epoch, size_of(given))
                    done.put_nowait((index, await self._item_call(role, sending)))
            except Exception as error:  # noqa: BLE001 - handed to the consumer below, which raises it
                done.put_nowait(error)

        workers = _room(op) * max(role.replicas_max, len(self.table.of_role(role.name)))
        tasks = [asyncio.create_task(take()) for _ in range(min(workers, len(items)))]
        try:
            for _ in items:
                found = await done.get()
                if isinstance(found, BaseException):
                    raise found
                yield found
        finally:
            await _cancel(tasks)

    async def offer(
        self,
        role: RoleSpec,
        op: OpSpec,
        item: object,
        *,
        loop_epoch: Epoch,
        avoid: frozenset[InstanceId],
        began: Callable[[Peer], bool],
    ) -> object:
        """One item to the least loaded ready instance, another than those in ``avoid`` if the role has one; sent once.

        ``began`` gets the receiver, and may refuse. The deadline counts from then on: a backlog is not the fault of the
        item. Returns the value, or how it was Lost: what the operation raised counts against the item, not the
        instance. Raises TimedOut, RolledBack.
        """
        sending = _Sending(self._call_id(), op, (item,), {}, None, loop_epoch, size_of(item), report=False)
        peer = await self._ready(role, lambda: self._free(role, op, avoid), sending)
        if not began(peer):
            return Lost("")
        _, deadline_s = self._limits(op, loop_epoch)
        try:
            found = await self._attempt_item(peer, sending._replace(deadline_s=deadline_s))
        except (BadInput, CallFailed) as error:  # it cannot be sent, or its result cannot
            found = Lost(error.message, traceback=str(error))
        if isinstance(found, Lost) and not found.traceback:
            self._set_aside(peer, refused=not found.text)
        return found

    async def changed(self) -> None:
        """Return at the next change of the table, or of who is free."""
        await self._changed.wait()

    async def _member_call(self, role: RoleSpec, rank: int, sending: _Sending) -> object:
        """From any loop: send at once if the member is ready; all else is for the home loop."""
        peer = self._ready_now(lambda: self._member(role, rank), sending)
        lost: Lost | None = None
        if peer is not None:
            found = await self._attempt(peer, sending)
            if not isinstance(found, Lost):
                return found
            lost = found
        return await self._home(self._until_answered(role, rank, sending, peer, lost))

    async def _until_answered(
        self, role: RoleSpec, rank: int, sending: _Sending, peer: Peer | None, lost: Lost | None
    ) -> object:
        # Ends with the deadline of the operation, or when the loop's epoch is over; a lost operation that may not be
        # repeated raises in ``_after_loss``.
        while True:
            if peer is not None and lost is not None:
                await self._after_loss(peer, sending, lost)
            peer = await self._ready(role, lambda: self._member(role, rank), sending)
            found = await self._attempt(peer, sending)
            if not isinstance(found, Lost):
                return found
            lost = found

    async def _item_call(self, role: RoleSpec, sending: _Sending) -> object:
        while True:  # as long as ``_until_answered``
            peer = await self._ready(role, lambda: self._free(role, sending.op), sending)
            found = await self._attempt_item(peer, sending)
            if not isinstance(found, Lost):
                return found
            await self._after_loss(peer, sending, found)

    async def _attempt_item(self, peer: Peer, sending: _Sending) -> object:
        """``_attempt`` at a member whose load counts: at home."""
        self._load[peer.id] = self._load.get(peer.id, 0) + 1
        try:
            return await self._attempt(peer, sending)
        finally:
            self._load[peer.id] -= 1
            self.wake()

    async def _attempt(self, peer: Peer, sending: _Sending) -> object:
        """Send once, from any loop: the value, or how it was lost.

        Over a connection that broke the same call is sent again: its instance runs none twice.
        """
        op, route = sending.op, self._route(peer)
        request = Request(
            call_id=sending.call_id,
            op=op.name,
            args=sending.args,
            kwargs=sending.kwargs,
            epoch=peer.epoch,
            loop_epoch=sending.loop_epoch,
            weights=route.weights,
            report=sending.report,
        )
        wait = self.waiting.begin(route.target, "call", op.name, call=sending.call_id)
        answered, size = False, sending.size
        broken, pauses = "", backoff(*RECONNECT_S)
        try:
            while True:  # as long as the process lives and the deadline is not over
                try:
                    found = await self._launcher.call(route.handle, request.to_call(self._left(sending.deadline_s)))
                    break
                except ProcessGone as error:
                    broken = str(error)
                    if not error.unsure or not await self._is_alive(peer):
                        return Lost(broken)
                await self._clock.sleep(next(pauses))
            answered = not isinstance(found, Refusal)
            size += size_of(found)
        except CallTimeout:
            raise TimedOut(
                f"{peer.role}.{op.name} gave no answer within its deadline of {op.deadline_s} s",
                role=peer.role,
                rank=peer.rank,
                op=op.name,
            ) from None
        except NotPicklable as error:
            raise _not_sent(peer, sending, error) from None
        finally:
            self.waiting.end(wait, ok=answered, size=size)
        if isinstance(found, Refusal):  # after a broken connection a stale call may have run before
            return Lost(found.text if found.kind == "failed" else broken, found.traceback)
        return found

    async def _is_alive(self, peer: Peer) -> bool:
        """Whether a process whose connection broke may still answer: its master is asked before it is given up.

        If the master does not answer, the process counts as alive; without its answers this one ends itself in time.
        """
        if self._peers.get((peer.role, peer.rank)) != peer:
            return False
        args = (peer.id.role, peer.id.rank, peer.started_epoch)
        call = Call(method="is_alive", args=args, timeout_s=ALIVE_ANSWER_S, control=True)
        try:
            return bool(await self._launcher.call(master_handle(self._job), call))
        except (ProcessGone, CallTimeout):
            return True

    def _route(self, peer: Peer) -> _Route:
        known = self._routes.get((peer.role, peer.rank))
        if known is None or known.peer is not peer:
            due = self.table.weights
            edges = [edge.name for edge in self._spec.weights if edge.target == peer.role and edge.name in due]
            known = _Route(peer, peer.handle(self._job), str(peer.id), {edge: due[edge] for edge in edges})
            self._routes[peer.role, peer.rank] = known
        return known

    def _set_aside(self, peer: Peer, *, refused: bool) -> None:
        """Exclude the peer until the table has a newer epoch of it, or, when it only refused, for some time."""
        self._down.add((peer.id, peer.epoch))
        if refused:
            self._clock.call_later(REFUSED_S, lambda: self._forgive(peer))

    def _forgive(self, peer: Peer) -> None:
        self._down.discard((peer.id, peer.epoch))
        self.wake()

    async def _after_loss(self, peer: Peer, sending: _Sending, lost: Lost) -> None:
        """Return when the call may be sent again, a refused one always; else raise, or wait for the rollback."""
        op, refused = sending.op, not lost.text
        if op.retry != "never" or not lost.traceback:  # code that raised there has ended the call alone
            self._set_aside(peer, refused=refused)
        if refused or op.retry == "safe":
            return
        fields = {"role": peer.role, "rank": peer.rank, "op": op.name}
        if op.retry == "commit":
            await self.wait_rollback(sending.deadline_s)
            raise CallLost(f"{peer.id}.{op.name} was lost and no rollback followed: {lost.text}", **fields)
        if lost.traceback:
            raise CallFailed(f"{peer.id}.{op.name}: {lost.text}", traceback=lost.traceback, **fields)
        raise CallLost(f"{peer.id}.{op.name}: {lost.text}", **fields)

    async def wait_rollback(self, deadline_s: float | None = None) -> None:
        """Wait until the loop is cancelled by the rollback of its job; returns only when that does not happen."""
        left_s = self._left(deadline_s)
        await self._clock.sleep(ROLLBACK_MAX_S if left_s is None else min(left_s, ROLLBACK_MAX_S))

    def _ready_now(self, choose: Callable[[], Peer | None], sending: _Sending) -> Peer | None:
        """Whom the call may be sent to now, if anybody. Raises RolledBack when its loop is over."""
        if sending.loop_epoch < self.loop_epoch:
            raise RolledBack(f"loop epoch {sending.loop_epoch} of {self._job} is over, it is at {self.loop_epoch}")
        return None if self._loop_is_over(sending.loop_epoch) else choose()

    async def _ready(self, role: RoleSpec, choose: Callable[[], Peer | None], sending: _Sending) -> Peer:
        since_s = self._clock.monotonic_s()
        while True:
            changed = self._changed
            peer = self._ready_now(choose, sending)
            if peer is not None:
                return peer
            try:
                with self.waiting.on(role.name, "ready"):
                    async with self._clock.timeout(self._left(sending.deadline_s)):
                        await changed.wait()
            except TimeoutError:
                raise self._role_down(role, since_s) from None

    def _loop_is_over(self, epoch: Epoch) -> bool:
        """True when the master gave the loop a newer epoch: it is about to be cancelled, and sends nothing more."""
        own = self._peers.get((self._caller.role, self._caller.rank))
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

    def _usable(self, peer: Peer) -> bool:
        return peer.ready and (peer.id, peer.epoch) not in self._down

    def _member(self, role: RoleSpec, rank: int) -> Peer | None:
        peer = self._peers.get((role.name, rank))
        return peer if peer is not None and self._usable(peer) else None

    def _free(self, role: RoleSpec, op: OpSpec, avoid: frozenset[InstanceId] = frozenset()) -> Peer | None:
        """The least loaded ready instance that has room, the lowest rank among equals."""
        peers = self.table.of_role(role.name)
        able = [peer for peer in peers if peer.id not in avoid] or peers
        able = [peer for peer in able if self._usable(peer)]
        free = [peer for peer in able if self._load.get(peer.id, 0) < _room(op)]
        return min(free, key=lambda peer: (self._load.get(peer.id, 0), peer.rank), default=None)

    def _call_id(self) -> str:
        return f"{self._caller}/{self.loop_epoch}/{next(self._numbers)}"

    def _limits(self, op: OpSpec, loop_epoch: Epoch | None) -> tuple[Epoch, float | None]:
        """For the loop of which epoch, and until when on the clock."""
        deadline_s = None if op.deadline_s is None else self._clock.monotonic_s() + op.deadline_s
        return self.loop_epoch if loop_epoch is None else loop_epoch, deadline_s

    def _left(self, deadline_s: float | None) -> float | None:
        return None if deadline_s is None else max(0.0, deadline_s - self._clock.monotonic_s())


def _not_sent(peer: Peer, sending: _Sending, error: NotPicklable) -> BadInput | CallFailed:
    """The error for arguments or a result that cannot be pickled, with the part of them that is to blame."""
    text, op = str(error), sending.op
    if error.answer:
        fields = {"role": peer.role, "rank": peer.rank, "op": op.name}
        return CallFailed(f"{peer.id}.{op.name}: its result cannot be sent: {text}", hint=SENDABLE, **fields)
    given: dict[str, object] = {"args": sending.args, **sending.kwargs}
    where = next(filter(None, (unpicklable_at(one, name, text) for name, one in given.items())), "an argument")
    return BadInput(f"{peer.role}.{op.name}: {where} cannot be sent: {text}", hint=SENDABLE)


def _room(op: OpSpec) -> int:
    """Items of one caller at one instance; of a synchronous operation the second queues there, which hides latency."""
    return ASYNC_INFLIGHT_MAX if op.is_async else 2


async def in_order(found: AsyncGenerator[tuple[int, T], None], count: int) -> list[T]:
    """The results of a stream of ``count`` items, in the order of the items."""
    results: list[Any] = [None] * count
    async for index, value in found:
        results[index] = value
    return results


async def _cancel(tasks: Iterable[asyncio.Future[T]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def all_results(calls: Sequence[Awaitable[T]]) -> list[T]:
    """All results; when one raises, the others are cancelled and it is raised."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        if left := [task for task in tasks if not task.done()]:
            await _cancel(left)


async def _first(calls: Sequence[Awaitable[T]]) -> T:
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
