"""Values a caller gets: Version, Snapshot, Record, TensorRef, Pin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rota.tensors.plane import Plane


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One published value of a name. ``ready`` is False for a part of a group step that is not complete yet."""

    name: str
    id: int
    epoch: int
    step: int
    bytes: int
    ready: bool = True
    received: int = 1


class Snapshot(dict[str, Any]):
    """Name -> tensor, all of one moment.

    For a group: ``step``, ``epoch``, ``id`` of that step, and ``meta``, the JSON value its publisher gave (for a step
    of several parts the list of their values, by part). ``versions`` is name -> version id. ``parts`` has what each
    writer of the step brought, and its meta, by rank: names may stand in more than one.
    """

    __slots__ = ("epoch", "id", "meta", "parts", "step", "versions")

    def __init__(
        self, tensors: Mapping[str, Any], *, id: int, step: int, epoch: int, meta: Any, versions: Mapping[str, int],
        parts: Sequence[tuple[Mapping[str, Any], Any]] = (),
    ) -> None:  # fmt: skip
        super().__init__(tensors)
        self.id, self.step, self.epoch, self.meta, self.versions = id, step, epoch, meta, dict(versions)
        self.parts = tuple(parts)

    def __reduce__(self) -> Any:
        raise TypeError("a Snapshot is memory of this machine; send plane.ref(tensor), or copy the tensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where the bytes of one part of a version lie: ``tier`` is ``memory``, ``file`` (spilled) or ``device``.

    ``bytes`` bytes from ``offset`` of the file ``path``, or on ``device`` (its UUID), whose ``path`` holds their place
    there. ``mapped``: this process has them mapped already.
    """

    version: int
    part: int
    tier: str
    path: Path
    offset: int
    bytes: int
    mapped: bool
    device: str = ""


class Record:
    """One record of a channel, this consumer's until ``Channel.ack`` or ``nack``, or until this object is dropped.

    ``tries`` counts how often it was taken, this time included. Its tensors stay valid as long as any view lives.
    """

    __slots__ = ("id", "lease", "meta", "name", "tensors", "tries")

    def __init__(self, name: str, id: int, tries: int, tensors: dict[str, Any], meta: Any, lease: object) -> None:
        self.name, self.id, self.tries, self.tensors, self.meta = name, id, tries, tensors, meta
        self.lease: object = lease


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """One version of a name, by value: picklable, small, valid while somebody leases it: the sender, or ``holder``,
    a pin made with it."""

    namespace: str
    name: str
    version: int
    holder: str = ""

    def get(self) -> Any:
        """The tensor of exactly this version, from the plane of this process. Raises VersionGone when it is gone."""
        return self._plane().get(self.name, version=self.version)

    def close(self) -> None:
        """End the pin, if there is one; harmless when it ended before. Views that live keep the bytes."""
        if self.holder:
            self._plane().unpin(self.holder)

    def _plane(self) -> Plane:
        from rota.tensors import connect  # noqa: PLC0415  # the plane stands above; a ref finds it where it arrives

        return connect(namespace=self.namespace)


class Pin:
    """A lease that no process holds: the version stays until ``close()`` or until its label's job ends.

    Not to be mixed up with pinned (page-locked) host memory.
    """

    def __init__(self, holder: str, name: str, version: int, close: Callable[[str], None]) -> None:
        self.holder, self.name, self.version = holder, name, version
        self._close = close

    def close(self) -> None:
        """End the pin; harmless when it ended before."""
        self._close(self.holder)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
