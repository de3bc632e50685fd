"""rota explain, failures, why, graph, top, trace: why a job waits, what failed, what its instances do and wait for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from cyclopts import Parameter

from rota.service.cli.flags import DEFAULT_FLAGS, JOB, Flags
from rota.service.cli.output import Table, Terminal
from rota.service.cli.verbs.formatting import age, ago_s, amount, clock_time, lasting, promise, replicas, shortened
from rota.service.cli.verbs.jobs import state_text, stream_table
from rota.service.client import Client
from rota.service.user_process import sleep
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput
from rota.spec.resources import counted
from rota.spec.states import JobState


def explain(
    job: JOB,
    *,
    what_if: Annotated[
        list[str] | None,
        Parameter(help="priority=80, queue=prod, gpus=2, replicas=2, time_limit=1h, PATH=VALUE; repeatable."),
    ] = None,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Say why a job waits, what is ahead of it, and what would let it start now.

    With --what-if it says when the job would start with all these changes, and what would bind it. It changes nothing.

    Examples
    --------
    rota explain big-1

    rota explain big-1 --what-if priority=80 --what-if gpus=4
    """
    if what_if:
        return flags.answer(lambda client: client.what_if(job, what_if), _what_if)
    return flags.answer(lambda client: client.explain(job), _explanation)


def _what_if(term: Terminal, doc: WhatIf) -> None:
    term.pairs([("job", doc["job"]), ("if", ", ".join(doc["changes"]))])
    for title, start in (("as it is", doc["now"]), ("with the changes", doc["then"])):
        why = start["why"]
        victims = [row["job"] for row in start["victims_if_preempted"]]
        term.line(f"\n{title}:")
        term.pairs(
            [
                ("starts", "now" if start["starts_now"] else estimate_text(start["estimate"])),
                ("why not now", f"{why['code']}: {why['text']}" if why else ""),
                ("preempts", shortened(victims, 8)),
                ("ahead", "" if start["starts_now"] else _ahead(start["ahead"])),
            ]
        )


def _ahead(ahead: Mapping[str, Any]) -> str:
    return f"{counted(ahead['jobs'], 'job')}, {counted(ahead['gpus'], 'device')}"


def _explanation(term: Terminal, doc: Explanation) -> None:
    queue = doc["queue"]
    why = doc.get("why") or {}
    placement = doc.get("placement") or {}
    term.pairs(
        [
            ("job", f"{doc['job']}  {state_text(doc)}"),
            ("why", f"{why['code']}: {why['text']}" if why else ""),
            ("queue", f"{queue['path']}: {_used(queue)} used{_limits(queue)}"),
            ("ahead", _ahead(doc["ahead"]) if doc["waiting"] else ""),
            ("estimate", estimate_text(doc.get("estimate"))),
            ("placed on", shortened(placement.get("nodes", []), 8)),
        ]
    )
    for title, rows in (
        ("nodes left after each rule", [f"{row['constraint']}: {row['nodes_left']}" for row in doc["tally"]]),
        ("held by", [_blocker(row) for row in doc["blocked_by"]]),
        ("would start now with", [_change(row) for row in doc["would_start_now_with"]]),
        ("plans", [_plan(row) for row in doc["plans"]]),
        ("decisions", [_decision(row) for row in doc["decisions"]]),
    ):
        if rows:
            term.line(f"\n{title}:")
            for row in rows:
                term.line(f"  {row}")
    if doc.get("see"):
        term.line(f"\nsee also: {doc['see']}")


def _plan(row: RolePlan) -> str:
    runs = f" {row['placed']}" if row["current"] else ""
    return f"{row['role']}, {counted(row['replicas'], 'instance')}: {row['why']}{runs}"


def _used(queue: Mapping[str, Any]) -> str:
    cores = counted(queue["used_cpus"], "CPU")
    return f"{counted(queue['used'], 'device')}, {cores}" if queue["used"] or not queue["used_cpus"] else cores


def _limits(queue: Mapping[str, Any]) -> str:
    shown = {name: promise(queue.get(name), queue.get(f"{name}_cpus")) for name in ("guaranteed", "limit")}
    return "".join(f", {name} {text}" for name, text in shown.items() if text)


def estimate_text(estimate: EstimateDocument | DryRunEstimate | None) -> str:
    """When a waiting job may start, and what that rests on; empty without an estimate."""
    if not estimate:
        return ""
    times = ", ".join(f"{name} {clock_time(estimate[name])}" for name in ("p10", "p50", "p90") if estimate.get(name))
    basis = estimate.get("basis")
    return (times or "none") + (f" ({basis})" if basis else "")


def _blocker(row: Mapping[str, Any]) -> str:
    ends = f", {'stopping, ' * (row['basis'] == 'stopping')}ends {clock_time(row['ends'])}" if row.get("ends") else ""
    return f"{row['job']}: {counted(row['gpus'], 'device')}, {counted(row.get('cpus') or 0, 'core')}{ends}"


def _change(row: Mapping[str, Any]) -> str:
    cost = row.get("cost") or "none"
    return row["text"] + (f"  (costs: {cost})" if cost != "none" else "")


def _decision(row: Mapping[str, Any]) -> str:
    detail = row.get("text") or row.get("reason") or (row.get("why") or {}).get("choice", "")
    attempt = f" (attempt {row['attempt']})" if "attempt" in row else ""
    return f"{clock_time(row['at'])}  {row['decision']}{attempt}  {detail}"


def failures(
    job: JOB,
    *,
    attempt: Annotated[int | None, Parameter(help="Only of this attempt.")] = None,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show what failed, the first instance first, and what was done about it.

    Examples
    --------
    rota failures ppo-3
    """
    return flags.answer(lambda client: client.failures(job, attempt=attempt), _failures)


def _failures(term: Terminal, doc: Mapping[str, Any]) -> None:
    first, end = doc.get("first"), doc.get("end")
    over = "the job ended" if JobState(doc["state"]).terminal else "open"
    rows = [item | {"open": "not healed" if over != "open" else _restarted(item)} for item in doc["items"]]
    rows += [{"seen_at": one["at"], **one, "open": over} for one in doc["open_losses"]]
    if rows or not end:
        replace(FAILURES, empty=f"{doc['job']}: no failures").print(term, rows)
    else:
        term.line(f"{doc['job']}: {doc['state']}, no instance failed")
    for one in doc.get("masters", ()):
        term.line(f"{clock_time(one['at'])}  {one['text']}: it was replaced, the job ran on")
    for one in doc.get("drains", ()):
        term.line(f"{clock_time(one['at'])}  {one['text']}")
    if first:
        term.line(f"\nfirst: {first['instance']} {first['reason']}: {first['text']}")
        if first.get("traceback"):
            term.line(str(first["traceback"]).rstrip())
    if end:
        term.line("\nend: " + " ".join(part for part in (end["instance"], f"{end['reason']}: {end['text']}") if part))
        if end["traceback"] and end["traceback"] != (first or {}).get("traceback"):
            term.line(str(end["traceback"]).rstrip())


def _restarted(item: Mapping[str, Any]) -> str:
    return "open" if item["seconds"] is None else f"restarted after {lasting(item['seconds'])}"


def _level(item: Mapping[str, Any]) -> str:
    level = item.get("level", "")
    return f"{item['moved_from']} -> {level}" if item.get("moved_from") else level


def _restored(item: Mapping[str, Any]) -> object:
    if item.get("restore") == 0:
        return "no commit"  # a script may have found files of its own
    return f"{item['restore']} ({item['restored_from']})" if item.get("restored_from") else item.get("restore")


def _lost_commits(item: Mapping[str, Any]) -> object:
    """None where nothing was committed before: a script may have lost all the same."""
    return item.get("lost_commits") or (0 if item.get("restore") else None)


FAILURES = Table(
    columns={
        "#": lambda item: item.get("n"),
        "SEEN": lambda item: clock_time(item["seen_at"]),
        "INSTANCE": "instance",
        "REASON": "reason",
        "LEVEL": _level,
        "SCOPE": lambda item: len(item["scope"]) if "scope" in item else "",
        "DECIDED AFTER": lambda item: lasting(item.get("detect_to_decide_s")),
        "HEALED AFTER": lambda item: lasting(item["seconds"]) if item.get("healed") else item["open"],
        "BACK TO": _restored,
        "LOST COMMITS": _lost_commits,
    },
    extra=("SCOPE", "LEVEL", "LOST COMMITS", "BACK TO", "DECIDED AFTER"),
)


def why(job: JOB, *, flags: Flags = DEFAULT_FLAGS) -> int:
    """Say who waits for whom in a running job: the one that holds up the rest, since when, with its stack.

    Examples
    --------
    rota why ppo-3
    """
    terminal = flags.terminal()
    with flags.client() as client:
        document, now = client.why(job), client.job(job)
    terminal.show(
        document, lambda term: _waits(term, document, f"{now['reason']}: {now['text']}" * bool(now["reason"]))
    )
    return 0


def _waits(term: Terminal, doc: Mapping[str, Any], reason: str = "") -> None:
    cause = doc.get("cause")
    if reason and not cause:
        term.line(reason)
    if cause:
        term.line(f"open recovery ({cause['level']}) of {cause['instance']}: {cause['reason']}: {cause['text']}")
    for one in doc["vertices"]:
        if one["name"] == "master" and one["state"] != "RUNNING":
            term.line(f"master: {one['doing']}")
    named = [("culprit" if not root["deadlock"] else "deadlock", root) for root in doc["culprits"]]
    named += [("suspect", root) for root in doc["suspects"]]
    for word, root in named:
        term.line(f"{word}: {root['text']}")
    for one in doc["slow"]:
        term.line(f"slow: {one['instance']} takes {one['factor']:g} times as long for a step as its role")
    for name in doc["dropped"]:
        term.line(f"dropped: {name} uses far less of the processor than while it made progress")
    said = bool(cause or named or doc["slow"] or doc["dropped"])
    for table, rows in ((WAITS, _distinct(doc["waits"])), (NOT_READY, doc["items"])):
        if rows:
            if said:
                term.line()
            table.print(term, rows)
            said = True
    for instance, text in doc["stacks"].items():
        term.line(f"\nstacks of {instance}:\n{text.rstrip()}")
    if not (cause or named or doc["waits"] or doc["items"]):
        shown = "no waits" if doc["live"] else "its master does not answer" if _runs(doc["state"]) else "nothing runs"
        term.line(f"{doc['job']} {doc['state']}: {shown}")
    term.line(f"see also: {doc['see']}")


def _distinct(waits: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each wait once, as old as the oldest report of it."""
    by_age = sorted(waits, key=lambda one: one["age_s"])
    oldest = {(one["source"], one["target"], one["kind"], one["what"]): one for one in by_age}
    return [one for one in waits if any(one is other for other in oldest.values())]


WAITS = Table(
    columns={
        "WHO WAITS": "source",
        "FOR WHOM": "target",
        "KIND": "kind",
        "WHAT": "what",
        "FOR": lambda one: lasting(one["age_s"]),
    }
)
NOT_READY = Table(columns={"NOT READY": "instance", "STATE": "state", "FOR": lambda item: age(item["since"])})


def _runs(state: str) -> bool:
    return JobState(state).holds_devices


def graph(
    job: Annotated[str, Parameter(help="A job, or a job file.")],
    *,
    format_: Annotated[str, Parameter(name="--format", help="text, dot or json.")] = "text",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show roles, edges and sub-graphs of a job or of a job file.

    Examples
    --------
    rota graph job.yaml

    rota graph ppo-3 --format dot
    """
    if format_ not in ("text", "dot", "json"):
        raise BadInput(f"--format {format_}: text, dot or json")
    terminal = flags.terminal()
    document: GraphDocument
    path = Path(job).expanduser()
    if path.suffix in (".yaml", ".yml", ".json") or path.is_file():
        from rota.service.offline import graph_of_file

        document = graph_of_file(path)
    else:
        with flags.client() as client:
            document = client.graph(job)
    if format_ == "dot" and not terminal.json:
        terminal.line(dot_text(document))
        return 0
    if format_ == "json":
        terminal = Flags(json=True).terminal()
    terminal.show(document, lambda term: _graph(term, document))
    if problem := cast("dict[str, str]", document).get("problem"):
        terminal.note(f"incomplete: {problem}")
    return 0


def _graph(term: Terminal, doc: Mapping[str, Any]) -> None:
    existing = doc["job"] is not None
    ROLES.print(term, [{**role, "n": replicas(role, now=existing)} for role in doc["roles"]])
    if doc["edges"]:
        term.line()
        EDGES.print(term, doc["edges"])
    stream_table(term, [stream["seen"] for stream in doc["streams"] if stream["seen"]])
    if doc.get("observed"):
        term.line("\nobserved:")
        OBSERVED.print(term, doc["observed"])
    term.line()
    for index, members in enumerate(doc["subgraphs"]):
        term.line(f"sub-graph {index}: {', '.join(members)}")


EDGES = Table(columns={"FROM": "source", "TO": "target", "KIND": "kind"})
OBSERVED = Table(
    columns={
        **EDGES.columns,
        "WHAT": "what",
        "TIMES": "n",
        "FAILED": "failed",
        "WAITED": lambda one: lasting(one["waited_s"]),
        "BYTES": "bytes",
    }
)
ROLES = Table(
    columns={
        "ROLE": "name",
        "N": "n",
        "RESTART": "restart",
        "STATE": lambda role: "loop" if role["loop"] else "kept" if role["stateful"] else "none",
        "LOSING ONE": lambda role: role["blast_radius"].partition(" ")[2].partition(" ")[2],
    }
)


def dot_text(doc: GraphDocument) -> str:
    """Graphviz text: a box a role, an arrow an edge."""
    lines = [f'digraph "{doc["name"]}" {{', "  rankdir=LR; node [shape=box];"]
    lines += [f'  "{role["name"]}" [label="{role["name"]} x{role["replicas"]}"];' for role in doc["roles"]]
    lines += [f'  "{stream["name"]}" [shape=cylinder];' for stream in doc["streams"]]
    lines += [f'  "{edge["source"]}" -> "{edge["target"]}" [label="{edge["kind"]}"];' for edge in doc["edges"]]
    return "\n".join([*lines, "}"])


if TYPE_CHECKING:
    from rota.service.models.cluster import DryRunEstimate
    from rota.service.models.jobs import GraphDocument
    from rota.service.models.reasons import EstimateDocument, Explanation, RolePlan, WhatIf

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
            terminal.show(document, lambda term, shown=document: TOP(term, shown))
            if terminal.json or once or not terminal.live:
                return 0
            sleep(pause_s)


def _look(client: Client, job: str) -> JsonObject:
    names = [job] if job else [one["id"] for one in client.jobs(limit=JOBS_MAX)["items"] if _runs(one["state"])]
    items = [_row(document, one) for document in map(client.job, names) for one in document["instances"]]
    return {"kind": "Top", "items": items, "next": None}


def _row(job: Mapping[str, Any], one: Mapping[str, Any]) -> JsonObject:
    shown = one.get("progress") or {}
    return {
        "job": job["id"],
        "instance": one["instance"],
        "state": one["state"],
        "node": one["node"],
        "pid": one["pid"],
        "restarts": one["restarts"],
        "doing": shown.get("quiet") or ", ".join(shown.get("busy") or ()),
        "waits_for": shown.get("waits_for", []),
        "progress": shown.get("n"),
        "unit": shown.get("unit", ""),
        "step_s": shown.get("step_s"),
        "idle_s": shown.get("idle_s"),
        "cpus": shown.get("cpus"),
        "rss_bytes": shown.get("rss_bytes"),
        "beat_age_s": shown.get("beat_age_s"),
    }


TOP = Table(
    columns={
        "JOB": "job",
        "INSTANCE": "instance",
        "STATE": "state",
        "DOES": "doing",
        "WAITS FOR": lambda one: ", ".join(one["waits_for"][:2]),
        "PROGRESS": lambda one: f"{amount(one['progress'])} {one['unit']}".strip() if one["progress"] else "",
        "STEP": lambda one: lasting(one["step_s"]) if one["step_s"] else "",
        "SILENT": lambda one: lasting(one["idle_s"]) if one["idle_s"] else "",
        "CORES": lambda one: f"{one['cpus']:.2f}" if one["cpus"] is not None else "",
        "MEMORY": lambda one: f"{one['rss_bytes'] / 2**20:.0f} MiB" if one["rss_bytes"] else "",
        "BEAT": lambda one: lasting(one["beat_age_s"]),
    },
    empty="no job runs; 'rota ps' lists those that wait",
    sparse=("DOES", "WAITS FOR", "PROGRESS", "STEP", "SILENT", "CORES", "MEMORY", "BEAT"),
    extra=("STATE", "STEP", "SILENT", "WAITS FOR", "BEAT"),
)


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
