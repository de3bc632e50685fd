"""rota explain, failures, why, graph: why a job waits, what failed first, who waits for whom, how it hangs together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from rota.service.cli.output import Terminal
from rota.service.cli.verbs.flags import DEFAULT_FLAGS, JOB, Flags
from rota.service.cli.verbs.formatting import age, clock_time, lasting, promise, replicas, shortened
from rota.service.cli.verbs.jobs import state_text, stream_table
from rota.spec.errors import BadInput
from rota.spec.resources import counted
from rota.spec.states import JobState

OBSERVED = ("source", "target", "kind", "what", "n", "failed", "waited_s", "bytes")


def explain(job: JOB, *, flags: Flags = DEFAULT_FLAGS) -> int:
    """Say why a job waits, what is ahead of it, and what would let it start now.

    Examples
    --------
    rota explain big-1
    """
    return flags.answer(lambda client: client.explain(job), _explanation)


def _explanation(term: Terminal, doc: Mapping[str, Any]) -> None:
    queue = doc["queue"]
    why = doc.get("why") or {}
    ahead = doc.get("ahead") or {}
    placement = doc.get("placement") or {}
    term.pairs(
        [
            ("job", f"{doc['job']}  {state_text(doc)}"),
            ("why", f"{why['code']}: {why['text']}" if why else ""),
            ("queue", f"{queue['path']}: {_used(queue)} used{_limits(queue)}"),
            ("ahead", f"{counted(ahead['jobs'], 'job')}, {counted(ahead['gpus'], 'device')}" if doc["waiting"] else ""),
            ("estimate", estimate_text(doc.get("estimate"))),
            ("placed on", shortened(placement.get("nodes", []), 8)),
        ]
    )
    for title, rows in (
        ("nodes left after each rule", [f"{row['constraint']}: {row['nodes_left']}" for row in doc["tally"]]),
        ("held by", [_blocker(row) for row in doc["blocked_by"]]),
        ("would start now with", [_change(row) for row in doc["would_start_now_with"]]),
        ("plans", [f"{row['role']}, {counted(row['replicas'], 'instance')}: {row['why']}" for row in doc["plans"]]),
        ("decisions", [_decision(row) for row in doc["decisions"]]),
    ):
        if rows:
            term.line(f"\n{title}:")
            for row in rows:
                term.line(f"  {row}")
    if doc.get("see"):
        term.line(f"\nsee also: {doc['see']}")


def _used(queue: Mapping[str, Any]) -> str:
    cores = counted(queue["used_cpus"], "cpu")
    return f"{counted(queue['used'], 'device')}, {cores}" if queue["used"] or not queue["used_cpus"] else cores


def _limits(queue: Mapping[str, Any]) -> str:
    told = {name: promise(queue.get(name), queue.get(f"{name}_cpus")) for name in ("guaranteed", "limit")}
    return "".join(f", {name} {text}" for name, text in told.items() if text)


def estimate_text(estimate: Mapping[str, Any] | None) -> str:
    """When a waiting job may start, and what that rests on; empty without an estimate."""
    if not estimate:
        return ""
    times = ", ".join(f"{name} {clock_time(estimate[name])}" for name in ("p50", "p90") if estimate.get(name))
    basis = estimate.get("basis")
    return (times or "none") + (f" ({basis})" if basis else "")


def _blocker(row: Mapping[str, Any]) -> str:
    ends = f", ends {clock_time(row['ends'])}" if row.get("ends") else ""
    return f"{row['job']}: {counted(row['gpus'], 'device')}, {counted(row.get('cpus') or 0, 'core')}{ends}"


def _change(row: Mapping[str, Any]) -> str:
    cost = row.get("cost") or "none"
    return row["text"] + (f"  (costs: {cost})" if cost != "none" else "")


def _decision(row: Mapping[str, Any]) -> str:
    detail = row.get("text") or row.get("reason") or ""
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
    term.table(
        [
            "#",
            "SEEN",
            "INSTANCE",
            "REASON",
            "LEVEL",
            "SCOPE",
            "DECIDED AFTER",
            "HEALED AFTER",
            "BACK TO",
            "LOST COMMITS",
        ],
        [
            (
                item["n"],
                clock_time(item["seen_at"]),
                item["instance"],
                item["reason"],
                _level(item),
                len(item["scope"]),
                lasting(item["detect_to_decide_s"]),
                lasting(item["seconds"]) if item["healed"] else "open",
                f"{item['restore']} ({item['restored_from']})" if item.get("restored_from") else item["restore"],
                item["lost_commits"],
            )
            for item in doc["items"]
        ]
        + [
            ("", clock_time(one["at"]), one["instance"], one["reason"], "", "", "", over, "", "")
            for one in doc["open_losses"]
        ],
        empty=f"{doc['job']}: no instance has failed",
    )
    for one in doc.get("masters", ()):
        term.line(f"{clock_time(one['at'])}  {one['text']}: it was replaced, the job ran on")
    if first:
        term.line(f"\nfirst: {first['instance']} {first['reason']}: {first['text']}")
        if first.get("traceback"):
            term.line(str(first["traceback"]).rstrip())
    if end:
        term.line("\nend: " + " ".join(part for part in (end["instance"], f"{end['reason']}: {end['text']}") if part))
        if end["traceback"] and end["traceback"] != (first or {}).get("traceback"):
            term.line(str(end["traceback"]).rstrip())


def _level(item: Mapping[str, Any]) -> str:
    return f"{item['moved_from']} -> {item['level']}" if item.get("moved_from") else str(item["level"])


def why(job: JOB, *, flags: Flags = DEFAULT_FLAGS) -> int:
    """Say who waits for whom in a running job: the one that holds up the rest, since when, with its stack.

    Examples
    --------
    rota why ppo-3
    """
    return flags.answer(lambda client: client.why(job), _waits)


def _waits(term: Terminal, doc: Mapping[str, Any]) -> None:
    cause = doc.get("cause")
    if cause:
        term.line(f"open recovery ({cause['level']}) of {cause['instance']}: {cause['reason']}: {cause['text']}")
    named = [("culprit" if not root["deadlock"] else "deadlock", root) for root in doc["culprits"]]
    named += [("suspect", root) for root in doc["suspects"]]
    for word, root in named:
        term.line(f"{word}: {root['text']}")
    for one in doc["slow"]:
        term.line(f"slow: {one['instance']} takes {one['factor']:g} times as long for a step as its role")
    for name in doc["dropped"]:
        term.line(f"dropped: {name} uses far less of the processor than while it made progress")
    said = bool(cause or named or doc["slow"] or doc["dropped"])
    if doc["waits"]:
        if said:
            term.line()
        term.table(
            ["WHO WAITS", "FOR WHOM", "KIND", "WHAT", "FOR"],
            [(one["source"], one["target"], one["kind"], one["what"], lasting(one["age_s"])) for one in doc["waits"]],
        )
    if doc["items"]:
        if said or doc["waits"]:
            term.line()
        term.table(
            ["NOT READY", "STATE", "FOR"],
            [(item["instance"], item["state"], age(item["since"])) for item in doc["items"]],
        )
    for instance, text in doc["stacks"].items():
        term.line(f"\nstacks of {instance}:\n{text.rstrip()}")
    if not (cause or named or doc["waits"] or doc["items"]):
        told = "no waits" if doc["live"] else "its master does not answer" if _runs(doc) else "nothing runs"
        term.line(f"{doc['job']} {doc['state']}: {told}")
    term.line(f"see also: {doc['see']}")


def _runs(doc: Mapping[str, Any]) -> bool:
    return JobState(doc["state"]).holds_devices


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
    document: Mapping[str, Any]
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
    if problem := document.get("problem"):
        terminal.note(f"incomplete: {problem}")
    return 0


def _graph(term: Terminal, doc: Mapping[str, Any]) -> None:
    term.table(
        ["ROLE", "N", "RESTART", "STATE", "LOSING ONE"],
        [
            (
                role["name"],
                replicas(role, now=doc["job"] is not None),
                role["restart"],
                "loop" if role["loop"] else "kept" if role["stateful"] else "none",
                role["blast_radius"].partition(" ")[2].partition(" ")[2],
            )
            for role in doc["roles"]
        ],
    )
    if doc["edges"]:
        term.line()
        term.table(["FROM", "TO", "KIND"], [(edge["source"], edge["target"], edge["kind"]) for edge in doc["edges"]])
    stream_table(term, [stream["seen"] for stream in doc["streams"] if stream["seen"]])
    if doc.get("observed"):
        term.line("\nobserved:")
        term.table(
            ["FROM", "TO", "KIND", "WHAT", "TIMES", "FAILED", "WAITED", "BYTES"],
            [
                tuple(lasting(one[name]) if name == "waited_s" else one[name] for name in OBSERVED)
                for one in doc["observed"]
            ],
        )
    term.line()
    for index, members in enumerate(doc["subgraphs"]):
        term.line(f"sub-graph {index}: {', '.join(members)}")


def dot_text(doc: Mapping[str, Any]) -> str:
    """Graphviz text: a box a role, an arrow an edge."""
    lines = [f'digraph "{doc["name"]}" {{', "  rankdir=LR; node [shape=box];"]
    lines += [f'  "{role["name"]}" [label="{role["name"]} x{role["replicas"]}"];' for role in doc["roles"]]
    lines += [f'  "{stream["name"]}" [shape=cylinder];' for stream in doc["streams"]]
    lines += [f'  "{edge["source"]}" -> "{edge["target"]}" [label="{edge["kind"]}"];' for edge in doc["edges"]]
    return "\n".join([*lines, "}"])
