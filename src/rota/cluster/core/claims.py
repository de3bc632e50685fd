"""What waiting jobs have claimed, in one pass, of the devices that others are giving back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rota.cluster.core.rows import Held
from rota.cluster.core.snapshot import State
from rota.cluster.core.txn import Txn
from rota.spec.ids import JobId


class Claims:
    """The holdings that claimants will get; what is free of them is taken for the rest of the pass.

    ``jobs`` are the claimants, oldest claim first.
    """

    def __init__(self, state: State, txn: Txn) -> None:
        self._state, self._txn = state, txn
        self._claims: list[tuple[Held, Held]] = []
        self._back: tuple[tuple[int, int, int], int] = ((-1, 0, 0), 0)
        self.jobs: list[JobId] = []

    def __bool__(self) -> bool:
        return bool(self._claims)

    def given_back(self, stopping: Sequence[JobId]) -> int:
        """Thousandths of devices at most, free ones and what these jobs give back, that nobody has claimed yet."""
        as_of = (self._txn.changes, len(stopping), len(self._claims))
        if self._back[0] != as_of:
            self._back = (as_of, self._count_back(stopping))
        return self._back[1]

    def _count_back(self, stopping: Sequence[JobId]) -> int:
        back = sum(_milli(slot) for job in stopping for slot in self._state.jobs[job].held)
        owed = sum(_milli(claim) - _milli(part) for claim, part in self._claims)
        return int(self._state.dev_milli.sum()) + back - owed

    def let_go(self, stopping: Iterable[JobId]) -> None:
        """In a trial: the state as it will be once these jobs have let go, less what is claimed of it."""
        for job in stopping:
            self._state.release(self._txn, job)
        for claim, part in self._claims:
            self._state.take(self._txn, part, -1)
            self._state.take(self._txn, claim, 1)

    def keep(self, held: Iterable[Held]) -> None:
        """Claim a holding."""
        for slot in held:
            self._claims.append((slot, take_what_is_free(self._state, self._txn, slot)))


def take_what_is_free(state: State, txn: Txn, slot: Held) -> Held:
    """Take what is free of a slot, and say what that was."""
    need = slot.milli or 1000
    devices = tuple(d for d in slot.devices if int(state.dev_milli[d]) >= need)
    cpu = min(slot.cpu_milli, int(state.cpu[slot.node]))
    mem = min(slot.mem, int(state.mem[slot.node]))
    part = Held(slot.node, devices, slot.milli, cpu, mem)
    state.take(txn, part, 1)
    return part


def _milli(slot: Held) -> int:
    return len(slot.devices) * (slot.milli or 1000)
