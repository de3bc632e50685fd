"""HTTP of both clients: the address of the service and its login, when to send again, errors, server-sent events."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import httpx

from rota.service.api import ApiRequest
from rota.service.config import Settings, load_settings
from rota.service.jobfile.problems import Problem
from rota.service.notebook import Document
from rota.service.user_process import spread
from rota.spec import errors
from rota.spec.errors import BadInput, JobFileError, NotReachable, RotaError, StoreCorrupt, TimedOut

if TYPE_CHECKING:
    from rota.service.models.jobs import JobDocument

TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
STREAM_SILENCE_S = 45.0
"""The service sends a comment every 15 s; three missed ones mean that the connection is dead."""
RETRIES_MAX = 4
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 3.0
RECONNECTS_MAX = 12
"""A follower outlives a restart of the service: about half a minute of trying in a row."""
MEDIA_SSE = "text/event-stream"
RECORD = "service.json"
RECORD_REMEDY = "rota down ends what runs there and removes the record; then rota up"
LOGIN = "login.json"
"""Below ``$ROTA_HOME``: the address and token of ``rota login``, 0600. Flags and variables win over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """How to reach a service.

    ``local`` is False when another address was asked for. ``guessed``: no service of this home runs and no token was
    given, so a service that answers at the default address belongs to another home.
    """

    url: str
    token: str
    home: Path
    local: bool
    guessed: bool = False


def find_service(server: str = "", token: str = "") -> ServiceAddress:
    """The address to use. Raises BadInput for settings that cannot be read."""
    settings = load_settings({"server": server, "token": token})
    if not settings.server and (stored := _read_login(settings)):
        given = settings.token if settings.origins["token"] != "default" else stored["token"]
        return ServiceAddress(url=stored["url"], token=given, home=settings.root, local=False)
    local = not settings.server
    recorded = _recorded_url(settings) if local else ""
    return ServiceAddress(
        url=recorded or settings.url,
        token=settings.token or _token(settings),
        home=settings.root,
        local=local,
        guessed=local and not recorded and not settings.token,
    )


def save_login(url: str, token: str) -> Path:
    """Use this service until ``forget_login``; the path of the file that records it."""
    path = load_settings().root / LOGIN
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{LOGIN}")
    partial.unlink(missing_ok=True)
    partial.touch(mode=0o600)
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"url": url.rstrip("/"), "token": token}))
        file.flush()
        os.fsync(file.fileno())
    return partial.replace(path)


def forget_login() -> str:
    """Drop the login; the address it was for, empty when there was none."""
    settings = load_settings()
    url = _read_login(settings).get("url", "")
    (settings.root / LOGIN).unlink(missing_ok=True)
    return url


def _read_login(settings: Settings) -> dict[str, str]:
    try:
        found = json.loads((settings.root / LOGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = isinstance(found, dict) and {"url", "token"} <= found.keys()
    return {"url": str(found["url"]), "token": str(found["token"])} if whole else {}


def _recorded_url(settings: Settings) -> str:
    """The address that the running service wrote down; empty when there is none."""
    path = settings.root / "run" / RECORD
    try:
        record = json.loads(path.read_bytes())
    except OSError:
        return ""
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("url"), str):
        raise StoreCorrupt(f"{path} is not the record of a service", hint=RECORD_REMEDY)
    return record["url"]


def _token(settings: Settings) -> str:
    try:
        return (settings.root / "token").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except OSError as exc:
        raise BadInput(f"the token cannot be read: {exc}", hint="set ROTA_TOKEN, or repair the file") from exc


def _tree(root: type[RotaError]) -> Iterator[type[RotaError]]:
    yield root
    for cls in root.__subclasses__():
        yield from _tree(cls)


BY_CODE: dict[str, type[RotaError]] = {
    cls.code: cls for cls in reversed(list(_tree(RotaError))) if cls is not JobFileError
}
_BY_STATUS: dict[int, type[RotaError]] = {
    401: errors.NoToken,
    403: errors.NotAllowed,
    404: errors.UnknownName,
    409: errors.Conflict,
    429: errors.LimitExceeded,
    503: errors.NotReachable,
    504: errors.TimedOut,
}
_TAKEN = ("message", "hint", "self")


def error_of(status: int, text: str, *, url: str) -> RotaError:
    """The exception behind an answer of 400 or more: problem+json, or whatever a proxy may have said instead."""
    try:
        raw = json.loads(text)
    except ValueError:
        raw = None
    if not isinstance(raw, dict):
        shown = " ".join(text.split())[:200]
        return _BY_STATUS.get(status, RotaError)(f"{url} answered {status}: {shown}", url=url)
    problem = cast("dict[str, object]", raw)
    code = str(problem.get("code", ""))
    default = BadInput if 400 <= status < 500 else RotaError
    cls = BY_CODE.get(code) or _BY_STATUS.get(status, default)
    given = cast("dict[str, object]", problem.get("fields") or {})
    fields = {str(name): value for name, value in given.items() if name not in _TAKEN}
    message = str(problem.get("detail") or problem.get("title") or f"{url} answered {status}")
    fields |= {"url": url, "request_id": problem.get("request_id", ""), "said_code": code or cls.code}
    hint = str(problem.get("hint", ""))
    if isinstance(places := problem.get("errors"), list) and places:
        found = tuple(Problem.from_json(item) for item in places if isinstance(item, dict))
        return JobFileError(found, hint=hint, **fields)
    return cls(message, hint=hint, **fields)


def not_reachable(url: str, cause: str) -> NotReachable:
    """No service answers at ``url``; one line with the remedy."""
    return NotReachable(f"no Rota service answers at {url} ({cause})", hint="start one here with 'rota up'", url=url)


def refused(answer: httpx.Response) -> RotaError:
    """The exception behind an answer that was read."""
    return error_of(answer.status_code, answer.text, url=str(answer.request.url))


def timed_out(document: JobDocument, timeout_s: float) -> TimedOut:
    """The job did not end in time."""
    return TimedOut(
        f"{document['id']} is {document['state']} after {timeout_s:g} s; it keeps running",
        hint=f"rota logs -f {document['id']}",
        job=document["id"],
        state=document["state"],
    )


class HttpOptions(TypedDict):
    """Options of the HTTP client of either client."""

    base_url: str
    headers: dict[str, str]
    timeout: httpx.Timeout
    trust_env: bool
    verify: bool


class HttpBase:
    """Address, headers and retries of both clients."""

    def __init__(self, server: str, token: str, timeout_s: float) -> None:
        self.address = address = find_service(server, token)
        self.url = address.url
        self.timeout_s = timeout_s
        self.headers = {"Accept": "application/json", "User-Agent": "rota-client"}
        if address.token and not address.guessed:  # another service must not see the token of this home
            self.headers["Authorization"] = f"Bearer {address.token}"
        self.timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
        self.http_options: HttpOptions = {
            "base_url": self.url,
            "headers": self.headers,
            "timeout": self.timeout,
            "trust_env": False,
            "verify": self.url.startswith("https:"),  # reading all authorities takes 40 ms, for http in vain
        }

    def timeout_of(self, request: ApiRequest[object]) -> httpx.Timeout:
        """How long to wait for the answer."""
        return httpx.Timeout(request.timeout_s, connect=CONNECT_TIMEOUT_S) if request.timeout_s else self.timeout

    def wait_s(self, attempt: int) -> float:
        """Twice as long each time, plus up to as much again, so that many clients do not come back at once."""
        return min(RETRY_MAX_S, RETRY_FIRST_S * 2**attempt * (1 + spread()))

    def may_retry(self, request: ApiRequest[object], exc: httpx.TransportError, attempt: int) -> bool:
        refused = isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout)
        return request.safe and not refused and attempt < RETRIES_MAX

    def may_reconnect(self, exc: httpx.TransportError, broken: int, last: str) -> bool:
        """True while a stream that broke ``broken`` times in a row is worth another try; not when it never began."""
        began = bool(last) or not isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout)
        return began and broken <= RECONNECTS_MAX

    def unreachable(self, exc: httpx.TransportError) -> RotaError:
        if isinstance(exc, httpx.ConnectError):
            if self.address.local and self.url.endswith(":0"):  # a service here takes a free port, and none has
                return NotReachable(f"no Rota service runs for {self.address.home}", hint="start it with 'rota up'")
            return not_reachable(self.url, "connection refused" if "refused" in str(exc) else str(exc))
        if isinstance(exc, httpx.TimeoutException):
            return not_reachable(self.url, f"no answer within {self.timeout_s:g} s")
        return not_reachable(self.url, str(exc) or type(exc).__name__)

    def read(self, answer: httpx.Response) -> object:
        """The document of an answer. Raises the exception of a refusal."""
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
        return Document(found if isinstance(found, dict) else {"items": found})

    def stream_headers(self, last: str) -> dict[str, str]:
        return {"Accept": MEDIA_SSE} | ({"Last-Event-ID": last} if last else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sse:
    """One event of a stream: its id (to continue from), its name, its data."""

    id: str = ""
    event: str = "message"
    data: str = ""

    def document(self) -> object:
        """The JSON of the data."""
        return json.loads(self.data)


class SseReader:
    """Lines of ``text/event-stream`` to events (WHATWG HTML, section 9.2.6), comments left out."""

    def __init__(self) -> None:
        self._id, self._event = "", ""
        self._data: list[str] = []

    def line(self, line: str) -> Sse | None:
        """Take one line without its end; an event when it was completed by it."""
        if not line:
            return self._finish()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "event":
            self._event = value
        return None

    def _finish(self) -> Sse | None:
        done = Sse(id=self._id, event=self._event or "message", data="\n".join(self._data)) if self._data else None
        self._event, self._data = "", []
        return done
