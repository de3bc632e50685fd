"""Routes of terminals beside instances: open one, follow its output, send its input."""

from __future__ import annotations

import base64
import binascii
import shlex
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response
from fastapi.sse import format_sse_event
from pydantic import BaseModel, ConfigDict, Field

from rota.service.models.base import REFUSAL, Sent, document
from rota.service.models.jobs import TerminalDocument, TerminalInputDocument
from rota.service.rest.deps import TERMINAL_PATH, EnteredJob, JobAccess, Note, check_live, member_of
from rota.service.rest.routes.jobs import EXEC_AUDITED_MAX, Argv
from rota.service.rest.routes.logs import NUMBER_MAX, REFUSALS, STREAM, counted_stream, event_number, frame
from rota.spec.errors import BadInput, Conflict, EngineUnavailable, LimitExceeded, NotReachable, UnknownName
from rota.spec.ids import InstanceId, RoleName

OPEN_S = 20.0
READ_S = 5.0
"""How long the instance is asked to wait for output."""
INPUT_CHARS_MAX = 65_536
"""Of one request, in base64."""
ENGINE_AWAY_S = 30.0
SIDE_MAX = 1000
SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
"""What runs where no command is given."""

router = APIRouter(prefix="/api/v1", tags=["terminals"], responses=REFUSAL)
Side = Annotated[int, Field(ge=1, le=SIDE_MAX)]


class TerminalBody(BaseModel):
    """Beside which instance, ``role`` or ``role/rank`` (else the first), what to run (else a shell), how it looks."""

    model_config = ConfigDict(extra="forbid")

    instance: Annotated[str, Field(max_length=200)] = ""
    argv: Argv = Field(default_factory=list)
    term: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+-]{1,64}$")] = "dumb"
    rows: Side = 24
    columns: Side = 80


class TerminalInputBody(BaseModel):
    """Input in base64 from an offset on; without it a sign of life, at least one in 30 s. ``leave`` hangs up."""

    model_config = ConfigDict(extra="forbid")

    offset: Annotated[int, Field(ge=0, le=NUMBER_MAX)] = 0
    data: Annotated[str, Field(max_length=INPUT_CHARS_MAX)] = ""
    rows: Side | None = None
    columns: Side | None = None
    leave: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a terminal is; its text is its id."""

    instance: InstanceId
    epoch: int
    name: str

    def __str__(self) -> str:
        return f"{self.instance.role}.{self.instance.rank}.{self.epoch}.{self.name}"

    @staticmethod
    def parse(text: str) -> _Place:
        """Raises UnknownName."""
        role, *rest = text.rsplit(".", 3)
        if len(rest) != 3 or not (rest[0].isdecimal() and rest[1].isdecimal() and len(text) <= 200):
            raise _gone(text)
        return _Place(InstanceId(RoleName(role), int(rest[0])), int(rest[1]), rest[2])


def _gone(terminal: str) -> UnknownName:
    return UnknownName(f"terminal {terminal[:80]} is not open", hint="open another: rota exec -it JOB")


@router.post("/jobs/{job}:terminal", status_code=201)
async def open_terminal(on: EnteredJob, body: TerminalBody, note: Note) -> Sent[TerminalDocument]:
    """Run a command, else a shell, on a terminal beside a running instance; the audit has the command.

    It ends when nothing is sent to it for 30 seconds.
    """
    app, job = on.app, on.job
    check_live(job)
    role, rank = member_of(job, body.instance or job.spec.roles[0].name)
    found, argv = InstanceId(RoleName(role), rank or 0), body.argv or [*SHELL]
    name = app.random_source.new_id(80).lower()
    note(instance=str(found), command=shlex.join(argv)[:EXEC_AUDITED_MAX])
    head = [name, on.caller.user, argv, body.term, [body.rows, body.columns]]
    with app.exec_slot(on.caller.user):
        asked = (job.id, found.role, found.rank, 0, "open_terminal", head)
        answer = await app.engine.terminal(*asked, timeout_s=OPEN_S)
    if answer is None:
        raise Conflict(f"{found} of {job.id} does not run", hint=f"see: rota show {job.id}")
    if answer[1]:
        raise LimitExceeded(str(answer[1]))
    app.terminal_used(job.id)
    return document(TerminalDocument, job=job.id, instance=str(found), terminal=str(_Place(found, answer[0], name)))


@router.get("/jobs/{job}/terminals/{terminal}", response_class=Response, responses=STREAM)
async def output(
    on: EnteredJob,
    terminal: str,
    after: Annotated[int, Query(ge=0, le=NUMBER_MAX)] = 0,
    last_event_id: Annotated[str, Header()] = "",
) -> Response:
    """Output of a terminal: server-sent events ``output`` (base64) that resume by ``Last-Event-ID``, then ``end``.

    ``end`` has the exit status of the program, or null and a text when its instance is gone.
    """
    place = _Place.parse(terminal)
    return counted_stream(on.app, on.caller, _frames(on, place, event_number(last_event_id, after)))


async def _frames(on: JobAccess, place: _Place, after: int) -> AsyncIterator[bytes]:
    app, away_s = on.app, 0.0
    while not app.loop.stopping:
        try:
            app.entered(app.auth.renewed(on.caller), on.job.id)
        except REFUSALS:
            return
        head = [place.name, on.caller.user, after, READ_S]
        try:
            found = await _ask(on, place, "read_terminal", head)
            away_s = 0.0
        except (EngineUnavailable, NotReachable):
            if (away_s := away_s + 1.0) > ENGINE_AWAY_S:
                return
            await app.clock.sleep(1.0)
            continue
        if found is None:
            yield frame({"exit_status": None, "text": f"it is gone, or {place.instance} is"}, event="end")
            return
        if found["data"]:
            after = found["end"]
            yield frame({"data": found["data"]}, event="output", id=str(after))
        elif found["exit_status"] is not None:
            yield frame({"exit_status": found["exit_status"], "text": ""}, event="end", id=str(after))
            return
        else:
            yield format_sse_event(comment="alive")


async def _ask(on: JobAccess, place: _Place, method: str, head: Sequence[object]) -> Any:
    """The answer of the instance; None where the terminal or the instance is gone."""
    where = (on.job.id, place.instance.role, place.instance.rank, place.epoch)
    found = await on.app.engine.terminal(*where, method, head, timeout_s=READ_S)
    return None if found is None else found[1]


@router.post(TERMINAL_PATH.removeprefix("/api/v1"))
async def send_input(on: EnteredJob, terminal: str, body: TerminalInputBody) -> Sent[TerminalInputDocument]:
    """Send input to a terminal, or a new size; ``taken`` is how much of it the program has got in all.

    It may be sent again: what was taken is not taken twice. The audit has the opening, not the input.
    """
    try:
        count = len(base64.b64decode(body.data, validate=True))
    except (binascii.Error, ValueError):
        raise BadInput("data: not base64") from None
    size = None if body.rows is None or body.columns is None else [body.rows, body.columns]
    place = _Place.parse(terminal)
    found = await _ask(
        on, place, "write_terminal", [place.name, on.caller.user, body.offset, body.data, size, body.leave]
    )
    if found is None:
        raise _gone(terminal)
    if count:
        on.app.terminal_used(on.job.id)
    return document(TerminalInputDocument, found, job=on.job.id, terminal=terminal)
