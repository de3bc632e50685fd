"""How the service gives out the web UI: which addresses, under which names, with which headers, from which sources."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import httpx
import pytest
from tests.service.standing import Standing, with_service

from rota.service.rest.routes.page import _GZIP_BYTES_MIN, PAGES

ROOT = Path(__file__).resolve().parents[2]
WEB, BUILT = ROOT / "web", ROOT / "src" / "rota" / "service" / "ui"
BYTES_MAX = 1_500_000


def stranger(service: Standing, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=service.http._transport, base_url="http://127.0.0.1:7700", headers=headers)


def test_every_page_address_gives_the_ui_and_no_other_does(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        nobody = stranger(service)
        first = await nobody.get("/")
        assert first.status_code == 200 and '<div id="root">' in first.text
        for path in (*(f"/{page}" for page in PAGES), "/jobs/hello-1/logs", "/nodes/r0n0"):
            assert (await nobody.get(path)).content == first.content, path
        for path in ("/api/v1/nowhere", "/other", "/assets/nothing.js", "/assets/../index.html/x", "/page/app.js"):
            answer = await nobody.get(path)
            assert answer.status_code == 404 and answer.json()["code"] == "UNKNOWN_NAME", path

    with_service(tmp_path, test)


def test_files_may_be_kept_for_ever_but_the_first_page_is_always_asked_for(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        nobody = stranger(service)
        page = await nobody.get("/")
        assert page.headers["cache-control"] == "no-cache"
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert "<style" not in page.text and not re.search(r"<script(?![^>]*\bsrc=)", page.text)
        files = re.findall(r'(?:src|href)="(/assets/[^"]+)"', page.text)
        assert {Path(name).suffix for name in files} >= {".js", ".css"}
        for name in files:
            packed = await nobody.get(name, headers={"Accept-Encoding": "gzip"})
            whole = await nobody.get(name, headers={"Accept-Encoding": "identity"})
            assert "immutable" in packed.headers["cache-control"]
            large = len(whole.content) >= _GZIP_BYTES_MIN
            assert (packed.headers.get("content-encoding") == "gzip") == large
            assert "content-encoding" not in whole.headers
            assert packed.content == whole.content == (BUILT / name.lstrip("/")).read_bytes()
            kind = "text/javascript" if name.endswith(".js") else "text/css"
            assert whole.headers["content-type"].startswith(kind)

    with_service(tmp_path, test)


@pytest.mark.parametrize(
    "path", ["/", "/jobs/x", "/assets/x.js", "/readyz", "/openapi.json", "/metrics", "/login?code=x"]
)
def test_nothing_is_told_under_a_name_that_somebody_points_at_the_service(tmp_path: Path, path: str) -> None:
    async def test(service: Standing) -> None:
        answer = await stranger(service, Host="evil.example").get(path)
        assert (answer.status_code, answer.json()["code"]) == (403, "NOT_ALLOWED")
        assert (await stranger(service, Host="10.1.2.3").get("/healthz")).status_code == 200

    with_service(tmp_path, test)


def test_the_built_ui_is_of_the_sources_in_the_tree() -> None:
    """The digest of ``web/sources.mjs``, computed a second time."""
    roots = json.loads(re.search(r"ROOTS = (\[.*\])", (WEB / "sources.mjs").read_text())[1])
    names = sorted(
        path.relative_to(WEB).as_posix()
        for root in roots
        for path in ([WEB / root] if "." in root else (WEB / root).rglob("*"))
        if path.is_file()
    )
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + b"\0" + (WEB / name).read_bytes() + b"\0")
    assert (BUILT / "sources.sha256").read_text().strip() == digest.hexdigest(), (
        "run 'make ui' and commit what it built"
    )


def test_the_built_ui_is_small_and_names_no_registry() -> None:
    files = [path for path in BUILT.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < BYTES_MAX
    assert (BUILT / "licenses.md").read_text().count("MIT License") > 3
    assert "resolved" not in (WEB / "package-lock.json").read_text()
