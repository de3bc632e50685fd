"""A disk that is really full: a small file system of memory, mounted where the installation lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

LOG = """
import sys
from pathlib import Path
from rota.runtime.event_log.interface import Writer
from rota.runtime.event_log.sql import SqlLog
from rota.spec.errors import StoreUnavailable
from rota.spec.events import NodeLost
from rota.spec.ids import NodeId

disk = Path(sys.argv[1])
log = SqlLog(f"sqlite:///{disk}/rota.db", migrate=True)
writer = Writer(scope="install", epoch=log.take_epoch("install"))
ballast = disk / "ballast"
ballast.write_bytes(bytes(2**19))
acknowledged = 0
try:
    while acknowledged < 100_000:
        acknowledged = log.append([NodeLost(node=NodeId("x" * 1000))] * 5, writer=writer)[-1].number
except StoreUnavailable as error:
    print(error.message, "|", error.hint)
print(0 < acknowledged == log.last_number() == len(log.read()))  # all of it can be read meanwhile
ballast.unlink()
print(log.append([NodeLost(node=NodeId("again"))], writer=writer)[-1].number == acknowledged + 1)
log.close()
print(SqlLog(f"sqlite:///{disk}/rota.db").last_number() == acknowledged + 1)
"""


def on_a_small_disk(folder: Path, *words: str, size: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a mount space of its own, with a file system of this size at ``folder``."""
    shell = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", shell, str(folder), *words]
    if subprocess.run([*command[:7], "true"], capture_output=True).returncode:
        pytest.skip("this kernel lets nobody mount a file system of memory")
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env={**os.environ, **env})


def test_a_log_on_a_full_disk_says_so_keeps_all_it_acknowledged_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    done = on_a_small_disk(tmp_path, sys.executable, "-c", LOG, str(tmp_path), size="2m")
    said, *held = done.stdout.splitlines()
    assert "rota.db: database or disk is full" in said, done
    assert said.endswith("| free space on that disk; nothing was written")
    assert held == ["True", "True", "True"], done


def test_up_on_a_full_disk_names_the_disk_and_the_remedy(tmp_path: Path) -> None:
    fill = f'head -c 200k /dev/zero > {tmp_path}/ballast; exec "$0" -m rota up --port 0'  # no room even to say so
    done = on_a_small_disk(tmp_path, "sh", "-c", fill, sys.executable, size="256k", ROTA_HOME=str(tmp_path / "home"))
    assert (done.returncode, "No space left on device" in done.stderr) == (2, True), done
    assert "free space on that disk" in done.stderr and "Traceback" not in done.stderr
