"""What the loop of a job finds on its Flow: handles of roles and streams, gradient edges, leases of shared devices.

Gradients: ``vision.encode -> speller.read`` with ``kind: grad``: the loop gives a batch to the edge. For each
micro-batch, in order, ``encode`` makes activations, ``read`` its loss from them (and calls ``backward()`` on it), and
what came to the activations goes back through ``encode``. Gradients add up in the parameters of both ends as in one
process; the loop then calls the operations that step the optimisers, and commits. At most ``inflight`` micro-batches
are between the ends, where their activations are kept; for the loop they are Refs.

Leases: roles that share devices by lease take turns: calls of one role at a time, first come, first served. The loop is
the only caller of such roles, so the lease of a device is a value in its process. When the turn passes on, every other
role of the devices that declares ``sleep`` is asked to give its memory up, then the role that comes on is asked to
``wake``, and only then its calls go out. A member that dies keeps the lease until its successor sleeps, since what is
left on the device is not known before; a successor that comes up out of turn is put to sleep too. After a recovery of
the loop it is not known who sleeps, so both operations may come twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from rota.job.core.graph import lease_groups
from rota.job.core.ledger import Order
from rota.job.health.stacks import line_in_job, place_in_job
from rota.job.instance.operations import PHASE
from rota.job.instance.streams import Batch, Pump, Streams
from rota.job.rpc import dispatch
from rota.job.rpc.client import RpcClient, all_results
from rota.spec.dispatch import Concat, MeanRule, OpSpec, Rank, Shard, StreamRule, SumRule, rule_to_text
from rota.spec.errors import BadInput, nearest
from rota.spec.ids import Epoch, InstanceId
from rota.spec.job import Edge, Endpoint, JobSpec, RoleSpec, endpoint
from rota.spec.resources import counted

if TYPE_CHECKING:
    from rota.job.instance.flow import Flow


def absent(text: str, name: str, known: Iterable[str]) -> AttributeError:
    """AttributeError for a name that the job does not declare, with the line that uses it and the nearest name."""
    place = place_in_job()
    return AttributeError(f"{place}{': ' if place else ''}{text}; {nearest(name, known)}")


Send = Callable[[RoleSpec, OpSpec, tuple[object, ...], Mapping[str, object]], Awaitable[Any]]
"""Sends one operation to the members of a role."""
CallSite = tuple[str, str, int]
"""What was called, and the file and line of the job that called it."""
Begin = Callable[[], Coroutine[object, object, object]]
Results = AsyncGenerator[object, None]


class PendingCall(Coroutine[Any, Any, Any]):
    """A call of the loop. It begins when it is awaited, or when a task that was made of it runs."""

    __slots__ = ("_begin", "_begun", "_call", "_unawaited")

    def __init__(self, begin: Begin, call: CallSite, unawaited: Counter[CallSite]) -> None:
        self._begin, self._call, self._unawaited = begin, call, unawaited
        self._begun: Coroutine[object, object, object] | None = None
        unawaited[call] += 1

    def __repr__(self) -> str:
        return f"<call of {self._call[0]} that must be awaited>"

    def __await__(self) -> Any:
        return self._work().__await__()

    def send(self, value: object) -> object:
        """See ``Coroutine``."""
        return self._work().send(value)

    def throw(self, *error: Any) -> object:
        """See ``Coroutine``."""
        return self._work().throw(*error)

    def close(self) -> None:
        """See ``Coroutine``."""
        self._work().close()

    @property
    def cr_frame(self) -> FrameType | None:
        """For the stacks of tasks that wait."""
        return getattr(self._begun, "cr_frame", None)

    @property
    def cr_await(self) -> object:
        """For the stacks of tasks that wait."""
        return getattr(self._begun, "cr_await", None)

    def _work(self) -> Coroutine[object, object, object]:
        if self._begun is None:
            self._begun = self._begin()
            self._unawaited[self._call] -= 1
        return self._begun


class UnawaitedCalls:
    """Calls of the loop that nothing has awaited yet; at its end they are those that never ran."""

    def __init__(self) -> None:
        self._counts: Counter[CallSite] = Counter()

    def call(self, name: str, begin: Begin) -> PendingCall:
        """A call that counts as unawaited until it is awaited."""
        return PendingCall(begin, (name, *line_in_job()), self._counts)

    def stream(self, name: str, begin: Callable[[], Results]) -> Results:
        """Results as they finish; unawaited until the first of them is asked for."""
        call = (name, *line_in_job())
        self._counts[call] += 1
        return self._streamed(call, begin)

    async def _streamed(self, call: CallSite, begin: Callable[[], Results]) -> Results:
        self._counts[call] -= 1
        async with aclosing(begin()) as found:
            async for one in found:
                yield one

    def lines(self) -> list[str]:
        """A line for each place in the code of the job whose calls never ran, with what to write instead."""
        found = sorted((call, count) for call, count in self._counts.items() if count > 0)
        return [
            f"{file}:{line}: {name}() was called {counted(count, 'time')} and never awaited, so it never ran; "
            f"write 'await {name}(...)', or 'async for' where it gives results as they finish"
            for (name, file, line), count in found
        ]


class RoleHandle:
    """The instances of one role; every declared operation is an async method of it.

    ``f.roles.rollout[2]`` is one of them: its operations run there alone, on the whole arguments.
    """

    def __init__(self, flow: Flow, role: RoleSpec, rank: int | None = None) -> None:
        self._flow, self._role, self._rank = flow, role, rank

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found = self._role.interface.op(name) if self._role.interface else None
        if found is None:
            names = [op.name for op in self._role.interface.ops] if self._role.interface else []
            raise absent(f"role {self._role.name!r} has no operation {name!r}", name, names)
        flow, called = self._flow, f"{self._role.name}.{name}"
        if self._rank is not None:
            one = rule_to_text(Rank(self._rank))
            found, called = replace(found, send=one, recv=one), f"{self._role.name}[{self._rank}].{name}"
        if isinstance(found.recv_rule, StreamRule):
            return lambda *args, **kwargs: flow.unawaited.stream(
                called, partial(flow.stream, self._role, found, args, kwargs)
            )
        return lambda *args, **kwargs: flow.unawaited.call(called, partial(flow.call, self._role, found, args, kwargs))

    def __getitem__(self, rank: int) -> RoleHandle:
        """The instance of this rank; a call of it raises BadInput while the role has none."""
        if not 0 <= rank < self._role.replicas_max:
            most = self._role.replicas_max - 1
            raise BadInput(f"{self._role.name}[{rank}]: its instances are 0 to {most}", hint="count with len(role)")
        return RoleHandle(self._flow, self._role, rank)

    def __len__(self) -> int:
        """How many instances are ready now."""
        return sum(peer.ready for peer in self._flow.table.of_role(self._role.name))


class Roles:
    """``f.roles.actor``: a handle for each role of the job."""

    def __init__(self, handles: Mapping[str, RoleHandle]) -> None:
        self._handles = dict(handles)

    def __getattr__(self, name: str) -> RoleHandle:
        return self[name]

    def __getitem__(self, name: str) -> RoleHandle:
        """A role whose name is not a Python name: ``f.roles["rollout.decode"]``."""
        try:
            return self._handles[name]
        except KeyError:
            raise absent(f"the job has no role {name!r}", name, self._handles) from None


class StreamHandle:
    """A stream as the loop uses it. Batches that were taken count as trained at the next commit, not before."""

    def __init__(self, flow: Flow, pump: Pump, name: str) -> None:
        self._flow, self._pump, self._name = flow, pump, name

    async def batches(self, size: int, *, order: Order = "admission") -> AsyncIterator[Batch]:
        """Batches of ``size`` items, fewer at the end, in the order of admission or of ``arrival``.

        Raises BadInput for a size that the stream cannot hold, or when a commit must come first; DataError when more
        items are bad than the contract of a role allows.
        """
        while True:
            await self._flow.settle()
            batch = await self._flow.in_control(self._pump.next_batch(size, order))
            if batch is None:
                return
            yield batch

    def put(self, value: object) -> Coroutine[object, object, int | str]:
        """Put an item into a stream without a source, once there is room; returns its uid.

        The uid is ``value[key]`` if there is one, else a number. Raises BadInput for a uid that is open.
        """
        return self._flow.unawaited.call(f"{self._name}.put", partial(self._put, value))

    async def _put(self, value: object) -> int | str:
        await self._flow.settle()
        return await self._flow.in_control(self._pump.put(value))

    def close(self) -> None:
        """Nothing more will be put in: ``batches`` ends behind the last item."""
        self._flow.call_in_control(self._pump.end_input)

    def must_commit(self, size: int) -> bool:
        """True when a further batch of ``size`` cannot come before a commit."""
        return self._pump.must_commit(size)


class StreamHandles:
    """``f.streams.groups``: a handle for each stream of the job."""

    def __init__(self, flow: Flow, streams: Streams) -> None:
        self._flow, self._streams = flow, streams

    def __getattr__(self, name: str) -> StreamHandle:
        return StreamHandle(self._flow, self._streams.find(name), name)

    __getitem__ = __getattr__


@dataclass(slots=True, kw_only=True)
class GradientEdge:
    """One gradient edge as the loop drives it; ``call`` sends one operation to the members of a role."""

    edge: Edge
    source: tuple[RoleSpec, OpSpec]
    target: tuple[RoleSpec, OpSpec]
    call: Send
    epoch: int
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def run(self, batch: object, rest: tuple[object, ...]) -> object:
        """Forward, step and back for every micro-batch; the answers of the target merged over all as it declares.

        Raises BadInput when the rows do not divide over the micro-batches, else what the calls raise.
        """
        parts = self._parts(batch, rest)
        room = asyncio.Semaphore(self.edge.inflight)
        made: asyncio.Queue[tuple[str, object, tuple[object, ...]]] = asyncio.Queue(len(parts))
        learned: asyncio.Queue[tuple[str, object]] = asyncio.Queue(len(parts))
        answers: list[tuple[object, int]] = []

        async def forward() -> None:
            for value, others in parts:
                await room.acquire()
                micro = f"{self.edge.source}/{self.epoch}/{next(self._numbers)}"
                made.put_nowait((micro, await self._send(self.source, "forward", micro, value), others))

        async def step() -> None:
            for _ in parts:
                micro, activations, others = await made.get()
                found = await self._send(self.target, "step", micro, (activations, others), Concat())
                answers.extend((value, rows) for value, _, rows in found)
                learned.put_nowait((micro, dispatch.concat([gradients for _, gradients, _ in found])))

        async def back() -> None:
            for _ in parts:
                micro, gradients = await learned.get()
                await self._send(self.source, "back", micro, gradients, Rank(0))
                room.release()

        await all_results([forward(), step(), back()])
        return _merged(answers, self.target[1])

    def _parts(self, batch: object, rest: tuple[object, ...]) -> list[tuple[Any, tuple[Any, ...]]]:
        micro = self.edge.micro
        rows = dispatch.length((batch, *rest))
        if rows % micro:
            raise BadInput(
                f"{self.edge.source} -> {self.edge.target}: {rows} rows do not divide over {micro} micro-batches",
                hint="give a multiple of micro, or change micro of the edge",
            )
        found = dispatch.split((batch, rest), Shard("micro"), mesh=(("micro", micro),), world=micro)
        return [found[rank].value for rank in range(micro)]

    async def _send(
        self, end: tuple[RoleSpec, OpSpec], phase: str, micro: str, value: object, recv: Concat | Rank | None = None
    ) -> Any:
        role, op = end
        op = op if recv is None else replace(op, recv=rule_to_text(recv))
        return await self.call(role, op, (value,), {PHASE: [phase, micro]})


def gradient_edges(spec: JobSpec, call: Send, epoch: int) -> dict[str, GradientEdge]:
    """The gradient edges of a job by what they leave."""
    found: dict[str, GradientEdge] = {}
    for edge in spec.edges:
        source, target = endpoint(spec, edge.source), endpoint(spec, edge.target)
        if edge.kind == "grad" and source.role is not None and target.role is not None:
            first, second = _end(spec, source), _end(spec, target)
            found[edge.source] = GradientEdge(edge=edge, source=first, target=second, call=call, epoch=epoch)
    return found


def _end(spec: JobSpec, end: Endpoint) -> tuple[RoleSpec, OpSpec]:
    role = spec.role(end.vertex)
    op = role.interface.op(end.op) if role.interface else None
    assert op is not None, f"{end.text} was checked before the start"
    return role, op


def _merged(answers: list[tuple[object, int]], op: OpSpec) -> object:
    values, rows = [value for value, _ in answers], [count for _, count in answers]
    match op.recv_rule:
        case MeanRule():
            return dispatch.weighted_sum(values, [count / sum(rows) for count in rows])
        case SumRule():
            return dispatch.weighted_sum(values, None)
        case Concat():
            return dispatch.concat(values)
        case _:
            return values[-1]


SLEEP, WAKE = "sleep", "wake"


class DeviceLease:
    """The leases of a job under one epoch of its loop. Belongs to the event loop that runs the loop's function."""

    def __init__(self, spec: JobSpec, rpc: RpcClient, send: Send) -> None:
        groups = [_Devices([spec.role(name) for name in names], rpc, send) for names in lease_groups(spec)]
        self._devices = {role.name: group for group in groups for role in group.roles}

    @contextlib.asynccontextmanager
    async def of(self, *roles: RoleSpec) -> AsyncIterator[None]:
        """The turn of every role, while the block runs; of different devices, for roles that share some are refused."""
        async with contextlib.AsyncExitStack() as stack:
            for role in sorted(roles, key=lambda one: one.name):
                if (devices := self._devices.get(role.name)) is not None:
                    await stack.enter_async_context(devices.held_by(role))
            yield


class _Devices:
    """The devices that some roles share, and whose turn it is."""

    def __init__(self, roles: list[RoleSpec], rpc: RpcClient, send: Send) -> None:
        self.roles = roles
        self._rpc, self._send = rpc, send
        self._holder: RoleSpec | None = None
        self._active = 0
        self._line: deque[object] = deque()
        self._changed = asyncio.Event()
        self._asleep: dict[str, tuple[tuple[InstanceId, Epoch], ...]] = {}

    @contextlib.asynccontextmanager
    async def held_by(self, role: RoleSpec) -> AsyncIterator[None]:
        """The devices for ``role``, once those before it in the line are through.

        The wait has no limit of its own, and the line none: each entry is a call that the loop itself has made, and
        those before it end by their deadlines, by the failure of their instance, or with the loop. ``rota why`` shows
        the wait, and who holds the devices.
        """
        ticket = object()
        self._line.append(ticket)
        try:
            while not (self._line[0] is ticket and (self._holder is role or self._active == 0)):
                with self._rpc.waiting.on((self._holder or role).name, "lease", role.name):
                    await self._changed.wait()
            await self._pass_to(role)
            self._active += 1
        finally:
            self._line.remove(ticket)
            self._wake()
        try:
            yield
        finally:
            self._active -= 1
            self._wake()

    async def _pass_to(self, role: RoleSpec) -> None:
        """Called by the first in the queue; when it is cancelled the devices have no holder and the next asks again."""
        held, self._holder = self._holder, None
        for other in self.roles:
            if other is not role and self._asleep.get(other.name) != self._members(other):
                await self._ask(other, SLEEP)
                self._asleep[other.name] = self._members(other)
        if held is not role:
            self._asleep.pop(role.name, None)
            await self._ask(role, WAKE)
        self._holder = role

    async def _ask(self, role: RoleSpec, name: str) -> None:
        op = role.interface.op(name) if role.interface else None
        if op is not None:
            await self._send(role, op, (), {})

    def _members(self, role: RoleSpec) -> tuple[tuple[InstanceId, Epoch], ...]:
        return tuple((peer.id, peer.epoch) for peer in self._rpc.table.of_role(role.name))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
