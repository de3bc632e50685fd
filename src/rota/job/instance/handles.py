"""What the loop of a job finds on its Flow: a handle for each role and each stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from rota.job.core.ledger import Order
from rota.job.health.stacks import line_in_job, place_in_job
from rota.job.instance.streams import Batch, Pump, Streams
from rota.spec.dispatch import StreamRule
from rota.spec.errors import nearest
from rota.spec.job import RoleSpec
from rota.spec.resources import counted

if TYPE_CHECKING:
    from rota.job.instance.flow import Flow


def absent(text: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error for a name that the loop asked for and the job has not: where that is written, and the nearest one."""
    place = place_in_job()
    return AttributeError(f"{place}{': ' if place else ''}{text}; {nearest(name, known)}")


Call = tuple[str, str, int]
"""What was called, and the file and line of the job that called it."""


class PendingCall(Coroutine[Any, Any, Any]):
    """A call of the loop. It begins when it is awaited, or when a task that was made of it runs."""

    __slots__ = ("_begin", "_begun", "_call", "_forgotten")

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, Any]], call: Call, forgotten: Counter[Call]) -> None:
        self._begin, self._call, self._forgotten = begin, call, forgotten
        self._begun: Coroutine[Any, Any, Any] | None = None
        forgotten[call] += 1

    def __repr__(self) -> str:
        return f"<call of {self._call[0]} that must be awaited>"

    def __await__(self) -> Any:
        return self._work().__await__()

    def send(self, value: Any) -> Any:
        """See ``Coroutine``."""
        return self._work().send(value)

    def throw(self, *error: Any) -> Any:
        """See ``Coroutine``."""
        return self._work().throw(*error)

    def close(self) -> None:
        """See ``Coroutine``."""
        self._work().close()

    @property
    def cr_frame(self) -> Any:
        """For the stacks of tasks that wait."""
        return getattr(self._begun, "cr_frame", None)

    @property
    def cr_await(self) -> Any:
        """For the stacks of tasks that wait."""
        return getattr(self._begun, "cr_await", None)

    def _work(self) -> Coroutine[Any, Any, Any]:
        if self._begun is None:
            self._begun = self._begin()
            self._forgotten[self._call] -= 1
        return self._begun


class Forgotten:
    """Calls of the loop that nothing has awaited yet; at its end they are those that never ran."""

    def __init__(self) -> None:
        self._counts: Counter[Call] = Counter()

    def call(self, name: str, begin: Callable[[], Coroutine[Any, Any, Any]]) -> PendingCall:
        """A call that counts as forgotten until it is awaited."""
        return PendingCall(begin, (name, *line_in_job()), self._counts)

    def stream(self, name: str, begin: Callable[[], AsyncGenerator[Any, None]]) -> AsyncGenerator[Any, None]:
        """Results as they finish; forgotten until the first of them is asked for."""
        call = (name, *line_in_job())
        self._counts[call] += 1
        return self._streamed(call, begin)

    async def _streamed(self, call: Call, begin: Callable[[], AsyncGenerator[Any, None]]) -> AsyncGenerator[Any, None]:
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
    """The instances of one role; every declared operation is an async method of it."""

    def __init__(self, flow: Flow, role: RoleSpec) -> None:
        self._flow = flow
        self._role = role

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found = self._role.interface.op(name) if self._role.interface else None
        if found is None:
            names = [op.name for op in self._role.interface.ops] if self._role.interface else []
            raise absent(f"role {self._role.name!r} has no operation {name!r}", name, names)
        flow, called = self._flow, f"{self._role.name}.{name}"
        if isinstance(found.recv_rule, StreamRule):
            return lambda *args, **kwargs: flow.forgotten.stream(
                called, partial(flow.stream, self._role, found, args, kwargs)
            )
        return lambda *args, **kwargs: flow.forgotten.call(called, partial(flow.call, self._role, found, args, kwargs))

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
        """A role whose name is no Python name: ``f.roles["rollout.decode"]``."""
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

    def put(self, value: Any) -> Coroutine[Any, Any, int | str]:
        """Put an item into a stream without a source, once there is room; returns its uid.

        The uid is ``value[key]`` if there is one, else a number. Raises BadInput for a uid that is open.
        """
        return self._flow.forgotten.call(f"{self._name}.put", partial(self._put, value))

    async def _put(self, value: Any) -> int | str:
        await self._flow.settle()
        return await self._flow.in_control(self._pump.put(value))

    def close(self) -> None:
        """Nothing more will be put in: ``batches`` ends behind the last item."""
        self._flow.call_in_control(self._pump.close_door)

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
