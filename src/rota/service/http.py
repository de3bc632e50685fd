"""What both clients share: the address, the headers, when to send again, how a job becomes the body of a request."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from rota.service import calls
from rota.service.calls import Ask
from rota.service.connect import find_service
from rota.service.jobfile.scripts import job_name
from rota.spec.errors import BadInput, NotReachable, RotaError, TimedOut

TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
STREAM_SILENCE_S = 45.0
"""The service sends a comment every 15 s; three missed ones mean that the connection is dead."""
RETRIES_MAX = 4
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 3.0
RECONNECTS_MAX = 12
"""A follower outlives a restart of the service: about half a minute of trying in a row."""
PAGE_MAX = 200
RESOURCES = {"cpus", "gpus", "gpu_type", "memory"}
"""What a command without a job file may ask for."""

Document = dict[str, Any]


def body_of(
    job: Any,
    *,
    sets: Mapping[str, Any] | Sequence[str] = (),
    command: Sequence[str] | None = None,
    workdir: str = "",
    res: Mapping[str, Any] | None = None,
) -> Document:
    """The body of a submission: ``command_of`` when there is a command, else ``source_of``."""
    for name in (res or {}).keys() - RESOURCES:
        hint = f"a field of the job: set={{{name!r}: ...}}, or Job(..., {name}=...) of a built one"
        raise BadInput(f"run() takes no {name!r}", hint=hint)
    if command is not None:
        changes = [f"{path}={value}" for path, value in sets.items()] if isinstance(sets, Mapping) else sets
        return command_of(command, sets=changes, res=res, workdir=workdir)
    if res:
        raise BadInput(f"{', '.join(res)}: only with a command", hint="set={'roles.NAME.resources.gpus': 1}")
    return source_of(job, sets=sets, workdir=workdir)


def source_of(
    job: Any, *, sets: Mapping[str, Any] | Sequence[str] = (), workdir: str = "", filename: str = ""
) -> Document:
    """The body of a submission: of a path, of the text of a job file, of a JobSpec, or of a built ``rota.Job``.

    Raises BadInput for a file that cannot be read and for anything else.
    """
    changes = [f"{path}={value}" for path, value in sets.items()] if isinstance(sets, Mapping) else list(sets)
    built: Any = getattr(job, "spec", job)
    spec: Any = built() if callable(built) else built
    if hasattr(spec, "to_json"):
        if changes:
            raise BadInput("'set' changes the text of a job file; change the built job itself instead")
        return {"spec": spec.to_json(), "workdir": workdir or str(Path.cwd())}
    if isinstance(job, Path) or (isinstance(job, str) and "\n" not in job and ":" not in job.strip("{")):
        path = Path(job).expanduser()
        return {
            "source": read_file(path),
            "filename": str(path),
            "sets": changes,
            "workdir": workdir or str(path.absolute().parent),
        }
    if not isinstance(job, str):
        raise BadInput(f"{type(job).__name__} is not a job", hint="give a path, the text of a job file, or a rota.Job")
    return {"source": job, "filename": filename or "job.yaml", "sets": changes, "workdir": workdir or str(Path.cwd())}


def command_of(
    argv: Sequence[str], *, sets: Sequence[str] = (), res: Mapping[str, Any] | None = None, workdir: str = ""
) -> Document:
    """The body of a job of one role ``main``: words as they are, a text by a shell. ``res``: cpus, gpus, memory."""
    first = argv.split() if isinstance(argv, str) else argv
    if not first:
        raise BadInput("the command is empty", hint="for example ['python', 'train.py']")
    role = {"run": argv if isinstance(argv, str) else [str(word) for word in argv]}
    source = json.dumps({"name": job_name(str(first[0])), "roles": {"main": role}}, indent=1)
    asked = [f"roles.main.resources.{key}={value}" for key, value in (res or {}).items() if value not in ("", None)]
    return {"source": source, "filename": "command", "sets": [*sets, *asked], "workdir": workdir or str(Path.cwd())}


def read_file(path: Path) -> str:
    """Text of a job file. Raises BadInput when it is missing or cannot be read, JobFileError when it is not UTF-8."""
    from rota.service.jobfile.nodes import decode  # noqa: PLC0415 - a client that submits nothing needs no parser

    try:
        return decode(path.read_bytes(), filename=str(path))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file", hint="'rota init --list' shows templates to begin with") from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a folder", hint="name the job file in it") from None
    except OSError as exc:
        raise BadInput(f"{path}: {exc.strerror or exc}") from exc


class Wire:
    """What both clients know: the address, the headers, and when to send again."""

    def __init__(self, server: str, token: str, timeout_s: float) -> None:
        self.address = address = find_service(server, token)
        self.url = address.url
        self.timeout_s = timeout_s
        self.headers = {"Accept": "application/json", "User-Agent": "rota-client"}
        if address.token and not address.guessed:  # a stranger is not shown the token of this home
            self.headers["Authorization"] = f"Bearer {address.token}"
        self.timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
        self.http_options: dict[str, Any] = {
            "base_url": self.url,
            "headers": self.headers,
            "timeout": self.timeout,
            "trust_env": False,
            "verify": self.url.startswith("https:"),  # reading all authorities takes 40 ms, for http in vain
        }

    def timeout_of(self, ask: Ask) -> httpx.Timeout:
        """How long to wait for the answer."""
        return httpx.Timeout(ask.timeout_s, connect=CONNECT_TIMEOUT_S) if ask.timeout_s else self.timeout

    def wait_s(self, attempt: int) -> float:
        """Twice as long each time, plus up to as much again, so that many clients do not come back at once."""
        return min(RETRY_MAX_S, RETRY_FIRST_S * 2**attempt * (1 + secrets.randbelow(1000) / 1000))

    def may_retry(self, ask: Ask, exc: httpx.TransportError, attempt: int) -> bool:
        refused = isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout)
        return ask.safe and not refused and attempt < RETRIES_MAX

    def may_reconnect(self, exc: httpx.TransportError, broken: int, last: str) -> bool:
        """True while a stream that broke ``broken`` times in a row is worth another try; not when it never began."""
        began = bool(last) or not isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout)
        return began and broken <= RECONNECTS_MAX

    def unreachable(self, exc: httpx.TransportError) -> RotaError:
        if isinstance(exc, httpx.ConnectError):
            return calls.not_reachable(self.url, "connection refused" if "refused" in str(exc) else str(exc))
        if isinstance(exc, httpx.TimeoutException):
            return calls.not_reachable(self.url, f"no answer within {self.timeout_s:g} s")
        return calls.not_reachable(self.url, str(exc) or type(exc).__name__)

    def read(self, answer: httpx.Response) -> Document:
        if answer.status_code == 401 and self.address.guessed:
            text = f"no service of {self.address.home} runs; the one at {self.url} is of another home"
            hint = "start this home's own: rota up --port 0; or use that one: rota login, with a token of it"
            raise NotReachable(text, hint=hint)
        if answer.status_code >= 400:
            raise refused(answer)
        if not answer.content:
            return {}
        try:
            found = answer.json()
        except ValueError:
            raise RotaError(f"{answer.request.url} did not answer in JSON", hint="is this a Rota service?") from None
        return found if isinstance(found, dict) else {"items": found}

    def stream_headers(self, last: str) -> dict[str, str]:
        return {"Accept": calls.MEDIA_SSE} | ({"Last-Event-ID": last} if last else {})


def refused(answer: httpx.Response) -> RotaError:
    """The exception behind an answer that was read; its traceback, too, ends with the hint."""
    error = calls.error_of(answer.status_code, answer.text, url=str(answer.request.url))
    if error.hint:
        error.add_note(error.hint)
    return error


def timed_out(document: Mapping[str, Any], timeout_s: float) -> TimedOut:
    """The job did not end in time."""
    return TimedOut(
        f"{document['id']} is {document['state']} after {timeout_s:g} s; it goes on",
        hint=f"rota logs -f {document['id']}",
        job=document["id"],
        state=document["state"],
    )
