"""Commands of a tenant: nothing that its job says acts on a process that is still root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rota.job.health.heartbeat import ProgressMarks
from rota.job.instance import spmd, tenant
from rota.job.instance.runners import Setup, make_context
from rota.runtime import isolation, probe
from rota.runtime.clock import SystemClock
from rota.runtime.environ import Home
from rota.spec.check import tenant_refused
from rota.spec.ids import Epoch, InstanceId, RoleName
from rota.spec.job import Checkpoint, JobSpec, RoleSpec
from rota.spec.resources import Res

LOADER = {"LD_PRELOAD": "/tmp/evil.so", "PATH": "/tmp/evil", "PYTHONPATH": "/tmp/evil", "OWN": "1"}


def config(home: Path, **more: Any) -> Any:
    role = RoleSpec(name=RoleName("main"), run=("true",), res=Res(cpus=1), env=tuple(LOADER.items()))
    spec = replace(JobSpec(name="j", roles=(role,)), run_as="daemon", **more)
    place = SimpleNamespace(home=str(home), job="j-1")
    clock = SystemClock()
    marks = ProgressMarks(clock)
    one = InstanceId(RoleName("main"), 0)
    return SimpleNamespace(role=role, spec=spec, place=place, id=one, devices=(), clock=clock, marks=marks)


def asked(given: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(tenant, "_shared", lambda path: path)
    return json.loads(tenant.command(given, ("true",))[4])


def test_variables_of_the_job_have_other_names_until_the_user_is_changed(tmp_path: Path) -> None:
    found = tenant.environment(tenant.variables(config(tmp_path)), config(tmp_path))
    assert {name for name in found if not name.startswith(isolation.PREFIX)} == {"PATH"} and found["PATH"] == os.defpath
    assert {name: found[isolation.PREFIX + name] for name in LOADER} == LOADER


def test_the_command_has_its_variables_under_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("account", "give", "separate", "become"):
        monkeypatch.setattr(isolation, name, lambda *_: (1, 1, "daemon", "/"))
    monkeypatch.setattr(os, "execvpe", lambda *given: made.append(given[2]))
    monkeypatch.setattr(os, "environ", {"PATH": os.defpath, "LANG": "C", f"{isolation.PREFIX}PATH": "/opt/bin"})
    words = dict.fromkeys(("user", "given", "home", "shown", "tmp", "shm", "programs"), "")
    monkeypatch.setattr(sys, "argv", ["isolation.py", json.dumps(words), "true"])
    made: list[dict[str, str]] = []
    isolation.main()
    assert made == [{"PATH": "/opt/bin", "USER": "daemon", "LOGNAME": "daemon", "HOME": "/", "TMPDIR": "/tmp"}]


@pytest.mark.parametrize("named", ["{home}", "{home}/jobs/other/output", "{home}/../../etc", "/etc"])
def test_a_folder_that_the_job_names_is_neither_given_nor_shown_nor_made(
    tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "jobs/other").mkdir(parents=True)
    named = named.format(home=home)
    given = config(home, output=named, checkpoint=Checkpoint(dir=named))
    monkeypatch.setattr(spmd.tenant, "_shared", lambda path: path)
    make_context(given, Setup(epoch=Epoch(1), world=1, restore=0))
    assert not (home / "jobs/other/output").exists()
    found = asked(given, monkeypatch)
    work = str(Home.of(str(home)).job("j-1").work / "main-0")
    assert found["given"] == found["shown"] == [work]


def test_the_checkpoints_of_the_job_itself_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "checkpoints" / "j-1"
    own.mkdir(parents=True)
    assert asked(config(tmp_path), monkeypatch)["given"] == [str(own)]


def test_a_link_in_place_of_an_error_file_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text(json.dumps({"message": {"message": "SECRET", "extraInfo": {"timestamp": "1"}}}))
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "error-0.json").symlink_to(secret)
    os.mkfifo(folder / "error-1.json")
    (folder / "error-2.json").write_text("[]")
    assert spmd.first_error(folder) is None
    (folder / "error-3.json").write_text(secret.read_text())
    assert spmd.first_error(folder) == ("rank 3: SECRET", "")
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert probe.requested_stacks(probe.process.identify(child.pid), folder / "error-0.json") == ""  # type: ignore[arg-type]
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("user", ["root", "0:5", "5:0"])
def test_neither_root_nor_its_group_is_a_tenant(user: str) -> None:
    with pytest.raises(isolation.CannotIsolate, match="is root, or of its group"):
        isolation.account(user)


def test_a_secret_that_would_act_on_the_service_is_refused(tmp_path: Path) -> None:
    spec = replace(config(tmp_path).spec, secrets=("TOKEN", "LD_PRELOAD", "PATH"))
    assert [one.path for one in tenant_refused(spec)] == [("secrets", 1), ("secrets", 2)]
