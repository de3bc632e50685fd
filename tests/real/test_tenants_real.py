"""Two tenants with users of their own on one machine: neither reads what belongs to the other, or to the service."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rota.service.client import Client
from rota.service.config import load_settings
from rota.service.process import daemon
from rota.spec.errors import JobFileError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts commands as other users")

USERS = {"one": "daemon", "two": "bin"}
QUEUES = f"""queues:
  - {{path: one, run_as: {USERS["one"]}}}
  - {{path: two, run_as: {USERS["two"]}}}
"""
HOLDER = """
import os, pathlib, sys, time
secret = sys.argv[1]
out = pathlib.Path(os.environ["ROTA_OUTPUT_DIR"])
for folder in (out, pathlib.Path("/tmp"), pathlib.Path("/dev/shm")):
    (folder / "held").write_text(secret)
print(secret, flush=True)
(out / "ready").write_text(str(os.getpid()))
time.sleep(300)
"""
READER = """
import json, os, pathlib
known = json.loads(os.environ["KNOWN"])
def tried(path):
    try:
        path = pathlib.Path(path)
        return sorted(os.listdir(path)) if path.is_dir() else path.read_bytes().decode(errors="replace")
    except OSError as error:
        return type(error).__name__
seen = {path: tried(path) for path in known["paths"]}
seen["ids"] = [os.getuid(), os.geteuid(), os.getgroups()]
seen["processes"] = [tried(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
seen["environment"] = dict(os.environ)
pathlib.Path(os.environ["ROTA_OUTPUT_DIR"], "seen.json").write_text(json.dumps(seen))
"""
SECRET = "SECRET-OF-ONE"
OF_THE_SERVICE = "SECRET-OF-THE-SERVICE"


@pytest.fixture
def client() -> Iterator[Client]:
    """A service of its own; its environment has a secret, which tenants must not see."""
    home = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    os.environ["SERVICE_PASSWORD"] = OF_THE_SERVICE
    settings = load_settings({"home": str(home), "port": 0}, environ={})
    document = daemon.up(settings)
    del os.environ["SERVICE_PASSWORD"]
    try:
        with Client(document["url"], (home / "token").read_text().strip()) as found:
            yield found
    finally:
        daemon.down(settings, force=True)
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A workdir that every user may read."""
    path = Path(tempfile.mkdtemp(prefix="w", dir="/tmp"))
    path.chmod(0o755)
    for name, text in (("holder.py", HOLDER), ("reader.py", READER)):
        (path / name).write_text(text)
    yield path
    shutil.rmtree(path)


def job_file(folder: Path, queue: str, *run: str, **env: str) -> Path:
    role = {"run": ["python", *run], "resources": {"cpus": 0.2}, "env": {"OWN": f"SECRET-OF-{queue.upper()}", **env}}
    path = folder / f"{queue}.json"
    path.write_text(json.dumps({"name": queue, "queue": queue, "time_limit": "5m", "roles": {"main": role}}))
    return path


@needs_root
def test_neither_tenant_reads_what_belongs_to_the_other_or_to_the_service(client: Client, folder: Path) -> None:
    client.apply_queues(QUEUES)
    one = client.run(job_file(folder, "one", "holder.py", SECRET))
    output = Path(client.job(one.id)["output"])
    _wait_for(output / "ready")
    home = output.parents[2]
    pid = int((output / "ready").read_text())
    paths = [
        *("/tmp/held", "/dev/shm/held", "/tmp", "/dev/shm", str(home / "token"), str(home / "secrets")),
        *map(str, (home, output, output / "held", output.parent / "logs", output.parent / "logs/main-0.log")),
        *(f"/proc/{pid}/environ", f"/proc/{pid}/cmdline", f"/proc/{pid}/root/tmp/held", f"/proc/{pid}/fd/1"),
    ]
    two = client.run(job_file(folder, "two", "reader.py", KNOWN=json.dumps({"paths": paths})))
    assert two.wait(timeout_s=300).state == "SUCCEEDED", client.logs(two.id)
    seen = json.loads((Path(client.job(two.id)["output"]) / "seen.json").read_text())
    entry = pwd.getpwnam(USERS["two"])
    assert seen["ids"] == [entry.pw_uid, entry.pw_uid, []]
    assert SECRET not in json.dumps(seen) and OF_THE_SERVICE not in json.dumps(seen)
    assert seen["environment"]["OWN"] == "SECRET-OF-TWO"
    gone = ("FileNotFoundError", "PermissionError")
    shared = ("/tmp", "/dev/shm", str(home))
    assert {path: seen[path] for path in paths if path not in shared and seen[path] not in gone} == {}
    assert "held" not in seen["/tmp"] and seen["/dev/shm"] == []
    assert all("reader.py" in line or line in gone for line in seen["processes"]), seen["processes"]
    # the holder has its own, as its user, and what its job left in memory goes with it
    assert (output / "held").read_text() == SECRET and (output / "held").stat().st_uid == pwd.getpwnam("daemon").pw_uid
    done = client.execute(one.id, "main/0", ["sh", "-c", "id -un; cat /tmp/held; cat /proc/1/environ"])
    assert done["stdout"].split() == ["daemon", SECRET], "a command beside an instance is the same tenant"
    assert Path(f"/dev/shm/rota-tenant-{one.id}/shared/held").exists()
    client.stop(one.id, grace_s=1)
    one.wait(timeout_s=120)
    assert not list(Path("/dev/shm").glob("rota-tenant-*"))


@needs_root
def test_what_would_run_as_the_service_is_refused(client: Client, folder: Path) -> None:
    client.apply_queues(QUEUES)
    for role, text in (
        ({"workload": "os:getpid"}, "a workload runs in a process of the service"),
        ({"run": "true", "packages": ["numpy"]}, "packages are installed as the service"),
    ):
        (folder / "job.json").write_text(json.dumps({"name": "bad", "queue": "one", "roles": {"main": role}}))
        with pytest.raises(JobFileError, match=text):
            client.run(folder / "job.json")
    for user, text in (("root", "is root"), ("nobody-of-that-name", "has no user")):
        with pytest.raises(JobFileError, match=text):
            client.apply_queues(f"queues: [{{path: one, run_as: {user}}}]")


def _wait_for(path: Path) -> None:
    until_s = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < until_s, f"{path} did not come"
        time.sleep(0.1)
