"""What lies outside the API: health, metrics, the OpenAPI document, the web UI and the cookie of its session."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import PurePosixPath
from typing import Annotated
from urllib.parse import quote, urlsplit, urlunsplit

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from rota.service.accounts import UserRole
from rota.service.models.accounts import Liveness, LoginDocument
from rota.service.models.base import REFUSAL, Sent
from rota.service.rest.auth import COOKIE, SESSION_TTL_S, bracketed, host_of
from rota.service.rest.deps import AppState, Asker, Parts, app_of, auth_request
from rota.spec.errors import BadInput, NoToken, NotReachable, UnknownName

PAGES = ("queues", "jobs", "nodes", "submit", "compare", "access", "admin")
"""First parts of the addresses that the UI draws itself; each answers with the same document."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Of its own, as browsers refuse scripts of a type that a machine's table gets wrong."""
_GZIP_BYTES_MIN = 1024
_FOR_EVER = "public, max-age=31536000, immutable"


async def known_host(request: Request) -> None:
    """Refuse a name that is not ours before anything is answered, also where no token is asked for."""
    (await app_of(request)).auth.check_host(auth_request(request))


router = APIRouter(tags=["page"], responses=REFUSAL)
_named = APIRouter(tags=["page"], dependencies=[Depends(known_host)], responses=REFUSAL)
ui = APIRouter(tags=["page"], dependencies=[Depends(known_host)], include_in_schema=False, responses=REFUSAL)


@router.get("/healthz")
async def healthz() -> Sent[Liveness]:
    """The process lives. Open to every name: who probes a process often knows its address alone."""
    return {"ok": True}


@_named.get("/readyz")
async def readyz(app: Parts) -> Sent[Liveness]:
    """The log was replayed and the store answers; 503 until then."""
    if not app.ready or app.loop.stale_since is not None:
        raise NotReachable("not ready", hint="the log is being replayed, or cannot be reached")
    return {"ok": True, "records": app.loop.installation.number}


@ui.get("/openapi.json")
async def openapi(request: Request) -> Sent[dict[str, object]]:
    """The API as OpenAPI 3.1."""
    return request.app.openapi()


@_named.get("/metrics", response_class=PlainTextResponse)
async def metrics(app: Parts, caller: Asker) -> Response:
    """Prometheus' text format; for who may see all queues."""
    caller.need(UserRole.VIEWER)
    return Response(app.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@_named.post("/api/v1/login/code", status_code=201)
async def new_code(app: Parts, caller: Asker) -> Sent[LoginDocument]:
    """A code that opens the page once."""
    code = app.auth.new_code(caller)
    return {"kind": "Login", "code": code, "url": f"{app.settings.url}/login?code={code}"}


@_named.get("/login", response_class=RedirectResponse)
async def login(request: Request, app: Parts, code: str = "", next: str = "") -> Response:
    """Trade a code for the session cookie of the page; without one, the form that asks for a code or a token.

    ``next``: the address of this service to show then.
    """
    if not code:
        return await index(request)
    try:
        cookie = app.auth.open_session(code)
    except BadInput as error:
        if "text/html" not in request.headers.get("accept", ""):
            raise
        form = await index(request)  # which says so, and asks for another
        form.status_code = error.http
        return form
    return _session(app, cookie, RedirectResponse(_local(next), status_code=303))


def _local(address: str) -> str:
    """The path and query of an address of this service; of any other the first page."""
    parts = urlsplit(address)
    below = parts.path.startswith("/") and not parts.path.startswith("//")
    inside = not parts.scheme and not parts.netloc and below and "\\" not in address
    return urlunsplit(parts) if inside else "/"


@ui.get("/ports/{job}/{role}/{rank}/{name}", response_class=RedirectResponse)
async def port(request: Request, app: Parts, job: str, role: str, rank: int, name: str) -> Response:
    """Open a port of an instance for this browser, and go there; without a session to the login first."""
    try:
        found = app.entered(app.auth.check(auth_request(request)), job)
    except NoToken:
        return RedirectResponse(f"/login?next={quote(request.url.path)}", status_code=303)
    opened = await app.forwards.open((found.id, f"{role}/{rank}", name))
    asked = bracketed(host_of(request.headers["host"]))
    return RedirectResponse(f"{request.url.scheme}://{asked}:{opened}/", status_code=303)


class LoginBody(BaseModel):
    """What opens a session: a code of 'rota ui', or a token."""

    model_config = ConfigDict(extra="forbid")

    code: Annotated[str, Field(max_length=200)] = ""
    token: Annotated[str, Field(max_length=200)] = ""


@_named.post("/login", status_code=204, response_class=Response)
async def login_by_form(request: Request, body: LoginBody, app: Parts) -> Response:
    """Trade a code or a token for the session cookie of the page."""
    asked, cookie = auth_request(request), ""
    if body.token:
        given = {**asked.headers, "authorization": f"Bearer {body.token}"}
        cookie = app.auth.session_of(app.auth.check(replace(asked, headers=given)).token)
    else:
        app.auth.check_origin(asked)
        cookie = app.auth.open_session(body.code.strip())
    return _session(app, cookie, Response(status_code=204))


@_named.post("/logout", status_code=204, response_class=Response)
async def logout(app: Parts, caller: Asker) -> Response:
    """Forget the session of this browser."""
    return _session(app, "", Response(status_code=204), keep_s=0.0)


def _session(app: AppState, cookie: str, answer: Response, *, keep_s: float = SESSION_TTL_S) -> Response:
    answer.set_cookie(
        COOKIE,
        cookie,
        max_age=int(keep_s),
        httponly=True,
        samesite="strict",
        secure=app.settings.url.startswith("https"),
    )
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """One file of the built UI; ``packed`` is empty where packing does not pay."""

    whole: bytes
    packed: bytes
    media_type: str


@cache
def _files() -> Mapping[str, _File]:
    """Every file of the built UI by its address below ``/``; read once."""
    root = resources.files("rota.service").joinpath("ui")
    found: dict[str, _File] = {}
    for folder in ("", "assets/"):
        for entry in root.joinpath(folder).iterdir():
            if entry.is_file():
                whole = entry.read_bytes()
                kind = _TYPES.get(PurePosixPath(entry.name).suffix, "text/plain; charset=utf-8")
                packed = gzip.compress(whole, mtime=0) if len(whole) >= _GZIP_BYTES_MIN else b""
                found[folder + entry.name] = _File(whole=whole, packed=packed, media_type=kind)
    return found


def _answer(request: Request, name: str, cache_control: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise UnknownName(f"no file {name!r}")
    headers = {"Cache-Control": cache_control, "Vary": "Accept-Encoding"}
    if file.packed and "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.packed, media_type=file.media_type, headers=headers | {"Content-Encoding": "gzip"})
    return Response(file.whole, media_type=file.media_type, headers=headers)


async def index(request: Request) -> Response:
    """The UI; it holds no data, its script asks for them with the cookie and draws the page of the address."""
    return _answer(request, "index.html", "no-cache")


for _path in ("/", *(f"/{page}{rest}" for page in PAGES for rest in ("", "/{rest:path}"))):
    ui.add_api_route(_path, index, response_class=Response)


@ui.get("/assets/{name}", response_class=Response)
async def asset(request: Request, name: str) -> Response:
    """Scripts and styles; their names carry a digest of what they hold, so they may be kept for ever."""
    return _answer(request, f"assets/{name}", _FOR_EVER)


@ui.get("/icon.svg", response_class=Response)
async def icon(request: Request) -> Response:
    """The icon."""
    return _answer(request, "icon.svg", "no-cache")


routers = (router, _named, ui)
"""In matching order."""
