"""Requests made from the OpenAPI document itself: whatever fits or misfits it, the service answers and never fails."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from standing import HELLO, listening, standing

from rota.service.rest.app import application

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

CASES = 60 if os.environ.get("ROTA_DEEP") else 1
"""Of each operation, valid and invalid by turns."""
FINE = {200, 201, 202, 204, 303, 400, 401, 403, 404, 405, 409, 412, 413, 415, 422, 429}


@contextmanager
def serving(home: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """A service in a thread of its own: its address, its token, its OpenAPI document."""
    loop, up, found = asyncio.new_event_loop(), threading.Event(), list[Any]()
    over = asyncio.Event()

    async def main() -> None:
        async with standing(home) as service, listening(service) as http:
            await service.submit(HELLO)
            document = application().openapi()
            found.append((str(http.base_url), http.headers["authorization"], document))
            up.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert up.wait(30)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
        loop.close()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_no_request_that_the_openapi_document_can_produce_is_a_server_error(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, token, document):
        schema = schemathesis.openapi.from_dict(document)
        statuses: Counter[int] = Counter()
        for operation in (found.ok() for found in schema.get_all_operations()):
            _play(operation, url, token, statuses)
        with httpx.Client(base_url=url, headers={"Authorization": token}) as http:
            assert http.get("/readyz").json()["ok"] and http.get("/api/v1/jobs/hello-1").status_code == 200
    assert document["openapi"].startswith("3.1") and set(statuses) <= FINE
    assert statuses.total() >= CASES * 30 and statuses[200] + statuses[202] + statuses[201] > 10


def _play(operation: Any, url: str, token: str, statuses: Counter[int]) -> None:
    quick = {"database": None, "phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}

    @settings(max_examples=CASES, deadline=None, **quick)
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        for part in (case.query, case.headers):  # a stream has no end, and another test
            for name in ("follow", "accept", "Accept"):
                (part or {}).pop(name, None)
        if "{job}" in operation.path and len(statuses) % 2:
            case.path_parameters["job"] = "hello-1"
        given = {"headers": {"Authorization": token}, "allow_redirects": False, "timeout": 30}
        answer = case.call(base_url=url.rstrip("/"), **given)
        statuses[answer.status_code] += 1
        assert answer.status_code in FINE, (operation.label, case.body, case.query, answer.text[:500])
        if answer.status_code >= 400:
            assert answer.json()["code"] and answer.json()["request_id"], operation.label

    ask()
