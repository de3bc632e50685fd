"""One engine for all real tests of a session, in a private short directory; a process left behind fails the session.

Fixture ``engine`` (session): an ``Engine`` with ``home`` (a fresh ``$ROTA_HOME``), ``address`` of the GCS,
``namespace``, ``host`` label and ``launcher()``: a RayLauncher for the running event loop. The session itself becomes a
client of the engine; import Ray (and what is in ``rota.runtime.ray``) only after asking for it, never at the top.

Fixture ``registry`` (function): ends the tensor registry of the home after the test; nothing may be left in it.

Fixture ``engine_home`` (function): an empty ``$ROTA_HOME`` with a short path; whatever engine a test starts there is
stopped at its end, and a process left behind fails that test. ``short_home`` is the same as a context manager, for
fixtures of a wider scope.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rota.runtime import process
from rota.runtime.environ import Home
from rota.runtime.ray.engine import EngineSettings, EngineState, client_environment, start_engine, stop_engine
from rota.runtime.redis.server import find_running

HOST = "here"
NAMESPACE = "rota/test"
OWN = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
"""Helpers of Python's own that end with the tests' process, not before."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--frames N``: how many frames of chance a call server is given."""
    parser.addoption("--frames", type=int, default=None, help="frames of chance that a call server is given")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever lies in this folder is real: the quick check does not even collect it."""
    for item in items:
        if Path(item.path).is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.real)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A running engine and how to reach it."""

    home: Path
    state: EngineState
    shm: str = ""
    namespace: str = NAMESPACE
    host: str = HOST

    @property
    def address(self) -> str:
        return self.state.address

    def launcher(self):
        """A launcher bound to this engine; close it with ``await launcher.close()``."""
        from rota.runtime.ray.launcher import RayLauncher

        return RayLauncher(self.namespace)


GUARD = """
import os, select, sys
home = os.read(0, 4096)
ended = select.poll()
ended.register(os.pidfd_open(int(sys.argv[1])), select.POLLIN)
ended.poll()
os.execvp("rm", ["rm", "-rf", home])
"""
"""Removes a home when the tests are gone without the end of their fixtures, as after Ctrl-C under xdist: with the home
end its engine and its service. It reads its name: whose arguments have it is taken for a process of the engine."""


def apply_environment(state: EngineState) -> None:
    """Make this process a possible client of the engine; must happen before Ray is imported."""
    for name, value in client_environment(state.token_path, state.folder).items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@contextlib.contextmanager
def made_short_home() -> Iterator[Path]:
    """An empty home under a short path; its engine is stopped at the end and must leave nothing."""
    home = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    words = (sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()))
    guard = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    assert guard.stdin is not None
    with guard.stdin as pipe:
        pipe.write(os.fsencode(home))
    try:
        yield home
    finally:
        left = stop_engine(home)
        guard.kill()
        guard.wait()
        left_over = processes_of(home)
        shutil.rmtree(home, ignore_errors=True)
        assert not left and not left_over, f"processes left behind: {left} {left_over}"


def processes_of(home: Path) -> list[str]:
    """Command lines of the running processes that were started with this home in their environment or arguments.

    What a client of the engine hands down to everything it starts says nothing: other tests' servers have it too.
    """
    found, wanted = [], str(home).encode()
    handed_down = tuple(f"{name}=".encode() for name in client_environment("", ""))
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid() and process.identify(int(entry.name)):
                command = (entry / "cmdline").read_bytes()
                if any(word in command for word in OWN):
                    continue
                own = [at for at in (entry / "environ").read_bytes().split(b"\0") if not at.startswith(handed_down)]
                if any(wanted in at for at in (command, *own)):
                    found.append(command.replace(b"\0", b" ").decode())
    return found


@pytest.fixture(scope="session")
def short_home():
    return made_short_home


@pytest.fixture
def engine_home() -> Iterator[Path]:
    with made_short_home() as home:
        yield home


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    assert "ray" not in sys.modules, "a test file imports Ray at its top: Ray reads its environment when imported"
    with made_short_home() as home:
        shm = os.environ.get("ROTA_SHM_DIR", "")
        state = start_engine(home, EngineSettings(host=HOST, cpus=64))
        apply_environment(state)
        import ray

        ray.init(state.address, namespace=NAMESPACE, log_to_driver=False, logging_level=30)
        try:
            yield Engine(home=home, state=state, shm=shm)
        finally:
            ray.shutdown()


@pytest.fixture
def registry(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The registry of the engine's home outlives its jobs; it is ended after each test, with nothing left in it.

    Instances have the environment in which the engine began; tests of tensors change it for this process afterwards.
    """
    from rota import tensors

    monkeypatch.setenv("ROTA_SHM_DIR", engine.shm)
    yield
    server = find_running(Home.of(engine.home))
    environment = psutil.Process(server.pid).environ() if server else {}
    left = tensors.connect(home=engine.home, keep=True)
    names = [row.name for row in left.ls()]
    left.close()
    tensors.down(engine.home)
    assert names == [], "a job that has ended leaves no tensor behind"
    assert server is not None
    assert not any(name.startswith("ROTA_ENGINE") for name in environment), "it is no process of the engine"
