"""The asyncio forms of the calls that copy or wait: each runs in a thread, the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from rota.tensors.handle import Snapshot, Version


class _Blocking(Protocol):
    def put(self, name: str, tensor: Any, **how: Any) -> Version: ...
    def get(self, name: str, **how: Any) -> Any: ...
    def publish_group(self, group: str, tensors: Mapping[str, Any], **how: Any) -> Version: ...
    def get_group(self, group: str, **how: Any) -> Snapshot: ...


class Coroutines:
    """What a plane offers to an event loop."""

    async def aput(self: _Blocking, name: str, tensor: Any, **how: Any) -> Version:
        """``put`` without blocking the event loop."""
        return await asyncio.to_thread(self.put, name, tensor, **how)

    async def aget(self: _Blocking, name: str, **how: Any) -> Any:
        """``get`` without blocking the event loop."""
        return await asyncio.to_thread(self.get, name, **how)

    async def apublish_group(self: _Blocking, group: str, tensors: Mapping[str, Any], **how: Any) -> Version:
        """``publish_group`` without blocking the event loop."""
        return await asyncio.to_thread(self.publish_group, group, tensors, **how)

    async def aget_group(self: _Blocking, group: str, **how: Any) -> Snapshot:
        """``get_group`` without blocking the event loop."""
        return await asyncio.to_thread(self.get_group, group, **how)
