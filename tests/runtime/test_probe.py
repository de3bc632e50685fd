"""Inventory, load and stacks of this machine."""

from __future__ import annotations

import re
import subprocess
import sys

import psutil
import pytest

from rota.runtime import probe, process
from rota.runtime.clock import SystemClock
from rota.runtime.devices import FakeDevices, local_devices
from rota.runtime.node import local_node
from rota.runtime.probe import Load, calls_of, probe_process

SPIN = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR1, file=sys.stderr)
def a_hot_loop():
    print("ready", flush=True)
    while True:
        pass
a_hot_loop()
"""


@pytest.fixture
def spinner():
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=-1, stderr=-1, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        yield child
        child.kill()


def identity(child) -> process.ProcessId:
    found = process.identify(child.pid)
    assert found is not None
    return found


def cpu_s(child) -> float:
    """Seconds of a processor that a process has used."""
    times = psutil.Process(child.pid).cpu_times()
    return times.user + times.system


def test_the_local_node_has_the_cores_and_memory_of_this_machine() -> None:
    here = local_node("here")
    assert (here.id, here.host) == ("here", "here")
    assert here.cpus >= 16 and here.memory_bytes > 1 << 28


def test_fake_devices_come_from_the_environment() -> None:
    devices = local_devices({"ROTA_FAKE_DEVICES": "2xH100:80GiB"})
    assert [(device.index, device.type, device.memory_bytes) for device in devices] == [
        (0, "H100", 80 << 30),
        (1, "H100", 80 << 30),
    ]
    assert local_devices({"ROTA_FAKE_DEVICES": "0xA100"}) == ()
    with pytest.raises(ValueError, match="COUNTxTYPE"):
        FakeDevices("H100")


def test_a_spinning_process_is_seen_to_use_the_processor_and_a_dead_one_is_left_out(spinner) -> None:
    own, clock = identity(spinner), SystemClock()
    load = Load(clock, own)
    began_s, used_s = clock.monotonic_s(), cpu_s(spinner)
    load.read()
    while cpu_s(spinner) < used_s + 0.2:  # on a busy machine it waits for a core
        process.wait_gone([own], 0.1)
        assert clock.monotonic_s() < began_s + 60.0
    found = load.read()
    share = (cpu_s(spinner) - used_s) / (clock.monotonic_s() - began_s)
    assert found["cpus"] == pytest.approx(share, rel=0.5)
    assert found["rss_bytes"] > 1 << 20
    spinner.kill()
    process.wait_gone([own], 30.0)
    assert load.read() == {"cpus": 0.0, "rss_bytes": 0}


def test_stacks_name_the_function_a_process_is_in(spinner) -> None:
    assert "a_hot_loop" in probe_process(identity(spinner))
    assert re.fullmatch(r"a_hot_loop \(<string>:\d+\) < <module> \(<string>:\d+\)", calls_of(identity(spinner)))
    gone = identity(spinner)
    spinner.kill()
    process.wait_gone([gone], 30.0)
    assert (probe_process(gone), calls_of(gone)) == ("", "")


def test_without_py_spy_a_process_writes_its_stacks_itself(spinner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_py_spy", lambda: None)
    assert "to its log" in probe_process(identity(spinner))
    assert any("a_hot_loop" in spinner.stderr.readline() for _ in range(3))
