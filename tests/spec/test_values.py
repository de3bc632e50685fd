"""Sizes, durations, pretend nodes, names: what people write becomes exact values or an error that helps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rota.spec.ids import InstanceId, RoleName
from rota.spec.resources import Res, counted, format_size, parse_duration, parse_size, pretend_nodes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("512MiB", 512 * 2**20), ("2GiB", 2 * 2**30), ("1.5 GB", 1_500_000_000), ("7B", 7), ("1tib", 2**40)],
)
def test_a_size_with_a_unit_is_bytes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


def test_a_bare_number_is_no_size_and_the_error_suggests_a_unit() -> None:
    with pytest.raises(ValueError, match="512MiB or 512GiB"):
        parse_size("512")


@pytest.mark.parametrize(
    ("read", "text", "meant"),
    [
        *((parse_size, text, "2GiB") for text in ("2G", "2Gi", "2gi")),
        *((parse_duration, text, "10m") for text in ("10min", "10 minutes", "10M", "10mins")),
        (parse_duration, "1hour30min", "1h30m"),
        (parse_duration, "2days", "2d"),
    ],
)
def test_a_unit_as_others_write_it_names_the_one_that_is_read(
    read: Callable[[str], float], text: str, meant: str
) -> None:
    with pytest.raises(ValueError, match=f"write {meant}$"):
        read(text)
    assert read(meant) > 0


@pytest.mark.parametrize("text", ["", "MiB", "-1GiB", "1 GiB 2", "1 parsec"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("8h", 28800), ("2d", 172800), ("1h30m", 5400), ("250ms", 0.25)]
)
def test_a_duration_with_units_is_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["90", "5 minutes", "m5", "", "1h-2m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


def test_sizes_are_shown_in_the_largest_unit_that_fits() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 2**31)] == ["0B", "1023B", "1.5KiB", "2GiB"]


def test_one_of_a_thing_is_told_in_the_singular() -> None:
    told = [counted(1, "job"), counted(2, "job"), counted(0, "job"), counted(1.0, "core"), counted(0.5, "core")]
    assert told == ["1 job", "2 jobs", "0 jobs", "1 core", "0.5 cores"]
    assert [counted("1..4", "instance"), counted(2, "process", "processes")] == ["1..4 instances", "2 processes"]


def test_pretend_nodes_have_racks_nodes_and_devices_on_one_host() -> None:
    nodes = pretend_nodes("3x4x8", host="here")
    assert len(nodes) == 12
    assert {node.host for node in nodes} == {"here"}
    assert {node.cells for node in nodes} == {("rack-0",), ("rack-1",), ("rack-2",)}
    assert all(node.capacity.gpus == 8 for node in nodes)
    assert len({node.id for node in nodes}) == 12


@pytest.mark.parametrize("shape", ["3x4", "0x1x1", "axbxc", "1000x1000x1"])
def test_a_shape_that_is_none_is_refused(shape: str) -> None:
    with pytest.raises(ValueError, match=r"RACKSxNODESxDEVICES|at least 1"):
        pretend_nodes(shape, host="here")


def test_resources_add_up() -> None:
    total = Res(cpus=1, gpus=2, memory_bytes=5) + Res(cpus=0.5, gpus=1, memory_bytes=7, gpu_type="H100")
    assert total == Res(cpus=1.5, gpus=3, memory_bytes=12, gpu_type="H100")


def test_an_instance_is_written_role_slash_rank_and_read_back() -> None:
    assert InstanceId.parse("rollout.decode/3") == InstanceId(RoleName("rollout.decode"), 3)
    assert str(InstanceId(RoleName("actor"), 0)) == "actor/0"
    for bad in ("actor", "actor/x", "/1", "9a/1"):
        with pytest.raises(ValueError, match="ROLE/RANK"):
            InstanceId.parse(bad)
