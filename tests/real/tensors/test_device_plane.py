"""Tensors on devices, through their keeper, under every rule of CUDA IPC: fault group 12.

The same file runs on a GPU (``pytest -m gpu``) with the device ``cuda:0``; what only the stand-in can show says so.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.real.tensors.crew import WAITING, Actors, Cases, Crew, wait_until

import rota.tensors
from rota.spec.errors import BadInput
from rota.tensors import errors
from rota.tensors.api.store import Plane
from rota.tensors.devices.client import Devices
from rota.tensors.devices.memfd import FakeCuda

torch = pytest.importorskip("torch")
FAKE = "fakecuda:0"


@pytest.fixture(scope="module")
def torch_zygote(tensor_home: Path) -> Iterator[Actors]:
    with tempfile.TemporaryDirectory(prefix="rt") as folder:
        actors = Actors(Path(folder), dict(os.environ), "--torch")
        yield actors
        actors.close()


@pytest.fixture(scope="module", params=[FAKE, pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Small slabs for keepers on the stand-in."""
    if request.param == FAKE:
        os.environ["ROTA_TENSORS_SLAB_BYTES"] = str(4 << 20)
        os.environ["ROTA_FAKECUDA_BYTES"] = str(16 << 20)
    yield request.param
    for name in ("ROTA_TENSORS_SLAB_BYTES", "ROTA_FAKECUDA_BYTES"):
        os.environ.pop(name, None)


@pytest.fixture(scope="module")
def shared(tensor_home: Path, device: str) -> Iterator[Plane]:
    """One namespace with one keeper for most of the file, since a keeper takes a while to start."""
    namespace = f"devices-{device.split(':')[0]}"
    with rota.tensors.connect(home=tensor_home, namespace=namespace, device=device, keep=True) as made:
        yield made


@pytest.fixture
def plane(shared: Plane) -> Iterator[Plane]:
    yield shared
    for row in shared.ls():
        shared.delete(row.name, missing_ok=True)
    wait_until(lambda: blocks(shared) == 0)
    assert shared.fsck()["violations"] == []


@pytest.fixture
def crew(torch_zygote: Actors, shared: Plane) -> Iterator[Crew]:
    made = Crew(torch_zygote, shared.home, shared.namespace)
    yield made
    made.end()


def ask(plane: Plane, op: str) -> dict[str, Any]:
    assert plane._space.devices is not None
    return plane._space.devices.ask(plane._space.devices.uuid, {"op": op})


def blocks(plane: Plane) -> int:
    """Ranges of device memory that versions have."""
    gc.collect()
    plane.gc()
    return len(ask(plane, "blocks")["blocks"])


def test_a_device_tensor_is_read_in_another_process_by_name(plane: Plane, crew: Crew, device: str) -> None:
    for dtype in ("float32", "bfloat16", "int64", "bool", "complex64"):
        plane.put(f"x/{dtype}", torch.arange(6).to(getattr(torch, dtype)).view(2, 3))
    plane.publish_group("g", {"a": torch.ones(1000), "none": torch.zeros(0, 3)}, step=7, meta={"lr": 1})
    with plane.create("made", (5,), torch.float32) as made:
        made.fill_(3)
    code = """
        import torch
        for name in ('float32', 'bfloat16', 'int64', 'bool', 'complex64'):
            want = torch.arange(6).to(getattr(torch, name)).view(2, 3)
            got = plane.get('x/' + name)
            assert (got.dtype, got.shape) == (want.dtype, want.shape) and torch.equal(got.cpu(), want), got
        group = plane.get_group('g')
        assert group.step == 7 and group.meta == {'lr': 1}
        assert group['a'].sum() == 1000 and group['none'].shape == (0, 3)
        assert plane.get('made').tolist() == [3] * 5
        plane.get('made')[2] = 4
        from rota.tensors.devices.client import _open
        assert len(_open) == 1, 'a slab is opened once, whatever lies in it'
        torch.zeros(1)
        plane._space.devices.finish()
    """
    assert crew.run(code, device=device) == 0
    again, devices = plane.get("made"), plane._space.devices
    assert devices is not None
    assert again.tolist() == [3, 3, 4, 3, 3]  # the same memory
    assert plane.version_of(again) == ("made", plane.info("made").version)
    assert plane.list_document("x/float32")["items"][0]["device"] == devices.uuid
    plane.put("host", torch.ones(3), device="cpu")
    assert plane.get("host", as_="numpy").tolist() == [1, 1, 1]
    with pytest.raises(errors.UnsupportedTensor, match="cannot be read as numpy"):
        plane.get("made", as_="numpy")
    with pytest.raises(BadInput, match="device="):
        plane.put("x", torch.ones(1), device="cuda:9")


@pytest.mark.parametrize("point", ["reserved", "allocated", "copying", "copied", "committed"])
def test_a_writer_killed_anywhere_leaves_no_device_memory(
    plane: Plane, crew: Crew, cases: Cases, device: str, point: str
) -> None:
    code = "import torch; plane.put('w', torch.ones(100))"
    for _ in cases(12, plane, 3, deep=10):
        plane.put("w", torch.zeros(100))
        assert crew.run(code, device=device, die_at=point) == -signal.SIGKILL
        assert plane.get("w")[0] == (1 if point == "committed" else 0)
        plane.release("w")
        wait_until(lambda: blocks(plane) == 1)
        assert plane.fsck()["violations"] == []


def test_a_reader_killed_with_views_gives_their_memory_back(
    plane: Plane, crew: Crew, cases: Cases, device: str
) -> None:
    for _ in cases(12, plane, 3, deep=10):
        plane.put("w", torch.zeros(100_000))
        reader = crew.start(f"v = plane.get('w'); print('holding', flush=True); {WAITING}", device=device)
        crew.says(reader, "holding")
        for value in range(5):
            plane.put("w", torch.full((100_000,), float(value)))
        wait_until(lambda: blocks(plane) == 2)
        crew.kill(reader)
        wait_until(lambda: blocks(plane) == 1)
        assert plane.get("w")[0] == 4


def test_publishes_and_deletes_leave_no_byte(plane: Plane, device: str, cases: Cases) -> None:
    before = ask(plane, "stat")
    for index in range(1000 if device != FAKE else 60):
        plane.put("w", torch.full((10_000 + index,), float(index)))
    assert plane.get("w")[0] >= 59
    plane.delete("w")
    wait_until(lambda: blocks(plane) == 0)
    after = ask(plane, "stat")
    assert after["bytes"] - after["free_bytes"] == 0
    assert after["slabs"] <= before["slabs"] + 1
    cases.done(12, plane)


def test_a_slab_stays_open_while_any_plane_of_the_process_has_a_view_in_it(plane: Plane, device: str) -> None:
    session = plane._session
    other = Devices(session.space.folder, session.home, session._url, device, session.clock)
    plane.put("w", torch.full((1000,), 3.0))
    view = plane.get("w")
    assert other.close_unused(0.0) == 0 and float(view.sum()) == 3000.0
    del view
    wait_until(lambda: other.close_unused(0.0) >= 1)  # what nobody uses is closed, by whichever plane


def test_memory_is_not_reused_before_the_work_on_it_is_done(plane: Plane, device: str, cases: Cases) -> None:
    """The stand-in raises at a reuse that comes too early; its work is a range and a time."""
    if device != FAKE:
        pytest.skip("work with a known end exists on the stand-in only")
    devices = plane._space.devices
    assert devices is not None
    driver: Any = devices.driver
    plane.put("w", torch.zeros(1_000_000))  # of 4 MiB: any other of this size needs the same place or a new slab
    view = plane.get("w")
    driver.launch(view.data_ptr(), view.nbytes, 0.3, driver.stream(0))
    other = type(driver.stream(0))()
    plane.record_stream(view, other)
    driver.launch(view.data_ptr(), view.nbytes, 0.6, other)
    began = plane._session.clock.monotonic_s()
    del view
    plane.delete("w")
    wait_until(lambda: blocks(plane) == 0)
    assert plane._session.clock.monotonic_s() - began >= 0.5, "released while a stream still worked on it"
    plane.put("w", torch.ones(1_000_000))  # poisoned, written anew
    assert (plane.get("w") == 1).all()
    cases.done(12, plane)


def test_a_device_that_a_process_does_not_see_is_named_and_another_order_is_found_by_uuid(
    plane: Plane, crew: Crew, device: str, cases: Cases
) -> None:
    if device != FAKE:
        pytest.skip("the machine may have one GPU only")
    plane.put("w", torch.arange(4.0))
    permuted = "assert plane.get('w').tolist() == [0, 1, 2, 3]; assert plane._space.devices.uuid == 'FAKE-1'"
    assert crew.run(permuted, device=FAKE, env={"ROTA_FAKECUDA_DEVICES": "1,0"}) == 0
    blind = """
        from rota.tensors.errors import WrongDevice
        try:
            plane.get('w')
        except WrongDevice as error:
            assert error.fields == {'name': 'w', 'wanted': 'FAKE-0', 'visible': ['FAKE-1']}, error.fields
        else:
            raise AssertionError
    """
    assert crew.run(blind, device=FAKE, env={"ROTA_FAKECUDA_DEVICES": "1"}) == 0
    without = blind.replace("['FAKE-1']", "[]")
    assert crew.run(without) == 0
    with pytest.raises(errors.WrongDevice, match="sees 2 devices"):
        plane._session.use_device("fakecuda:5")
    with pytest.raises(BadInput, match="already uses fakecuda"):
        plane._session.use_device("cuda:0")
    plane._session.use_device("fakecuda:1")
    plane.put("second", torch.ones(2))
    assert json.loads(plane.info("second").desc)["device"] == "FAKE-1"
    assert plane.get("w").tolist() == [0, 1, 2, 3], "what lies on another device is read as before"
    assert plane.get("second").tolist() == [1, 1]
    plane._session.use_device(FAKE)
    with pytest.raises(BadInput, match="cuda:N"):
        plane._session.use_device("gpu0")
    cases.done(12, plane)


def test_a_full_device_evicts_what_may_go_and_then_says_so(plane: Plane, device: str, cases: Cases) -> None:
    if device != FAKE:
        pytest.skip("filling a GPU disturbs others on it")
    for index in range(12):  # of 2 MiB each, on a device of 16 MiB
        plane.put(f"kv/{index}", torch.full((1 << 19,), float(index)), evictable=True)
    left = [row.name for row in plane.ls("kv/")]
    assert "kv/11" in left
    assert len(left) < 9
    assert plane.get("kv/11")[0] == 11
    with pytest.raises(errors.OutOfMemory, match="device FAKE-0 holds 16777216 bytes"):
        plane.put("big", torch.zeros(20 << 20, dtype=torch.uint8))
    assert plane.fsck()["violations"] == []
    cases.done(12, plane)


def test_a_killed_keeper_is_named_and_what_is_published_again_is_readable(
    tensor_home: Path, space_name: str, cases: Cases, device: str
) -> None:
    with rota.tensors.connect(home=tensor_home, namespace=space_name, device=device) as plane:
        for _ in cases(12, plane, 2, deep=10):
            plane.put("w", torch.zeros(1000))
            plane.put("v", torch.zeros(1000))
            kept = plane.get("w").clone()
            plane.release("w")
            pid = ask(plane, "stat")["pid"]
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(errors.OwnerLost, match="keeper of device"):
                wait_until(lambda: plane.get("w") is None or plane.release("w"))
            assert plane.fsck()["violations"] == []
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())  # no zombie, though nothing was started since
            plane.put("w", kept + 1)
            assert plane.get("w")[0] == 1
            dropped: list[str] = []
            wait_until(
                lambda dropped=dropped: dropped.extend(each["what"] for each in plane.gc()["dropped"]) or "v" in dropped
            )
            assert "w" not in dropped
            assert [row.name for row in plane.ls()] == ["w"]
            assert plane.fsck()["violations"] == []
            plane.delete("w")


def test_the_registry_may_be_lost_while_the_keeper_lives(plane: Plane, cases: Cases) -> None:
    for _ in cases(12, plane, 2, deep=10):
        plane.put("w", torch.arange(100.0))
        plane.put("w", torch.arange(100.0) + 1)
        assert plane.recover()["names"] == 1
        assert plane.get("w")[0] == 1
        assert plane.info("w").payload >= 400
        wait_until(lambda: blocks(plane) == 1)
        assert plane.fsck()["violations"] == []


@pytest.mark.parametrize("moment", ["before the answer", "after the answer"])
def test_what_is_released_while_the_keeper_is_asked_is_no_violation(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    plane.put("w", torch.zeros(1000))
    devices = plane._space.devices
    assert devices is not None
    asked = devices.ask

    def asks(uuid: str, words: dict[str, Any], **how: Any) -> dict[str, Any]:
        if moment == "before the answer":
            plane.delete("w", missing_ok=True)
        reply = asked(uuid, words, **how)
        plane.delete("w", missing_ok=True)
        return reply

    monkeypatch.setattr(devices, "ask", asks)
    assert plane.fsck()["violations"] == []


def export(crew: Crew) -> tuple[int, bytes, list[str]]:
    """Another process that owns memory of the stand-in: its pid, a handle, and what it does when told by a signal."""
    code = """
        import signal
        from rota.tensors.devices.memfd import FakeCuda
        own = FakeCuda(); at = own.allocate(0, 4096)
        def free(*_):
            try: own.free(at); print('freed', flush=True)
            except Exception as error: print(error.fields['rule'], flush=True)
        signal.signal(signal.SIGUSR1, free)
        print('handle', own.export(at).hex(), flush=True)
        while True: signal.pause()
    """
    pid = crew.start(code)
    said = crew.says(pid, "\n").split()
    return pid, bytes.fromhex(said[1]), said


def test_each_broken_rule_of_ipc_has_a_name(plane: Plane, crew: Crew, device: str, cases: Cases) -> None:
    if device != FAKE:
        pytest.skip("CUDA corrupts or leaks where the stand-in raises")
    pid, handle, _ = export(crew)
    fake = FakeCuda()

    def rule(*call: Any) -> str:
        with pytest.raises(errors.ProtocolBreach) as caught:
            call[0](*call[1:])
        cases.done(12, plane)
        return caught.value.fields["rule"]

    assert rule(fake.open, 1, handle) == "wrong-device"
    at = fake.open(0, handle)
    assert rule(fake.open, 0, handle) == "open-twice"
    assert rule(fake.open, 0, fake.export(fake.allocate(0, 4096))) == "open-in-exporter"
    os.kill(pid, signal.SIGUSR1)
    crew.says(pid, "free-while-open")
    view = fake.flat(fake.memory(at, 4096), 0)
    assert rule(fake.close, at) == "close-under-view"
    del view
    fake.launch(at, 4096, 5.0, fake.stream(0))
    assert rule(fake.reuse, at, 512) == "reuse-before-event"
    assert rule(fake.free, at) == "foreign-address"
    assert rule(fake.memory, at + 4000, 4096) == "foreign-address"
    fake.close(at)
    os.kill(pid, signal.SIGUSR1)
    crew.says(pid, "freed")
    with pytest.raises((errors.ProtocolBreach, errors.IpcUnavailable)):
        fake.open(0, handle)
    pid, handle, _ = export(crew)
    crew.kill(pid)
    with pytest.raises(errors.IpcUnavailable, match=f"process {pid}, the owner"):
        fake.open(0, handle)
    fake._pid = -1
    assert rule(fake.uuids) == "fork"


def test_a_keeper_answers_nonsense_and_a_repeated_question(plane: Plane, cases: Cases) -> None:
    devices = plane._space.devices
    assert devices is not None
    plane.put("w", np.zeros(10))
    version = plane.info("w").version
    first = devices.take(version, 80)
    assert devices.take(version, 80) == first  # a lost reply costs nothing
    for words in ({"op": "steal"}, {"op": "take"}, {"op": "take", "version": "x", "bytes": 1}, {}):
        assert "error" in devices.ask(devices.uuid, words)
    assert ask(plane, "stat")["slabs"] >= 1
    cases.done(12, plane)
