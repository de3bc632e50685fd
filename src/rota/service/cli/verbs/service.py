"""rota up, down, join, leave, status, backup, restore, doctor, demo: the service of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from rota.service import local
from rota.service.cli.flags import DEFAULT_FLAGS, Flags, confirm
from rota.service.cli.output import Table, Terminal
from rota.service.cli.verbs.formatting import age
from rota.spec.errors import BadInput, Conflict, NotReachable
from rota.spec.resources import counted

if TYPE_CHECKING:
    from rota.service.config import Settings

DOWN = 3
"""Exit status of ``status`` when the service does not answer."""


def up(
    *,
    host: Annotated[str, Parameter(help="Address to listen on; default: this machine only.")] = "",
    port: Annotated[int | None, Parameter(help="Port; default 7700, 0 takes a free one.")] = None,
    db: Annotated[str, Parameter(help="Database URL; default: SQLite in $ROTA_HOME.")] = "",
    redis: Annotated[str, Parameter(help="Registry URL; default: an embedded one.")] = "",
    ray: Annotated[str, Parameter(help="Address of a Ray cluster; default: a local one with the first job.")] = "",
    listen: Annotated[
        str, Parameter(help="Address at which other machines reach this one, so that they can join.")
    ] = "",
    pretend: Annotated[
        str,
        Parameter(help="Schedule on RACKSxNODESxDEVICES pretend nodes (3x4x8); kept by later 'up's; 'none' ends that."),
    ] = "",
    profile: Annotated[
        str,
        Parameter(alias="--policy", help="Scheduling profile, as `rota sim compare` names them; kept by later 'up's."),
    ] = "",
    foreground: Annotated[bool, Parameter(help="Stay here until Ctrl-C.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Start the service of this machine, or find the one that runs.

    Examples
    --------
    rota up

    rota up --pretend 3x4x8

    rota up --listen 10.0.0.5
    """
    given = {"host": host, "port": port, "db_url": db, "redis_url": redis, "ray_address": ray, "pretend": pretend}
    settings = flags.settings(**given, listen=listen, profile=profile)
    terminal = flags.terminal()
    if foreground:
        terminal.note(f"serving {settings.home}; Ctrl-C ends it")
        local.serve(settings)
        return 0
    document = local.up(settings)
    if not document["started"]:
        _refuse_other(flags, settings)
    terminal.show(document, lambda term: _status(term, document))
    return 0


def _refuse_other(flags: Flags, settings: Settings) -> None:
    """Raise Conflict for a flag that the service which runs was not started with: it would be dropped in silence."""
    with flags.client() as client:
        runs = {one["name"]: one["value"] for one in client.settings()["items"]}
    for one in settings.document()["items"]:
        name, value = one["name"], one["value"]
        if one["origin"] == "flag" and name not in ("server", "token", "pretend") and value != runs.get(name):
            has = f"the service runs already with {name}={runs.get(name)}"
            raise Conflict(f"{has}; {name}={value} is not applied", hint="rota down, then rota up again with it")


def down(
    *,
    jobs: Annotated[str, Parameter(help="leave: they continue at the next 'up'; cancel: stop all, of all users.")] = (
        "leave"
    ),
    yes: Annotated[bool, Parameter(help="Cancel without a prompt.")] = False,
    force: Annotated[bool, Parameter(help="Wait for no job to save; state that is in memory alone is lost.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """End the service of this machine with everything it started; on a machine that joined another, leave that.

    Jobs that wait stay in the queue; those that run save, stop and are queued again. The next 'rota up'
    continues each from its last commit, or from the beginning without one.

    Examples
    --------
    rota down

    rota down --jobs cancel --yes
    """
    if jobs not in ("leave", "cancel", "stop"):  # stop is the older name of cancel
        raise BadInput(f"--jobs {jobs}: expected leave or cancel")
    terminal, settings, cancel = flags.terminal(), flags.settings(), jobs != "leave"
    if local.has_joined(settings):
        return leave(force=force, flags=flags)
    if cancel and force:
        raise BadInput(f"--force asks no job to end, --jobs {jobs} asks all", hint="leave one of them out")
    if users := local.live_by_user(settings) if cancel else {}:
        of_users = ", ".join(f"{n} of {name}" for name, n in sorted(users.items(), key=lambda one: (-one[1], one[0])))
        confirm(f"cancel {counted(sum(users.values()), 'job')} ({of_users})", yes=yes)
        terminal.note(f"cancelling {counted(sum(users.values()), 'job')} ({of_users}) ...")
    left = local.live_in_log(settings) if cancel and not users else {}
    document = local.down(settings, cancel=cancel, force=force)
    document["left_jobs"] = document["left_jobs"] or left
    terminal.show(document, lambda term: term.line(_ended(document)))
    if left:
        terminal.note("no job was cancelled, as no service runs; first: rota up")
    return 0 if document["state"] == "down" and not left else 1


def _ended(document: Mapping[str, Any]) -> str:
    parts = [f"{document['state']}: {', '.join(document['ended']) or 'nothing was running'}"]
    if document["stopped_jobs"]:
        parts.append(f"cancelled {counted(len(document['stopped_jobs']), 'job')}")
    if left := sum(document["left_jobs"].values()):
        then = "from its last commit, or from the beginning without one"
        parts.append(f"{counted(left, 'job')} left; the next 'rota up' continues each {then}")
    if document["still_running"]:
        parts.append(f"still running: {', '.join(f'process {pid}' for pid in document['still_running'])}")
    return "; ".join([*parts, *filter(None, [document["text"]])])


def join(
    address: Annotated[str, Parameter(help="HOST or HOST:PORT of the service, on the machine of 'rota up --listen'.")],
    *,
    name: Annotated[str, Parameter(help="Name of this machine; default: its host name.")] = "",
    cpus: Annotated[int | None, Parameter(help="Cores that jobs may ask for; default: all.")] = None,
    gpus: Annotated[int | None, Parameter(help="Devices that jobs may use; default: all.")] = None,
    label: Annotated[list[str] | None, Parameter(help="KEY=VALUE, for example rack=r1; may be repeated.")] = None,
    at: Annotated[str, Parameter(help="Address of this machine for others; default: that of the route there.")] = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Make this machine a part of the installation at an address. 'rota leave' ends that.

    It starts the engine, the tensor registry and an agent that keeps both. Python, Ray and Rota must have the versions
    of the installation. The token is one that may do nothing else: 'rota token create --role machine'.

    Examples
    --------
    rota join 10.0.0.5 --token rota_...

    rota join head:7700 --label rack=r1 --label zone=a
    """
    settings = flags.settings()
    given = {"name": name, "cpus": cpus, "gpus": gpus, "labels": label or (), "at": at}
    return flags.show(lambda: local.join(settings, address, **given), _joined)


def leave(
    *,
    force: Annotated[bool, Parameter(help="Do not notify the service.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """End what 'rota join' started on this machine, with what jobs run here: they continue elsewhere.

    To move the jobs first, at a commit: rota nodes drain NODE.

    Examples
    --------
    rota leave
    """
    return flags.show(
        lambda: local.leave(flags.settings(), force=force), _joined, lambda done: done["state"] == "stuck"
    )


def _joined(term: Terminal, document: Mapping[str, Any]) -> None:
    parts = [document["text"] or f"{document['host']} left {document['url']}"]
    parts += [f"ended: {', '.join(document['ended'])}"] if document["ended"] else []
    parts += [f"still running: process {pid}" for pid in document["still_running"]]
    term.line("; ".join(parts))


def status(
    *,
    settings: Annotated[bool, Parameter(help="Show every setting and where it came from.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show whether the service answers, and how its parts are.

    Exits with 3 when the service does not answer.

    Examples
    --------
    rota status --settings
    """
    terminal = flags.terminal()
    known = flags.settings()
    if settings:
        document = _settings(flags, terminal)
        terminal.show(document, lambda term: SETTINGS(term, document))
        return 0
    from rota.service.http import find_service

    if not find_service(flags.server, flags.token).local:
        with flags.client() as client:
            document = client.status()
    else:
        document = local.status(known)
    terminal.show(document, lambda term: _status(term, document))
    if document["state"] == "down":
        terminal.note(f"no Rota service runs for {document['home']}; start it: rota up")
        return DOWN
    return 0


def _settings(flags: Flags, terminal: Terminal) -> Mapping[str, Any]:
    """Those of the service that runs, else those that one would start with."""
    with flags.client() as client:
        try:
            return client.settings()
        except NotReachable:
            terminal.note("no service answers; it would start with these")
    return flags.settings().document()


SETTINGS = Table(columns={"SETTING": "name", "VALUE": "value", "FROM": "origin"})


def _status(term: Terminal, doc: Mapping[str, Any]) -> None:
    cluster = doc.get("cluster") or {}
    jobs = ", ".join(f"{count} {state}" for state, count in (cluster.get("jobs") or {}).items())
    kept = doc.get("next_pretend")
    term.pairs(
        [
            ("service", doc["state"] + (f" for {age(doc['started_at'])}" if doc.get("started_at") else "")),
            ("address", doc.get("url")),
            ("page", doc.get("login")),
            ("home", doc.get("home")),
            ("version", doc.get("version")),
            ("profile", doc.get("profile")),
            ("nodes", _nodes(doc, cluster)),
            ("next up", f"with --pretend {kept} again; --pretend none returns to this machine" if kept else ""),
            ("stores", ", ".join(f"{name}:/ is {url}" for name, url in (doc.get("stores") or {}).items())),
            ("jobs", jobs),
            ("still running", ", ".join(map(str, doc.get("still_running", [])))),
        ]
    )
    for name, part in (doc.get("parts") or {}).items():
        if isinstance(part, dict):
            term.line(f"  {name}: {part.get('state')}" + (f"  {part['text']}" if part.get("text") else ""))
    for warning in doc.get("warnings", ()):
        term.note(f"warning: {warning}")


def _nodes(doc: Mapping[str, Any], cluster: Mapping[str, Any]) -> str:
    if not cluster:
        return ""
    keeps = "'rota up' keeps them, --pretend none returns to this machine"
    pretend = f", pretend {doc['pretend']} ({keeps})" if doc.get("pretend") else ""
    return f"{cluster['nodes']}, {cluster['gpus_used']}/{cluster['gpus']} devices used{pretend}"


def backup(
    out: Annotated[Path, Parameter(help="The file to write, for example rota.tar.gz.")],
    *,
    no_jobs: Annotated[bool, Parameter(help="Without logs and output of jobs.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Write everything that this installation knows into one file; the service may run meanwhile.

    It holds the token and the key of the secrets: keep it as safe as the installation itself.

    Examples
    --------
    rota backup rota-2026-01-31.tar.gz
    """
    document = local.back_up(flags.settings(), out, jobs=not no_jobs)
    text = f"{document['file']}: {_kept(document)}"
    flags.terminal().show(document, lambda term: term.line(text))
    return 0


def _kept(document: Mapping[str, Any]) -> str:
    return f"{counted(document['records'], 'record')}, {counted(document['files'], 'file')}"


def restore(
    source: Annotated[Path, Parameter(help="A file of 'rota backup'.")],
    *,
    db: Annotated[str, Parameter(help="Database URL; default: SQLite in $ROTA_HOME.")] = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Fill an empty installation from a back-up, on the same kind of database or the other one.

    Examples
    --------
    ROTA_HOME=/srv/rota rota restore rota-2026-01-31.tar.gz
    """
    document = local.restore(flags.settings(db_url=db), source)
    nodes = f" (with the pretend nodes {document['pretend']})" if document["pretend"] else ""
    text = f"{document['home']}: {_kept(document)}; start it: rota up{nodes}"
    terminal = flags.terminal()
    terminal.show(document, lambda term: term.line(text))
    if jobs := document["jobs"]:
        terminal.note(f"The next 'rota up' here continues {counted(jobs, 'job')} of the back-up.")
        terminal.note("If the installation of the back-up still runs, end it first (rota down), or they run twice.")
    return 0


def doctor(
    *,
    fix: Annotated[bool, Parameter(help="Repair what can be repaired without harm.")] = False,
    nodes: Annotated[bool, Parameter(help="Check the machines of the installation and each pair of them.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Check this machine and this installation, and say what to do; exits with 1 when something fails.

    Examples
    --------
    rota doctor --fix

    rota doctor --nodes
    """
    if nodes:
        with flags.client() as client:
            return flags.show(client.check_nodes, _pairs_report, lambda found: found["mark"] == "fail")
    return flags.show(
        lambda: local.examine(flags.settings(), fix=fix), _report, lambda report: report["mark"] == "fail"
    )


def _pairs_report(term: Terminal, doc: Mapping[str, Any]) -> None:
    MACHINES(term, doc)
    if doc["pairs"]:
        PAIRS(term, doc)
    for one in doc["items"]:
        term.line(f"{'FAIL' if one['mark'] == 'fail' else 'WARN'}  {one['name']}: {one['fact']}")
        term.line(f"      {one['remedy']}")
    if not doc["items"]:
        term.line("ok: names, clocks, ports and versions agree")


def _version_cell(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda one: one["versions"].get(name) or ""


MACHINES = Table(
    columns={
        "NODE": "node",
        "ADDRESS": "address",
        "PYTHON": _version_cell("python"),
        "TORCH": _version_cell("torch"),
        "RAY": _version_cell("ray"),
        "ROTA": _version_cell("rota"),
    },
    rows=lambda doc: doc["machines"],
)
PAIRS = Table(
    columns={
        "FROM": "source",
        "TO": "target",
        "NAME": lambda one: "yes" if one["resolves"] else "no",
        "LATENCY": lambda one: "" if one["latency_s"] is None else f"{one['latency_s'] * 1e3:.2f} ms",
        "CLOCK": lambda one: "" if one["skew_s"] is None else f"{one['skew_s'] * 1e3:+.1f} ms",
        "BANDWIDTH": lambda one: "" if one["bytes_per_s"] is None else f"{one['bytes_per_s'] / 1e6:.0f} MB/s",
        "ERROR": "error",
    },
    rows=lambda doc: doc["pairs"],
    extra=("ERROR",),
)


def _report(term: Terminal, report: Mapping[str, Any]) -> None:
    for done in report["fixed"]:
        term.line(f"fixed: {done}")
    signs = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}
    width = max(len(item["name"]) for item in report["items"])
    for item in report["items"]:
        term.line(f"{signs[item['mark']]}  {item['name']:<{width}}  {item['fact']}")
        if item["remedy"]:
            term.line(f"{'':<{width + 8}}{item['remedy']}")


HOMES = Table(
    columns={"HOME": "home", "ENDED": lambda one: ", ".join(one["ended"]), "LEFT": "still_running"},
    empty="no demo left anything",
)


def demo(
    *,
    out: Annotated[Path, Parameter(help="Folder of the report.")] = Path("rota-demo-report"),
    keep: Annotated[bool, Parameter(help="Leave the service running at the end.")] = False,
    clean: Annotated[bool, Parameter(help="Only remove what earlier demos left: services, folders.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Train a small model, kill a rollout, an actor rank and the master, and show how the job heals.

    It uses a service of its own, ends within 8 minutes on two cores and leaves nothing running. Exits with 0 only when
    every kill healed, each commit is in the log once, and the reward rose.

    Examples
    --------
    rota demo --out report

    rota demo --clean
    """
    if clean:
        return flags.show(local.clean_demos, HOMES, lambda found: any(one["still_running"] for one in found["items"]))
    terminal = flags.terminal()
    outcome, document = local.play_demo(out, terminal.note if terminal.json else terminal.line, keep=keep)
    for problem in outcome.problems:
        terminal.note(f"problem: {problem}")
    verdict = "all kills healed" if not outcome.problems else counted(len(outcome.problems), "problem")
    terminal.show(document, lambda term: term.line(f"{verdict}; the whole demo took {outcome.seconds} s"))
    return 0 if not outcome.problems else 1
