"""Where a machine is, by what Ray, Kubernetes, a file and the kernel say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.runtime.topology import locate, numa_nodes, read_topology, sockets_of
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
