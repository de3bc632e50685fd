"""The REST interface as values: what to send for each question, what an answer means; no I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

from rota.service.jobfile.problems import Problem
from rota.spec import errors
from rota.spec.errors import BadInput, JobFileError, NotReachable, RotaError

API_PATH = "/api/v1"
MEDIA_SSE = "text/event-stream"
JobSort = Literal["submitted", "name", "state", "priority", "queue"]
"""Orders of a list of jobs: the newest or the highest priority first, names from A on; of equals the newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. ``safe`` may be sent again when nobody answered: reads, and writes with an idempotency key.

    An answer that takes longer than others has a ``timeout_s`` of its own.
    """

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    safe: bool = True
    timeout_s: float = 0.0


def get(path: str, **params: Any) -> Ask:
    """A read below ``/api/v1``; parameters that are None, empty or False are left out."""
    return Ask(method="GET", path=API_PATH + path, params=_given(params))


def job_path(job: str, part: str = "") -> str:
    """``/jobs/<id>[/part]`` with the id quoted."""
    return f"/jobs/{quote(job, safe='')}" + (f"/{part}" if part else "")


def events_path(job: str) -> str:
    """The events of a job, or of the whole installation."""
    return job_path(job, "events") if job else "/events"


def _given(params: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, value in params.items():
        if value is True:
            shown[name] = "true"
        elif value is not False and value not in (None, "", (), []):  # 0 is a number like others
            shown[name] = list(value) if isinstance(value, tuple | list) else value
    return shown


# -- errors -----------------------------------------------------------------------------------------------------------


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
    problem: dict[str, Any] = raw
    code = str(problem.get("code", ""))
    default = BadInput if 400 <= status < 500 else RotaError
    cls = BY_CODE.get(code) or _BY_STATUS.get(status, default)
    fields = {str(name): value for name, value in (problem.get("fields") or {}).items() if name not in _TAKEN}
    message = str(problem.get("detail") or problem.get("title") or f"{url} answered {status}")
    fields |= {"url": url, "request_id": problem.get("request_id", ""), "said_code": code or cls.code}
    hint = str(problem.get("hint", ""))
    if isinstance(problem.get("errors"), list) and problem["errors"]:
        found = tuple(Problem.from_json(item) for item in problem["errors"] if isinstance(item, dict))
        return JobFileError(found, hint=hint, **fields)
    return cls(message, hint=hint, **fields)


def not_reachable(url: str, cause: str) -> NotReachable:
    """Nobody answers at ``url``; one line with the remedy."""
    return NotReachable(f"no Rota service answers at {url} ({cause})", hint="start one here with 'rota up'", url=url)


# -- server-sent events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sse:
    """One event of a stream: its id (to go on from), its name, its data."""

    id: str = ""
    event: str = "message"
    data: str = ""

    def document(self) -> dict[str, Any]:
        """The JSON of the data."""
        found = json.loads(self.data)
        return found if isinstance(found, dict) else {"data": found}


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
