"""Inventory of a machine: what the driver lists, in bus order; names under which it may be asked."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rota.runtime.devices import Nvidia
from rota.runtime.node import CPUS_MIN, cores_allowed, local_node, network_environment, own_names

INFORMATION = "Model: \t\t NVIDIA {model} 80GB HBM3\nIRQ:   \t\t 42\nGPU UUID: \t GPU-{n}\nBus Type: \t PCIe\n"


def test_devices_come_in_the_order_of_their_bus_addresses(tmp_path: Path) -> None:
    for n, (address, model) in enumerate([("0000:8a:00.0", "H100"), ("0000:1b:00.0", "A100")]):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(INFORMATION.format(model=model, n=n))
    assert [(one.index, one.type, one.uuid) for one in Nvidia(tmp_path).inventory()] == [
        (0, "A100", "GPU-1"),
        (1, "H100", "GPU-0"),
    ]


def test_a_machine_without_a_driver_has_no_devices(tmp_path: Path) -> None:
    assert Nvidia(tmp_path / "absent").inventory() == ()


def test_the_local_node_has_cores_for_a_handful_of_roles_and_all_memory() -> None:
    node = local_node("here")
    assert (node.id, node.host) == ("here", "here")
    assert node.cpus >= CPUS_MIN
    cores = float(cores_allowed())
    assert dict(node.labels).get("cores") == (f"{cores:g}" if cores < CPUS_MIN else None), "it says what it really has"
    assert node.memory_bytes > 2**28


@pytest.mark.parametrize(
    ("files", "groups", "cores"),
    [
        ({}, "", 8),
        ({"cpu.max": "max 100000"}, "0::/", 8),
        ({"cpu.max": "150000 100000"}, "0::/", 2),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b", 3),
        ({"cpu.max": "50000 100000"}, "0::/of/the/host", 1),
        ({"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "50000"}, "4:cpu,cpuacct:/x", 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "2:cpuset:/\n1:cpu:/", 8),
        ({"cpu.max": "9900000 100000"}, "0::/", 8),
    ],
)
def test_cores_are_those_of_the_mask_or_fewer_under_a_quota(
    files: dict[str, str], groups: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "groups").write_text(groups)
    assert cores_allowed(tmp_path, tmp_path / "groups") == cores


def test_a_machine_knows_its_name_and_its_loopback_address() -> None:
    assert {socket.gethostname().lower(), "127.0.0.1"} <= own_names()


def test_the_interface_of_the_address_of_a_node_is_the_one_its_libraries_use(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"lo": [SimpleNamespace(address="127.0.0.1")], "eth1": [SimpleNamespace(address="10.0.0.7")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: given)
    assert network_environment("10.0.0.7") == {
        "ROTA_NODE_ADDRESS": "10.0.0.7",
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "eth1"),
    }
    assert network_environment("10.9.9.9") == {"ROTA_NODE_ADDRESS": "10.9.9.9"}, "an address behind a translation"
    assert network_environment("127.0.0.1") == {"ROTA_NODE_ADDRESS": "127.0.0.1"}, "one machine works by itself"
