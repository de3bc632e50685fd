"""rota run and clone: check, plan or submit a job, and follow it to its end."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from rota.service.cli.flags import DEFAULT_FLAGS, JOB, Flags
from rota.service.cli.output import Table, Terminal
from rota.service.cli.shell import INTERRUPTED
from rota.service.cli.verbs.formatting import ReplicaRange, ago_s, lasting, replicas, resources, shortened
from rota.service.cli.verbs.live import JobWatch, Ticker, elapsed, live_line
from rota.service.cli.verbs.logs import log_text
from rota.service.cli.verbs.sweep import NO_SWEEP, POINTS, SweepFlags, SweepPlan, plan_sweep, run_sweep
from rota.service.cli.verbs.terminal import shell_job, shell_source
from rota.service.jobfile.problems import Problem
from rota.service.local import up as start_service
from rota.spec.check import SIZES_HINT, unenforced
from rota.spec.errors import BadInput, JobFileError, NotReachable, RotaError, did_you_mean
from rota.spec.resources import counted
from rota.spec.states import JobState
from rota.spec.torchrun import script_of

if TYPE_CHECKING:
    from rota.service.api import JobText
    from rota.service.client import Client
    from rota.service.models.jobs import JobDocument
    from rota.spec.check import Finding
    from rota.spec.job import JobSpec

T = TypeVar("T")
LOOK_S = 1.0
"""How long ``--check`` waits for the queues of a service that was not named, in seconds."""
SCRIPTS = (".sh", ".sbatch", ".slurm")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ChangeFlags:
    """The flags of ``rota run`` that change what the job file says."""

    set_: Annotated[list[str] | None, Parameter(name="--set", help="path=value over the file; repeatable.")] = None
    name: Annotated[str, Parameter(name=["-n", "--name"], help="Name of the job.")] = ""
    queue: Annotated[str, Parameter(name=["-q", "--queue"], help="Queue.")] = ""
    priority: Annotated[int | None, Parameter(name=["-p", "--priority"], help="-1 to 100.")] = None
    time_limit: Annotated[str, Parameter(name=["-t", "--time"], help="Hard end, for example 2h.")] = ""
    after: Annotated[list[str] | None, Parameter(help="Job (id or name) to start after; JOB:ended; repeatable.")] = None
    cpus: Annotated[str, Parameter(help="Cores of one instance, for a single role.")] = ""
    gpus: Annotated[str, Parameter(help="Devices of one instance, for a single role.")] = ""
    memory: Annotated[str, Parameter(help="Memory of one instance, for a single role.")] = ""
    env: Annotated[list[str] | None, Parameter(name=["-e", "--env"], help="K=V; repeatable.")] = None

    @property
    def resources(self) -> dict[str, str]:
        """Resources of the only role of the job, as given by flags."""
        return {"cpus": self.cpus, "gpus": self.gpus, "memory": self.memory}

    def sets(self) -> dict[str, str]:
        """The others as ``--set`` values, the short flags first; each with the flag that it came by."""
        number = "" if self.priority is None else str(self.priority)
        short = [
            *(("name", self.name, "-n"), ("queue", self.queue, "-q"), ("priority", number, "-p")),
            ("time_limit", self.time_limit, "-t"),
        ]
        made = {f"{path}={value}": f"{flag} {value}" for path, value, flag in short if value}
        if self.after:
            made[f"after={json.dumps(self.after)}"] = f"--after {' --after '.join(self.after)}"
        made |= {f"env.{pair}": f"-e {pair}" for pair in _variables(self.env).values()}
        return made | {text: f"--set #{number}" for number, text in enumerate(self.set_ or (), 1)}


NO_CHANGES = ChangeFlags()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WaitFlags:
    """The flags of ``rota run`` and ``rota clone`` that say how long they stay with the job."""

    detach: Annotated[bool, Parameter(name=["-d", "--detach"], help="Return as soon as it is submitted.")] = False
    wait: Annotated[bool, Parameter(name=["-w", "--wait"], help="Wait for the end without showing logs.")] = False
    timeout: Annotated[str, Parameter(help="With waiting: give up after this long (exit 5); the job runs on.")] = ""

    def given(self) -> dict[str, object]:
        """Their values by their names."""
        return {"-d": self.detach, "-w": self.wait, "--timeout": self.timeout}

    def follow(self, terminal: Terminal) -> tuple[bool, float | None]:
        """Whether the output is followed, and for how many seconds at most. Raises BadInput if nothing waits."""
        timeout_s = ago_s(self.timeout)
        follows = terminal.live and not self.detach and not terminal.json and not self.wait
        if self.timeout and not (follows or self.wait):
            raise BadInput(f"--timeout {self.timeout} is how long to wait, and nothing waits", hint="add -w")
        return follows, timeout_s


NO_WAIT = WaitFlags()


def run(
    file: Annotated[str, Parameter(help="Job file (YAML, JSON; '-' is stdin) or shell script.")] = "",
    *,
    argv: Annotated[list[str] | None, Parameter(show=False)] = None,
    changes: ChangeFlags = NO_CHANGES,
    workdir: Annotated[str, Parameter(help="Where relative paths and imports start; default: the file's folder.")] = "",
    check: Annotated[bool, Parameter(help="Only report every mistake of the file, its queue and workloads.")] = False,
    dry_run: Annotated[bool, Parameter(help="Show roles, gangs, placement and blast radius; start nothing.")] = False,
    pretend: Annotated[str, Parameter(help="With --dry-run: plan on RACKSxNODESxDEVICES instead.")] = "",
    ignore_image: Annotated[bool, Parameter(help="Run a job that names an image without it.")] = False,
    waits: WaitFlags = NO_WAIT,
    shell: Annotated[bool, Parameter(help="A job with a terminal, which ends with its shell or command.")] = False,
    sweep: SweepFlags = NO_SWEEP,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Run a job file, or a command.

    On a terminal it follows the output and exits as the job ends; Ctrl-C detaches and the job runs on. Elsewhere it
    returns once the job is durable. The service of this machine is started if none answers.

    With --sweep it runs the job once for each point. The same command again continues the sweep: no job is repeated.

    Examples
    --------
    rota run job.yaml --set roles.trainer.replicas=4

    rota run -n hello -- python -c "print('hello')"

    rota run --shell --gpus 1 --memory 16GiB

    rota run job.yaml --sweep lr=1e-4,3e-4 --sweep seed=1..5 --metric loss
    """
    _check_workdir(workdir, flags)
    sets = changes.sets()
    body = _body(file, ["sh"] if shell else argv, sets, changes.resources, workdir, ignore_image)
    if shell:
        body["source"] = shell_source({**waits.given(), "--sweep": sweep != NO_SWEEP})
    terminal, wait = flags.terminal(), waits.wait
    follow, timeout_s = waits.follow(terminal)  # every mistake is reported before anything is started
    headers = _headers(file)
    spec = _as_given(sets, lambda: _in_all_roles(changes.env, body, sets, _read(body, flags), flags), headers)
    plan = None if sweep == NO_SWEEP else _as_given(sets, lambda: plan_sweep(sweep, body, spec), headers)
    _note(terminal, _missing_scripts(flags, spec, body["workdir"]))
    if check:
        return _as_given(sets, lambda: _check(flags, terminal, body, spec), headers)
    if dry_run and plan is not None:
        return flags.show(plan.document, POINTS)
    if dry_run:
        return flags.show(lambda: _plan(flags, terminal, body, pretend), _plan_table)
    if pretend:
        raise BadInput("--pretend goes with --dry-run", hint="for a pretend cluster that runs: rota up --pretend 3x4x8")
    with _client(flags, terminal) as client:
        if plan is not None:
            return _sweep(client, terminal, plan, wait=wait or follow, detach=waits.detach, timeout_s=timeout_s)
        handle = _as_given(sets, lambda: client.submit(body), headers)
        terminal.note(f"{handle['id']} submitted  {handle.get('url', '')}")
        _note(terminal, unenforced(spec) if ignore_image else ())
        if shell:
            return shell_job(flags, client, handle["id"], argv or ())
        return _watched(flags, client, handle, follow=follow, wait=wait, timeout_s=timeout_s)


def _check_workdir(workdir: str, flags: Flags) -> None:
    """Raises BadInput for a folder that is not here, unless the service is on another machine."""
    if workdir and not Path(workdir).expanduser().is_dir():
        from rota.service.http import find_service

        if find_service(flags.server, flags.token).local:
            raise BadInput(f"--workdir {workdir}: no such folder", hint="give the folder of the code")


def _note(terminal: Terminal, notes: Iterable[str]) -> None:
    for note in notes:
        terminal.note(f"note: {note}")


def _missing_scripts(flags: Flags, spec: JobSpec, workdir: str) -> Iterator[str]:
    """The scripts that roles run and this machine does not have now, unless the service is on another one."""
    from rota.service.http import find_service

    folder = Path(workdir) / (spec.workdir or "")
    scripts = {role.name: script_of(role.run, shell=role.shell) for role in spec.roles if role.run}
    if not folder.is_dir() or not find_service(flags.server, flags.token).local:
        return
    for name, script in scripts.items():
        if script and not os.path.lexists(folder / script):
            near = did_you_mean(Path(script).name, (one.name for one in (folder / script).parent.glob("*.py")))
            yield f"roles.{name}.run: {folder} has no {script}; {near or 'it has to be there when the job starts'}"


def _watched(
    flags: Flags, client: Client, handle: JobDocument, *, follow: bool, wait: bool, timeout_s: float | None
) -> int:
    """Follow a job that was submitted, wait for it, or print its id."""
    terminal = flags.terminal()
    if follow or wait:
        with flags.client() as other:
            watch = JobWatch(other, handle["id"])
            return _to_the_end(client, terminal, watch, handle["id"], follow=follow, timeout_s=timeout_s)
    terminal.show(handle, lambda term: term.line(handle["id"]))
    return 0


def clone(
    job: JOB,
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set", help="path=value over the job; repeatable.")] = None,
    name: Annotated[str, Parameter(name=["-n", "--name"], help="Name of the new job.")] = "",
    ignore_image: Annotated[bool, Parameter(help="Run a job that names an image without it.")] = False,
    waits: WaitFlags = NO_WAIT,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Submit a job again as it is now, live or ended, with changes. The copy begins anew, without its commits.

    Examples
    --------
    rota clone hello-1

    rota clone hello-1 --set roles.main.resources.gpus=1 -n smaller
    """
    terminal = flags.terminal()
    changes = ChangeFlags(set_=set_, name=name).sets()
    follow, timeout_s = waits.follow(terminal)
    with flags.client() as client:
        made = _as_given(changes, lambda: client.clone(job, set=[*changes], ignore_image=ignore_image))
        terminal.note(f"{made.id} submitted  {made.document['url']}")
        return _watched(flags, client, made.document, follow=follow, wait=waits.wait, timeout_s=timeout_s)


def _sweep(
    client: Client, terminal: Terminal, plan: SweepPlan, *, wait: bool, detach: bool, timeout_s: float | None
) -> int:
    if plan.budget and detach:
        hint = "leave out -d: after Ctrl-C, or a kill, the same command continues it"
        raise BadInput(f"--budget {plan.budget}: each rung waits for the one before", hint=hint)
    return run_sweep(client, terminal, plan, wait=wait or bool(plan.budget), timeout_s=timeout_s)


def _variables(env: Iterable[str] | None) -> dict[str, str]:
    """What ``-e`` gave, by the name of the variable. Raises BadInput for what is not K=V."""
    found: dict[str, str] = {}
    for pair in env or ():
        key, equals, _ = pair.partition("=")
        if not equals or not key:
            raise BadInput(f"-e {pair}: not K=V")
        found[key] = pair
    return found


def _in_all_roles(
    env: Iterable[str] | None, body: JobText, changes: dict[str, str], spec: JobSpec, flags: Flags
) -> JobSpec:
    """The job with ``-e`` in every role, also over the ``env`` of the role; a ``--set`` of that comes later."""
    pairs = _variables(env)
    given = [(role.name, pairs[key]) for role in spec.roles for key, _ in role.env if key in pairs]
    if not given:
        return spec
    over = {f"roles.{name}.env.{pair}": f"-e {pair}" for name, pair in given}
    changes |= over
    body["sets"] = [*over, *body["sets"]]
    return _read(body, flags)


def _body(
    file: str, argv: list[str] | None, changes: dict[str, str], res: Mapping[str, str], workdir: str, ignore_image: bool
) -> JobText:
    """The text of the job with its changes; ``changes`` get those of ``res``, with the flag that each came by."""
    body = _text(file, argv, [*changes], res, workdir)
    flag_of = {f".resources.{key}={value}": f"--{key} {value}" for key, value in res.items() if value}
    changes |= {one: flag for one in body["sets"] for tail, flag in flag_of.items() if one.endswith(tail)}
    return {**body, "ignore_image": True} if ignore_image else body


def _text(file: str, argv: list[str] | None, changes: list[str], res: Mapping[str, str], workdir: str) -> JobText:
    if argv and file:
        raise BadInput("give a job file or a command after '--', not both")
    if not argv and not file:
        raise BadInput("missing job file or command", hint="rota run job.yaml, or rota run -- python train.py")
    folder = str(Path(workdir).expanduser().absolute()) if workdir else ""
    if argv:
        from rota.service.api import command_of

        if len(argv) == 1 and set(argv[0].strip()) & set(" |;&<>") and shutil.which(argv[0]) is None:
            hint = f"rota run -- sh -c {shlex.quote(argv[0])}"
            raise BadInput(f"{argv[0]!r} is one word, not a program with arguments", hint=hint)
        return command_of(argv, sets=changes, res=res, workdir=folder)
    if file == "-":
        source, name, base = sys.stdin.read(), "stdin", Path.cwd()
    else:
        path = Path(file).expanduser()
        from rota.service.api import read_file

        if path.suffix == ".py" or path.suffix == ".ipynb":
            raise BadInput(f"{file} is not a job file", hint=f"rota run -- python {file}")
        if not path.exists() and shutil.which(file) is not None:
            raise BadInput(f"{file} is a program, not a job file", hint=f"rota run -- {file}")
        source, name, base = read_file(path), file, path.absolute().parent
        if path.suffix in SCRIPTS:
            from rota.service.jobfile.scripts import script_body

            made = script_body(source, filename=file, workdir=folder or str(base))
            return {**made, "sets": [*made["sets"], *changes, *_for_main(res)]}
    given = [f"roles.{_only_role(source, name)}.resources.{key}={value}" for key, value in res.items() if value]
    return {"source": source, "filename": name, "sets": changes + given, "workdir": folder or str(base)}


def _headers(file: str) -> dict[str, Problem]:
    """Where each ``--set`` that the head of a script means is in the script, as a problem without words."""
    if Path(file).suffix not in SCRIPTS:
        return {}
    from rota.service.api import read_file
    from rota.service.jobfile.scripts import header_places

    text = read_file(Path(file).expanduser())
    lines = text.splitlines()
    return {
        one: Problem(loc="", line=line, col=col, message="", file=file, source=lines[line - 1])
        for one, (line, col) in header_places(text).items()
    }


def _for_main(res: Mapping[str, str]) -> list[str]:
    return [f"roles.main.resources.{key}={value}" for key, value in res.items() if value]


def _only_role(source: str, name: str) -> str:
    from rota.service.jobfile.reader import read_job

    roles = read_job(source, filename=name).roles
    if len(roles) != 1:
        raise BadInput(
            f"{name} has {len(roles)} roles; --cpus, --gpus and --memory are for one",
            hint="--set roles.NAME.resources.gpus=2",
        )
    return roles[0].name


def _read(body: JobText, flags: Flags) -> JobSpec:
    """The job of the file. Where it has mistakes, that of its queue is one, if a service answers."""
    from rota.service.jobfile.reader import read_job
    from rota.service.offline import queue_fault

    def of_queue(path: str) -> Finding | None:
        with suppress(RotaError), _looking(flags) as client:
            return queue_fault(client, path)
        return None

    return read_job(body["source"], filename=body["filename"], sets=body["sets"], find_queue=of_queue)


def _looking(flags: Flags) -> Client:
    """A client that waits for no service of this home for long."""
    from rota.service.client import Client

    return flags.client() if flags.server else Client(token=flags.token, timeout_s=LOOK_S)


def _as_given(changes: Mapping[str, str], ask: Callable[[], T], headers: Mapping[str, Problem] | None = None) -> T:
    """What ``ask`` gives; an error in a flag names the flag as it was given, one in the head of a script its line."""
    try:
        return ask()
    except JobFileError as exc:
        shown = tuple(_flag_text(one, changes, headers or {}) for one in exc.problems)
        raise JobFileError(shown, hint=exc.hint, **exc.fields) from None


def _flag_text(problem: Problem, changes: Mapping[str, str], headers: Mapping[str, Problem]) -> Problem:
    header = headers.get(problem.source) if problem.file.startswith("--set") else None
    if header is not None and problem.source not in changes:
        return replace(problem, file=header.file, line=header.line, col=header.col, source=header.source)
    flag = changes.get(problem.source, "") if problem.file.startswith("--set") else ""
    if not flag or flag.startswith("--set"):
        return replace(problem, file=flag or problem.file)
    return replace(problem, file=flag, line=0)  # the text behind a short flag is ours: a place in it says nothing


def _client(flags: Flags, terminal: Terminal) -> Client:
    """A client of a service that answers; the local one is started when it does not."""
    client = flags.client()
    try:
        client.status()
    except NotReachable:
        client.close()
        from rota.service.http import find_service

        settings = flags.settings()
        if not find_service(flags.server, flags.token).local:
            raise

        terminal.note("starting the service of this machine ...")
        with Ticker(live_line(terminal), elapsed("starting the service")):
            start_service(settings)
        return flags.client()
    return client


def _check(flags: Flags, terminal: Terminal, body: JobText, spec: JobSpec) -> int:
    from rota.service.http import find_service
    from rota.service.offline import check_job

    local = find_service(flags.server, flags.token).local
    if note := check_job(spec, body, _missing(flags, spec), local=local):
        terminal.note(f"note: {note}")
    counts = {"roles": len(spec.roles), "instances": sum(role.replicas_min for role in spec.roles)}
    document = {"kind": "JobCheck", "name": spec.name, "valid": True, **counts, "digest": spec.digest}
    most: ReplicaRange = {
        "replicas": counts["instances"],
        "replicas_max": sum(role.replicas_max for role in spec.roles),
    }
    words = f"{counted(counts['roles'], 'role')}, {counted(replicas(most), 'instance')}"
    terminal.show(document, lambda term: term.line(f"{body['filename']}: {spec.name} is valid, {words}"))
    return 0


def _missing(flags: Flags, spec: JobSpec) -> Sequence[Finding]:
    """What the job names and the service does not have; nothing where no service of this home answers in time."""
    from rota.service.offline import missing_names

    try:
        with _looking(flags) as client:
            return missing_names(client, spec, named=bool(flags.server))
    except RotaError:
        if flags.server:
            raise
        return ()


def _plan(flags: Flags, terminal: Terminal, body: JobText, pretend: str) -> Mapping[str, Any]:
    if not pretend:
        try:
            with flags.client() as client:
                return client.plan(body)
        except NotReachable:
            if flags.server:
                raise
            terminal.note("no service answers; planned on this machine alone")
    from rota.service.offline import plan_job

    return plan_job(body, pretend=pretend)


class PlanReport(dict[str, Any]):
    """The document of a plan; of a job built in Python, on this machine alone."""

    @staticmethod
    def of(job: object, *, ignore_image: bool = False) -> PlanReport:
        """What ``job`` would become. Raises what submitting would raise."""
        from rota.service.api import source_of
        from rota.service.offline import plan_job

        body = source_of(job)
        body["ignore_image"] = ignore_image
        return PlanReport(plan_job(body))

    def show(self) -> None:
        """Print it as ``rota run --dry-run`` does."""
        _plan_table(Terminal(out=sys.stdout), self)


def _plan_table(term: Terminal, report: Mapping[str, Any]) -> None:
    from rota.service.cli.verbs.inspect import estimate_text

    starts = "starts now" if report.get("starts_now") else f"waits: {(report.get('why') or {}).get('text', '')}"
    term.line(f"{report['name']}: {starts}")
    if estimate := estimate_text((report.get("explanation") or {}).get("estimate")):
        term.line(f"estimated start: {estimate}")
    where = _places(report)
    PLANNED.print(term, [{**role, "where": shortened(where.get(role["name"], []))} for role in report["roles"]])
    for role in report["roles"]:
        if role["fixed_size"]:
            less, most = role["replicas"], role["replicas_max"]
            term.line(f"{role['name']} stays at {less}, never {most}: {role['fixed_size']}; {SIZES_HINT}")
        for plan in role["plans"]:
            term.line(f"plan of {plan['replicas']} {role['name']}: {plan['why']}")
    for note in report.get("notes", ()):
        term.line(f"note: {note}")
    gangs = [f"{gang['gang']} ({counted(len(gang['bundles']), 'slot')})" for gang in report["gangs"]]
    term.line(f"gangs: {', '.join(gangs)}")


PLANNED = Table(
    columns={
        "ROLE": "name",
        "N": replicas,
        "EACH": lambda role: resources(role["resources"]),
        "WHERE": "where",
        "LOSING ONE": lambda role: role["blast_radius"]["text"].removeprefix(f"losing {role['name']}/0 "),
    }
)


def _places(report: Mapping[str, Any]) -> dict[str, list[str]]:
    """Nodes (with devices) of each role, from gangs and their grants."""
    found: dict[str, list[str]] = {}
    grants = {grant["gang"]: grant for grant in (report.get("placement") or {}).get("gangs", ())}
    for gang in report["gangs"]:
        grant = grants.get(gang["gang"])
        for bundle, given in zip(gang["bundles"], grant["bundles"] if grant else [], strict=False):
            devices = ",".join(str(device) for device in given["devices"])
            place = f"{given['node']}[{devices}]" if devices else given["node"]
            for member in bundle["members"]:
                places = found.setdefault(member["role"], [])
                if place not in places:
                    places.append(place)
    return found


def _to_the_end(
    client: Client, terminal: Terminal, watch: JobWatch, job: str, *, follow: bool, timeout_s: float | None
) -> int:
    try:
        with Ticker(live_line(terminal), watch) as ticker:
            for line in client.logs(job, follow=True, notice=terminal.note) if follow else ():
                watch.spoke = True
                with ticker.line.paused():
                    terminal.line(log_text(line, terminal))
            document = client.wait(job, timeout_s=timeout_s)
    except KeyboardInterrupt:
        terminal.note(f"\ndetached; {job} keeps running.  follow: rota logs -f {job}   stop: rota stop {job}")
        return INTERRUPTED
    show_end(client, terminal, document)
    return 0 if document["state"] == JobState.SUCCEEDED else 1


def show_end(client: Client, terminal: Terminal, document: JobDocument) -> None:
    """How a job ended: the document, or a line on stderr with the first failing instance."""
    if terminal.json:
        terminal.show(document, lambda _: None)
        return
    if terminal.quiet:
        terminal.line(f"{document['id']} {document['state']}")
        return
    healed = document.get("failovers") or 0
    ran = f" after {lasting(document.get('run_s') or 0)}"
    extra = f", {counted(healed, 'failure')} healed" if healed and document["state"] == JobState.SUCCEEDED else ""
    terminal.note(f"{document['id']} {document['state']}{ran}{extra}: {document.get('text') or ''}")
    if document.get("output"):
        terminal.note(f"output: {document['output']}")
    if (upload := document.get("upload")) and not upload["error"]:
        terminal.note(f"uploaded: {counted(upload['files'], 'file')} to {upload['url']}")
    if document["state"] != JobState.FAILED:
        return
    first = client.failures(document["id"]).get("first") or (document.get("error") or {})
    if place := first.get("instance"):
        terminal.note(f"first failure: {place} {first.get('reason', '')}: {first.get('text', '')}")
    if first.get("traceback"):
        terminal.note(str(first["traceback"]).rstrip())
    terminal.note(f"more: rota failures {document['id']}")
