"""Machines that join, by values and over REST: versions, names, the right to join, addresses and settings."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from standing import HELLO, Standing, with_service

from rota.runtime import process
from rota.runtime.devices import local_devices
from rota.runtime.environ import Home
from rota.runtime.node import host_name, machine_identity
from rota.service.accounts import AccountBook, Caller, UserRole
from rota.service.config import load_settings
from rota.service.machine_checks import own_versions, version_conflicts
from rota.service.process import joined as joining
from rota.service.process.joined import service_url
from rota.service.rest import machine_names
from rota.service.rest.machine_names import SEEN_S, JoinedMachine, MachineNames
from rota.spec.errors import BadInput, Conflict, LimitExceeded, NotAllowed, NotReachable, UnknownName
from rota.spec.events import NodeLost, Record, TokenMade, UserChanged
from rota.testing.memory import VirtualClock


def machine(**given: Any) -> dict[str, Any]:
    return {"host": "m1", "identity": "i1", "address": "10.0.0.6", "versions": own_versions(), **given}


async def joined(service: Standing, **given: Any) -> tuple[int, dict[str, Any]]:
    answer = await service.http.post("/api/v1/machines", json=machine(**given))
    return answer.status_code, answer.json()


def listens(service: Standing) -> None:
    """From now on the installation takes machines."""
    service.app.settings = replace(service.app.settings, listen="10.0.0.5")


def test_a_machine_gets_the_access_once_and_its_state_later(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        status, refused = await joined(service)
        assert status == 409 and "rota up --listen" in refused["hint"]
        listens(service)
        status, found = await joined(service)
        assert status == 201 and found["access"] == {"engine": "e1", "address": "10.0.0.5:20000", "token": "t" * 64}
        seen = service.app.machines.get("m1")
        later = await service.get("/machines/m1")
        assert service.app.machines.get("m1") is seen
        beat = await service.http.post("/api/v1/machines/m1/heartbeat")
        assert (beat.status_code, beat.json()) == (200, later)
        assert service.app.machines.get("m1") is not seen
        assert not any("heartbeat" in one.read_text() for one in tmp_path.rglob("*audit.jsonl"))
        assert later == {"api": "rota/v1", "kind": "Machine", "host": "m1", "state": "joining", "engine": "e1"}
        assert (await service.http.delete("/api/v1/machines/m1")).status_code == 200
        assert (await service.http.get("/api/v1/machines/m1")).status_code == 404
        assert (await service.http.post("/api/v1/machines/m1/heartbeat")).status_code == 404

    with_service(tmp_path, test)


def test_other_versions_and_taken_names_are_refused_by_name(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        listens(service)
        _, refused = await joined(service, versions=own_versions() | {"ray": "1.2.3"})
        assert f"ray is 1.2.3 there and {own_versions()['ray']} here" in refused["detail"]
        assert f"ray=={own_versions()['ray']}" in refused["hint"]
        assert (await joined(service))[0] == 201
        assert (await joined(service))[0] == 201  # the same machine again
        status, refused = await joined(service, identity="i2")
        assert status == 409 and "10.0.0.6" in refused["detail"] and "--name" in refused["hint"]
        _, own = await joined(service, host=host_name(), identity=machine_identity())
        assert "takes part already" in own["detail"]

    with_service(tmp_path, test)


def test_versions_that_must_be_equal() -> None:
    here = {"python": "3.11.4", "ray": "2.60.0", "rota": "0.1.0", "torch": "2.9"}
    assert version_conflicts(here | {"python": "3.11.9", "torch": "2.8"}, here) == []
    found = version_conflicts({"python": "3.12.1", "rota": "0.1.0"}, here)
    assert [(one.name, one.there, one.wanted) for one in found] == [
        ("python", "3.12.1", "Python 3.11"),
        ("ray", "", "ray==2.60.0"),
    ]


def token(role: str, user: str = "local") -> TokenMade:
    return TokenMade(id="t", user=user, digest="", name="", role=role, queue="", expires_at=None, by="local")


def test_only_admins_give_the_right_to_join() -> None:
    accounts = AccountBook()
    for name, role in (("root", "admin"), ("ann", "user")):
        accounts.apply(Record(number=1, job=None, seq=0, at=0.0, event=UserChanged(name=name, grants=(("", role),))))
    for user in ("local", "root"):
        caller = accounts.caller(token("machine", user), by="token")
        caller.need_machines()
        assert caller.joins_only and not caller.has(UserRole.VIEWER)
    for made in (token("machine", "ann"), token("user", "ann"), token("user")):
        with pytest.raises(NotAllowed, match="role machine"):
            accounts.caller(made, by="token").need_machines()
    assert not accounts.caller(token("admin"), by="token").joins_only


def test_the_address_of_a_service() -> None:
    assert service_url("head") == "http://head:7700"
    assert service_url("10.0.0.5:7701") == "http://10.0.0.5:7701"
    assert service_url("https://[fe80::1]:1/") == "https://[fe80::1]:1"
    for wrong in ("", "http://", "ftp://head", "head:x"):
        with pytest.raises(BadInput, match="not the address of a service"):
            service_url(wrong)


def test_joining_again_while_the_service_is_away_ends_nothing(tmp_path: Path) -> None:
    settings = load_settings({"home": str(tmp_path)}, environ={})
    files = joining.MachineFiles(Home.of(settings.home).make())
    files.root.mkdir()
    member = joining._membership(settings, "127.0.0.1:1", "t", "m1", 1, None, (), "")
    process.write_private(files.membership, json.dumps(asdict(member)))
    run = process.RunFolder(files.root)
    agent = process.Spawn(command=("sleep", "60"), env={}, log=tmp_path / "log", cwd=tmp_path)
    child = process.spawn(agent, name=joining.AGENT, run=run)
    try:
        with pytest.raises(NotReachable):
            joining.join(settings, "127.0.0.1:1", token="t", name="m1", cpus=1)
        assert run.find_alive(joining.AGENT) is not None and files.read() == member
    finally:
        child.kill()
        child.wait()


def test_the_agent_of_a_machine_takes_the_token_of_a_later_join(tmp_path: Path) -> None:
    """Tokens end (--ttl): the machine joins again with another one, and what runs there continues."""
    asked: list[str] = []

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.headers["Authorization"].removeprefix("Bearer "))
            self.send_error(500)
            write("new")

        def log_message(self, *_: object) -> None:
            pass

    settings = load_settings({"home": str(tmp_path)}, environ={})
    files = joining.MachineFiles(Home.of(settings.home).make())
    files.root.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as service:
        threading.Thread(target=service.serve_forever).start()
        member = joining._membership(settings, f"127.0.0.1:{service.server_port}", "old", "m1", 1, None, (), "")

        def write(token: str) -> None:
            process.write_private(files.membership, json.dumps(asdict(replace(member, token=token))))

        write("old")
        agent = process.Spawn(
            command=(sys.executable, "-m", joining.MODULE, settings.home), env={}, log=tmp_path / "log", cwd=tmp_path
        )
        child = process.spawn(agent, name=joining.AGENT, run=process.RunFolder(files.root))
        deadline_s = time.monotonic() + 60.0
        while "new" not in asked and time.monotonic() < deadline_s:
            time.sleep(0.05)
        joining._end(files)  # with the watcher that it started
        child.wait()
        service.shutdown()
    assert asked[0] == "old" and asked[-1] == "new"


def test_the_address_for_others_is_an_address_and_the_default_of_the_host(tmp_path: Path) -> None:
    def settings(**flags: object) -> Any:
        return load_settings({"home": str(tmp_path), **flags}, environ={})

    assert settings(listen="10.0.0.5").url == "http://10.0.0.5:7700"
    assert settings(listen="10.0.0.5", host="127.0.0.1").url == "http://127.0.0.1:7700"
    assert settings().host == "127.0.0.1"
    with pytest.raises(BadInput, match=r"listen='?head.* is not an IP address"):
        settings(listen="head")
    for other in ({"ray_address": "head:6379"}, {"pretend": "1x1x1"}):
        with pytest.raises(BadInput, match="cannot be combined"):
            settings(listen="10.0.0.5", **other)


def test_a_machine_may_give_fewer_devices_than_it_has() -> None:
    variables = {"ROTA_FAKE_DEVICES": "4xH100"}
    assert len(local_devices(variables)) == 4
    assert [one.index for one in local_devices(variables | {"ROTA_GPUS_MAX": "2"})] == [0, 1]


def test_a_cluster_whose_machines_cannot_be_used_says_which_and_what_to_do(tmp_path: Path) -> None:
    silent = {"machine": "m1", "why": "it did not say what it has", "remedy": "install Rota there"}

    async def test(service: Standing) -> None:
        for _ in range(3):  # the third one waits
            await service.submit(HELLO.replace("gpus: 2", "gpus: 4"))
        lost = [NodeLost(node=one, text="gone") for one in service.app.loop.installation.nodes]
        await service.app.loop.append(lost)
        service.app.loop.unusable = [silent]
        refused = await service.http.post("/api/v1/jobs", json={"source": HELLO, "workdir": "/"})
        assert refused.status_code == 422
        problem = refused.json()
        assert problem["detail"] == "no machine can be used: m1: it did not say what it has (install Rota there)"
        assert problem["fields"] == {"reason": "NO_USABLE_NODE", "machines": [silent]}
        explained = await service.get("/jobs/hello-3/explain")
        assert explained["waiting"] and explained["why"]["code"] == "NO_USABLE_NODE"
        assert "m1: it did not say what it has" in explained["why"]["text"] and not explained["starts_now"]

    with_service(tmp_path, test)


def test_too_large_a_job_names_the_machines_that_cannot_be_used(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        service.app.loop.unusable = [{"machine": "m1", "why": "it did not say what it has", "remedy": "x"}]
        big = HELLO.replace("gpus: 2", "gpus: 64")
        refused = (await service.http.post("/api/v1/jobs", json={"source": big, "workdir": "/"})).json()
        assert refused["fields"]["reason"] != "NO_USABLE_NODE"
        assert "m1 cannot be used: it did not say what it has" in refused["hint"]

    with_service(tmp_path, test)


def test_a_token_of_the_role_machine_asks_the_routes_of_machines_alone(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        listens(service)
        made = (await service.http.post("/api/v1/tokens", json={"role": "machine"})).json()
        mine = {"Authorization": f"Bearer {made['token']}"}
        assert (await service.http.post("/api/v1/machines", json=machine(), headers=mine)).status_code == 201
        assert (await service.http.get("/api/v1/machines/m1", headers=mine)).status_code == 200
        for path in ("status", "nodes", "jobs", "whoami", "cluster"):
            refused = await service.http.get(f"/api/v1/{path}", headers=mine)
            assert (path, refused.status_code) == (path, 403)
            assert "joining machines alone" in refused.json()["detail"]

    with_service(tmp_path, test)


def test_a_token_takes_and_frees_its_own_names_alone_also_after_a_restart(tmp_path: Path) -> None:
    clock, path = VirtualClock(), tmp_path / "machines.json"
    one, two = (Caller(user="local", by="token", token=name, grants=(("", UserRole.MACHINE),)) for name in ("t1", "t2"))
    admin = Caller(user="local", by="token", token="a")

    def wanted(token: Caller, host: str = "m1", identity: str = "i1") -> JoinedMachine:
        return JoinedMachine(host=host, identity=identity, address="10.0.0.6", versions={}, token=token.token)

    names = MachineNames(path, clock)
    names.take(wanted(one))
    with pytest.raises(NotAllowed, match="belongs to another token"):
        names.give_back("m1", two)
    clock.advance(SEEN_S)
    names.seen("m1", two)  # does not keep it in use
    with pytest.raises(Conflict, match=r"belongs to the token with which 10\.0\.0\.6 joined"):
        names.check("m1", "i2", two)
    names.check("m1", "i2", one)  # a machine that was started again
    names.check("m1", "i1", two)  # the same machine, after its first token expired
    names = MachineNames(path, clock)
    with pytest.raises(Conflict, match=r"taken by one at 10\.0\.0\.6"):
        names.check("m1", "i2", two)
    clock.advance(SEEN_S)
    with pytest.raises(Conflict, match="belongs to the token"):
        names.check("m1", "i2", two)
    names.check("m1", "i2", admin)
    names.give_back("m1", admin)
    names.check("m1", "i2", two)
    assert json.loads(path.read_text()) == []
    path.write_text("{")
    with pytest.raises(UnknownName, match="no machine 'm1' has joined"):
        MachineNames(path, clock).seen("m1", one)


def test_the_names_of_machines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_names, "MACHINES_MAX", 3)
    clock = VirtualClock()
    names = MachineNames(tmp_path / "machines.json", clock)
    caller = Caller(user="local", by="token", token="t1", grants=(("", UserRole.MACHINE),))

    def take(host: str) -> None:
        names.take(JoinedMachine(host=host, identity=host, address="", versions={}, token="t1"))

    for host in ("m1", "m2", "m3"):
        take(host)
        clock.advance(1.0)
    with pytest.raises(LimitExceeded, match="3 machines have joined"):
        take("m4")
    clock.advance(SEEN_S - 3.0)
    take("m4")
    with pytest.raises(UnknownName):
        names.seen("m1", caller)
    names.seen("m2", caller)


@pytest.mark.slow
def test_agent_and_watcher_of_a_machine_start_each_other_until_it_leaves(tmp_path: Path) -> None:
    settings = load_settings({"home": str(tmp_path)}, environ={})
    files = joining.MachineFiles(Home.of(settings.home).make())
    files.root.mkdir()
    member = joining._membership(settings, "127.0.0.1:1", "t", "m1", 1, None, (), "")
    process.write_private(files.membership, json.dumps(asdict(member)))
    run = process.RunFolder(files.root)

    def alive(name: str, other_than: int = 0) -> process.ProcessId:
        deadline = time.monotonic() + 120
        while (found := run.find_alive(name)) is None or found.pid == other_than:
            assert time.monotonic() < deadline, files.log.read_text()
            time.sleep(0.05)
        return found.id

    try:
        files.start(joining.AGENT)
        agent, watcher = alive(joining.AGENT), alive(joining.WATCHER)
        for name, killed in ((joining.AGENT, agent), (joining.WATCHER, watcher)):
            os.kill(killed.pid, signal.SIGKILL)
            alive(name, killed.pid)
    finally:
        ended, left = joining._end(files)
    assert (joining.AGENT in ended, left) == (True, [])
    assert not files.root.exists()
    files.start(joining.AGENT)  # of a machine that left
    assert run.find_alive(joining.AGENT) is None
