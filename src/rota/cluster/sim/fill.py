"""Fill a cluster with tasks of a trace until more is asked than there is: how much of it is given out, by placement."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

from rota.cluster.core.scoring import WHOLE, Board, Kind, Mix
from rota.cluster.policies.fgd import POLICIES, Chooser
from rota.cluster.sim.traces import TraceError
from rota.runtime.clock import Clock
from rota.runtime.random import SeededChance
from rota.spec.errors import UnknownName

DEMANDS = tuple(range(50, 135, 5))
"""Asked parts of all devices, in percent, at which the given part is noted."""


def fill(nodes: Path, pods: Path, policy: str, seed: int, clock: Clock) -> dict[str, Any]:
    """Tasks arrive, shuffled, then drawn again and again, until 130 % of the devices were asked; what fits nowhere is
    dropped. The document of ``rota sim fgd --json``: part of the devices given out at each asked part, in percent.

    The files have the columns of Alibaba's cluster-trace-gpu-v2023. Source: Fragmentation Gradient Descent (ATC'23),
    section 6.2. Raises TraceError and UnknownName.
    """
    if policy not in POLICIES:
        raise UnknownName(f"there is no placement {policy!r}", hint=f"placements: {', '.join(POLICIES)}")
    models: dict[str, int] = {}
    board = _board(nodes, models)
    tasks = [_task(place, row, models) for place, row in _rows(pods, "cpu_milli,memory_mib,num_gpu,gpu_milli")]
    if not tasks or not board.total:
        raise TraceError(f"{pods if board.total else nodes}: nothing to place or no device to place on")
    rng = SeededChance(seed).rng()
    chooser = Chooser(policy, board, Mix(kind for kind, _ in tasks), rng.randrange)
    began, arrived, asked, given, dropped = clock.monotonic_s(), 0, 0, 0, 0
    shown: dict[str, float] = {}
    order = rng.sample(tasks, len(tasks))
    while asked * 100 < DEMANDS[-1] * board.total:
        kind, mem = order[arrived] if arrived < len(order) else rng.choice(tasks)
        arrived += 1
        asked += kind.devices * kind.share
        found = chooser.choose(kind, mem)
        if found is None:
            dropped += 1
        else:
            board.take(found[0], kind, mem, found[1])
            given += kind.devices * kind.share
        while len(shown) < len(DEMANDS) and asked * 100 >= DEMANDS[len(shown)] * board.total:
            shown[str(DEMANDS[len(shown)])] = round(100 * given / board.total, 2)
    wall = clock.monotonic_s() - began
    return {
        "policy": policy,
        "seed": seed,
        "nodes": len(board.cpu),
        "gpus": board.total // WHOLE,
        "arrived": arrived,
        "dropped": dropped,
        "allocation_percent": shown,
        "wall_s": wall,
        "tasks_per_s": arrived / wall if wall else None,
    }


def _rows(path: Path, columns: str) -> list[tuple[str, dict[str, str]]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in columns.split(",") if name not in (reader.fieldnames or ())]
            if missing:
                raise TraceError(f"{path}:1: the header lacks {', '.join(missing)}")
            return [(f"{path}:{number}", row) for number, row in enumerate(reader, 2)]
    except (OSError, UnicodeDecodeError, csv.Error, EOFError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def _whole(place: str, row: dict[str, str], name: str) -> int:
    try:
        return int(float(row[name] or 0))
    except ValueError:
        raise TraceError(f"{place}: {name}: {row[name]!r} is not a number") from None


def _board(path: Path, models: dict[str, int]) -> Board:
    rows = _rows(path, "sn,cpu_milli,memory_mib,gpu,model")
    if not rows:
        raise TraceError(f"{path}: no nodes; the file needs at least one row below its header")
    seen: dict[str, str] = {}
    for place, row in rows:
        if row["sn"] in seen:
            raise TraceError(f"{place}: sn: node {row['sn']!r} is there twice; first at {seen[row['sn']]}")
        seen[row["sn"]] = place
    cpu, mem, gpus = ([_whole(place, row, name) for place, row in rows] for name in ("cpu_milli", "memory_mib", "gpu"))
    return Board(cpu, mem, gpus, [models.setdefault(row["model"], len(models)) for _, row in rows])


def _task(place: str, row: dict[str, str], models: dict[str, int]) -> tuple[Kind, int]:
    count = _whole(place, row, "num_gpu")
    types = tuple(sorted(models.get(name, -1) for name in (row.get("gpu_spec") or "").split("|") if name))
    kind = Kind(_whole(place, row, "cpu_milli"), count, _whole(place, row, "gpu_milli") if count else 0, types)
    return kind, _whole(place, row, "memory_mib")
