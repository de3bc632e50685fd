"""What the loop of a job finds on its Flow: a handle for each role and each stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rota.job.core.ledger import Order
from rota.job.stacks import place_in_job
from rota.job.streams import Batch, Pump, Streams
from rota.spec.dispatch import StreamRule
from rota.spec.errors import nearest
from rota.spec.job import RoleSpec

if TYPE_CHECKING:
    from rota.job.flow import Flow


def absent(text: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error for a name that the loop asked for and the job has not: where that is written, and the nearest one."""
    place = place_in_job()
    return AttributeError(f"{place}{': ' if place else ''}{text}; {nearest(name, known)}")


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
        if isinstance(found.recv_rule, StreamRule):
            return lambda *args, **kwargs: self._flow.stream(self._role, found, args, kwargs)
        return lambda *args, **kwargs: self._flow.call(self._role, found, args, kwargs)

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

    def __init__(self, flow: Flow, pump: Pump) -> None:
        self._flow, self._pump = flow, pump

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

    async def put(self, value: Any) -> int | str:
        """Put an item into a stream without a source, once there is room; returns its uid.

        The uid is ``value[key]`` if there is one, else a number. Raises BadInput for a uid that is open.
        """
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
        return StreamHandle(self._flow, self._streams.find(name))

    __getitem__ = __getattr__
