"""Job traces: read from files or generated, and the nodes of each tenant."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import isfinite, nan
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rota.runtime.random import RandomSource
from rota.spec.errors import BadInput

ROWS_MAX = 5_000_000
Number = TypeVar("Number", int, float)


class TraceError(BadInput):
    """A trace or tenant file that cannot be used; the message has file, line, field and rule."""

    code = "TRACE_INVALID"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """One row of a trace; times in seconds. ``gang`` is (members, devices of each)."""

    job_id: str
    submit_s: float
    duration_s: float
    gpus: int
    vc: str
    gang: tuple[int, int]
    user: str = ""
    priority: int = 50
    preemptible: bool = True
    gpu_type: tuple[str, ...] = ()
    milli_gpu: int = 0
    cpu_milli: int = 0
    mem_mib: int = 0
    est_s: float | None = None
    deadline_s: float | None = None
    checkpoint_every_s: float | None = None
    job_class: str = ""
    max_gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One row of a tenant file: its nodes, and what its queue is promised and allowed, in devices."""

    vc: str
    nodes: int
    gpus_per_node: int = 8
    gpu_type: str = "gpu"
    guaranteed: float | None = None
    limit: float | None = None
    weight: float = 1.0
    parent: str = ""
    cpu_milli: int = 96_000
    mem_mib: int = 2**20

    @property
    def path(self) -> str:
        """Queue path of the tenant."""
        return f"{self.parent}/{self.vc}" if self.parent else self.vc

    @property
    def entitled(self) -> float:
        """Devices it may count on: its guarantee, else its own nodes."""
        return self.nodes * self.gpus_per_node if self.guaranteed is None else self.guaranteed

    def scaled(self, scale: float) -> Tenant:
        """The tenant with ``max(1, round(nodes * scale))`` nodes, Python's ``round``."""
        return replace(self, nodes=max(1, round(self.nodes * scale)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Jobs in order of submission, then id; ``skipped`` counts rows of tenants that have no nodes, ``unknown``."""

    jobs: tuple[TraceJob, ...]
    skipped: int = 0
    unknown: tuple[str, ...] = ()
    name: str = field(default="")

    def beside(self, other: Trace) -> Trace:
        """This trace with the jobs of another as opportunistic load; ids of the other get a ``~``."""
        extra = (replace(job, job_id=f"~{job.job_id}", priority=-1) for job in other.jobs)
        jobs = sorted((*self.jobs, *extra), key=lambda job: (job.submit_s, job.job_id))
        return replace(self, jobs=tuple(jobs))


def read_trace(path: Path, tenants: Iterable[Tenant]) -> Trace:
    """Read a trace CSV (``.gz`` accepted). Rows may be unsorted; ids must be unique. Raises TraceError."""
    per_node = {tenant.vc: tenant.gpus_per_node for tenant in tenants}
    jobs: list[TraceJob] = []
    seen: set[str] = set()
    skipped, unknown = 0, set[str]()
    for place, row in rows_of(path, ("job_id", "submit_s", "duration_s", "gpus", "vc")):
        if row["vc"] not in per_node:
            skipped += 1
            unknown.add(row["vc"])
            continue
        job = _trace_job(place, row, per_node[row["vc"]])
        if job.job_id in seen:
            raise _wrong(place, row, "job_id", f"{job.job_id!r} occurs twice; ids must be unique")
        seen.add(job.job_id)
        jobs.append(job)
    jobs.sort(key=lambda job: (job.submit_s, job.job_id))
    return Trace(jobs=tuple(jobs), skipped=skipped, unknown=tuple(sorted(unknown)), name=path.name)


def read_tenants(path: Path) -> tuple[Tenant, ...]:
    """Read a tenant CSV: ``vc, nodes`` and optional columns. Raises TraceError."""
    tenants: list[Tenant] = []
    for place, row in rows_of(path, ("vc", "nodes")):
        values: dict[str, Any] = {"vc": row["vc"], "nodes": _number(place, row, "nodes", int)}
        values |= _numbers(place, row, ("gpus_per_node", "cpu_milli", "mem_mib"), int)
        values |= _numbers(place, row, ("guaranteed", "limit", "weight"), float)
        values |= {name: row[name] for name in ("gpu_type", "parent") if row.get(name)}
        if any(tenant.vc == row["vc"] for tenant in tenants):
            raise _wrong(place, row, "vc", f"{row['vc']!r} occurs twice; give its nodes in one row")
        tenants.append(Tenant(**values))
    if not tenants:
        raise TraceError(f"{path}: no tenants; the file needs at least one row below its header")
    return tuple(tenants)


def rows_of(path: Path, required: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """Rows of a CSV file (``.gz`` accepted) by column, each with ``path:line``. Raises TraceError."""
    try:
        with _open(path) as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            missing = [name for name in required if name not in (reader.fieldnames or ())]
            if missing:
                raise TraceError(f"{path}:1: the header lacks {', '.join(missing)}; it needs {', '.join(required)}")
            for row in reader:
                if reader.line_num > ROWS_MAX:
                    raise TraceError(f"{path}: more than {ROWS_MAX} rows")
                yield f"{path}:{reader.line_num}", row
    except (OSError, UnicodeDecodeError, csv.Error, EOFError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise TraceError(f"{path}: cannot be read: {why}") from error


def _wrong(place: str, row: dict[str, str], name: str, what: str) -> TraceError:
    """What is wrong with a field, at its line and, in a row without quotes, column."""
    column = 1 + sum(len(row[before] or "") + 1 for before in takewhile(lambda one: one != name, row))
    return TraceError(f"{place}:{column}: {name}: {what}")


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _numbers(place: str, row: dict[str, str], names: Iterable[str], kind: type[int | float]) -> dict[str, Any]:
    """Those of these optional columns that the row gives."""
    return {name: _number(place, row, name, kind) for name in names if row.get(name)}


def _number(place: str, row: dict[str, str], name: str, kind: type[Number]) -> Number:
    text = (row.get(name) or "").strip()
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not isfinite(value):
        raise _wrong(place, row, name, f"{text!r} is not a number")
    if value < 0 and name != "priority":
        raise _wrong(place, row, name, f"{text} is below 0")
    if kind(value) != value:
        raise _wrong(place, row, name, f"{text} is not a whole number")
    return kind(value)


def _trace_job(place: str, row: dict[str, str], per_node: int) -> TraceJob:
    gpus = _number(place, row, "gpus", int)
    optional = _numbers(place, row, ("est_s", "deadline_s", "checkpoint_every_s"), float)
    optional |= _numbers(place, row, ("milli_gpu", "cpu_milli", "mem_mib", "priority", "max_gpus"), int)
    if row.get("preemptible"):
        optional["preemptible"] = row["preemptible"].strip().lower() not in ("0", "false", "no")
    if row.get("gpu_type"):
        optional["gpu_type"] = tuple(row["gpu_type"].split("|"))
    optional |= {name: row[name] for name in ("user", "job_class") if row.get(name)}
    gang = _gang(place, row, gpus, per_node)
    return TraceJob(
        job_id=row["job_id"],
        submit_s=_number(place, row, "submit_s", float),
        duration_s=_number(place, row, "duration_s", float),
        gpus=gang[0] * gang[1],
        vc=row["vc"],
        gang=gang,
        **optional,
    )


def _gang(place: str, row: dict[str, str], gpus: int, per_node: int) -> tuple[int, int]:
    """Members and devices of each: as given, else one node if it suffices, else whole nodes, rounded up."""
    if text := row.get("gang"):
        found = re.fullmatch(r"\s*([1-9]\d*)[xX](\d+)\s*", text)
        if found is None:
            raise _wrong(place, row, "gang", f"{text!r} is not MEMBERSxDEVICES, for example 4x8")
        return int(found.group(1)), int(found.group(2))
    if gpus <= per_node:
        return 1, gpus
    size = max(1, per_node)
    return -(-gpus // size), size


def generate(
    random_source: RandomSource, tenants: Iterable[Tenant], *, jobs: int, load: float, mean_s: float = 3600.0
) -> Trace:
    """A random trace: Poisson arrivals, sizes 1/1/1/2/4/8 and some of several nodes, long-tailed durations.

    ``load`` is the asked share of all devices on average; a load above 1 makes the queue grow without end.
    """
    rng = random_source.rng()
    known = tuple(tenants)
    sizes = (1, 1, 1, 2, 4, 8, 16)
    devices = sum(tenant.nodes * tenant.gpus_per_node for tenant in known)
    rate = load * devices / (mean_s * sum(sizes) / len(sizes))
    now = 0.0
    made: list[TraceJob] = []
    for i in range(jobs):
        now += rng.expovariate(rate)
        tenant = rng.choices(known, weights=[t.nodes for t in known])[0]
        gpus = min(rng.choice(sizes), tenant.nodes * tenant.gpus_per_node)
        gang = _gang("", {}, gpus, tenant.gpus_per_node)
        made.append(
            TraceJob(
                job_id=f"g{i}",
                submit_s=round(now, 3),
                duration_s=round(rng.lognormvariate(0, 1) * mean_s / 1.6487, 3),
                gpus=gang[0] * gang[1],
                vc=tenant.vc,
                gang=gang,
            )
        )
    return Trace(jobs=tuple(made), name="generated")
