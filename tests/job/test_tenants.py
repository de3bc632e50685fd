"""Commands of a tenant: nothing that its job says acts on a process that is still root."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rota.job.health.heartbeat import ProgressMarks
from rota.job.instance import spmd, tenant
from rota.job.instance.runners import Setup, make_context
from rota.runtime import file_locks, isolation, probe
from rota.runtime.clock import SystemClock
from rota.runtime.environ import Home
from rota.spec.check import tenant_refused
from rota.spec.errors import TimedOut
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


def test_settings_of_the_service_are_not_passed_on_and_what_an_instance_is_told_is(tmp_path: Path) -> None:
    told = {"ROTA_JOB": "j-1", "ROTA_PORT_WEB": "81", "CUDA_VISIBLE_DEVICES": "0", "RANK": "1"}
    private = {"ROTA_DB_URL": "postgresql://u:pw@h/d", "ROTA_TOKEN": "t", "ROTA_OIDC_SECRET": "s", "SERVICE_KEY": "k"}
    found = tenant.environment({**told, **private}, config(tmp_path), given=("RANK",))
    assert found == {"PATH": os.defpath} | {isolation.PREFIX + name: value for name, value in told.items()}


def test_a_shared_folder_that_is_removed_while_it_is_waited_for_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shm"
    path.mkdir()
    removing = os.open(path, os.O_RDONLY)
    fcntl.flock(removing, fcntl.LOCK_EX)
    waits = threading.Event()
    tried = file_locks.try_lock

    def noted(fd: int, **more: Any) -> bool:
        waits.set()
        return tried(fd, **more)

    monkeypatch.setattr(tenant, "try_lock", noted)
    found: list[Path] = []
    thread = threading.Thread(target=lambda: found.append(tenant._shared(path)))
    thread.start()
    assert waits.wait(10)
    shutil.rmtree(path)
    os.close(removing)
    thread.join(10)
    try:
        assert found == [path / "shared"] and found[0].is_dir() and found[0].stat().st_mode & 0o7777 == 0o1777
        assert path.stat().st_mode & 0o077 == 0, "a user could lock it"
        other = os.open(path, os.O_RDONLY)
        assert not file_locks.try_lock(other), "it is kept by a lock"
        os.close(other)
        tenant.remove_shared()
        assert not path.exists()
    finally:
        tenant._locks.clear()


def test_a_shared_folder_that_stays_locked_is_named_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant, "LOCK_S", 0.2)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(TimedOut, match=f"{tmp_path} is locked by .*{os.getpid()}"):
        tenant._shared(tmp_path)
    os.close(held)
    assert not tenant._locks


def test_folders_made_where_the_job_may_write_follow_none_of_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, outside = tmp_path / "tmp", tmp_path / "outside"
    own.mkdir()
    outside.mkdir()
    monkeypatch.setattr(isolation, "OF_TENANT", (str(own),))
    opened = isolation.made(str(own / "home" / "jobs"))
    assert os.path.samestat(os.fstat(opened), (own / "home" / "jobs").stat())
    os.close(opened)
    (own / "link").symlink_to(outside)
    (own / "home" / "link").symlink_to(outside)
    (own / "file").write_text("")
    for name in ("link/new", "home/link", "home/link/new", "file"):
        with pytest.raises(isolation.CannotIsolate, match="is not a folder; the job must remove it"):
            isolation.made(str(own / name))
    assert not list(outside.iterdir())
