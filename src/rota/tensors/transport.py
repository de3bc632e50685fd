"""Pull a group from another node once, then share it locally: one elected process fetches, the others wait for it."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from rota.runtime import environ
from rota.runtime.clock import SystemClock
from rota.runtime.process import try_lock
from rota.tensors import errors
from rota.tensors.api.store import Plane
from rota.tensors.core import Json, Tensor
from rota.tensors.reader import Snapshot

_TURN_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A whole step of a group as it came from another node."""

    tensors: Mapping[str, Tensor]
    step: int
    epoch: int = 0
    meta: Json = None


def pull(
    plane: Plane,
    group: str,
    fetch: Callable[[], Pulled | None],
    *,
    min_step: int,
    wait_s: float,
    retain: int = 1,
    as_: str = "torch",
) -> Snapshot:
    """The group's step if this node has at least ``min_step``, else fetched and published here first.

    Of all processes of the node that ask for a group one calls ``fetch`` (None: the other node has nothing new either);
    when it dies, the next one does, for the kernel frees its lock. Raises WaitTimeout, and what ``fetch`` raises.
    """
    key = hashlib.sha256(group.encode()).hexdigest()[:16]
    fd = os.open(plane.folder / f"pull-{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, environ.PRIVATE_FILE)
    try:
        clock = SystemClock()
        until_s = clock.monotonic_s() + wait_s
        while True:
            left_s = until_s - clock.monotonic_s()
            try:
                return plane.get_group(group, min_step=min_step, wait_s=max(0.0, min(_TURN_S, left_s)), as_=as_)
            except (errors.NotFound, errors.WaitTimeout):
                pass
            if try_lock(fd):
                try:
                    if _fetch_once(plane, group, fetch, min_step, retain):
                        continue  # it is there now, whatever the time
                finally:
                    fcntl.flock(fd, fcntl.LOCK_UN)
            if left_s <= 0:
                raise errors.WaitTimeout(f"{group}: no step >= {min_step} came in {wait_s:g} s", name=group)
    finally:
        os.close(fd)


def _fetch_once(plane: Plane, group: str, fetch: Callable[[], Pulled | None], min_step: int, retain: int) -> bool:
    """Whether the step is here now."""
    try:
        if plane.info(group).step >= min_step and plane.info(group).version:
            return True  # it came between the last look and the lock
    except errors.NotFound:
        pass
    found = fetch()
    if found is None:
        return False
    plane.publish_group(group, found.tensors, step=found.step, epoch=found.epoch, meta=found.meta, retain=retain)
    return found.step >= min_step
