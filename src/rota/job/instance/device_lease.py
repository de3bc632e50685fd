"""Roles that share devices by lease take turns: calls of one role at a time, first come, first served.

The loop is the only caller of such roles, so the lease of a device is a value in its process. When the turn passes on,
every other role of the devices that declares ``sleep`` is asked to give its memory up, then the role that comes on is
asked to ``wake``, and only then its calls go out. A member that dies keeps the lease until its successor sleeps, since
nobody knows before what is left on the device; a successor that comes up out of turn is put to sleep too. After a
recovery of the loop nothing is known of who sleeps, so both operations may come twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from rota.job.core.graph import lease_groups
from rota.job.rpc.client import RpcClient
from rota.spec.dispatch import OpSpec
from rota.spec.ids import Epoch, InstanceId
from rota.spec.job import JobSpec, RoleSpec

SLEEP, WAKE = "sleep", "wake"
Send = Callable[[RoleSpec, OpSpec, tuple[Any, ...], dict[str, Any]], Awaitable[Any]]


class DeviceLease:
    """The leases of a job under one epoch of its loop. Belongs to the event loop that runs the loop's function."""

    def __init__(self, spec: JobSpec, courier: RpcClient, send: Send) -> None:
        groups = [_Devices([spec.role(name) for name in names], courier, send) for names in lease_groups(spec)]
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

    def __init__(self, roles: list[RoleSpec], courier: RpcClient, send: Send) -> None:
        self.roles = roles
        self._courier, self._send = courier, send
        self._holder: RoleSpec | None = None
        self._active = 0
        self._line: deque[object] = deque()
        self._changed = asyncio.Event()
        self._asleep: dict[str, tuple[tuple[InstanceId, Epoch], ...]] = {}

    @contextlib.asynccontextmanager
    async def held_by(self, role: RoleSpec) -> AsyncIterator[None]:
        ticket = object()
        self._line.append(ticket)
        try:
            while not (self._line[0] is ticket and (self._holder is role or self._active == 0)):
                with self._courier.waiting.on((self._holder or role).name, "lease", role.name):
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
        """Who holds the head of the line is alone here; cut short, nobody holds the devices and the next asks anew."""
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
        return tuple((peer.id, peer.epoch) for peer in self._courier.table.of_role(role.name))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
