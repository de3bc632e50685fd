"""rota nodes, queues, alerts and report: what there is, who holds and used it, and how to change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from csv import writer as csv_writer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from rota.service.cli.flags import DEFAULT_FLAGS, Flags, confirm
from rota.service.cli.output import Table, Terminal
from rota.service.cli.verbs.formatting import (
    age,
    ago_s,
    amount,
    clock_time,
    lasting,
    not_understood,
    promise,
    shortened,
    size,
)
from rota.spec.resources import counted, format_size

if TYPE_CHECKING:
    from rota.service.models.cluster import DrainPlan, QueueRow, UsageRow

ACTIONS = ("drain", "cordon", "undrain", "uncordon")


def nodes(
    action: Annotated[str, Parameter(help="show, drain, cordon, undrain or uncordon; default: list.")] = "",
    node: Annotated[str, Parameter(help="The node to act on.")] = "",
    *more: Annotated[str, Parameter(name="MORE", help="Further nodes to drain, cordon or undrain.")],
    reason: Annotated[str, Parameter(help="Reason that users see.")] = "",
    notice: Annotated[str, Parameter(help="How long jobs on a drained node have to move.")] = "10m",
    dry_run: Annotated[bool, Parameter(help="Only list the affected jobs.")] = False,
    yes: Annotated[bool, Parameter(name=["-y", "--yes"], help="Do not prompt.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """List nodes, show one, or take one out of use for new work and back.

    show prints the state of a node, its jobs and who holds its devices, and what its machine does now, measured there:
    cores, memory, network, disks, devices, processes of jobs.

    Both drain and cordon keep new work off a node. cordon lets the jobs on it run to their end. drain shows them,
    asks, and moves them: at a commit or checkpoint to another node, or back into the queue if there is none when the
    notice is over. undrain and uncordon are the same: the node takes work again. A node that a person finds bad is
    drained until it is repaired: --notice 0s moves its jobs at once, --reason is shown beside it and to their users.

    Examples
    --------
    rota nodes

    rota nodes show r0n1

    rota nodes drain r0n1 r0n2 --reason "new driver" --yes
    """
    terminal = flags.terminal()
    if action == "show" and node and not more:
        with flags.client() as client:
            status, usage = client.node(node), client.node_usage(node)
        terminal.show(usage, lambda term: _node_page(term, status, usage))
        return 0
    if action and (action not in ACTIONS or not node):
        forms = {"": "", "show": "NODE", **dict.fromkeys(ACTIONS, "NODE ...")}
        raise not_understood(["nodes", action, node, *more], forms)
    if not action:
        return flags.answer(lambda client: client.nodes(), NODES)
    marks: dict[str, Any] = {"reason": reason, "notice_s": ago_s(notice) if action == "drain" else None}
    names = list(dict.fromkeys((node, *more)))
    with flags.client() as client:
        asks, plans = action == "drain" and not yes and not dry_run, list["DrainPlan"]()
        if asks or more:  # of several, an unknown name is found before any is changed
            plans = [client.mark_node(name, action, **marks, dry_run=True) for name in names]
            if asks:
                _confirm_drain(
                    terminal, names, {row["job"]: row["effect"] for one in plans for row in one["jobs"]}, yes
                )
        if action == "drain" and more and not dry_run:  # so that no job moves from one of them to another
            for name in (plan["node"] for plan in plans if plan["state"] == "healthy"):
                client.mark_node(name, "cordon", reason=reason)
        plans = [client.mark_node(name, action, **marks, dry_run=dry_run) for name in names]
    shown = {"kind": "DrainPlanList", "items": plans} if more else plans[0]
    terminal.show(shown, lambda term: _drain_tables(term, plans))
    return 0


def _confirm_drain(terminal: Terminal, nodes: Sequence[str], effects: Mapping[str, str], yes: bool) -> None:
    """Show the jobs that a drain moves and ask. Raises BadInput for no; nothing is asked where none moves."""
    for job, effect in effects.items():
        terminal.note(f"  {job}: {effect}")
    if effects:
        confirm(f"Draining {', '.join(nodes)} moves {counted(len(effects), 'job')} ({shortened(effects)})", yes=yes)


def alerts(
    action: Annotated[str, Parameter(help="ack: mark one as seen; default: list.")] = "",
    alert: Annotated[str, Parameter(name="ID", help="The id of the alert.")] = "",
    *,
    note: Annotated[str, Parameter(help="A note that other users see.")] = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """List what needs attention now: suspected hangs, recoveries, lost nodes, starving queues, low limits, a full disk.

    Examples
    --------
    rota alerts

    rota alerts ack recovered:ppo-3:1 --note "known driver fault"
    """
    if action and (action != "ack" or not alert):
        raise not_understood(["alerts", action, alert], {"": "", "ack": "ID"})
    return flags.answer(lambda client: client.acknowledge(alert, note=note) if action else client.alerts(), ALERTS)


ALERTS = Table(
    columns={
        "ID": "id",
        "SEVERITY": "severity",
        "SINCE": lambda one: clock_time(one["since"]),
        "WHAT": "text",
        "SEEN BY": lambda one: " ".join(filter(None, [one["acknowledged_by"], one["note"]])),
        "MORE": "hint",
    },
    empty="no alerts",
    sparse=("SEEN BY",),
    extra=("SINCE", "MORE"),
)


def _note(node: Mapping[str, Any]) -> str:
    """Why a node is as it is; of a drained one who is still there and until when, or that it may be taken down."""
    drain, words = node.get("drain"), [node["text"]] if node["text"] else []
    if drain is not None and drain["safe"]:
        words.insert(0, "drained: safe to take down")
    elif drain is not None:
        until = f" until {clock_time(drain['until'])}" if drain["until"] else ", to their end"
        words.insert(0, f"draining: {counted(drain['jobs_left'], 'job')} left ({shortened(node['jobs'])}){until}")
    return "; ".join(words)


NODES = Table(
    columns={
        "NODE": "id",
        "STATE": "state",
        "CELL": lambda node: "/".join(node["cells"]),
        "GPUS": lambda node: f"{node['gpus_used']}/{node['gpus']}" if node["gpus"] else "",
        "TYPE": lambda node: shortened(sorted({device["type"] for device in node["devices"]})),
        "CPUS": lambda node: f"{amount(node['cpus_used'])}/{amount(node['cpus'])}",
        "MEMORY": lambda node: size(node["memory_bytes"]),
        "JOBS": lambda node: shortened(node["jobs"]),
        "NOTE": _note,
    },
    empty="no nodes yet",
    extra=("CELL", "MEMORY", "TYPE"),
)


def _node_page(term: Terminal, status: Mapping[str, Any], doc: Mapping[str, Any]) -> None:
    """What Rota has there, then what its machine does."""
    shared = f"{size(doc['shared_used_bytes'])} of {size(doc['shared_bytes'])}"
    held = "".join(f"  {device['index']}: {device['job']}" for device in status["devices"] if device["job"])
    term.pairs(
        [
            ("node", f"{doc['node']}  {status['state']}"),
            ("note", _note(status)),
            ("jobs", shortened(status["jobs"])),
            ("devices", f"{status['gpus_used']} of {status['gpus']} held{held}" if status["gpus"] else ""),
            ("cores held", f"{amount(status['cpus_used'])} of {amount(status['cpus'])}"),
            ("cores", f"{doc['cores_busy']:g} of {doc['cores']} busy, load {doc['load']:g}"),
            ("memory", f"{size(doc['memory_used_bytes'])} of {size(doc['memory_bytes'])}, shared memory {shared}"),
        ]
    )
    for table in (NETWORK, DISKS, DEVICES, PROCESSES):
        if table.rows(doc):
            table(term, doc)


def _rate(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda one: f"{format_size(int(one[name]))}/s"


def _rows(name: str) -> Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    return lambda doc: doc[name]


NETWORK = Table(
    columns={
        "INTERFACE": "name",
        "ADDRESS": "address",
        "SPEED": lambda one: f"{one['bits_per_s'] / 1e9:g} Gbit/s" if one["bits_per_s"] > 0 else "",
        "IN": _rate("received_bytes_per_s"),
        "OUT": _rate("sent_bytes_per_s"),
    },
    rows=_rows("network"),
)
DISKS = Table(
    columns={
        "DISK": "path",
        "USED": lambda one: size(one["used_bytes"]),
        "SIZE": lambda one: size(one["total_bytes"]),
    },
    rows=_rows("disks"),
)
DEVICES = Table(
    columns={
        "DEVICE": "index",
        "TYPE": "name",
        "BUSY": lambda one: "" if one["busy"] is None else f"{one['busy']:.0%}",
        "MEMORY": lambda one: (
            "" if one["memory_bytes"] is None else f"{size(one['memory_used_bytes'] or 0)}/{size(one['memory_bytes'])}"
        ),
        "POWER": lambda one: "" if one["power_w"] is None else f"{one['power_w']:.0f} W",
        "TEMPERATURE": lambda one: "" if one["temperature_c"] is None else f"{one['temperature_c']:.0f} C",
    },
    rows=_rows("devices"),
)
PROCESSES = Table(
    columns={
        "JOB": "job",
        "MEMBER": "member",
        "PID": "pid",
        "CORES": lambda one: amount(one["cores"]),
        "MEMORY": lambda one: size(one["memory_bytes"]),
    },
    rows=_rows("processes"),
)


def _drain_tables(term: Terminal, plans: Sequence[Mapping[str, Any]]) -> None:
    for plan in plans:
        would = f"is {plan['state']} and would be {plan['action']}ed" if plan["dry_run"] else f"is {plan['state']}"
        term.line(f"{plan['node']} {would}" + (f"; {plan['note']}" if plan.get("note") else ""))
        for row in plan["jobs"]:
            term.line(f"  {row['job']}: {row['effect']}")


def queues(
    action: Annotated[str, Parameter(help="apply; default: list.")] = "",
    file: Annotated[str, Parameter(help="YAML or JSON: a list of queues.")] = "",
    *,
    dry_run: Annotated[bool, Parameter(help="Only show the changes.")] = False,
    if_version: Annotated[int | None, Parameter(help="Only if the tree is still this version of --dry-run.")] = None,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show the tree of queues, or replace it.

    Examples
    --------
    rota queues

    rota queues apply queues.yaml --dry-run

    rota queues apply queues.yaml --if-version 3
    """
    if action and (action != "apply" or not file):
        raise not_understood(["queues", action], {"": "", "apply": "FILE"})
    if not action:
        return flags.answer(lambda client: client.queues(), QUEUES)
    from rota.service.api import read_file

    text = read_file(Path(file), hint="")
    return flags.answer(
        lambda client: client.apply_queues(text, filename=file, dry_run=dry_run, if_version=if_version), _diff_table
    )


def _diff_table(term: Terminal, diff: Mapping[str, Any]) -> None:
    rows = [(name, shortened(diff[name], 20)) for name in ("added", "changed", "removed")]
    if any(text for _, text in rows):
        term.pairs(rows)
        for one in diff["fields"]:
            term.line(f"  {one['queue']} {one['field']}: {one['before']} -> {one['after']}")
        ago = f", which {diff['by']} applied {age(diff['at'])} ago" if diff["at"] else ""
        term.line(f"in place of version {diff['version']}{ago}")
        if diff["dry_run"]:
            term.line(f"to apply it unless they change meanwhile: --if-version {diff['version']}")
    else:
        term.line("nothing changes")
    for one in diff["over"]:
        term.line(one["text"])


def _promise(name: str) -> Callable[[QueueRow], str]:
    """A cell of what the queue promises or allows."""

    def cell(queue: QueueRow) -> str:
        stated = queue[name] or {}
        return promise(stated.get("gpus"), stated.get("cpus"), stated.get("memory_bytes"))

    return cell


QUEUES = Table(
    columns={
        "QUEUE": lambda queue: "  " * queue["path"].count("/") + queue["path"].rpartition("/")[2],
        "STATE": "state",
        "GPUS": lambda queue: amount(queue["used_gpus"]),
        "CPUS": lambda queue: amount(queue["used_cpus"]),
        "GUARANTEED": _promise("guaranteed"),
        "LIMIT": _promise("limit"),
        "A USER": _promise("user_limit"),
        "BORROWED": lambda queue: amount(queue["borrowed_gpus"]),
        "RUNNING": "running_jobs",
        "WAITING": "pending_jobs",
        "WANTED": lambda queue: amount(queue["pending_gpus"]),
        "OLDEST": lambda queue: age(queue["oldest_wait_since"]),
    },
    empty="no queues",
    extra=("OLDEST", "BORROWED", "WANTED", "A USER"),
)


def report(
    *,
    by: Annotated[str, Parameter(help="user, queue, job or gpu_type.")] = "user",
    since: Annotated[str, Parameter(help="Period up to now, e.g. 7d.")] = "30d",
    csv: Annotated[bool, Parameter(help="Comma-separated, for a spreadsheet.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show who used what: device and core hours, jobs and their ends, waiting, restarts.

    Examples
    --------
    rota report --by queue --since 7d --csv > usage.csv
    """
    with flags.client() as client:
        document = client.report(by=by, since_s=ago_s(since))
    terminal = flags.terminal()
    if csv and not terminal.json:
        writer = csv_writer(terminal.out)
        writer.writerow([by, *USAGE])
        writer.writerows([one[by], *(cell(one) for cell in USAGE.values())] for one in document["items"])
        return 0
    terminal.show(document, lambda term: _usage_table(by)(term, document))
    return 0


USAGE: dict[str, Callable[[UsageRow], float | None]] = {
    "jobs": lambda one: one["jobs"],
    "succeeded": lambda one: one["succeeded"],
    "failed": lambda one: one["failed"],
    "cancelled": lambda one: one["cancelled"],
    "gpu_hours": lambda one: one["gpu_hours"],
    "cpu_hours": lambda one: one["cpu_hours"],
    "wait_s p50": lambda one: one["wait_s"]["p50"],
    "wait_s p95": lambda one: one["wait_s"]["p95"],
    "restarts": lambda one: one["restarts"],
}
"""Columns of a report and of its comma-separated form."""


def _usage_table(by: str) -> Table:
    """The columns of ``USAGE`` with units that people read."""
    columns: dict[str, str | Callable[[UsageRow], object]] = {by.replace("_", " ").upper(): by}
    for name, cell in USAGE.items():
        header = name.replace("_s ", " ").replace("_", " ").upper()
        columns[header] = (lambda one, cell=cell: lasting(cell(one))) if name.startswith("wait_s") else cell
    return Table(columns=columns, empty="no usage", extra=("CPU HOURS", "WAIT P50", "CANCELLED"))
