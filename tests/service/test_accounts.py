"""Users, tokens, roles and secrets: who may do what on every route, and what nobody is shown."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from standing import Standing, listening, standing, with_service

from rota.runtime.secrets import Vault, masked
from rota.service.accounts import LOCAL, REDACTED, Caller, Redactor, UserRole
from rota.service.control import intake
from rota.service.rest import auth as audit_file
from rota.service.rest import deps
from rota.service.rest.app import application
from rota.service.rest.auth import Audit
from rota.service.rest.routes import accounts
from rota.service.webhooks import OWNER
from rota.spec.errors import BadInput, LimitExceeded
from rota.spec.events import SecretChanged
from rota.spec.ids import NAME_RULE
from rota.spec.states import JobState
from rota.testing.memory import VirtualClock

QUEUES = [{"path": "default"}, {"path": "research"}, {"path": "research/rl"}, {"path": "prod"}]
USERS = {
    "ann": [("research", "user")],
    "bob": [("prod", "user")],
    "pat": [("prod", "user")],
    "quinn": [("prod", "queue-admin")],
    "vera": [("", "viewer")],
}
MARKS = ("zebra", "bob", "value-of-env", "line-of-log", "label-of-job", "text-of-source")
"""Words that stand in bob's job alone."""
JOB = """\
# text-of-source
name: zebra
queue: prod
labels: {secret: label-of-job}
env: {PASSWORD: value-of-env}
roles: {main: {run: [echo, value-of-env], resources: {gpus: 4}}}
"""
SEE, READ, FILE, STEER, ANY, ADMIN, ALL = "see", "read", "file", "steer", "any", "admin", "all-queues"
RIGHTS = {
    "GET /api/v1/jobs/{job}": SEE,
    "GET /api/v1/jobs/{job}/explain": SEE,
    "POST /api/v1/jobs/{job}/explain": READ,
    "GET /api/v1/jobs/{job}/placement": SEE,
    "GET /api/v1/jobs/{job}/attempts": SEE,
    "GET /api/v1/jobs/{job}/failures": READ,
    "GET /api/v1/jobs/{job}/graph": READ,
    "GET /api/v1/jobs/{job}/spec": READ,
    "GET /api/v1/jobs/{job}/why": READ,
    "GET /api/v1/jobs/{job}/trace": READ,
    "GET /api/v1/jobs/{job}/events": READ,
    "GET /api/v1/jobs/{job}/logs": READ,
    "GET /api/v1/jobs/{job}/files": FILE,
    "GET /api/v1/jobs/{job}/files/part?path=none": FILE,
    "PATCH /api/v1/jobs/{job}": STEER,
    "POST /api/v1/jobs/{job}:pause": STEER,
    "POST /api/v1/jobs/{job}:resume": STEER,
    "POST /api/v1/jobs/{job}:scale": STEER,
    "POST /api/v1/jobs/{job}:exec": STEER,
    "POST /api/v1/jobs/{job}:terminal": STEER,
    "GET /api/v1/jobs/{job}/terminals/{terminal}": FILE,
    "POST /api/v1/jobs/{job}/terminals/{terminal}": FILE,
    "POST /api/v1/jobs/{job}:stop": STEER,
    "GET /api/v1/jobs": ANY,
    "POST /api/v1/jobs": "submit",
    "POST /api/v1/jobs:plan": "submit",
    "GET /api/v1/events": ANY,
    "GET /api/v1/status": ANY,
    "GET /api/v1/nodes": ANY,
    "GET /api/v1/nodes/{node}": ANY,
    "GET /api/v1/nodes/{node}/usage": ALL,
    "GET /api/v1/alerts": ANY,
    "POST /api/v1/alerts:acknowledge": "own",
    "GET /api/v1/cluster": ANY,
    "GET /api/v1/cluster/heat": ANY,
    "GET /api/v1/cluster/history": ANY,
    "GET /api/v1/queues": ANY,
    "GET /api/v1/queues/{path}": ANY,
    "GET /api/v1/reasons": ANY,
    "GET /api/v1/sim/profiles": ANY,
    "POST /api/v1/sim/outlook": ANY,
    "GET /api/v1/templates": ANY,
    "GET /api/v1/whoami": ANY,
    "GET /api/v1/tokens": ANY,
    "POST /api/v1/tokens": ANY,
    "DELETE /api/v1/tokens/{token}": "own",
    "GET /api/v1/secrets": "own-secret",
    "PUT /api/v1/secrets/{name}": "own-secret",
    "DELETE /api/v1/secrets/{name}": "own-secret",
    "POST /api/v1/login/code": ANY,
    "GET /api/v1/report": ANY,
    "GET /metrics": ALL,
    "GET /api/v1/settings": ADMIN,
    "POST /api/v1/service:hold": ADMIN,
    "PUT /api/v1/queues": ADMIN,
    "POST /api/v1/nodes/{node}:{action}": ADMIN,
    "POST /api/v1/nodes:check": ADMIN,
    "POST /api/v1/machines": ADMIN,
    "GET /api/v1/machines/{host}": ADMIN,
    "POST /api/v1/machines/{host}/heartbeat": ADMIN,
    "DELETE /api/v1/machines/{host}": ADMIN,
    "GET /api/v1/users": ADMIN,
    "PUT /api/v1/users/{name}": ADMIN,
    "DELETE /api/v1/users/{name}": ADMIN,
    "GET /api/v1/webhooks": ADMIN,
    "POST /api/v1/webhooks": ADMIN,
    "DELETE /api/v1/webhooks/{webhook}": ADMIN,
    "GET /api/v1/audit": ADMIN,
}
OPEN = {"GET /healthz", "GET /readyz", "GET /login", "POST /login", "POST /logout"}
BODIES: dict[str, dict[str, Any]] = {
    "PATCH /api/v1/jobs/{job}": {"changes": {"priority": 51}},
    "POST /api/v1/jobs/{job}/explain": {"changes": ["priority=51"]},
    "POST /api/v1/jobs/{job}:scale": {"role": "main", "n": 2},
    "POST /api/v1/jobs/{job}:exec": {"instance": "main/0", "argv": ["true"]},
    "POST /api/v1/jobs/{job}:terminal": {"argv": ["true"]},
    "POST /api/v1/jobs/{job}/terminals/{terminal}": {},
    "POST /api/v1/jobs": {"source": JOB},
    "POST /api/v1/jobs:plan": {"source": JOB},
    "POST /api/v1/sim/outlook": {"profiles": ["default"]},
    "PUT /api/v1/secrets/{name}": {"value": "x"},
    "PUT /api/v1/queues": {"queues": [{"path": "default"}, {"path": "prod"}], "dry_run": True},
    "PUT /api/v1/users/{name}": {"grants": [{"queue": "prod", "role": "user"}]},
    "POST /api/v1/tokens": {},
    "POST /api/v1/alerts:acknowledge": {"alert": "none"},
    "POST /api/v1/machines": {"host": "m9", "identity": "i", "address": "10.0.0.9", "versions": {}},
    "POST /api/v1/webhooks": {"url": "ftp://nowhere"},
}


class Town:
    """A service with several tenants, each with a client of its own, and a job of bob's that runs in ``prod``."""

    def __init__(self, service: Standing) -> None:
        self.service = service
        self.who: dict[str, httpx.AsyncClient] = {"local": service.http}

    def client(self, token: str) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(
            transport=self.service.http._transport, base_url="http://127.0.0.1:7700", headers=headers
        )

    async def token(self, **body: Any) -> str:
        answer = await self.service.http.post("/api/v1/tokens", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["token"]

    async def settle(self) -> None:
        answer = await self.service.http.put("/api/v1/queues", json={"queues": QUEUES})
        assert answer.status_code == 200, answer.text
        for name, grants in USERS.items():
            rows = [{"queue": queue, "role": role} for queue, role in grants]
            answer = await self.service.http.put(f"/api/v1/users/{name}", json={"grants": rows})
            assert answer.status_code == 200, answer.text
            self.who[name] = self.client(await self.token(user=name))
        answer = await self.who["bob"].post("/api/v1/jobs", json={"source": JOB})
        assert answer.status_code == 201, answer.text
        await self.service.until("zebra-1", JobState.ADMITTED)
        logs = self.service.app.home.job("zebra-1").logs
        (logs / "main-0.log").write_text("2026-01-01T00:00:00.000Z 1/1 stdout line-of-log\n")


def with_town(home: Path, test: Any) -> None:
    async def settled(service: Standing) -> None:
        town = Town(service)
        await town.settle()
        await test(town)

    with_service(home, settled)


def routes() -> list[str]:
    return [f"{method.upper()} {path}" for path, item in application().openapi()["paths"].items() for method in item]


async def ask(who: httpx.AsyncClient, route: str, **body: Any) -> httpx.Response:
    method, _, path = route.partition(" ")
    known = {
        "job": "zebra-1",
        "node": "r0n0",
        "action": "drain",
        "token": "none",
        "name": "KEY",
        "path": "prod",
        "host": "m9",
    }
    for name, value in known.items():
        path = path.replace(f"{{{name}}}", value)
    return await who.request(method, path, json=body or BODIES.get(route))


def expected(right: str, name: str) -> set[int]:
    """The statuses that a user may get on a route about bob's job in ``prod``; conflicts of state are not refusals."""
    fine = {200, 201, 202, 409, 422}
    sees = name != "ann"
    reads = name in ("bob", "quinn", "local")
    table = {
        SEE: fine if sees else {404},
        READ: fine if reads else {403} if sees else {404},
        FILE: fine | {404} if reads else {403} if sees else {404},
        STEER: fine if reads else {403} if sees else {404},
        "submit": fine if name in ("bob", "pat", "quinn", "local") else {403},
        "own": {404},
        "own-secret": {403} if name == "vera" else fine | {404},
        ADMIN: fine | {404} if name == "local" else {403},
        ALL: fine if name in ("vera", "local") else {403},
        ANY: fine,
    }
    return table[right]


@pytest.mark.slow
def test_every_route_gives_every_role_what_it_may_have_and_a_stranger_nothing(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        listed = set(routes())
        assert listed - OPEN == {route.partition("?")[0] for route in RIGHTS}, (
            "a route without a line in the table of rights"
        )
        nobody, tried = town.client(""), 0
        for name in ("ann", "vera", "pat", "quinn", "bob", "local"):
            for route, right in RIGHTS.items():
                answer = await ask(town.who[name], route)
                assert answer.status_code in expected(right, name), (name, route, answer.status_code, answer.text)
                tried += 1
        for route in RIGHTS:
            assert (await ask(nobody, route)).status_code == 401, route
        assert tried == 6 * len(RIGHTS)

    with_town(tmp_path, test)


def test_who_may_not_submit_learns_of_no_file_and_has_nothing_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    monkeypatch.setattr(intake, "find_tool", lambda: asked.append("tool") or "podman")

    async def test(service: Standing) -> None:
        body = {"grants": [{"queue": "", "role": "viewer"}]}
        assert (await service.http.put("/api/v1/users/vera", json=body)).status_code == 200
        made = (await service.http.post("/api/v1/tokens", json={"user": "vera"})).json()
        service.http.headers["Authorization"] = f"Bearer {made['token']}"
        for door in ("jobs", "jobs:plan"):
            for name in ("there.json", "not-there.json"):
                source = f"name: t\nimage: x:1\nroles: {{main: {{run: torchrun train.py, plan: {name}}}}}\n"
                body = {"source": source, "workdir": str(tmp_path)}
                assert (await service.http.post(f"/api/v1/{door}", json=body)).status_code == 403, (door, name)
        assert asked == []

    (tmp_path / "there.json").write_text("{")
    with_service(tmp_path, test)


def test_nothing_of_another_tenant_is_in_any_answer(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        own = "name: lion\nqueue: research/rl\nroles: {main: {run: [echo], replicas: 2, resources: {gpus: 4}}}\n"
        assert (await town.who["ann"].post("/api/v1/jobs", json={"source": own})).status_code == 201
        await town.service.until("lion-1", JobState.QUEUED)
        asked = [route for route in RIGHTS if route.startswith("GET")] + ["POST /api/v1/sim/outlook"]
        for route in (*asked, "POST /api/v1/jobs:plan"):
            for job in ("zebra-1", "zebr", "lion-1"):
                body = {"source": own} if "plan" in route else {}
                answer = await ask(town.who["ann"], route.replace("{job}", job), **body)
                told = answer.text.replace(f"no job '{job}'", "")
                found = [mark for mark in MARKS if mark in told]
                assert not found, (route, found, answer.text)
        explained = (await town.who["ann"].get("/api/v1/jobs/lion-1/explain")).json()
        assert explained["waiting"] and explained["blocked_by"][0]["gpus"] == 4
        assert "zebra-1" in (await town.who["local"].get("/api/v1/jobs/lion-1/explain")).text

    with_town(tmp_path, test)


def test_a_plan_counts_what_the_user_who_asks_holds(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        queues = [one | ({"user_limit": {"gpus": 1}} if one["path"] == "research/rl" else {}) for one in QUEUES]
        assert (await town.who["local"].put("/api/v1/queues", json={"queues": queues})).status_code == 200
        body = {"source": "name: ox\nqueue: research/rl\nroles: {main: {run: [echo], resources: {gpus: 1}}}\n"}
        assert (await town.who["ann"].post("/api/v1/jobs", json=body)).status_code == 201
        await town.service.until("ox-1", JobState.ADMITTED)
        plans = [(await town.who[name].post("/api/v1/jobs:plan", json=body)).json() for name in ("ann", "local")]
        assert plans[0]["why"]["code"] == plans[0]["explanation"]["why"]["code"] == "USER_LIMIT", plans[0]["why"]
        assert plans[1]["starts_now"] or plans[1]["why"]["code"] != "USER_LIMIT"

    with_town(tmp_path, test)


def test_a_viewer_sees_that_a_job_is_there_and_nothing_that_its_owner_wrote(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        shown = (await town.who["vera"].get("/api/v1/jobs/zebra-1")).text
        events = (await town.who["vera"].get("/api/v1/events", params={"limit": 1000})).text
        assert "zebra-1" in shown and "zebra-1" in events
        for hidden in ("value-of-env", "label-of-job", "text-of-source"):
            assert hidden not in shown and hidden not in events
        assert "value-of-env" in (await town.who["quinn"].get("/api/v1/events", params={"limit": 1000})).text

    with_town(tmp_path, test)


def test_tokens_expire_are_revoked_and_are_never_worth_more_than_what_made_them(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        weak = town.client(await town.token(user="bob", role="viewer", queue="prod"))
        assert (await weak.get("/api/v1/jobs/zebra-1/logs")).status_code == 200
        assert (await weak.post("/api/v1/jobs/zebra-1:stop")).status_code == 403
        child = (await weak.post("/api/v1/tokens", json={"role": "admin"})).json()
        assert child["role"] == "viewer" and child["queue"] == "prod"
        assert (await town.who["bob"].post("/api/v1/tokens", json={"user": "pat"})).status_code == 403
        soon = town.client(await town.token(user="bob", ttl_s=0.01))
        await asyncio.sleep(0.02)
        assert (await soon.get("/api/v1/jobs")).status_code == 401
        made = (await town.who["bob"].post("/api/v1/tokens", json={"name": "laptop"})).json()
        laptop = town.client(made["token"])
        assert (await laptop.get("/api/v1/whoami")).json()["name"] == "bob"
        code = (await laptop.post("/api/v1/login/code")).json()["code"]
        browser = town.client("")
        await browser.get(f"/login?code={code}")
        assert (await browser.get("/api/v1/whoami")).json() | {"by": ""} == {
            "api": "rota/v1", "kind": "User", "by": "", "name": "bob", "grants": [{"queue": "prod", "role": "user"}]
        }  # fmt: skip
        assert (await town.who["ann"].delete(f"/api/v1/tokens/{made['id']}")).status_code == 404
        for less in ({"role": "viewer"}, {"queue": "prod"}):
            refused = await town.client(await town.token(user="bob", **less)).delete(f"/api/v1/tokens/{made['id']}")
            assert refused.status_code == 403 and "may do more" in refused.json()["detail"]
        assert (await weak.delete(f"/api/v1/tokens/{child['id']}")).json()["revoked"]
        assert (await laptop.delete(f"/api/v1/tokens/{made['id']}")).json()["revoked"]
        assert [(await one.get("/api/v1/jobs")).status_code for one in (laptop, browser)] == [401, 401]
        kept = "".join(str(record.event) for record in town.service.log.read(limit=1000))
        assert made["token"].split("_", 2)[2] not in kept and made["id"] in kept

    with_town(tmp_path, test)


def test_a_user_who_is_removed_loses_every_token_and_a_restart_forgets_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with standing(tmp_path) as service:
            town = Town(service)
            await town.settle()
            bob, ann = (town.who[name].headers["Authorization"] for name in ("bob", "ann"))
            assert (await service.http.delete("/api/v1/users/bob")).status_code == 200
            assert (await town.who["bob"].get("/api/v1/jobs")).status_code == 401
        async with standing(tmp_path) as again:
            for token, status in ((bob, 401), (ann, 200)):
                answer = await again.http.get("/api/v1/whoami", headers={"Authorization": token})
                assert answer.status_code == status
            names = [one["name"] for one in (await again.get("/users"))["items"]]
            assert names == ["ann", "local", "pat", "quinn", "vera"]

    asyncio.run(test())


def test_secrets_of_a_user_are_gone_before_the_user_and_jobs_that_name_them_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(service: Standing) -> None:
        vault = service.app.vault
        body = {"grants": [{"queue": "", "role": "user"}]}
        assert (await service.http.put("/api/v1/users/eve", json=body)).status_code == 200
        made = (await service.http.post("/api/v1/tokens", json={"user": "eve"})).json()
        with pytest.raises(BadInput, match="KEY: the value is empty"):
            vault.put("eve", "KEY", "")
        vault.put("eve", "KEY", "correct-horse")
        answer = await service.http.post(
            "/api/v1/jobs",
            json={"source": "name: uses\nsecrets: [KEY]\nroles: {main: {run: [echo]}}\n"},
            headers={"Authorization": f"Bearer {made['token']}"},
        )
        assert answer.status_code == 201
        with monkeypatch.context() as patch:
            patch.setattr(Vault, "remove", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
            assert (await service.http.delete("/api/v1/users/eve")).status_code == 500
        assert "eve" in service.app.auth.accounts.users, "it can be asked for again"
        assert (await service.http.delete("/api/v1/users/eve")).json()["jobs"] == ["uses-1"]
        assert vault.names("eve") == []
        vault.put("eve", "KEY", "left by a version that removed users first")
        assert (await service.http.put("/api/v1/users/eve", json=body)).status_code == 200
        assert vault.names("eve") == []

    with_service(tmp_path, test)


def test_a_queue_admin_runs_no_command_where_secrets_of_the_owner_are(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        town.service.app.vault.put("bob", "KEY", "correct-horse")
        source = JOB.replace("name: zebra", "name: uses\nsecrets: [KEY]").replace("gpus: 4", "gpus: 1")
        assert (await town.who["bob"].post("/api/v1/jobs", json={"source": source})).status_code == 201
        body = {"instance": "main/0", "argv": ["true"]}
        told = [
            (await town.who[name].post(f"/api/v1/jobs/{job}:exec", json=body)).status_code
            for job in ("uses-1", "zebra-1")
            for name in ("quinn", "pat", "bob", "local")
        ]
        assert told[:2] == [403, 403]
        assert set(told[2:4]) <= {200, 409}, "a conflict: it does not run yet"
        assert told[4] in (200, 409) and told[5] == 403

    with_town(tmp_path, test)


def test_commands_beside_instances_are_limited_in_all_and_of_each_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deps, "EXECS_OF_USER_MAX", 1)

    async def test(service: Standing) -> None:
        await service.submit()
        await service.until_asked("hello-1")
        body = {"instance": "main/0", "argv": ["cat", str(tmp_path / "pipe")]}
        first = asyncio.create_task(service.http.post("/api/v1/jobs/hello-1:exec", json=body))
        async with asyncio.timeout(60):
            while not service.app.execs:
                await asyncio.sleep(0.005)
        second = await service.http.post("/api/v1/jobs/hello-1:exec", json={**body, "argv": ["true"]})
        assert second.status_code == 429 and "1 of local" in second.json()["detail"]
        monkeypatch.setattr(deps, "EXECS_MAX", 1)
        with pytest.raises(LimitExceeded), service.app.exec_slot("ann"):
            pass
        await asyncio.to_thread((tmp_path / "pipe").write_text, "done")
        assert (await first).json()["stdout"] == "done" and not service.app.execs

    os.mkfifo(tmp_path / "pipe")
    with_service(tmp_path, test)


def test_a_queue_admin_sets_what_is_below_the_own_queue_and_no_more(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        await town.service.http.put(
            "/api/v1/users/rita", json={"grants": [{"queue": "research", "role": "queue-admin"}]}
        )
        rita = town.client(await town.token(user="rita"))
        wider = [one | ({"limit": {"gpus": 2}} if one["path"] == "research/rl" else {}) for one in QUEUES]
        assert (await rita.put("/api/v1/queues", json={"queues": wider})).json()["changed"] == ["research/rl"]
        for path in ("research", "prod"):
            more = [one | ({"weight": 9} if one["path"] == path else {}) for one in wider]
            assert (await rita.put("/api/v1/queues", json={"queues": more})).status_code == 403, path

    with_town(tmp_path, test)


def test_every_change_and_every_refusal_of_one_is_in_the_audit_with_user_token_and_address(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        await town.who["ann"].post("/api/v1/nodes/r0n0:drain")
        await town.client("rota_x_wrong").post("/api/v1/jobs/zebra-1:stop")
        newest, before = (await town.service.get("/audit", limit=2))["items"]
        assert (newest["user"], newest["status"], newest["path"]) == ("", 401, "/api/v1/jobs/zebra-1:stop")
        assert (before["user"], before["status"]) == ("ann", 403)
        assert before["token"] and before["address"] == "127.0.0.1" and before["request_id"]
        of_bob = (await town.service.get("/audit", user="bob"))["items"]
        assert [(one["method"], one["path"], one["status"]) for one in of_bob] == [("POST", "/api/v1/jobs", 201)]

    with_town(tmp_path, test)


def test_a_dry_run_is_marked_as_one_in_the_audit(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        node, queues, plan = "/api/v1/nodes/r0n0:cordon", "/api/v1/queues", "/api/v1/jobs:plan"
        for dry_run in (True, False):
            await service.http.post(node, json={"dry_run": dry_run})
            await service.http.put(queues, json={"queues": [{"path": "default"}], "dry_run": dry_run})
        await service.http.post(plan, json={"source": "no job"})
        found = [(one["path"], one["status"], one.get("dry_run", False)) for one in service.app.audit.newest(5)]
        dry, real = [(queues, 200, True), (node, 202, True)], [(queues, 200, False), (node, 202, False)]
        assert found == [(plan, 422, True), *real, *dry]

    with_service(tmp_path, test)


def test_a_change_that_the_audit_cannot_note_is_not_made_and_one_that_was_made_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Path("/dev/full")  # a disk without space

    async def test(service: Standing) -> None:
        audit, submit = service.app.audit, service.app.intake.submit
        kept, strangers = audit._path, audit._anonymous_path

        async def fills_the_disk(*given: Any, **named: Any) -> Any:
            done = await submit(*given, **named)
            audit._path = audit._anonymous_path = full
            return done

        monkeypatch.setattr(service.app.intake, "submit", fills_the_disk)
        assert (await service.submit())["id"] == "hello-1"
        refused = await service.http.post("/api/v1/jobs/hello-1:stop")
        assert refused.status_code == 503 and "nothing was done" in refused.json()["detail"]
        assert (await service.get("/jobs/hello-1"))["state"] != JobState.CANCELLED
        assert (await service.http.post("/api/v1/jobs", headers={"Authorization": "Bearer x"})).status_code == 401
        audit._path, audit._anonymous_path = kept, strangers
        assert [(one["path"], one["status"]) for one in audit.newest(9)] == [("/api/v1/jobs", None)]

    with_service(tmp_path, test)


def test_a_bug_has_an_answer_with_an_id_and_a_line_in_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(service: Standing) -> None:
        async def breaks(*_: Any, **__: Any) -> Any:
            raise RuntimeError("a bug")

        monkeypatch.setattr(service.app.intake, "submit", breaks)
        answer = await service.http.post("/api/v1/jobs", json={"source": JOB})
        assert answer.status_code == 500 and answer.json()["code"] == "INTERNAL"
        (line,) = service.app.audit.newest(1)
        assert (line["status"], line["user"]) == (500, "local")
        assert line["request_id"] == answer.headers["rota-request-id"] == answer.json()["request_id"]

    with_service(tmp_path, test)


def test_a_flood_of_strangers_leaves_a_count_and_not_a_full_disk(tmp_path: Path) -> None:
    clock = VirtualClock()
    audit = Audit(tmp_path / "audit.jsonl", clock)
    audit.begin({"user": "ann", "request_id": "r1"})
    for _ in range(1000):
        audit.anonymous({"user": "", "status": 401})
    audit.end("r1", 201)
    clock.advance(61)
    audit.anonymous({"user": "", "status": 401})
    newest = audit.newest(1000)
    assert len(newest) == 62 and newest[0]["left_out"] == 940 and newest[-1]["status"] == 201


def test_strangers_push_no_line_of_a_user_out_of_the_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_file, "FILE_BYTES_MAX", 500)
    clock = VirtualClock()
    audit = Audit(tmp_path / "audit.jsonl", clock)
    audit.begin({"user": "ann", "request_id": "r1"})
    for _ in range(50):
        clock.advance(1)
        audit.anonymous({"user": "", "path": "/api/v1/jobs", "status": 401})
    audit.end("r1", 201)
    assert [one["status"] for one in audit.newest(100, user="ann")] == [201]
    assert [one["status"] for one in audit.newest(2)] == [401, 401] and audit.newest(100)[-1]["user"] == "ann"


def test_what_another_tenant_may_not_know_is_gathered_once_for_a_page(tmp_path: Path) -> None:
    looks = []

    class Jobs(dict[str, Any]):
        def values(self) -> Any:
            looks.append(1)
            return super().values()

    story = SimpleNamespace(queue="prod", submitted=SimpleNamespace(user="bob"))
    redactor = Redactor(Jobs({"zebra-1": story}), Caller(user="ann", by="token", grants=(("research", UserRole.USER),)))
    shown = [redactor.redact({"by": "bob", "text": f"zebra-1 holds {i}"}) for i in range(1000)]
    assert len(looks) == 1 and shown[7] == {"by": REDACTED, "text": f"{REDACTED} holds 7"}


def test_a_stream_ends_when_the_token_of_its_reader_is_revoked_or_the_right_is_taken(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        async with listening(town.service) as http:
            for path, taken in (
                ("/events", "token"),
                ("/jobs/zebra-1/logs", "token"),
                ("/jobs/zebra-1/events", "right"),
            ):
                user = "quinn" if taken == "right" else "bob"
                made = (await town.service.http.post("/api/v1/tokens", json={"user": user})).json()
                headers = {"Authorization": f"Bearer {made['token']}"}
                async with http.stream("GET", f"/api/v1{path}", params={"follow": True}, headers=headers) as answer:
                    frames = answer.aiter_bytes()
                    assert answer.status_code == 200 and await anext(frames)
                    if taken == "token":
                        await town.service.http.delete(f"/api/v1/tokens/{made['id']}")
                    else:
                        await town.service.http.put("/api/v1/users/quinn", json={"grants": [{"role": "viewer"}]})
                    async with asyncio.timeout(60):
                        rest = b"".join([frame async for frame in frames])
                assert b"event: end" not in rest, "it did not end with the job"
                again = await http.get(f"/api/v1{path}", params={"follow": True}, headers=headers)
                assert again.status_code == (401 if taken == "token" else 403)

    with_town(tmp_path, test)


def test_a_secret_is_named_by_a_job_and_shown_by_nothing(tmp_path: Path) -> None:
    value = "correct-horse-battery"

    async def test(town: Town) -> None:
        bob = town.who["bob"]
        source = JOB.replace("name: zebra", "name: uses\nsecrets: [API_KEY]")
        refused = await bob.post("/api/v1/jobs", json={"source": source})
        assert refused.status_code == 404 and "rota secret set API_KEY" in refused.json()["hint"]
        assert (await bob.put("/api/v1/secrets/API_KEY", json={"value": value})).status_code == 200
        assert (await town.who["pat"].get("/api/v1/secrets")).json()["items"] == []
        assert (await town.who["pat"].post("/api/v1/jobs", json={"source": source})).status_code == 404
        assert (await bob.post("/api/v1/jobs", json={"source": source})).status_code == 201
        for route in (*RIGHTS, "GET /api/v1/secrets/API_KEY"):
            if route.startswith("GET"):
                assert value not in (await ask(bob, route.replace("{job}", "uses-1"))).text, route
        assert Vault(town.service.app.home).open("bob", ["API_KEY"]) == {"API_KEY": value}
        for file in tmp_path.rglob("*"):
            assert not file.is_file() or value.encode() not in file.read_bytes(), file
        modes = {file: oct(file.stat().st_mode & 0o777) for file in (tmp_path / "secrets" / "bob").iterdir()}
        assert set(modes.values()) == {"0o600"} and oct((tmp_path / "secret.key").stat().st_mode & 0o777) == "0o600"
        assert (await bob.delete("/api/v1/secrets/API_KEY")).status_code == 200
        assert not list((tmp_path / "secrets" / "bob").iterdir())

    with_town(tmp_path, test)


@pytest.mark.parametrize("name", ["../../x", "a/b", ".hidden", "1st", "ü"])
def test_a_secret_or_user_of_a_bad_name_touches_no_file(tmp_path: Path, name: str) -> None:
    async def test(service: Standing) -> None:
        before = sorted(tmp_path.rglob("*"))
        for path in (f"/api/v1/secrets/{name}", f"/api/v1/users/{name}"):
            body = {"value": "v", "grants": [{"role": "user"}]}
            body.pop("grants" if "secrets" in path else "value")
            refused = await service.http.put(path, json=body)
            assert refused.status_code in (404, 405, 422), path
            if refused.status_code == 422 and "users" in path:
                assert (refused.json()["detail"], refused.json()["hint"]) == (f"user {name!r} is not a name", NAME_RULE)
        assert [one for one in sorted(tmp_path.rglob("*")) if one not in before and "audit.jsonl" not in one.name] == []

    with_service(tmp_path, test)


def test_what_is_not_there_or_not_allowed_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(town: Town) -> None:
        owner, last = town.who["local"], town.service.log.last_number
        monkeypatch.setattr(accounts, "TOKENS_MAX", 3)
        for _ in range(2):
            assert (await owner.post("/api/v1/tokens", json={"user": "ann"})).json()["name"] == ""
        before = last()
        full = await owner.post("/api/v1/tokens", json={"user": "ann"})
        assert full.status_code == 422 and "ann has 3 tokens" in full.text
        for name in (LOCAL, OWNER):
            body = {"grants": [{"queue": "prod", "role": "user"}]}
            refused = await owner.put(f"/api/v1/users/{name}", json=body)
            assert refused.status_code == 422 and f"user '{name}' is a name of Rota's own" in refused.text, refused.text
        for path in ("users/nobody", "webhooks/nothing", "tokens/nothing"):
            assert (await owner.delete(f"/api/v1/{path}")).status_code == 404, path
        for method in ("PUT", "DELETE"):
            body = {"value": "x"} if method == "PUT" else None
            assert (await town.who["vera"].request(method, "/api/v1/secrets/KEY", json=body)).status_code == 403
        assert last() == before

    with_town(tmp_path, test)


def test_an_admin_sees_the_tokens_of_everybody_and_a_user_those_of_its_own(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        async def users(name: str) -> set[str]:
            return {one["user"] for one in (await town.who[name].get("/api/v1/tokens")).json()["items"]}

        assert await users("local") >= set(USERS)
        assert [await users(name) for name in ("ann", "quinn", "vera")] == [{"ann"}, {"quinn"}, {"vera"}]

    with_town(tmp_path, test)


def test_the_log_says_whose_secret_was_set_and_removed_and_never_its_value(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        before = town.service.log.last_number()
        assert (await town.who["bob"].put("/api/v1/secrets/KEY", json={"value": "hush"})).status_code == 200
        assert (await town.who["bob"].delete("/api/v1/secrets/KEY")).status_code == 200
        found = [record.event for record in town.service.log.read(after=before)]
        assert [one for one in found if isinstance(one, SecretChanged)] == [
            SecretChanged(owner="bob", name="KEY", removed=removed, by="bob") for removed in (False, True)
        ]

    with_town(tmp_path, test)


def test_two_users_may_choose_the_same_idempotency_key(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        ids = []
        for name, queue in (("ann", "research/rl"), ("bob", "prod"), ("ann", "research/rl")):
            source = f"name: same\nqueue: {queue}\nroles: {{main: {{run: [echo]}}}}\n"
            answer = await town.who[name].post(
                "/api/v1/jobs", json={"source": source}, headers={"Idempotency-Key": "k"}
            )
            ids.append((answer.status_code, answer.json()["id"]))
        assert ids == [(201, "same-1"), (201, "same-2"), (200, "same-1")]

    with_town(tmp_path, test)


def test_what_a_cut_left_of_a_value_is_masked() -> None:
    values = ["correct-horse-bättery", "abc"]
    assert masked("key: correct-ho", values, cut=True) == "key: ******"
    assert masked("key: correct-horse-b\ufffd", values, cut=True) == "key: ******"
    assert masked("key: correct-ho", values) == "key: correct-ho"
    assert masked("correct-horse-bättery ab", values, cut=True) == "****** ab"


def test_masking_takes_the_longest_value_first_and_leaves_short_ones() -> None:
    assert masked("a=secret1 b=secret12 c=abc", ["secret1", "secret12", "abc"]) == "a=****** b=****** c=abc"
