"""rota top, trace: what every instance does now, and where the time of a job went."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from time import sleep  # noqa: TID251 - the pause between two looks, in the user's process
from typing import Annotated, Any

from cyclopts import Parameter

from rota.service.cli.output import Terminal
from rota.service.cli.verbs.flags import DEFAULT_FLAGS, JOB, Flags
from rota.service.cli.verbs.formatting import ago_s, amount, lasting
from rota.service.client import Client
from rota.spec.resources import counted
from rota.spec.states import JobState

JOBS_MAX = 50
CLEAR = "\x1b[H\x1b[2J"


def top(
    job: Annotated[str, Parameter(help="One job; without it every job that runs.")] = "",
    *,
    every: Annotated[str, Parameter(help="Pause between two looks.")] = "2s",
    once: Annotated[bool, Parameter(help="Look once.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show what every instance does now: its operation, its steps, its silence, its load. Ctrl-C ends it.

    With --json, or when the output is not a terminal, it looks once.

    Examples
    --------
    rota top

    rota top grpo-sums-1 --json
    """
    terminal, pause_s = flags.terminal(), max(0.2, ago_s(every) or 2.0)
    with flags.client() as client:
        while True:
            document = _look(client, job)
            if terminal.live and not terminal.json and not once:
                terminal.out.write(CLEAR)
            terminal.show(document, lambda term, shown=document: _table(term, shown))
            if terminal.json or once or not terminal.live:
                return 0
            sleep(pause_s)


def _look(client: Client, job: str) -> dict[str, Any]:
    names = [job] if job else [one["id"] for one in client.jobs(limit=JOBS_MAX)["items"] if _runs(one["state"])]
    items = [_row(document, one) for document in map(client.job, names) for one in document["instances"]]
    return {"kind": "Top", "items": items, "next": None}


def _runs(state: str) -> bool:
    return JobState(state).holds_devices


def _row(job: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, Any]:
    told = one.get("progress") or {}
    return {
        "job": job["id"],
        "instance": one["instance"],
        "state": one["state"],
        "node": one["node"],
        "pid": one["pid"],
        "restarts": one["restarts"],
        "doing": told.get("quiet") or ", ".join(told.get("busy") or ()),
        "waits_for": told.get("waits_for", []),
        "progress": told.get("n"),
        "unit": told.get("unit", ""),
        "step_s": told.get("step_s"),
        "idle_s": told.get("idle_s"),
        "cpus": told.get("cpus"),
        "rss_bytes": told.get("rss_bytes"),
        "beat_age_s": told.get("beat_age_s"),
    }


def _table(term: Terminal, doc: Mapping[str, Any]) -> None:
    """A row an instance; of columns that say nothing for anybody only the first three are there, to fit 80 columns."""
    names = ["JOB", "INSTANCE", "STATE", "DOES", "WAITS FOR", "PROGRESS", "STEP", "SILENT", "CORES", "MEMORY", "BEAT"]
    rows = [
        (
            one["job"],
            one["instance"],
            one["state"],
            one["doing"],
            ", ".join(one["waits_for"][:2]),
            f"{amount(one['progress'])} {one['unit']}".strip() if one["progress"] else "",
            lasting(one["step_s"]) if one["step_s"] else "",
            lasting(one["idle_s"]) if one["idle_s"] else "",
            f"{one['cpus']:.2f}" if one["cpus"] is not None else "",
            f"{one['rss_bytes'] / 2**20:.0f} MiB" if one["rss_bytes"] else "",
            lasting(one["beat_age_s"]) if one["beat_age_s"] is not None else "",
        )
        for one in doc["items"]
    ]
    said = [index < 3 or any(row[index] for row in rows) for index in range(len(names))]
    columns, *shown = ([cell for cell, says in zip(row, said, strict=True) if says] for row in (names, *rows))
    term.table(columns, shown, empty="no job runs; 'rota ps' lists those that wait")


def trace(
    job: JOB,
    out: Annotated[Path | None, Parameter(help="The file to write, for https://ui.perfetto.dev.")] = None,
    *,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Write one trace of a job, a lane per instance, and say what bounds its steps.

    Without a file it only says it. Works while the job runs and after its end.

    Examples
    --------
    rota trace grpo-sums-1 out.json
    """
    terminal = flags.terminal()
    with flags.client() as client:
        document = client.trace(job)
    if out is not None:
        out.write_text(json.dumps(document), encoding="utf-8")
    events = len(document["traceEvents"])
    shown = {"kind": "TraceSummary", "job": document["job"], "file": str(out or ""), "events": events}
    terminal.show(shown | document["summary"], lambda term: _summary(term, shown | document["summary"]))
    return 0


def _summary(term: Terminal, doc: Mapping[str, Any]) -> None:
    parts = [f"{name} {share:.0%}" for name, share in doc["bound_by"].items()]
    idle = [f"{role} {share:.0%}" for role, share in doc["idle"].items()]
    term.pairs(
        [
            ("job", doc["job"]),
            ("steps", f"{doc['steps']} in {lasting(doc['seconds'])}"),
            ("bound by", ", ".join(parts)),
            ("idle", ", ".join(idle)),
            (
                "written",
                f"{doc['file']}: {counted(doc['events'], 'event')}, open it at https://ui.perfetto.dev"
                if doc["file"]
                else "",
            ),
        ]
    )
