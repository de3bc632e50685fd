"""Where a machine is, by what Ray, Kubernetes, a file and the kernel say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.runtime.topology import locate, numa_nodes, nvlink_islands, read_topology, sockets_of
from rota.spec.errors import BadInput


def test_zone_and_rack_come_from_labels_and_the_file_wins() -> None:
    kube = {"topology.kubernetes.io/zone": "z1", "ray.io/node-group": "gpu", "rota-identity": "x", "team": "vision"}
    found = locate("m1", kube, {})
    assert found.cells == ("z1",)
    assert dict(found.labels) == {"topology.kubernetes.io/zone": "z1", "zone": "z1", "team": "vision"}
    assert locate("m1", {"rack": "r1", "ray.io/availability-zone": "a"}, {}).cells == ("a", "r1")
    assert locate("m1", {"rack": "r1"}, {"m1": {"rack": "r2", "region": "eu"}}).cells == ("eu", "r2")
    assert locate("m1", {}, {"m2": {"rack": "r2"}}).cells == ()


def test_the_file_is_a_map_of_machines(tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    assert read_topology(path) == {}
    path.write_text("m1: {zone: a, rack: 7}\nm2:\n  rack: r1\n")
    assert read_topology(path) == {"m1": {"zone": "a", "rack": "7"}, "m2": {"rack": "r1"}}
    for wrong in ("- a", "m1: r1", "m1: {rak: r1}", "m1: {"):
        path.write_text(wrong)
        with pytest.raises(BadInput) as caught:
            read_topology(path)
        assert str(path) in str(caught.value) and "rack: r1" in caught.value.hint


def test_sockets_are_those_of_the_devices(tmp_path: Path) -> None:
    for bus, node in (("0000:01:00", "0"), ("0000:02:00", "0"), ("0000:81:00", "1"), ("0000:82:00", "1")):
        (tmp_path / f"{bus}.0").mkdir()
        (tmp_path / f"{bus}.0" / "numa_node").write_text(f"{node}\n")
    buses = tuple(sorted(one.name[:-2] for one in tmp_path.iterdir()))
    assert numa_nodes(buses, tmp_path) == (0, 0, 1, 1)
    assert numa_nodes(("0000:99:00",), tmp_path) == (-1,)
    assert [sockets_of(one) for one in ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0), (), (-1, -1, 1, 1), (0, 0, 0, 1))] == [
        2, 1, 1, 1, 1, 1,
    ]  # fmt: skip


def test_devices_that_nvlink_connects_lie_together() -> None:
    """The form of ``nvidia-smi topo -m``: bridges between pairs, a switch between all, PCIe alone, no device."""
    header = "\t" + "\t".join(f"GPU{n}" for n in range(4)) + "\tNIC0\tCPU Affinity\tNUMA Affinity"
    tail = "\tSYS\t0-31\t0"

    def table(*rows: str) -> str:
        lines = [f"GPU{n}\t" + "\t".join(row.split()) + tail for n, row in enumerate(rows)]
        legend = "NIC0\tSYS\tSYS\tSYS\tSYS\t X\n\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing NVLinks"
        return "\n".join([header, *lines, legend])

    pairs = table("X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X")
    switch = table("X NV18 NV18 NV18", "NV18 X NV18 NV18", "NV18 NV18 X NV18", "NV18 NV18 NV18 X")
    plain = table("X PIX SYS SYS", "PIX X SYS SYS", "SYS SYS X PHB", "SYS SYS PHB X")
    found = [nvlink_islands(one) for one in (pairs, switch, plain, "No devices were found")]
    assert found == [(0, 0, 2, 2), (0, 0, 0, 0), (-1, -1, -1, -1), ()]
    assert [sockets_of(one) for one in found] == [2, 1, 1, 1]
