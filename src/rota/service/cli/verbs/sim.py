"""rota sim run, compare, fgd, cases: the scheduler in virtual time, without a service."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from rota.service.cli.flags import DEFAULT_FLAGS, Flags
from rota.service.cli.output import Table, Terminal
from rota.service.cli.verbs.formatting import amount, lasting, shortened
from rota.spec.errors import BadInput
from rota.spec.resources import counted

if TYPE_CHECKING:
    from rota.service.offline import CompareOptions, RunOptions, SimCosts

TRACE = Annotated[Path, Parameter(help="CSV of jobs: job_id, submit_s, duration_s, gpus, vc.")]
VCS = Annotated[Path, Parameter(help="CSV of tenants: vc, nodes.")]
SCALE = Annotated[float, Parameter(help="Multiplies the nodes of every tenant.")]
PLOTS = Annotated[Path | None, Parameter(help="Folder for drawings (SVG): use, queue, fairness, waits by tenant.")]
SEED = Annotated[int, Parameter(help="Seed of all random choices.")]

NEVER_MAX = 10
"""Jobs that never started, shown as text."""


def run(
    *,
    trace: TRACE | None = None,
    vcs: VCS | None = None,
    log: Annotated[Path | None, Parameter(help="Event log to replay in place of a trace: rota.db, or JSON.")] = None,
    profile: Annotated[str, Parameter(help="Scheduling profile; else fifo for a trace, default for a log.")] = "",
    scale: SCALE = 1.0,
    seed: SEED = 0,
    out_jobs: Annotated[Path | None, Parameter(help="Write a line a job to this CSV.")] = None,
    jobs: Annotated[bool, Parameter(help="Show every job.")] = False,
    plots: PLOTS = None,
    start_s: Annotated[float, Parameter(help="Seconds from its devices to the first work of a job.")] = 0.0,
    checkpoint_s: Annotated[float, Parameter(help="Seconds that saving takes a job.")] = 0.0,
    restore_s: Annotated[float, Parameter(help="Seconds that restoring takes a job after a stop.")] = 0.0,
    sharing_speed: Annotated[float, Parameter(help="Speed of each of two jobs on one device, 1 = alone.")] = 0.5,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Simulate a trace of jobs under a profile, or compare decisions of a recorded log (exit status 1 if some differ).

    Examples
    --------
    rota sim run --trace jobs.csv --vcs tenants.csv --profile pool
    rota sim run --trace jobs.csv --vcs tenants.csv --profile gandiva --checkpoint-s 5 --restore-s 25
    rota sim run --log ~/.local/state/rota/rota.db
    """
    from rota.service.offline import sim_replay, sim_run

    if log is not None:
        if trace is not None or vcs is not None:
            raise BadInput("--log takes the place of --trace and --vcs")
        made_by = profile or "default"
        shown = partial(_replay, profile=made_by)
        return flags.show(lambda: sim_replay(log, made_by), shown, lambda document: document["different"])
    if trace is None or vcs is None:
        raise BadInput("a run needs --trace and --vcs, or --log")
    _positive(scale)
    for flag, seconds in (("start-s", start_s), ("checkpoint-s", checkpoint_s), ("restore-s", restore_s)):
        if not 0 <= seconds < float("inf"):
            raise BadInput(f"--{flag} {seconds:g}: a number of seconds, 0 or more")
    if not 0 < sharing_speed <= 1:
        raise BadInput(f"--sharing-speed {sharing_speed:g}: above 0, at most 1")
    costs: SimCosts = {
        "start_s": start_s,
        "checkpoint_s": checkpoint_s,
        "restore_s": restore_s,
        "sharing_speed": sharing_speed,
    }
    given: RunOptions = {"scale": scale, "seed": seed, "out_jobs": out_jobs, "all_jobs": jobs, "plots": plots}
    ran_by = profile or "fifo"
    return flags.show(lambda: sim_run(trace, vcs, ran_by, costs=costs, **given), partial(_run, jobs=jobs))


def compare(
    *,
    trace: TRACE,
    vcs: VCS,
    profiles: Annotated[str, Parameter(help="Names with commas between; the first is the baseline.")],
    scale: SCALE = 1.0,
    seed: SEED = 0,
    tolerance: Annotated[float, Parameter(help="Seconds a start may be later without counting as later.")] = 0.0,
    plots: PLOTS = None,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Simulate a trace under several profiles and compare them with the first.

    Examples
    --------
    rota sim compare --trace jobs.csv --vcs tenants.csv --profiles private,pool --plots drawings
    """
    from rota.service.offline import sim_compare

    names = [name.strip() for name in profiles.split(",") if name.strip()]
    if not names:
        raise BadInput("--profiles names none", hint="for example private,pool")
    _positive(scale)
    given: CompareOptions = {"scale": scale, "seed": seed, "tolerance_s": tolerance, "plots": plots}
    return flags.show(lambda: sim_compare(trace, vcs, names, **given), _compare)


def fgd(
    *,
    nodes: Annotated[Path, Parameter(help="CSV of nodes: sn, cpu_milli, memory_mib, gpu, model.")],
    pods: Annotated[Path, Parameter(help="CSV of tasks: cpu_milli, memory_mib, num_gpu, gpu_milli, gpu_spec.")],
    policy: Annotated[str, Parameter(help="random, bestfit, dotprod, packing, clustering or fgd.")] = "fgd",
    seed: SEED = 0,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Fill a cluster with tasks until 130 % of its devices were asked; print the allocated part.

    Examples
    --------
    rota sim fgd --nodes nodes.csv --pods tasks.csv --policy bestfit
    """
    from rota.service.offline import sim_fgd

    return flags.show(lambda: sim_fgd(nodes, pods, policy, seed=seed), _fill)


def cases(
    file: Annotated[Path, Parameter(help="JSON file of recorded cases.")],
    *,
    profile: Annotated[str, Parameter(help="auto picks by the form of the file.")] = "auto",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Replay recorded scheduling cases; exits with 1 when some fail. Works in a checkout of the repository alone.

    Examples
    --------
    rota sim cases hived.json --json
    """
    from rota.service.offline import sim_cases

    return flags.show(lambda: sim_cases(file, profile), _cases, lambda document: document["failed"])


def _positive(scale: float) -> None:
    if not 0 < scale <= 10_000:
        raise BadInput(f"--scale {scale:g}: above 0, at most 10000")


def _run(term: Terminal, doc: Mapping[str, Any], *, jobs: bool) -> None:
    summary = doc["summary"]
    term.pairs(
        [
            ("trace", f"{doc['trace']} under {doc['profile']}, scale {amount(doc['scale'])}, seed {doc['seed']}"),
            ("cluster", f"{counted(doc['cluster']['nodes'], 'node')}, {counted(doc['cluster']['gpus'], 'device')}"),
            ("jobs", f"{summary['finished']} of {summary['jobs']} finished"),
            ("  left out", _left_out(summary, doc)),
            ("makespan", lasting(summary["makespan_s"])),
            ("utilisation", _percent(summary["utilisation"])),
            ("preemptions", summary["preemptions"]),
            ("  to move", summary["migrations"]),
            ("  to take turns", summary["turns"]),
            ("resizes", summary["resizes"]),
            ("broken rules", summary["invariant_violations"]),
            ("took", f"{summary['wall_s']:.2f} s"),
        ]
    )
    term.line()
    spreads = [{"": name.removesuffix("_s"), **summary[name]} for name in ("wait_s", "response_s", "jct_s")]
    SPREADS.print(term, spreads)
    term.line()
    TENANTS.print(term, [{"name": name, **one} for name, one in doc["vcs"].items()])
    if jobs:
        term.line()
        JOBS(term, doc)
    _never_started(term, doc["never_started"])


def _never_started(term: Terminal, never: Sequence[Mapping[str, Any]], under: str = "") -> None:
    """The first jobs that no device was found for, and why; ``under`` which profile, where there are several."""
    for one in never[:NEVER_MAX]:
        term.line(f"never started{under}: {one['job_id']} of {one['vc']}: {one['reason']}: {one['text']}")
    if len(never) > NEVER_MAX:
        term.line(f"never started{under}: {len(never) - NEVER_MAX} more; see --json")


def _left_out(summary: Mapping[str, Any], doc: Mapping[str, Any]) -> str:
    """How many jobs were not played, and whose; empty for none."""
    lacks = f"{counted(summary['skipped'], 'job')} of tenants that the file of tenants lacks: "
    return lacks + shortened(doc["unknown_tenants"], 8) if summary["skipped"] else ""


def _spread(field: str, name: str) -> Callable[[Any], str]:
    """A cell: one figure of the spread of a field in seconds."""
    return lambda one: _seconds(one[field], name)


SPREADS = Table(
    columns={
        "": "",
        **{
            name.upper(): lambda one, name=name: lasting(one.get(name)) if one.get(name) is not None else ""
            for name in ("mean", "p50", "p95", "p99", "max")
        },
    }
)
TENANTS = Table(
    columns={
        "TENANT": "name",
        "JOBS": "jobs",
        "WAIT": _spread("wait_s", "mean"),
        "JCT": _spread("jct_s", "mean"),
        "DEVICE HOURS": lambda one: f"{one['used_gpu_s'] / 3600:.1f}",
        "BORROWED HOURS": lambda one: f"{one['borrowed_gpu_s'] / 3600:.1f}",
    }
)
JOBS = Table(
    columns={
        "JOB": "job_id",
        "TENANT": "vc",
        "GPUS": lambda one: amount(one["gpus"]),
        "STATE": "state",
        "SUBMITTED": lambda one: lasting(one["submit_s"]),
        "WAIT": lambda one: lasting(one["wait_s"]),
        "JCT": lambda one: lasting(one["jct_s"]),
        "PREEMPTIONS": "preemptions",
    },
    rows=lambda doc: doc["jobs"],
)
COMPARED = Table(
    columns={
        "PROFILE": "profile",
        "DONE": lambda one: f"{one['summary']['finished']} of {one['summary']['jobs']}",
        "WAIT MEAN": lambda one: _seconds(one["summary"]["wait_s"], "mean"),
        "WAIT P99": lambda one: _seconds(one["summary"]["wait_s"], "p99"),
        "JCT MEAN": lambda one: _seconds(one["summary"]["jct_s"], "mean"),
        "UTILISATION": lambda one: _percent(one["summary"]["utilisation"]),
        "LATER": lambda one: one["vs_baseline"]["later_jobs"],
        "LATER GUARANTEED": lambda one: one["vs_baseline"]["later_guaranteed"],
        "EARLIER": lambda one: one["vs_baseline"]["earlier_jobs"],
    },
    extra=("UTILISATION", "LATER GUARANTEED", "WAIT P99"),
)
FILL = Table(
    columns={"ASKED %": lambda one: one[0], "GIVEN %": lambda one: f"{one[1]:.2f}"},
    rows=lambda doc: doc["allocation_percent"].items(),
)


def _replay(term: Terminal, doc: Mapping[str, Any], *, profile: str) -> None:
    decided = f"{doc['same']} of {counted(doc['decisions'], 'decision')} the same under {profile}"
    term.line(f"{decided}, in {counted(doc['records'], 'record')}")
    for one in doc["different"]:
        here = "; ".join(map(_decision_text, one["here"])) or "no decision"
        term.line(f"{one['number']} {one['job']}: recorded {_decision_text(one['recorded'])}, here {here}")


def _decision_text(event: Mapping[str, Any]) -> str:
    """The kind of a decision with what two of one kind differ by: reason, gang, job for which it stops, places."""
    words = [event["kind"], *(event.get(key) or "" for key in ("reason", "gang"))]
    words.append(f"for {event['for_job']}" if event.get("for_job") else "")
    gangs = event["placement"]["gangs"] if "placement" in event else [event] if "bundles" in event else []
    bundles = [one for gang in gangs for one in gang["bundles"]]
    places = [f"{one['node']}:{','.join(map(str, one['devices']))}".rstrip(":") for one in bundles]
    return " ".join(filter(None, [*words, *places]))


def _seconds(spread: Mapping[str, Any], name: str) -> str:
    return lasting(spread.get(name)) if spread.get(name) is not None else ""


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.1f}%"


def _compare(term: Terminal, doc: Mapping[str, Any]) -> None:
    label = {doc["baseline"]: f"{doc['baseline']} (baseline)"}
    COMPARED.print(term, [{"profile": label.get(name, name), **one} for name, one in doc["profiles"].items()])
    for name, one in doc["profiles"].items():
        _never_started(term, one["never_started"], f" under {name}")
    if left_out := _left_out(doc["profiles"][doc["baseline"]]["summary"], doc):
        term.line(f"left out: {left_out}")


def _cases(term: Terminal, doc: Mapping[str, Any]) -> None:
    for case in doc["cases"]:
        if not case["ok"]:
            term.line(f"failed {case['id']}: {case['why']}")
    term.line(f"{doc['passed']} passed, {doc['failed']} failed")


def _fill(term: Terminal, doc: Mapping[str, Any]) -> None:
    term.line(f"{doc['policy']}, seed {doc['seed']}: {counted(doc['nodes'], 'node')}, {counted(doc['gpus'], 'device')}")
    term.line(f"{doc['arrived']} tasks, {doc['dropped']} dropped, {doc['tasks_per_s'] or 0:.0f} a second")
    FILL(term, doc)
