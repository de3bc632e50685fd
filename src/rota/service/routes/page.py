"""What lies outside the API: health, metrics, the status page and its session."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from starlette.responses import FileResponse

from rota.service.auth import COOKIE, SESSION_TTL_S
from rota.service.routes.doors import Asker, Document, Parts, asked_of
from rota.spec.errors import NotReachable, UnknownName

router = APIRouter(tags=["page"])

_FILES = {
    "app.js": "text/javascript; charset=utf-8",
    "jobs.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


@router.get("/healthz")
async def healthz() -> Document:
    """The process lives."""
    return {"ok": True}


@router.get("/readyz")
async def readyz(doors: Parts) -> Document:
    """The log was replayed and the store answers; 503 until then."""
    if not doors.ready or doors.loop.stale_since is not None:
        raise NotReachable("not ready", hint="the log is being replayed, or the store is away")
    return {"ok": True, "records": doors.loop.installation.number}


@router.get("/metrics")
async def metrics(doors: Parts, caller: Asker) -> Response:
    """Prometheus' text format."""
    return Response(doors.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.post("/api/v1/login/code", status_code=201)
async def new_code(doors: Parts, caller: Asker) -> Document:
    """A code that opens the page once."""
    code = doors.auth.new_code()
    return {"kind": "Login", "code": code, "url": f"{doors.settings.url}/login?code={code}"}


@router.get("/login", response_class=RedirectResponse)
async def login(code: str, request: Request, doors: Parts) -> Response:
    """Trade a code for the session cookie of the page."""
    doors.auth.check_host(asked_of(request))
    answer = RedirectResponse("/", status_code=303)
    answer.set_cookie(
        COOKIE,
        doors.auth.open_session(code),
        max_age=int(SESSION_TTL_S),
        httponly=True,
        samesite="strict",
        secure=doors.settings.url.startswith("https"),
    )
    return answer


@router.get("/", response_class=FileResponse)
async def index() -> Response:
    """The status page; it holds no data, its script asks for them with the cookie."""
    return _file("index.html", "text/html; charset=utf-8")


@router.get("/page/{name}", response_class=FileResponse)
async def page_file(name: str) -> Response:
    """Scripts and style of the page."""
    if name not in _FILES:
        raise UnknownName(f"no file {name!r}")
    return _file(name, _FILES[name])


def _file(name: str, media_type: str) -> Response:
    text = resources.files("rota.service").joinpath("page", name).read_text(encoding="utf-8")
    return Response(text, media_type=media_type, headers={"Cache-Control": "no-cache"})
