"""Who may ask, what an error looks like, health, metrics, nodes and queues."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from described import routes_of
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families
from standing import HELLO, Standing, with_service
from starlette.requests import Request

from rota.runtime.event_log.interface import EventLog
from rota.service.rest.app import BODY_BYTES_MAX, _bug, application
from rota.service.rest.auth import FAILURES_MAX, FAILURES_WINDOW_S
from rota.service.rest.deps import caller_of
from rota.service.rest.routes.page import ui
from rota.spec.errors import StoreUnavailable
from rota.spec.states import JobState

OPEN = {"/healthz", "/readyz", "/login"}
UI = {route.path for route in ui.routes if isinstance(route, APIRoute)}
"""Files without data; the session comes after them."""


def stranger(service: Standing, **headers: str) -> httpx.AsyncClient:
    """A client of the same application without the token."""
    transport = service.http._transport
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7700", headers=headers)


def test_no_route_but_the_open_ones_answers_a_stranger(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        app = application()
        nobody = stranger(service)
        asked = 0
        for path, item in app.openapi()["paths"].items():
            for method in item:
                answer = await nobody.request(method.upper(), path.replace("{action}", "drain"), json={"source": "x"})
                if path in OPEN:
                    assert answer.status_code != 401, path
                else:
                    asked += 1
                    assert (answer.status_code, answer.json()["code"]) == (401, "NO_TOKEN"), path
        assert asked >= 22

    with_service(tmp_path, test)


def test_a_wrong_token_is_refused_and_after_ten_of_them_made_to_wait(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        wrong = stranger(service, Authorization="Bearer rota_x_wrong")
        codes = [(await wrong.get("/api/v1/jobs")).status_code for _ in range(FAILURES_MAX + 1)]
        assert codes == [401] * FAILURES_MAX + [429]
        refused = await wrong.get("/api/v1/jobs")
        wait_s = int(refused.headers["Retry-After"])
        assert 1 < wait_s <= FAILURES_WINDOW_S and refused.json()["hint"] == f"wait {wait_s} s"
        assert (await service.http.get("/api/v1/jobs")).status_code == 200

    with_service(tmp_path, test)


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
def test_another_host_or_origin_is_refused_even_with_the_token(tmp_path: Path, headers: dict[str, str]) -> None:
    async def test(service: Standing) -> None:
        answer = await service.http.get("/api/v1/jobs", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "NOT_ALLOWED")

    with_service(tmp_path, test)


def test_a_code_opens_one_session_once_and_a_change_needs_the_page_header(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        code = (await service.http.post("/api/v1/login/code")).json()["code"]
        browser = stranger(service)
        answer = await browser.get(f"/login?code={code}")
        assert answer.status_code == 303
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie
        assert (await browser.get("/api/v1/jobs/hello-1")).status_code == 200
        assert (await browser.post("/api/v1/jobs/hello-1:stop")).status_code == 403
        assert (await browser.post("/api/v1/jobs/hello-1:stop", headers={"Rota-CSRF": "1"})).status_code == 202
        assert (await stranger(service).get(f"/login?code={code}")).status_code == 422
        for value in (b"99999999999.00", b"99999999999.\xe9", b"\xb2.00"):
            forged = await stranger(service).get("/api/v1/jobs", headers=[(b"Cookie", b"rota_session=" + value)])
            assert forged.status_code == 401, value

    with_service(tmp_path, test)


def test_the_form_of_the_page_takes_a_code_or_a_token_from_its_own_page_alone(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        token = service.http.headers["authorization"].split()[1]
        code = (await service.http.post("/api/v1/login/code")).json()["code"]
        for body in ({"token": token}, {"code": code}):
            browser = stranger(service)
            assert (await browser.post("/login", json=body)).status_code == 204, body
            assert (await browser.get("/api/v1/whoami")).json()["by"] == "cookie"
        for body, status in (({"token": "wrong"}, 401), ({"code": code}, 422), ({}, 422), ({"other": "x"}, 422)):
            assert (await stranger(service).post("/login", json=body)).status_code == status, body
        elsewhere = stranger(service, Origin="http://evil.example")
        for body in ({"token": token}, {"code": "x"}):
            assert (await elsewhere.post("/login", json=body)).status_code == 403
        large = await stranger(service).post("/login", json={"token": "x" * 5000})
        assert (large.status_code, "larger than 4096 bytes" in large.text) == (413, True)

    with_service(tmp_path, test)


def test_a_browser_with_a_used_code_gets_the_form_and_a_program_the_error(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        for path, status in (("/login", 200), ("/login?code=used", 422)):
            form = await stranger(service, Accept="text/html").get(path)
            assert (form.status_code, form.headers["content-type"][:9]) == (status, "text/html"), path
        program = await stranger(service).get("/login?code=used")
        assert (program.status_code, program.json()["hint"]) == (422, "'rota ui' opens a new one")

    with_service(tmp_path, test)


def test_the_token_file_is_private_and_its_secret_is_in_no_answer(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        assert oct((tmp_path / "token").stat().st_mode & 0o777) == "0o600"
        secret = (tmp_path / "token").read_text().strip()
        for path in ("/api/v1/status", "/metrics", "/openapi.json", "/", "/api/v1/events"):
            assert secret not in (await service.http.get(path)).text

    with_service(tmp_path, test)


def test_every_error_is_a_problem_with_code_hint_and_request_id(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        wrong = [
            await service.http.get("/api/v1/nowhere"),
            await service.http.get("/api/v1/jobs", params={"limit": 0}),
            await service.http.post("/api/v1/jobs", content=b"{"),
            await service.http.post("/api/v1/jobs", json={"sauce": ""}),
            await service.http.delete("/api/v1/jobs"),
        ]
        assert [answer.status_code for answer in wrong] == [404, 422, 422, 422, 405]
        for answer in wrong:
            problem = answer.json()
            assert answer.headers["content-type"] == "application/problem+json"
            assert problem["request_id"] == answer.headers["rota-request-id"] != ""
            assert {"type", "title", "status", "detail", "code", "hint", "exit"} <= problem.keys()

    with_service(tmp_path, test)


def test_a_mistake_in_a_request_names_the_place_and_the_remedy(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        jobs, plain = "/api/v1/jobs", {"content-type": "text/plain"}
        spec = {"name": "x", "roles": [{"name": "a", "run": ["true"], "res": {"cpus": 1.0, "gpu": 1.0}}]}
        for method, path, sent, told in (
            ("POST", jobs, {"json": {"sorce": "x"}}, "body.sorce: unknown field; did you mean 'source'?"),
            ("POST", jobs, {"json": [1]}, "body: expected an object; fields: source, filename, sets, workdir, spec"),
            ("POST", jobs, {"content": b"{}", "headers": plain}, "add the header 'Content-Type: application/json'"),
            ("POST", jobs, {"content": b'{"a"', "headers": {"content-type": "application/json"}}, "no JSON: Expecting"),
            ("POST", jobs, {"json": {"spec": {"name": "x"}}}, "spec: roles: missing"),
            ("POST", jobs, {"json": {"spec": spec}}, "spec.roles[0].res.gpu: unknown field; did you mean 'gpus'?"),
            (
                "GET",
                f"{jobs}?limit=abc",
                {},
                "query.limit: Input should be a valid integer, unable to parse string as an ",
            ),
            ("GET", f"{jobs}?limit=abc", {}, "an integer, not 'abc'"),
            ("GET", f"{jobs}?limit=900", {}, "less than or equal to 200, not '900'"),
            ("GET", f"{jobs}?stat=RUNNING", {}, "query.stat: unknown parameter; did you mean 'state'?"),
            ("GET", "/api/v1/nodes/r0n0?x=1", {}, "query.x: unknown parameter; this route takes none"),
            ("GET", "/api/v1/job", {}, "no GET of /api/v1/job; did you mean '/api/v1/jobs'?"),
            ("DELETE", jobs, {}, "no DELETE of /api/v1/jobs; what there is: /openapi.json"),
            ("PUT", "/api/v1/queues", {"json": {"queues": [{"path": "a", "limt": {}}]}}, "did you mean 'limit'?"),
        ):
            problem = (await service.http.request(method, path, **sent)).json()
            assert told in f"{problem['detail']}; {problem['hint']}", problem

    with_service(tmp_path, test)


def test_a_body_over_the_limit_is_refused(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        answer = await service.http.post("/api/v1/jobs", content=b'{"source": "' + b"x" * BODY_BYTES_MAX + b'"}')
        assert answer.status_code == 413

    with_service(tmp_path, test)


class AwayLog:
    """A log whose store went away: every question fails."""

    def __getattr__(self, name: str) -> object:
        def fail(*_: object, **__: object) -> None:
            raise StoreUnavailable("the disk is gone")

        return fail


def test_while_the_store_is_away_reads_go_on_with_their_age_and_writes_are_refused(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        loop = service.app.loop
        whole: EventLog = loop.log
        loop.log = AwayLog()  # type: ignore[assignment]
        refused = await service.http.post("/api/v1/jobs", json={"source": HELLO})
        assert (refused.status_code, refused.json()["code"]) == (503, "STORE_UNAVAILABLE")
        assert int(refused.headers["retry-after"]) >= 1
        while loop.stale_since is None:
            await service.app.clock.sleep(0.01)
        read = await service.http.get("/api/v1/jobs/hello-1")
        assert read.status_code == 200
        assert int(read.headers["rota-stale"]) >= 0
        assert (await service.http.get("/readyz")).status_code == 503
        loop.log = whole
        assert (await service.submit())["id"] == "hello-2"
        while loop.stale_since is not None:
            await service.app.clock.sleep(0.01)
        assert (await service.http.get("/readyz")).status_code == 200

    with_service(tmp_path, test)


def test_a_drained_node_gets_no_new_work_until_it_is_undrained(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        drained = await service.http.post("/api/v1/nodes/r0n0:drain", json={"reason": "fan"})
        assert drained.json()["state"] == "drained"
        for _ in range(3):
            await service.submit()
        await service.until("hello-2", JobState.ADMITTED)
        third = await service.until("hello-3", JobState.QUEUED)
        assert third["nodes"] == []
        nodes = {row["id"]: row for row in (await service.get("/nodes"))["items"]}
        assert nodes["r0n0"]["gpus_used"] == 0
        assert nodes["r0n1"]["gpus_used"] == 4
        assert [d["job"] for d in nodes["r0n1"]["devices"]].count("hello-1") == 2
        await service.http.post("/api/v1/nodes/r0n0:undrain")
        assert (await service.until("hello-3", JobState.ADMITTED))["nodes"] == ["r0n0"]
        for action, effect in (("cordon", "new work goes elsewhere"), ("uncordon", "new work may come here again")):
            (row,) = (await service.http.post(f"/api/v1/nodes/r0n0:{action}")).json()["jobs"]
            assert row["job"] == "hello-3" and row["effect"].endswith(effect)
            state = {one["id"]: one["state"] for one in (await service.get("/nodes"))["items"]}["r0n0"]
            assert state == {"cordon": "cordoned", "uncordon": "healthy"}[action]

    with_service(tmp_path, test)


def test_queues_are_replaced_whole_and_a_queue_with_jobs_stays(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        tree = {"queues": [{"path": "default"}, {"path": "rl", "guaranteed": {"gpus": 4}, "limit": {"gpus": 6}}]}
        diff = (await service.http.put("/api/v1/queues", json=tree)).json()
        assert diff["added"] == ["rl"]
        await service.submit("queue: rl\n" + HELLO)
        await service.until("hello-1", JobState.ADMITTED)
        row = next(row for row in (await service.get("/queues"))["items"] if row["path"] == "rl")
        assert (row["used_gpus"], row["guaranteed_gpus"], row["limit_gpus"], row["running_jobs"]) == (2.0, 4.0, 6.0, 1)
        refused = await service.http.put("/api/v1/queues", json={"queues": [{"path": "default"}]})
        assert refused.status_code == 422
        assert "rl" in refused.json()["detail"]
        keep = tree["queues"]
        for wrong in ([], [*keep, {"path": "a/b"}], [*keep, {"path": "rl"}], [*keep, {"path": "x", "weight": 0}]):
            answer = await service.http.put("/api/v1/queues", json={"queues": wrong})
            assert answer.status_code == 422, wrong
        await service.submit("queue: rl\n" + HELLO)
        await service.until("hello-2", JobState.ADMITTED)
        assert diff["over"] == []
        low = [{"path": "default"}, {"path": "rl", "limit": {"gpus": 3}, "user_limit": {"gpus": 1}}]
        over = (await service.http.put("/api/v1/queues", json={"queues": low})).json()["over"]
        assert [(one["queue"], one["user"], one["used"], one["limit"]) for one in over] == [
            ("rl", None, 4000, 3000),
            ("rl", "local", 4000, 1000),
        ]
        told = "queue rl uses 4 GPUs, above a limit of 3 GPUs: nothing is stopped, and nothing new starts until less is"
        assert over[0]["text"] == f"{told} in use"
        assert (await service.get("/jobs/hello-2"))["state"] == "ADMITTED"
        for _ in range(2):
            await service.submit("queue: rl\n" + HELLO.replace("gpus: 2", "gpus: 1"))

        async def reasoned() -> dict[str, Any]:
            job = await service.get("/jobs/hello-4")
            return job if job["text"] else {}

        last = await service.until_true(reasoned)
        assert (last["reason"], last["text"].partition(":")[0]) == ("QUOTA_LIMIT", "It is behind hello-3")

    with_service(tmp_path, test)


def test_metrics_parse_and_counters_survive_a_restart(tmp_path: Path) -> None:
    async def first(service: Standing) -> dict[str, float]:
        for _ in range(5):
            await service.submit(HELLO.replace("gpus: 2", "gpus: 4"))
        await service.http.post("/api/v1/jobs/hello-4:stop")
        await service.until("hello-4", JobState.CANCELLED)
        number = -1
        while number != service.app.loop.installation.number:  # until nothing more is decided about the others
            number = service.app.loop.installation.number
            await asyncio.sleep(0.05)
        return await samples(service)

    async def samples(service: Standing) -> dict[str, float]:
        text = (await service.http.get("/metrics")).text
        families = list(text_string_to_metric_families(text))
        assert all(family.name.startswith("rota_") and family.documentation for family in families)
        wanted = ("rota_jobs_total", "rota_decisions_total", "rota_queue_pending_jobs", "rota_queue_used")
        return {
            f"{sample.name}{sorted(sample.labels.items())}": sample.value
            for family in families
            for sample in family.samples
            if sample.name in wanted
        }

    before = with_service(tmp_path, first)
    assert before["rota_queue_used[('queue', 'default')]"] == 8.0
    assert before["rota_queue_pending_jobs[('queue', 'default')]"] == 2.0
    ended = "rota_jobs_total[('queue', 'default'), ('reason', 'STOPPED_BY_USER'), ('state', 'CANCELLED')]"
    assert before[ended] == 1.0
    assert with_service(tmp_path, samples) == before


def test_words_of_strangers_add_no_rows_to_the_metrics(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        nobody = stranger(service)
        for number in range(20):
            await nobody.request(f"WORD{number}", f"/nowhere/{number}")
        text = (await service.http.get("/metrics")).text
        assert "WORD" not in text and "nowhere" not in text
        assert 'rota_http_request_seconds_count{method="other",route="",status="404"} 20.0' in text

    with_service(tmp_path, test)


def test_the_api_description_is_openapi_3_1_and_names_every_route(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        described = (await service.http.get("/openapi.json")).json()
        assert described["openapi"].startswith("3.1")
        routes = routes_of(application())
        assert {route.path_format for route in routes} >= set(described["paths"]) > {"/api/v1/jobs", "/metrics"}
        for route in routes:
            direct = route.dependant.dependencies
            guarded = any(one.call is caller_of for used in direct for one in (used, *used.dependencies))
            assert guarded or route.path in OPEN | UI, route.path
        for operations in described["paths"].values():
            assert all(one.get("summary") for one in operations.values())

    with_service(tmp_path, test)


@pytest.mark.parametrize(("number", "remedy"), [(errno.ENOSPC, "free space"), (errno.EROFS, "mount it for writing")])
def test_a_full_disk_is_told_without_a_claim_of_what_was_written(number: int, remedy: str) -> None:
    answer = _bug(Request({"type": "http"}), OSError(number, os.strerror(number), "/home/log"))
    told = json.loads(bytes(answer.body))
    assert (answer.status_code, told["detail"]) == (503, f"/home/log: {os.strerror(number)}")
    assert remedy in told["hint"] and "the same Idempotency-Key" in told["hint"]
