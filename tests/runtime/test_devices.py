"""Inventory of a machine: what the driver lists, in bus order; names under which it may be asked."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rota.runtime.devices import CPUS_MIN, local_node, nvidia_devices, own_names

INFORMATION = "Model: \t\t NVIDIA {model} 80GB HBM3\nIRQ:   \t\t 42\nGPU UUID: \t GPU-{n}\nBus Type: \t PCIe\n"


def test_devices_come_in_the_order_of_their_bus_addresses(tmp_path: Path) -> None:
    for n, (address, model) in enumerate([("0000:8a:00.0", "H100"), ("0000:1b:00.0", "A100")]):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(INFORMATION.format(model=model, n=n))
    assert [(one.index, one.type, one.uuid) for one in nvidia_devices(tmp_path)] == [
        (0, "A100", "GPU-1"),
        (1, "H100", "GPU-0"),
    ]


def test_a_machine_without_a_driver_has_no_devices(tmp_path: Path) -> None:
    assert nvidia_devices(tmp_path / "absent") == ()


def test_the_local_node_has_cores_for_a_handful_of_roles_and_all_memory() -> None:
    node = local_node("here")
    assert (node.id, node.host) == ("here", "here")
    assert node.cpus >= CPUS_MIN
    cores = float(os.cpu_count() or 1)
    assert dict(node.labels).get("cores") == (f"{cores:g}" if cores < CPUS_MIN else None), "it says what it really has"
    assert node.memory_bytes > 2**28


def test_a_machine_knows_its_name_and_its_loopback_address() -> None:
    assert {socket.gethostname().lower(), "127.0.0.1"} <= own_names()
