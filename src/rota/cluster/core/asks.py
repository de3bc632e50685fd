"""What a job asks of the cluster, compiled to whole numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rota.spec.gang import CellLevel, GangRequest
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import DEFAULT_QUEUE


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One bundle: whole devices, or thousandths of one device; thousandths of cores; bytes of memory."""

    gpus: int = 0
    milli: int = 0
    type: str | None = None
    cpu_milli: int = 0
    mem: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Shape:
    """All bundles of one job in order, with what must lie together or apart; equal shapes are equal values.

    ``names`` gives per slot the gang, the bundle index in it, and the role, for messages only.
    """

    slots: tuple[Slot, ...]
    together: tuple[tuple[tuple[int, ...], CellLevel], ...] = ()
    apart: tuple[tuple[tuple[int, ...], tuple[int, ...], CellLevel], ...] = ()
    names: tuple[tuple[str, int, str], ...] = ()

    @cached_property
    def gpus(self) -> int:
        """Devices in all, a shared one counted as one thousandth steps rounded up."""
        return math.ceil(self.gpu_milli / 1000)

    @cached_property
    def gpu_milli(self) -> int:
        """Thousandths of devices in all."""
        return sum(slot.gpus * 1000 + slot.milli for slot in self.slots)

    @cached_property
    def uniform(self) -> bool:
        """All slots equal, whole devices, no constraint: the common case, placed without search."""
        return len(set(self.slots)) == 1 and not self.slots[0].milli and not self.together and not self.apart

    @cached_property
    def _key(self) -> int:
        return hash((self.slots, self.together, self.apart))

    def __hash__(self) -> int:
        return self._key

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Shape) and (self._key, self.slots, self.together, self.apart) == (
            other._key,
            other.slots,
            other.together,
            other.apart,
        )

    def role(self, slot: int) -> str:
        """Name of the role of a slot, or its number."""
        return self.names[slot][2] if self.names else f"bundle {slot}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAsk:
    """One job as the scheduler knows it from its submission; sizes in ``shape``, times in seconds.

    ``queued_at`` orders the queue and never changes, also after a preemption. ``est_s`` is the expected run time.
    """

    id: JobId
    shape: Shape
    queue: str = DEFAULT_QUEUE
    user: str = "local"
    priority: int = 50
    queued_at: float = 0.0
    est_s: float | None = None
    grace_s: float = 30.0
    preemptible: bool = True
    not_before: float = 0.0
    avoid: tuple[NodeId, ...] = ()
    """Nodes that it must not be on."""
    data: tuple[str, ...] = ()
    """Data sets that it reads: nodes that lately ran a job with one of them are preferred."""
    failover: bool = False
    """In place of devices that a running job lost: it may have the nodes that are held back as spares."""
    part_of: JobId | None = None
    """The job that asks for this beside what it was admitted with; None for what a job is admitted with."""
    spare: bool = False
    """A part that its job can do without."""
    slots_max: int = 0
    """With equal slots: how many of them it can use at most, while nobody else waits for them; 0 = those it asks."""
    labels: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def opportunistic(self) -> bool:
        """Runs on what is left over and gives way at once."""
        return self.priority < 0

    @property
    def may_stop(self) -> bool:
        """Whether it can be a victim by itself: a part that its job needs stops with the job."""
        return self.preemptible and (self.part_of is None or self.spare)


def compile_shape(requests: Sequence[GangRequest]) -> Shape:
    """Put the bundles of all gangs of a job in one line. More than one device is rounded up."""
    slots: list[Slot] = []
    names: list[tuple[str, int, str]] = []
    together: list[tuple[tuple[int, ...], CellLevel]] = []
    apart: list[tuple[tuple[int, ...], tuple[int, ...], CellLevel]] = []
    for request in requests:
        base = len(slots)
        for bundle in request.bundles:
            whole = bundle.res.gpus >= 1
            slots.append(
                Slot(
                    gpus=math.ceil(bundle.res.gpus - 1e-9) if whole else 0,
                    milli=0 if whole else round(bundle.res.gpus * 1000),
                    type=bundle.res.gpu_type,
                    cpu_milli=round(bundle.res.cpus * 1000),
                    mem=bundle.res.memory_bytes,
                )
            )
            roles = dict.fromkeys(member.role for member in bundle.members)
            names.append((request.gang, bundle.index, "+".join(roles) or f"bundle {bundle.index}"))
        together.extend((tuple(base + i for i in t.bundles), t.level) for t in request.together)
        apart.extend(
            (tuple(base + i for i in a.left), tuple(base + i for i in a.right), a.level) for a in request.apart
        )
    return Shape(slots=tuple(slots), together=tuple(together), apart=tuple(apart), names=tuple(names))
