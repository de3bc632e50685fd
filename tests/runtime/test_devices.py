"""Families of devices: what each reads of a machine, which devices are unfit, and the variables of a process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rota.job.health.preflight import DeviceWatch
from rota.runtime import devices
from rota.runtime.devices import (
    Amd,
    Ascend,
    DeviceFamily,
    DeviceFault,
    Nvidia,
    Tpu,
    local_devices,
    local_family,
    nvidia_type,
)
from rota.runtime.node import local_node
from rota.spec.errors import BadInput
from rota.spec.resources import Device, Health

CHIPS = """
	NPU ID                         Chip ID                        Chip Logic ID                  Chip Name
	0                              0                              0                              Ascend 910B3
	0                              1                              -                              Mcu
	4                              0                              1                              Ascend 910B3
"""
NPU_SMI = f"""#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
case "$*" in
    "info -m") cat <<'END'
{CHIPS}
END
    ;;
    *"-t usages"*) echo "	HBM Capacity(MB)               : 65536" ;;
    *"-t health -i 4"*) echo "	Health                         : Critical" ;;
    *"-t health"*) echo "	Health                         : OK" ;;
esac
"""


class Toy(DeviceFamily):
    """Three devices, of which the second is too hot."""

    name = "toy"
    variable = "TOY_VISIBLE_DEVICES"

    def inventory(self) -> tuple[Device, ...]:
        return tuple(Device(index=i, type="TOY1", memory_bytes=1 << 30) for i in range(3))

    def faults(self, devices: Sequence[int]) -> list[DeviceFault]:
        return [DeviceFault(index=1, text="too hot")]


class NoVariable(DeviceFamily):
    """Says nothing of itself."""


class NoInventory(DeviceFamily):
    """Does not say what is there."""

    variable = "TOY_VISIBLE_DEVICES"


class Indices(NoInventory):
    """Says how many are there, and not what they are."""

    def inventory(self) -> Any:
        return [0, 1]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def npus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Ascend:
    """The family on a machine with the chips of ``NPU_SMI``."""
    write(folder / "bin/npu-smi", NPU_SMI)
    (folder / "bin/npu-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin", prepend=":")
    write(folder / "dev/davinci0", "")
    return Ascend(folder / "dev")


def test_amd_devices_are_those_of_the_topology_with_product_memory_and_errors(tmp_path: Path) -> None:
    nodes = tmp_path / "kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "cpu_cores_count 96\nsimd_count 0\n")
    for node, minor in ((2, 128), (10, 136)):
        write(
            nodes / f"{node}/properties",
            f"simd_count 1216\ngfx_target_version 90402\nunique_id {node}77\ndrm_render_minor {minor}\n",
        )
        write(nodes / f"{node}/mem_banks/0/properties", "heap_type 1\nsize_in_bytes 206141652992\n")
        write(nodes / f"{node}/mem_banks/1/properties", "heap_type 0\nsize_in_bytes 5\n")
    write(tmp_path / "drm/renderD128/device/product_name", "AMD Instinct MI300X OAM\n")
    write(tmp_path / "drm/renderD128/device/ras/umc_err_count", "ue: 3\nce: 40\n")
    amd = Amd(tmp_path)
    assert [(d.index, d.type, d.memory_bytes, d.uuid) for d in amd.inventory()] == [
        (0, "MI300X", 206141652992, "277"),
        (1, "gfx942", 206141652992, "1077"),
    ]
    assert amd.memory_errors() == {0: 3}
    assert amd.environment((1,)) == {"HIP_VISIBLE_DEVICES": "1"} and not Amd(tmp_path / "none").is_here()


def test_ascend_devices_are_those_of_npu_smi_and_a_critical_one_is_unfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ascend = npus(tmp_path, monkeypatch)
    assert [(d.index, d.type, d.memory_bytes, d.uuid) for d in ascend.inventory()] == [
        (0, "910B3", 64 << 30, "0-0"),
        (1, "910B3", 64 << 30, "4-0"),
    ]
    assert [(one.index, one.text) for one in ascend.faults((0, 1))] == [(1, "npu-smi says Critical")]
    assert Ascend(tmp_path).inventory() == () and Ascend(tmp_path).faults((0, 1)) == []
    assert ascend.environment((0, 1)) == {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}


def test_tpu_chips_are_those_on_the_bus_and_a_part_of_a_host_has_its_shape(tmp_path: Path) -> None:
    for bus, vendor, kind in (("0000:00:05.0", "0x1ae0", "0x0063"), ("0000:00:04.0", "0x1ae0", "0x0063")):
        write(tmp_path / bus / "vendor", vendor + "\n")
        write(tmp_path / bus / "device", kind + "\n")
    write(tmp_path / "0000:00:01.0/vendor", "0x8086\n")
    write(tmp_path / "0000:00:06.0/vendor", "0x1ae0\n")
    write(tmp_path / "0000:00:06.0/device", "0x0042\n")
    tpu = Tpu(tmp_path)
    assert [(d.index, d.type, d.memory_bytes, d.uuid) for d in tpu.inventory()] == [
        (0, "v5e", 16 << 30, "0000:00:04.0"),
        (1, "v5e", 16 << 30, "0000:00:05.0"),
    ]
    assert tpu.environment((1,)) == {
        "TPU_VISIBLE_CHIPS": "1",
        "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
        "TPU_HOST_BOUNDS": "1,1,1",
    }
    assert tpu.environment((0, 1, 2, 3)) == {"TPU_VISIBLE_CHIPS": "0,1,2,3"}


def test_a_family_of_the_installation_comes_first_and_its_unfit_devices_are_bad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROTA_DEVICE_FAMILIES", f"{__name__}:Toy")
    assert local_family().environment((0, 2)) == {"TOY_VISIBLE_DEVICES": "0,2"}
    node = local_node("here")
    assert [d.health for d in node.devices] == [Health.HEALTHY, Health.BAD, Health.HEALTHY]
    assert dict(node.labels)["rota.unfit-devices"] == "device 1: too hot"
    assert local_family({"ROTA_FAKE_DEVICES": "2xH100"}).name == "nvidia"


@pytest.mark.parametrize(
    ("name", "text"),
    [("no.such:Toy", "No module named"), (f"{__name__}:Nothing", "Nothing"), (f"{__name__}:NoVariable", "a variable")],
)
def test_a_family_that_cannot_be_had_is_named_with_the_next_step(name: str, text: str) -> None:
    with pytest.raises(BadInput, match=name) as raised:
        local_devices({"ROTA_DEVICE_FAMILIES": name})
    assert text in raised.value.message and raised.value.hint


def without_devices(monkeypatch: pytest.MonkeyPatch, nowhere: Path) -> None:
    monkeypatch.setattr(devices, "BUILT_IN", (Nvidia(nowhere), Amd(nowhere), Ascend(nowhere), Tpu(nowhere)))


def test_a_machine_without_devices_hides_those_of_nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_devices(monkeypatch, tmp_path / "nowhere")
    family = local_family({})
    assert isinstance(family, Nvidia) and family.environment(())["CUDA_VISIBLE_DEVICES"] == ""


def test_a_broken_family_of_a_package_breaks_no_machine_with_devices_of_a_built_in_one_and_is_named_on_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "site/brokenpkg.py", "raise RuntimeError('no driver')")
    write(tmp_path / "site/brokenpkg-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: brokenpkg\nVersion: 1.0\n")
    write(tmp_path / "site/brokenpkg-1.0.dist-info/entry_points.txt", "[rota.devices]\nb = brokenpkg:Npus\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    devices._installed.cache_clear()
    without_devices(monkeypatch, tmp_path / "nowhere")
    with pytest.raises(BadInput, match="'brokenpkg:Npus' of the package brokenpkg: RuntimeError: no driver") as raised:
        local_family({})
    assert raised.value.hint == "install what it needs on this machine, or uninstall brokenpkg"
    write(tmp_path / "gpus/0000:1a:00.0/information", "Model: NVIDIA H100\n")
    monkeypatch.setattr(devices, "BUILT_IN", (Nvidia(tmp_path / "gpus"),))
    assert [device.type for device in local_family({}).inventory()] == ["H100"]


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"), ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"), ("NVIDIA GeForce RTX 4090", "RTX-4090"), ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"), ("NVIDIA RTX A6000", "RTX-A6000"), ("NVIDIA TITAN V", "TITAN-V"),
        ("", "GPU"),
    ],
)  # fmt: skip
def test_two_models_have_two_types(model: str, kind: str) -> None:
    assert nvidia_type(model) == kind


def test_a_node_and_a_look_of_an_instance_ask_npu_smi_for_each_chip_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "BUILT_IN", (npus(tmp_path, monkeypatch),))
    monkeypatch.delenv("ROTA_FAKE_DEVICES", raising=False)

    def calls() -> list[str]:
        found = (tmp_path / "bin/calls").read_text().splitlines()
        (tmp_path / "bin/calls").unlink()
        return found

    node = local_node("here")
    assert [device.health for device in node.devices] == [Health.HEALTHY, Health.BAD]
    first = ["info -m", *(f"info -t {what} -i {card} -c 0" for what in ("usages", "health") for card in (0, 4))]
    assert calls() == first
    assert local_node("here") == node and len(calls()) == 3, "sizes of memory do not change"
    monkeypatch.setattr(devices, "BUILT_IN", (Ascend(tmp_path / "dev"),))  # as in the process of an instance
    assert DeviceWatch((0,)).look() == [] and calls() == ["info -m", "info -t health -i 0 -c 0"]
    missing, critical = DeviceWatch((1, 2)).look()
    assert "device 2 is not there" in missing.text and "device 1 is faulty: npu-smi says Critical" in critical.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NoInventory", "is_here(): NotImplementedError: NoInventory has no inventory()"),
        ("Indices", "inventory(): TypeError: 0 is not a Device"),
    ],
)
def test_a_family_whose_code_fails_is_named(name: str, text: str) -> None:
    with pytest.raises(BadInput, match=re.escape(f"device family {name}: {text}")) as raised:
        local_devices({"ROTA_DEVICE_FAMILIES": f"{__name__}:{name}"})
    assert "take it out of device_families" in raised.value.hint
