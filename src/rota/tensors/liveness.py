"""Who is alive, by locks alone; sweep the dead.

A stopped process is alive and its leases hold; a dead one is known by its free lock, never by a missed heartbeat. Each
client tries to be the sweeper four times a second; the winner scans the client files and undoes what the dead had.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from rota.tensors import faults
from rota.tensors.clientfile import PIN_MARK, clients_in, dead_in
from rota.tensors.space import Space

_SLICE: Final = 1000
_UNBORN_S: Final = 60.0
_SLICES_MAX: Final = 10_000


def sweep_dead(space: Space) -> list[str]:
    """Undo what every dead client had; the clients swept. The caller is the one sweeper."""
    swept: list[str] = []
    for client, fd in dead_in(space.clients):
        try:
            sweep_client(space, client)
            for slab in space.folder.glob(f"k/{client}.*"):  # what a keeper had: its memory died with it
                slab.unlink(missing_ok=True)
            (space.clients / client).unlink(missing_ok=True)
            swept.append(client)
        finally:
            os.close(fd)
    _remove_unborn(space)
    if swept:
        restore_slots(space)
        space.counters["swept"] += len(swept)
    return swept


def _remove_unborn(space: Space) -> None:
    """Files of clients that died before they had locked and shown them."""
    for path in space.clients.glob(".*"):
        with contextlib.suppress(FileNotFoundError):
            if space.clock.wall_s() - path.stat().st_mtime > _UNBORN_S:
                path.unlink()


def sweep_unfiled(space: Space) -> list[str]:
    """Undo registry clients that have no file: they died between two steps of their own sweep."""
    known = space.registry.members("clients")
    lost = [c for c in known - set(clients_in(space.clients)) if not c.startswith(PIN_MARK) and c != space.client]
    for client in lost:
        sweep_client(space, client)
    return lost


def sweep_client(space: Space, client: str) -> None:
    """Undo one client slice by slice; each slice may be repeated."""
    for _ in range(_SLICES_MAX):
        swept = space.registry.sweep(client, _SLICE)
        faults.point("mid-sweep")
        for version, name in swept.drops:
            space.delete(name, expected=version)
        if not swept.left:
            return


def restore_slots(space: Space) -> int:
    """Fill slots that a dead publisher left at 0; readers were right meanwhile, only slower. How many were filled."""
    filled = 0
    for row in space.registry.ls_all():
        if row.version and space.table.current(row.slot) == 0 and not space.table.blocker(row.slot):
            with space.table.changing(row.slot, row.name):
                now = space.find_row(row.name)
                if now is not None and now.version and now.slot == row.slot:
                    space.table.store(row.slot, now.version)
                    filled += 1
    return filled
