"""What is asked of every route, and its answers as they are stored."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI
from tests.service.described import route_of, routes_of
from tests.service.snapshots.installation import LIMIT_S, QUEUES, Installed, job_file
from tests.service.snapshots.normal import normal

from rota.service.machine_checks import own_versions
from rota.service.rest.app import application
from rota.spec.ids import JobId

API = "/api/v1"
HEADERS = ("location", "etag", "allow", "retry-after", "www-authenticate", "cache-control", "set-cookie")
BAD_FILE = "name: x\nroles:\n  main:\n    rum: [echo]\n    replicas: -1\n"
METRIC = re.compile(r"(?m)^(?!#)(\S+?(?:\{.*\})?) \S+$")
TIMED = re.compile(r"_seconds_(?:bucket|sum)|_http_|process_|python_")
"""Metrics of which not even the rows are the same at every run."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request. ``user`` asks in place of the admin, ``""`` with no token at all is ``stranger``."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    user: str = ""

    def __str__(self) -> str:
        return f"{self.method} {httpx.URL(self.path, params=dict(self.params)) if self.params else self.path}"


def get(path: str, *, user: str = "", accept: str = "", **params: Any) -> Ask:
    """A read below ``/api/v1``."""
    return Ask(method="GET", path=API + path, params=params, user=user, headers={"Accept": accept} if accept else {})


def send(method: str, path: str, body: Any = None, *, user: str = "", **headers: str) -> Ask:
    """A change below ``/api/v1``."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Ask(method=method, path=API + path, body=body, user=user, headers=named)


def names_of(app: FastAPI) -> list[str]:
    """``METHOD path`` of every route."""
    return [f"{method} {route.path}" for route in routes_of(app) for method in sorted(route.methods or ())]


def name_of(method: str, path: str) -> str:
    """The route that a request comes to; ``no route`` for none."""
    route = route_of(method, path)
    return "no route" if route is None else f"{method} {route.path}"


def file_of(route: str) -> str:
    """The name of the file of a route."""
    text = route.replace(API, "") if API in route else route.replace(" /", " page/")
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "root"


def reads(jobs: Iterable[JobId]) -> Iterator[Ask]:
    """Every GET route, and those of jobs for jobs in every state."""
    everything = [*jobs]
    yield from (get("/jobs", all=True), get("/jobs"), get("/jobs", all=True, user="ann"), get("/jobs", user="eve"))
    yield get("/jobs", all=True, sort="priority", limit=3)
    yield get("/jobs", state="FAILED", label="team=vision", queue="research")
    for job in everything:
        yield from (get(f"/jobs/{job}"), get(f"/jobs/{job}/explain"))
    for job in ("learn-1", "heal-1", "crash-1", "grow-1", "big-1"):
        for part in ("failures", "graph", "placement", "spec", "attempts", "why"):
            yield get(f"/jobs/{job}/{part}")
    yield get("/jobs/learn-1/failures", attempt=1)
    yield from (get("/jobs/learn-1/trace"), get("/jobs/big-1/trace"))
    for job in ("crash-1", "big-1", "admit-1"):
        yield from (get(f"/jobs/{job}", user="ann"), get(f"/jobs/{job}/explain", user="bob"))
    yield get("/jobs/check-1", user="eve")
    yield get("/events", limit=1000)
    yield get("/events", limit=40, user="ann")
    yield get("/events", limit=3, after=10)
    yield get("/jobs/learn-1/events")
    yield get("/jobs/learn-1/events", type="Committed")
    yield get("/jobs/done-1/events", follow=True)
    yield from (get("/jobs/learn-1/logs"), get("/jobs/learn-1/logs", instance="loop/0", tail=2))
    yield get("/jobs/learn-1/logs", accept="text/plain")
    yield get("/jobs/done-1/logs")
    yield get("/jobs/learn-1/files")
    yield Ask(method="GET", path=f"{API}/jobs/learn-1/files", params={"path": "../x"})
    yield Ask(method="GET", path=f"{API}/jobs/learn-1/files/part", params={"path": "report.json", "offset": 13})
    yield Ask(method="GET", path=f"{API}/jobs/learn-1/files/part", params={"path": "nowhere"})
    yield from (get("/status"), get("/status", user="eve"), get("/cluster"), get("/settings"), get("/reasons"))
    yield from (get("/cluster/heat"), get("/cluster/heat", user="ann"), get("/nodes"), get("/nodes", user="eve"))
    yield from (get("/cluster/history"), get("/cluster/history", since_s=3600, points=4, user="bob"))
    yield from (get("/nodes", limit=1, cursor="r0n0"), get("/nodes/r1n1"), get("/nodes/r0n0", user="bob"))
    yield from (get("/alerts"), get("/queues"), get("/queues/research/rl"))
    for by in ("user", "queue", "job", "gpu_type"):
        yield get("/report", by=by, since_s=86400)
    yield from (get("/whoami"), get("/whoami", user="bob"), get("/users"), get("/tokens"), get("/tokens", user="ann"))
    yield from (get("/secrets"), get("/secrets", user="ann"), get("/webhooks"))
    yield from (get("/sim/profiles"), get("/templates"))
    for path in ("/healthz", "/readyz", "/openapi.json", "/metrics", "/icon.svg", "/login", "/", "/assets/index.js"):
        yield Ask(method="GET", path=path)
    for page in ("queues", "jobs", "nodes", "submit", "compare", "admin", "access"):
        yield from (Ask(method="GET", path=f"/{page}"), Ask(method="GET", path=f"/{page}/learn-1"))
    for user in ("", "stranger"):  # a port that no instance has; to the login
        yield Ask(method="GET", path="/ports/learn-1/main/0/notebook", user=user)


def refusals() -> Iterator[Ask]:
    """What is refused: 400 to 422 of every kind."""
    yield from (get("/jobs", user="stranger"), get("/jobs", user="wrong"))
    yield from (get("/users", user="ann"), get("/audit", user="ann"), get("/settings", user="eve"))
    yield from (
        get("/jobs/learn-1/failures", user="ann"),
        get("/jobs/lern-1"),
        get("/jobs/learn-1/failures", attempt=9),
    )
    yield from (
        get("/nodes/r9n9"),
        get("/queues/reserch"),
        get("/jobs/learn-1", colour="red"),
        get("/jobs", state="WALKING"),
    )
    yield from (
        get("/jobs", limit=0),
        get("/jobs", cursor="x"),
        get("/report", by="colour"),
        get("/events", type="Exploded"),
    )
    yield from (get("/jobs/learn-1/logs", instance="x/0"), get("/nowhere"), send("DELETE", "/jobs"))
    yield send("POST", "/jobs", {"source": BAD_FILE, "filename": "job.yaml"})
    yield send("POST", "/jobs", {"source": job_file("huge", gpus=99)})
    yield send("POST", "/jobs", {"source": job_file("lost", queue="nowhere")})
    yield send("POST", "/jobs", {"source": job_file("mine", queue="prod")}, user="eve")
    yield from (send("POST", "/jobs", {}), send("POST", "/jobs", {"sauce": "x"}), send("POST", "/jobs", [1]))
    yield send("POST", "/jobs", {"spec": {"name": "x", "rolls": []}})
    yield send("PATCH", "/jobs/big-1", {"changes": {"priority": 101}})
    yield send("PATCH", "/jobs/big-1", {"changes": {"priority": 1}}, If_Match='"9"')
    yield send("PATCH", "/jobs/learn-1", {"changes": {"priority": 1}}, user="ann")
    yield from (send("POST", "/jobs/done-1:stop"), send("POST", "/jobs/done-1:resume"))
    yield send("POST", "/jobs/learn-1:scale", {"role": "actor", "n": 7})
    yield send("POST", "/jobs/learn-1:scale", {"role": "actor"})
    yield send("POST", "/jobs/done-1:exec", {"instance": "main/0", "argv": ["true"]})
    yield from (send("POST", "/nodes/r0n0:drain", user="ann"), send("POST", "/nodes/r0n0:explode"))
    yield send("PUT", "/queues", {"queues": [{"path": "default"}]})
    yield send("PUT", "/queues", {"queues": [{"path": "default", "weigth": 2}]})
    yield send("PUT", "/queues", {"source": "- path: a\n  weight: heavy\n"})
    yield from (send("PUT", "/users/zed", {"grants": [{"role": "king"}]}), send("DELETE", "/users/zed"))
    yield from (send("POST", "/tokens", {"user": "zed"}), send("DELETE", "/tokens/none"))
    yield from (send("DELETE", "/secrets/NONE"), send("PUT", "/secrets/X", {"value": "x"}, user="eve"))
    yield from (send("POST", "/webhooks", {"url": "http://127.0.0.1/x"}), send("DELETE", "/webhooks/none"))
    yield send("POST", "/sim/outlook", {"profiles": ["fifi"]})
    yield Ask(method="GET", path="/login", params={"code": "wrong"})
    yield Ask(method="POST", path="/login", body={"code": "wrong"})


def changes() -> Iterator[Ask]:
    """Every route that changes something, in order, from the smallest effect to the largest."""
    yield send("POST", "/jobs:plan", {"source": job_file("dry", gpus=1), "workdir": "/"})
    yield send("POST", "/jobs/big-1/explain", {"changes": ["gpus=1"]})
    yield send("POST", "/jobs:plan", {"source": job_file("dry", gpus=4, replicas="3"), "workdir": "/"})
    yield send("POST", "/sim/outlook", {"profiles": ["fifo", "srtf"]})
    tree = [{**one, "guaranteed": {"cpus": 0, "gpus": 1}, "limit": {"cpus": 0, "gpus": 2}} for one in QUEUES[1:2]]
    tree = [QUEUES[0], *tree, *QUEUES[2:], {"path": "more"}]
    yield from (send("PUT", "/queues", {"queues": tree, "dry_run": dry}) for dry in (True, False))
    yield send("POST", "/nodes/r0n0:drain", {"dry_run": True})
    yield send("POST", "/alerts:acknowledge", {"alert": "recovered:learn-1:1", "note": "known"})
    yield send("POST", "/alerts:acknowledge", {"alert": "recoverd:learn-1:1"})
    again = {"source": job_file("again"), "workdir": "/", "filename": "/data/again.yaml"}
    yield from (send("POST", "/jobs", again, Idempotency_Key="k1"), send("POST", "/jobs", again, Idempotency_Key="k1"))
    yield send("POST", "/jobs", {**again, "workdir": "/data"}, Idempotency_Key="k1")
    yield send("PATCH", "/jobs/big-1", {"changes": {"priority": 80, "time_limit_s": 60}}, If_Match='"2", "3"')
    yield send("POST", "/jobs/learn-1:exec", {"instance": "rollout/0", "argv": ["sh", "-c", "echo out; echo err >&2"]})
    yield send("POST", "/jobs/grow-1:scale", {"role": "serve", "n": 3})
    yield from (
        send("POST", "/jobs/tail-1:pause"),
        send("POST", "/jobs/tail-1:resume"),
        send("POST", "/jobs/tail-1:stop"),
    )
    for action in ("uncordon", "cordon", "undrain", "drain"):
        yield send("POST", f"/nodes/{'r1n0' if 'cordon' in action else 'r1n1'}:{action}", {"reason": "as planned"})
    yield from (get("/nodes/r0n0/usage"), get("/nodes/r9n9/usage"), send("POST", "/nodes:check"))
    yield send("POST", "/nodes:check", user="ann")
    joining = {"host": "m9", "identity": "i1", "address": "10.0.0.6", "versions": own_versions()}
    yield from (send("POST", "/machines", joining), send("POST", "/machines", joining | {"identity": "i2"}))
    yield from (send("POST", "/machines", joining, user="ann"), get("/machines/m9"))
    yield from (send("POST", "/machines/m9/heartbeat"), send("DELETE", "/machines/m9"))
    yield get("/machines/m9")
    yield send("PUT", "/users/ann", {"grants": [{"queue": "research", "role": "queue-admin"}]})
    yield send("POST", "/tokens", {"name": "spare"}, user="bob")
    yield from (send("PUT", "/secrets/NEW", {"value": "x"}), send("DELETE", "/secrets/NEW"))
    yield send("POST", "/webhooks", {"url": "https://93.184.216.35/all"})
    yield send("POST", "/login/code")
    yield from (get("/secrets"), get("/webhooks"), get("/users"), get("/jobs/tail-1"))


async def late(it: Installed) -> list[Ask]:
    """What needs an identifier that the installation gave; then the end of the service, and who asked for what."""
    token = next(one.made.id for one in it.app.auth.accounts.tokens.values() if one.made.name == "spare")
    webhook = next(iter(it.app.notifier.targets))
    terminals = it.engine.terminals
    await terminals.start("t", "local", ["printf", "out"], {"PATH": os.defpath}, (24, 80))
    while (seen := await terminals.read("t", "local", 3, 1.0)) is not None and seen["exit_status"] is None:
        pass
    return [
        send("POST", "/jobs/learn-1:terminal", {"instance": "rollout/0", "argv": ["true"]}),
        send("POST", "/jobs/learn-1/terminals/rollout.0.1.t", {"data": "eA=="}),
        get("/jobs/learn-1/terminals/rollout.0.1.t"),
        get("/jobs/learn-1/terminals/rollout.0.1.none"),
        send("DELETE", f"/tokens/{token}"),
        send("DELETE", f"/webhooks/{webhook}"),
        send("DELETE", "/users/bob"),
        Ask(method="POST", path="/login", body={"token": it.http.headers["authorization"].split()[1]}),
        Ask(method="POST", path="/logout"),
        send("POST", "/service:hold", {"grace_s": 5.0}),
        get("/status"),
        get("/jobs/big-1/explain"),
        get("/audit", limit=1000),
        get("/audit", user="ann"),
    ]


async def answers(it: Installed) -> dict[str, list[dict[str, Any]]]:
    """Every answer by its route."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names_of(application())}
    jobs = [*it.app.loop.installation.jobs]
    for ask in (*reads(jobs), *refusals(), *changes()):
        await _answered(it, ask, found)
    for ask in await late(it):
        await _answered(it, ask, found)
    return found


async def _answered(it: Installed, ask: Ask, found: dict[str, list[dict[str, Any]]]) -> None:
    if ask.method != "GET":
        it.time.advance(1.0)
    answer = await asyncio.wait_for(it.http.send(_request(it, ask)), LIMIT_S)
    if ask.method != "GET":
        await it.settle()
    route = name_of(ask.method, ask.path)
    document = {
        "request": str(ask),
        **({"as": ask.user} if ask.user else {}),
        **({"sent": ask.body} if ask.body is not None else {}),
        "status": answer.status_code,
        "content_type": answer.headers.get("content-type"),
        "headers": {name: answer.headers[name] for name in HEADERS if name in answer.headers},
        "body": _body(answer, ask.path),
    }
    found.setdefault(route, []).append(normal(document, it.home))


def _request(it: Installed, ask: Ask) -> httpx.Request:
    headers = dict(ask.headers)
    if ask.user == "wrong":
        headers["Authorization"] = "Bearer rota_wrong_wrong"
    elif ask.user and ask.user != "stranger":
        headers["Authorization"] = f"Bearer {it.tokens[ask.user]}"
    request = it.http.build_request(ask.method, ask.path, params=dict(ask.params), json=ask.body, headers=headers)
    if ask.user == "stranger":
        del request.headers["Authorization"]
    return request


def _body(answer: httpx.Response, path: str) -> Any:
    """The document; lines of a text; of the page only that it is one."""
    kind = answer.headers.get("content-type", "")
    if path == "/openapi.json":
        return _asked_for(answer.json())
    if "json" in kind:
        return answer.json()
    if path == "/metrics":
        return [line for line in METRIC.sub(r"\1", answer.text).splitlines() if not TIMED.search(line)]
    if "html" in kind or "svg" in kind or "javascript" in kind or not answer.content:
        return f"{'some' if answer.content else 'no'} bytes"
    return answer.text.splitlines()


def _asked_for(document: dict[str, Any]) -> dict[str, Any]:
    """Of the description of the API what it takes: parameters and bodies, and whether it describes its answers."""
    return {
        path: {
            method: {
                "operation": one["operationId"],
                "parameters": [f"{p['in']} {p['name']}" for p in one.get("parameters", ())],
                "body": one.get("requestBody", {}).get("content", {}),
                "success": [status for status in one["responses"] if status.startswith("2")],
            }
            for method, one in methods.items()
        }
        for path, methods in document["paths"].items()
    }
