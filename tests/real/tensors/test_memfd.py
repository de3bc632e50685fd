"""Host memory without a name: memfds of a keeper, sent as descriptors; nobody's death leaks or tears them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.real.tensors.crew import HOLDING, Cases, Crew, end, wait_until

import rota.tensors
from rota.tensors import errors, inspect
from rota.tensors.api.store import Plane
from rota.tensors.devices.memfd import Memfd

KILLED = -signal.SIGKILL


@pytest.fixture
def plane(tensor_home: Path) -> Iterator[Plane]:
    """One namespace, and so one keeper, for the file."""
    with rota.tensors.connect(home=tensor_home, namespace="memfd", device="memfd", keep=True) as made:
        yield made
        end(made)


def ask(plane: Plane, **words: Any) -> dict[str, Any]:
    assert plane._space.devices is not None
    return plane._space.devices.ask("memfd", words)


def test_a_tensor_without_a_name_in_any_file_system_is_read_in_another_process(plane: Plane, actors: Crew) -> None:
    secret = np.frombuffer(b"nobody finds this by a path " * 1000, np.uint8)
    plane.put("w", secret)
    plane.publish_group("g", {"a": np.arange(5000.0), "none": np.zeros((0, 3))}, step=7)
    with plane.create("made", (5,), "float32", as_="numpy") as made:
        made[:] = 3
    code = """
        import sys
        assert plane.get('w', as_='numpy').tobytes().startswith(b'nobody finds')
        group = plane.get_group('g', as_='numpy')
        assert group.step == 7 and group['a'].sum() == 12497500 and group['none'].shape == (0, 3)
        made = plane.get('made', as_='numpy')
        made[2] = 4
        assert plane.version_of(made) == ('made', plane.info('made').version)
        assert 'torch' not in sys.modules
    """
    assert actors.run(code, device="memfd") == 0
    assert plane.get("made", as_="numpy").tolist() == [3, 3, 4, 3, 3]  # the same memory
    assert plane.get("made").tolist() == [3, 3, 4, 3, 3]  # as a torch tensor too
    assert plane.list_document("w")["items"][0]["device"] == "memfd"
    files = [path for path in plane.folder.rglob("*") if path.is_file()]
    assert not any(b"nobody finds" in path.read_bytes() for path in files)
    without = """
        from rota.tensors.errors import WrongDevice
        try:
            plane.get('w')
        except WrongDevice as error:
            assert "device='memfd'" in error.hint, error
        else:
            raise AssertionError
    """
    assert actors.run(without) == 0


def test_a_sealed_view_cannot_be_written_and_no_size_can_be_changed(plane: Plane, actors: Crew) -> None:
    plane.put("w", np.arange(5000))
    view = plane.get("w", sealed=True, as_="numpy")
    assert not view.flags.writeable and view.sum() == 12497500
    code = """
        import ctypes
        v = plane.get('w', sealed=True, as_='numpy')
        ctypes.memset(v.__array_interface__['data'][0], 1, 8)
    """
    assert actors.run(code, device="memfd") == -signal.SIGSEGV
    own = Memfd()
    fd = own.need(own.allocate(0, 4096), owned=True).fd
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


@pytest.mark.parametrize("point", ["reserved", "allocated", "copying", "copied", "committed"])
def test_a_writer_killed_anywhere_leaves_no_memory(plane: Plane, actors: Crew, cases: Cases, point: str) -> None:
    for _ in cases(12, plane, 2, deep=10):
        plane.put("w", np.zeros(100))
        assert actors.run("plane.put('w', np.ones(100))", device="memfd", die_at=point) == KILLED
        assert plane.get("w", as_="numpy")[0] == (point == "committed")
        wait_until(lambda: plane.gc() and len(ask(plane, op="blocks")["blocks"]) == 1)
    assert ask(plane, op="stat")["bytes"] <= 4 << 20


def test_a_header_that_was_never_written_or_is_gone_stops_no_gc(
    plane: Plane, actors: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.put("w", np.zeros(100))
    with monkeypatch.context() as patch:
        patch.setattr(type(plane._space), "reap", lambda _: 0)  # the moment between a sweep and a look at the notes
        assert actors.run("plane.put('other', np.ones(700_000))", device="memfd", die_at="reserved") == KILLED
        wait_until(lambda: plane.gc() and not plane.ls("other*"))
    plane.put("x", np.zeros(100))
    before = plane._space.registry.dump()
    fields = before[f"v:{plane.info('x').version}"]
    plane.delete("x")
    plane._space.reap()
    with plane._space.segments.path(fields["seg"]).open("r+b") as file:
        file.seek(int(fields["off"]))
        file.write(bytes(512))  # another writer took the block
    assert [v for v, *_ in inspect._on_devices(plane._space, before)] == [str(plane.info("w").version)]


def test_a_reader_killed_with_a_view_gives_its_memory_back(plane: Plane, actors: Crew, cases: Cases) -> None:
    for _ in cases(12, plane, 2, deep=10):
        plane.put("w", np.zeros(100_000))
        reader = actors.start(HOLDING, device="memfd")
        actors.says(reader, "holding")
        for value in range(5):
            plane.put("w", np.full(100_000, float(value)))
        wait_until(lambda: len(ask(plane, op="blocks")["blocks"]) == 2)
        actors.kill(reader)
        wait_until(lambda: plane.gc() and len(ask(plane, op="blocks")["blocks"]) == 1)
        assert plane.get("w", as_="numpy")[0] == 4


def test_views_outlive_the_keeper_and_a_get_says_that_it_died(plane: Plane, cases: Cases) -> None:
    plane.put("w", np.arange(1000))
    view = plane.get("w", as_="numpy")
    os.kill(ask(plane, op="stat")["pid"], signal.SIGKILL)
    wait_until(lambda: plane.gc()["swept"] or not plane.ls())
    with pytest.raises((errors.OwnerLost, errors.NotFound)):
        plane.get("w", version=plane.info("w").version, as_="numpy")
    assert view.sum() == 499500, "mapped memory stays"
    plane.put("w", np.ones(3))
    assert plane.get("w", as_="numpy").tolist() == [1, 1, 1]
    del view
    cases.done(12, plane)


def test_what_a_keeper_does_not_have_and_what_the_platform_lacks_is_named(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.put("w", np.zeros(4))
    assert "none" in ask(plane, op="descriptor", slab="none")["error"]
    assert plane._space.devices is not None
    with pytest.raises(errors.IpcUnavailable, match="sends no descriptor of gone"):
        plane._space.devices._receive("memfd", "gone")
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(errors.IpcUnavailable, match="this platform has no memfds"):
        Memfd().uuids()


def test_a_keeper_that_does_not_answer_makes_no_get_of_another_store_wait(
    plane: Plane, actors: Crew, tensor_home: Path
) -> None:
    plane.put("w", np.ones(10))
    assert actors.run("plane.put('large', np.ones(8_000_000))", device="memfd") == 0  # a slab that is not open here
    keeper = ask(plane, op="stat")["pid"]
    with rota.tensors.connect(home=tensor_home, namespace="memfd-2", device="memfd", keep=True) as other:
        assert Crew(actors._actors, tensor_home, "memfd-2").run("plane.put('w', np.ones(10))", device="memfd") == 0
        os.kill(keeper, signal.SIGSTOP)
        try:
            stuck = threading.Thread(target=plane.get, args=("large",))
            stuck.start()
            stuck.join(0.5)
            began_s = time.monotonic()
            assert other.get("w", as_="numpy").sum() == 10
            assert stuck.is_alive() and time.monotonic() - began_s < 10.0  # one answer is waited for 30 s
        finally:
            os.kill(keeper, signal.SIGCONT)
        stuck.join(30.0)
        assert plane.get("large", as_="numpy").sum() == 8_000_000
        end(other)
