"""What a caller sends for a job, and the job completed with what its workloads declare, as a child process reads it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rota.job.core.check import check_graph
from rota.job.core.paths import with_default_loop, with_shared_meshes
from rota.runtime import environ
from rota.runtime.clock import SystemClock
from rota.runtime.data_cache import DataFailed, apart, output_refused, url_refused
from rota.runtime.environ import Home
from rota.runtime.execute import execute_command
from rota.runtime.image import PULL_MAX_S
from rota.runtime.packages import python_of
from rota.runtime.secrets import VARIABLE
from rota.service.jobfile.reader import placed
from rota.spec import check, codec
from rota.spec.check import Finding
from rota.spec.codec import JsonObject
from rota.spec.errors import JobFileError, did_you_mean, nearest
from rota.spec.ids import NAME_PATTERN, RoleName
from rota.spec.job import After, Interface, JobSpec
from rota.spec.reasons import Reason
from rota.spec.states import JobState

INSPECT_TIMEOUT_S = 120.0
INSTALL_TIMEOUT_S = 1800.0
_ENV_FAILED = str(Reason.ENV_SETUP_FAILED)
OUTPUT_BYTES_MAX = 4 * 2**20
STDERR_SHOWN = 4000
IMPORT_HINT = "the module is imported to read what it declares: repair it, and leave work to its functions and methods"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a caller sends: the text of a job file with its name and ``--set`` values, or a finished ``spec``.

    ``workdir`` is the folder that the file's relative paths start from. ``ignore_image`` takes away the
    image that a job names.
    """

    source: str = ""
    filename: str = "job.yaml"
    sets: tuple[str, ...] = ()
    workdir: str = ""
    spec: JsonObject | None = None
    ignore_image: bool = False

    @property
    def digest(self) -> str:
        """Hash that distinguishes two submissions under one idempotency key."""
        parts = [
            self.source,
            self.filename,
            list(self.sets),
            self.workdir,
            self.spec,
            *([True] if self.ignore_image else []),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def workdir_of(spec: JobSpec, given: Submission) -> str:
    """The folder that the job starts in and imports from; empty where no absolute one was given."""
    base = Path(given.workdir) if given.workdir else Path(given.filename).parent
    if not base.is_absolute():
        return spec.workdir if spec.workdir and Path(spec.workdir).is_absolute() else ""
    return str(base / spec.workdir) if spec.workdir else str(base)


def check_workdir(spec: JobSpec, given: Submission, where: str) -> None:
    """Raises JobFileError for a ``workdir`` of the file that is not a folder here, on the machine called ``where``."""
    if (fault := workdir_fault(spec, given, where)) is not None:
        raise JobFileError(placed((fault,), given.source, filename=given.filename, sets=given.sets))


def workdir_fault(spec: JobSpec, given: Submission, where: str = "the machine of the service") -> Finding | None:
    """That the ``workdir`` of the file is not a folder here; None where it is, or none is given."""
    folder = workdir_of(spec, given)
    if not (spec.workdir and folder) or Path(folder).is_dir():
        return None
    text = f"{folder} is not a folder on {where}"
    return Finding(path=("workdir",), message=text, hint="give the folder of the code", code="BAD_TYPE")


def secret_faults(names: Sequence[str], known: Container[str]) -> list[Finding]:
    """The secrets that a job names and its owner, who has those that are ``known``, does not have."""
    return [
        Finding(
            path=("secrets", index),
            message=f"no secret {name!r}",
            hint=f"set it: rota secret set {name}",
            code="UNKNOWN_NAME",
        )
        for index, name in enumerate(names)
        if name not in known
    ]


def closed_fault(line: Iterable[tuple[str, str]]) -> Finding | None:
    """Why a queue takes no new jobs, by the path and state of it and of those above it; None where it takes them."""
    closed = next(((path, state) for path, state in line if state in ("closed", "draining")), None)
    if closed is None:
        return None
    message = f"queue {closed[0]!r} is {closed[1]} and takes no new jobs"
    hint = "use another queue, see: rota queues; an admin opens it again"
    return Finding(path=("queue",), message=message, hint=hint, code=str(Reason.QUEUE_CLOSED))


def dependency_fault(
    index: int, one: After, job: tuple[str, JobState, str | None] | None, names: Callable[[], Iterable[str]]
) -> Finding | None:
    """Why a job cannot start after ``job`` (id, state, reason): it is not there, or had to succeed and did not.

    ``names`` gives those of the caller's jobs, for the hint; it is called where ``job`` is None.
    """
    path = ("after", index)
    if job is None:
        hint = did_you_mean(one.job, names()) or "submit that job first, or give the id of one: rota ps -a"
        return Finding(path=path, message=f"no job {one.job!r}", hint=hint, code="UNKNOWN_NAME")
    found, state, reason = job
    if one.when == "succeeded" and state.terminal and state is not JobState.SUCCEEDED:
        message = f"{found} had to succeed first; it ended as {state} ({reason})"
        return Finding(
            path=path, message=message, hint=f"{found}:ended starts after it however it ended", code="CONFLICT"
        )
    return None


def with_stores(spec: JobSpec, given: Submission, stores: Mapping[str, str]) -> JobSpec:
    """The job with the URLs of the named stores that ``data`` and ``output`` name as ``STORE:/path``.

    Raises JobFileError for a store that is not there, and a path that leaves it.
    """
    found: dict[str, str] = {}
    faults: list[Finding] = []
    for field, value in (("data", spec.data), ("output", spec.output)):
        name, colon, path = (value or "").partition(":")
        if not colon or path.startswith("//") or not NAME_PATTERN.match(name):
            continue
        if not path.startswith("/") and name not in stores:
            continue  # a file of that name
        if wrong := _store_refused(name, path, stores):
            faults.append(Finding(path=(field,), message=wrong[0], hint=wrong[1], code=wrong[2]))
        else:
            found[field] = f"{stores[name].rstrip('/')}{path}"
    if faults:
        raise JobFileError(placed(faults, given.source, filename=given.filename, sets=given.sets))
    return replace(spec, **found) if found else spec


def _store_refused(name: str, path: str, stores: Mapping[str, str]) -> tuple[str, str, str] | None:
    """What is wrong with ``NAME:PATH``, what to do, and its code."""
    if name not in stores:
        hint = nearest(name, sorted(stores), "stores")
        return f"this installation has no store {name!r}", f"{hint}; see: rota status", "UNKNOWN_NAME"
    if not path.startswith("/"):
        return f"{path!r} is not a path in the store {name!r}", f"write {name}:/{path}", "BAD_TYPE"
    if ".." in path.split("/"):
        return f"{path!r} leaves the store {name!r}", "write a path without '..'", "BAD_TYPE"
    return None


def check_urls(spec: JobSpec, given: Submission) -> None:
    """Raises JobFileError for URLs whose stores are not known here; blocks while libraries are imported."""
    found: list[Finding] = []
    for field, url, refused in (("data", spec.data_url, url_refused), ("output", spec.output_url, output_refused)):
        wrong, remedy = refused(url) if url else ("", "")
        if wrong:
            found.append(Finding(path=(field,), message=wrong, hint=remedy, code="NOT_SUPPORTED"))
    if found:
        raise JobFileError(placed(found, given.source, filename=given.filename, sets=given.sets))


async def fetch_data(spec: JobSpec, owner: str, *, here: bool) -> Refused | None:
    """Why the data that a job names cannot be had, or its output not written to its URL.

    Data of a URL is fetched to this machine where jobs run ``here`` alone, and a folder is looked for here then.
    """
    if here and _looks_for(spec) and await asyncio.to_thread(_is_gone, str(spec.data)):
        text = f"{spec.data} does not exist on this machine, where all jobs run"
        fault = Finding(path=("data",), message=text, code=str(Reason.DATA_UNREACHABLE))
        return Refused(reason=Reason.DATA_UNREACHABLE, faults=(fault,))
    asked = (
        ("data", spec.data_url, "fetch" if here else "check", Reason.DATA_UNREACHABLE),
        ("output", spec.output_url, "writable", Reason.OUTPUT_UNREACHABLE),
    )
    for field, url, what, reason in asked:
        if url is None:
            continue
        try:
            await apart(what, str(Home.find().root), url, env=store_environ(spec, owner))
        except DataFailed as error:
            fault = Finding(path=(field,), message=str(error), code=str(reason))
            return Refused(reason=reason, faults=(fault,), traceback=error.output)
    return None


def _looks_for(spec: JobSpec) -> bool:
    """Whether its data is a folder that must be there by now, and that its own user may know of.

    What runs before its program may make it: an earlier job, or a setup. A job that runs as another user would learn
    what is there in folders that it may not read.
    """
    made = spec.after or any(role.setup for role in spec.roles)
    return (spec.data or "").startswith("/") and not made and spec.run_as is None


def _is_gone(path: str) -> bool:
    """True if the path does not exist; one that this user may not look at may exist."""
    try:
        Path(path).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def store_environ(spec: JobSpec, owner: str) -> dict[str, str]:
    """Variables of a process that asks stores for a job: those of the service and of the job, and its secrets."""
    secrets = {VARIABLE: " ".join((owner, *spec.secrets)) if spec.secrets else ""}
    return environ.snapshot() | dict(spec.env) | secrets


async def with_interfaces(spec: JobSpec, given: Submission) -> JobSpec:
    """The job with what its workloads declare.

    Raises JobFileError, at the places in the job file, for workloads that cannot be imported or do not fit together.
    """
    found = await inspect_workloads(spec, workdir_of(spec, given))
    if isinstance(found, Refused):
        problems = placed(found.faults, given.source, filename=given.filename, sets=given.sets)
        raise JobFileError(problems, hint=found.hint, code=str(found.reason), traceback=found.traceback)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Workloads could not be imported or declare nonsense; ``role`` is the first of them, ``traceback`` of all."""

    reason: Reason
    faults: tuple[Finding, ...]
    role: str = ""
    traceback: str = ""

    @property
    def text(self) -> str:
        """All of it, a line each."""
        return "\n".join(map(str, self.faults))

    @property
    def hint(self) -> str:
        """What to do, where the faults do not say it."""
        return IMPORT_HINT if self.reason is Reason.IMPORT_ERROR else ""


async def inspect_workloads(
    spec: JobSpec, workdir: str, built: Mapping[RoleName, str] | None = None
) -> JobSpec | Refused:
    """The spec with the interface of every role, or why it can never run. The children are gone when this returns.

    ``built`` is what ``install_packages`` gave; without it the packages are installed on this machine first.
    """
    if built is None:
        installed = await install_packages(spec, workdir)
        if isinstance(installed, Refused):
            return installed
        built = installed
    wanted: dict[str, dict[RoleName, str]] = {}
    for role in spec.roles:
        if role.workload and role.interface is None:
            wanted.setdefault(built.get(role.name, sys.executable), {})[role.name] = role.workload
    for python, workloads in wanted.items():
        found = await _inspect_with(python, spec, workdir, workloads)
        if isinstance(found, Refused):
            return found
        spec = found
    return _checked(spec)


async def pull_image(spec: JobSpec) -> Refused | None:
    """Why the image that a job names cannot be had on this machine; None when it is there, or none is named."""
    if spec.image is None:
        return None
    command = (sys.executable, "-m", "rota.runtime.image", str(Home.find().root), spec.image)
    done = await execute_command(command, timeout_s=PULL_MAX_S)
    if done["exit_status"] == 0:
        return None
    lines = done["stderr"].strip().splitlines() or [f"pulling it took more than {PULL_MAX_S:.0f} s"]
    fault = Finding(path=("image",), message=f"{spec.image}: {lines[-1]}", code=str(Reason.IMAGE_PULL_FAILED))
    return Refused(reason=Reason.IMAGE_PULL_FAILED, faults=(fault,), traceback="\n".join(lines))


async def install_packages(spec: JobSpec, workdir: str) -> dict[RoleName, str] | Refused:
    """The interpreter of each role that has packages, which are installed for it now unless they are already."""
    built: dict[RoleName, str] = {}
    for role in spec.roles:
        if not (packages := spec.packages_of(role)):
            continue
        env = {name: value for name, value in (*spec.env, *role.env) if name.startswith("PIP_")}
        asked = json.dumps({"packages": packages, "settings": env})
        command = (sys.executable, "-m", "rota.runtime.packages", str(Home.find().root), workdir, asked)
        done = await execute_command(command, timeout_s=INSTALL_TIMEOUT_S)
        if done["exit_status"] != 0:
            path = ("roles", role.name, "packages") if role.packages else ("packages",)
            why = done["stderr"].strip() or f"installing them took more than {INSTALL_TIMEOUT_S:.0f} s"
            fault = Finding(path=path, message=f"could not be installed: {_pip_error(why)}", code=_ENV_FAILED)
            return Refused(reason=Reason.ENV_SETUP_FAILED, faults=(fault,), role=role.name, traceback=why)
        built[role.name] = str(python_of(Path(done["stdout"])))
    return built


def _pip_error(output: str) -> str:
    """The line that says what is wrong: the last one that pip calls an error."""
    lines = output.splitlines()
    return next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1]).removeprefix("ERROR: ")


async def _inspect_with(python: str, spec: JobSpec, workdir: str, wanted: Mapping[RoleName, str]) -> JobSpec | Refused:
    env = environ.snapshot() | dict(spec.env)
    child = await asyncio.create_subprocess_exec(
        python,
        "-m",
        "rota.job.inspect",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
        limit=OUTPUT_BYTES_MAX,
    )
    args = {role: spec.role(role).args for role in wanted}
    request = json.dumps({"workdir": workdir, "workloads": wanted, "args": args}).encode()
    try:
        async with SystemClock().timeout(INSPECT_TIMEOUT_S):
            out, err = await child.communicate(request)
    except TimeoutError:
        return _unread(wanted, f"importing took more than {INSPECT_TIMEOUT_S:.0f} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    if child.returncode != 0 or not out:
        text = f"a module ended the process that imports it (status {child.returncode}); its output follows"
        shown = err.decode(errors="replace")[-STDERR_SHOWN:]
        return _unread(wanted, text, shown)
    return _completed(spec, json.loads(out))


def _unread(wanted: Mapping[RoleName, str], text: str, output: str = "") -> Refused:
    """Nothing came back: who is to blame is known where there is one workload only."""
    path: check.Path = ("roles", next(iter(wanted)), "workload") if len(wanted) == 1 else ("roles",)
    return Refused(reason=Reason.IMPORT_ERROR, faults=(_fault(path, text),), traceback=output)


def _faults(role: str, answer: JsonObject) -> list[Finding]:
    """What is wrong with the workload of a role: each argument of its constructor, or the workload."""
    at: check.Path = ("roles", role, "args")
    if arguments := answer.get("arguments"):
        return [_fault((*at, name) if name else at, text) for name, text in arguments.items()]
    return [_fault(("roles", role, "workload"), answer["error"])]


def _fault(path: check.Path, text: str) -> Finding:
    return Finding(path=path, message=text, code=str(Reason.IMPORT_ERROR))


def _completed(spec: JobSpec, found: dict[str, JsonObject]) -> JobSpec | Refused:
    bad = {role: answer for role, answer in found.items() if "error" in answer}
    if bad:
        arguments = all("arguments" in answer for answer in bad.values())
        return Refused(
            reason=Reason.INVALID if arguments else Reason.IMPORT_ERROR,
            faults=tuple(one for role, answer in bad.items() for one in _faults(role, answer)),
            role=next(iter(bad)),
            traceback="\n".join(dict.fromkeys(text for one in bad.values() if (text := one.get("traceback", "")))),
        )
    interfaces = {role: codec.from_json_value(Interface, answer["interface"]) for role, answer in found.items()}
    roles = tuple(replace(role, interface=interfaces.get(role.name, role.interface)) for role in spec.roles)
    return replace(spec, roles=roles)


def _checked(spec: JobSpec) -> JobSpec | Refused:
    """Refuse a graph that cannot work: now that the interfaces are known, operations, axes and state can be checked."""
    spec = with_shared_meshes(with_default_loop(spec))
    faults = check_graph(spec)
    return Refused(reason=Reason.INVALID, faults=faults) if faults else spec
