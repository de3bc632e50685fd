"""The application: routes, permission, problems, limits and headers of every answer."""

from __future__ import annotations

import json
import logging
from functools import cache
from typing import get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import TypeAdapter
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rota.service.config import rota_version
from rota.service.jobfile.problems import DISK_REMEDIES, Problem
from rota.service.models.base import PROBLEM, REFS, ProblemDocument, document
from rota.service.rest.auth import SAFE_METHODS
from rota.service.rest.deps import NOT_AUDITED, AppState, asked_line, auth_request
from rota.service.rest.routes import accounts, cluster, files, jobs, logs, machines, page, terminals
from rota.spec.codec import JsonObject
from rota.spec.errors import (
    JobFileError,
    LimitExceeded,
    NotReachable,
    RotaError,
    StoreUnavailable,
    did_you_mean,
    nearest,
)

BODY_BYTES_MAX = 16 * 2**20
BODY_S = 120.0
"""Within this the whole body of a request must come."""
LOGIN_BYTES_MAX, LOGIN_S = 4096, 10.0
"""The same of the login of the page, whose sender is not known yet."""
LOGIN = "/login"
RETRY_AFTER_S = 1
METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
"""Named in the metrics; a stranger may send any word as a method, and each would be one more row for ever."""

VALUE_SHOWN_MAX = 60
"""Characters of a wrong value that its error shows."""

_log = logging.getLogger("rota.service")

_SECURITY = (
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
_HTTP_CODES = {404: "UNKNOWN_NAME", 405: "INVALID", 400: "INVALID", 408: "TIMED_OUT", 413: "LIMIT_EXCEEDED"}


class Application(FastAPI):
    """FastAPI whose description names the document of every refusal."""

    def openapi(self) -> JsonObject:
        """The OpenAPI document."""
        found = super().openapi()
        problem = TypeAdapter(ProblemDocument).json_schema(ref_template=REFS)
        found["components"]["schemas"] |= problem.pop("$defs", {}) | {ProblemDocument.__name__: problem}
        return found


@cache
def application() -> FastAPI:
    """Every route with its checks, once a process; ``make_app`` puts the parts of an installation behind them.

    Routes are taken as they are: those of an included router FastAPI makes a second time at the first request.
    """
    jobs_parts = (jobs.router, files.router, logs.router, terminals.router)
    parts = (*jobs_parts, cluster.router, machines.router, accounts.router, cluster.sim)
    app = Application(
        routes=[route for router in (*parts, *page.routers) for route in router.routes],
        title="Rota",
        version=rota_version(),
        description="Schedules, runs and heals deep-learning jobs of many roles.",
        openapi_url=None,  # served by routes/page.py, which checks the name it is asked under
        docs_url=None,
        redoc_url=None,
    )
    app.add_exception_handler(RotaError, _rota_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
    return app


def make_app(app: AppState) -> ASGIApp:
    """The ASGI application over the given parts."""
    return Guard(application(), app)


class Guard:
    """ASGI middleware: request id, parts of the application, body limits, security headers, metrics, audit."""

    def __init__(self, inner: ASGIApp, app: AppState) -> None:
        self._inner, self._app = inner, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        request_id = self._app.random_source.new_id(60)
        scope.setdefault("state", {}).update(request_id=request_id, app=self._app)
        method = scope["method"] if scope["method"] in METHODS else "other"
        scope = _as_routed(scope, scope["method"])
        started_s = self._app.clock.monotonic_s()
        status = 500

        async def marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._note(scope, request_id, status)
                headers = [*message.get("headers", ()), *_SECURITY, (b"rota-request-id", request_id.encode())]
                stale = self._app.loop.stale_since
                if stale is not None:
                    age = str(int(self._app.clock.monotonic_s() - stale)).encode()
                    headers.append((b"rota-stale", age))
                message = {**message, "headers": headers}
            elif method == "HEAD":
                return
            await send(message)
            if method == "HEAD":  # also of a stream, which ends where its reader is gone
                await send({"type": "http.response.body"})

        try:
            refusal = self._refusal(scope)
            await (refusal or self._inner)(scope, self._limited(scope, receive), marked)
        finally:
            route = getattr(scope.get("route"), "path", "")
            took_s = self._app.clock.monotonic_s() - started_s
            self._app.metrics.http.labels(method, route, str(status)).observe(took_s)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request with a body of which nothing is read, as it is not known who sends it."""
        headers = Headers(scope=scope)
        if scope["path"] == LOGIN or not (headers.get("content-length", "0") != "0" or "transfer-encoding" in headers):
            return None
        if scope["method"] in SAFE_METHODS:  # their routes read none
            return None
        request = Request(scope)
        try:
            scope["state"]["asker"] = self._app.auth.check(auth_request(request))
        except RotaError as error:
            return _rota_error(request, error)
        return None

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """``receive`` that ends with 413 for a body that is too large, with 408 for one that takes too long."""
        most, limit_s = (LOGIN_BYTES_MAX, LOGIN_S) if scope["path"] == LOGIN else (BODY_BYTES_MAX, BODY_S)
        clock = self._app.clock
        until_s = clock.monotonic_s() + limit_s
        read, complete = 0, False

        async def limited() -> Message:
            nonlocal read, complete
            try:
                async with clock.timeout(None if complete else until_s - clock.monotonic_s()):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not come within {limit_s:.0f} s") from None
            complete = complete or not message.get("more_body", False)
            read += len(message.get("body", b""))
            if read > most:
                raise HTTPException(413, f"the body is larger than {most} bytes")
            return message

        return limited

    def _note(self, scope: Scope, request_id: str, status: int) -> None:
        """Write the status of a modifying request to the audit; if that fails, the request does not."""
        known = "caller" in scope["state"]
        if scope["method"] in SAFE_METHODS or (known and scope["route"].path in NOT_AUDITED):
            return
        try:
            if known:
                self._app.audit.end(request_id, status)
            else:
                self._app.audit.anonymous({**asked_line(scope, None), "status": status})
        except OSError as error:
            _log.error("%s %s answered %s, which the audit lacks: %s", scope["method"], scope["path"], status, error)


def _as_routed(scope: Scope, method: str) -> Scope:
    """HEAD is what GET answers, without its body; not of the login, which spends a code."""
    return {**scope, "method": "GET" if method == "HEAD" and scope["path"] != LOGIN else method}


def problem(
    request: Request, *, status: int, code: str, detail: str, hint: str = "", exit: int = 1, **more: object
) -> Response:
    """An error as RFC 9457 asks for it."""
    body = document(
        ProblemDocument,
        type=f"/reference/errors#{code}",
        title=code.replace("_", " ").capitalize(),
        status=status,
        detail=detail,
        code=code,
        hint=hint,
        exit=exit,
        request_id=getattr(request.state, "request_id", ""),
        **more,
    )
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(json.dumps(body), status_code=status, media_type=PROBLEM, headers=headers)


def _rota_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RotaError)
    errors = [one.to_json() for one in error.problems] if isinstance(error, JobFileError) else []
    fields = dict(error.fields)
    more = {"errors": errors, "fields": fields}
    code = str(fields.pop("code", error.code))
    if error.http >= 500 and not isinstance(error, NotReachable | LimitExceeded):
        _log.error("%s %s: %s", request.method, request.url.path, error, exc_info=error)
    text, hint = error.message, error.hint
    answer = problem(request, status=error.http, code=code, detail=text, hint=hint, exit=error.exit, **more)
    if (wait_s := fields.get("retry_after_s")) is not None:
        answer.headers["Retry-After"] = str(wait_s)
    return answer


def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [_plain(request, one) for one in error.errors()]
    detail, errors = "; ".join(map(str, problems)), [one.to_json() for one in problems]
    return problem(request, status=422, code="INVALID", detail=detail, exit=2, errors=errors)


def _plain(request: Request, raw: JsonObject) -> Problem:
    """What is wrong with a parameter or a part of the body, in our words where pydantic's name no remedy."""
    kind, loc = str(raw["type"]), [str(part) for part in raw["loc"]]
    message, hint = str(raw["msg"]).removeprefix("Value error, "), ""
    if kind == "json_invalid":
        message, loc = f"no JSON: {raw['ctx']['error']} at character {loc[-1]}", loc[:1]
    elif loc == ["body"] and "json" not in request.headers.get("content-type", ""):
        message, hint = "not sent as JSON", "add the header 'Content-Type: application/json'"
    elif loc == ["body"]:
        message, hint = "expected an object", f"fields: {', '.join(_body_fields(request))}"
    elif kind == "missing":
        message = "missing"
    elif loc[0] in ("query", "path"):  # not what a body says: it may hold what must not be shown
        message += f", not {repr(raw['input'])[:VALUE_SHOWN_MAX]}"
    elif kind == "extra_forbidden":
        message, hint = "unknown field", nearest(loc[-1], _body_fields(request), "fields") if len(loc) == 2 else ""
    return Problem(loc=".".join(loc), line=0, col=0, message=message, hint=hint, code=kind.upper())


def _body_fields(request: Request) -> list[str]:
    """The names that the body of this route may have."""
    given = [one.field_info.annotation for one in request.scope["route"].dependant.body_params]
    kinds = [kind for one in given for kind in (one, *get_args(one))]
    return [name for kind in kinds if hasattr(kind, "model_fields") for name in kind.model_fields]


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, path = _HTTP_CODES.get(error.status_code, "INVALID"), request.url.path
    detail, hint = str(error.detail), ""
    if error.status_code in (404, 405):
        detail, hint = f"no {request.method} of {path}", did_you_mean(path, request.app.openapi()["paths"])
        hint = (hint if error.status_code == 404 else "") or "what there is: /openapi.json"
    answer = problem(request, status=error.status_code, code=code, detail=detail, hint=hint, exit=2)
    if error.status_code == 405:
        answer.headers["Allow"] = ", ".join(_methods_of(request))
    return answer


def _methods_of(request: Request) -> list[str]:
    """What may be asked of this path."""

    def fits(method: str) -> bool:
        scope = _as_routed(request.scope, method)
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in sorted(METHODS) if fits(method)]


def _bug(request: Request, error: Exception) -> Response:
    if isinstance(error, OSError) and (remedy := DISK_REMEDIES.get(error.errno or 0)):
        text = f"{error.filename or 'a file'}: {error.strerror}"
        hint = f"{remedy}; then ask again with the same Idempotency-Key"
        away = StoreUnavailable
        return problem(request, status=away.http, code=away.code, detail=text, hint=hint, exit=away.exit)
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    detail = f"{type(error).__name__}: internal error; see the service log"
    return problem(request, status=500, code="INTERNAL", detail=detail)
