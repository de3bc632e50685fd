"""Stamped output lines: parsed, merged by time, read from the end, found by time, followed without loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.makers import format_line

from rota.runtime.clock import SystemClock
from rota.runtime.output import (
    BLOCK_BYTES,
    find_offset,
    follow_batch,
    log_files,
    log_name,
    merge,
    read_lines,
    tail_lines,
)

START = 1_700_000_000.0


def write(folder: Path, role: str, rank: int, *lines: tuple[float, str]) -> Path:
    path = folder / log_name(role, rank)
    with path.open("a") as file:
        file.writelines(format_line(START + at, 1, 2, "out", text) for at, text in lines)
    return path


def test_a_line_comes_back_with_everything_that_was_stamped_on_it(tmp_path: Path) -> None:
    path = tmp_path / log_name("actor-critic", 3)
    path.write_text("2023-11-14T22:13:20.500Z 2/7 stderr a  b\n")
    (line,) = read_lines(path, 0)
    assert (line.instance, line.attempt, line.epoch, line.stream, line.text) == ("actor-critic/3", 2, 7, "err", "a  b")
    assert (line.ts, line.offset, line.end) == (START + 0.5, 0, path.stat().st_size)


def test_a_line_without_a_stamp_keeps_its_text_and_the_time_before(tmp_path: Path) -> None:
    path = write(tmp_path, "a", 0, (5, "first"))
    with path.open("a") as file:
        file.write("Fatal Python error\n")
    assert [(line.ts, line.text) for line in read_lines(path, 0)] == [
        (START + 5, "first"),
        (START + 5, "Fatal Python error"),
    ]


def test_a_line_that_is_not_complete_is_left_for_later(tmp_path: Path) -> None:
    path = write(tmp_path, "a", 0, (0, "whole"))
    with path.open("a") as file:
        file.write("2023-11-14T22:13:21.000Z 1/2 out ha")
    lines = read_lines(path, 0)
    assert [line.text for line in lines] == ["whole"]
    with path.open("a") as file:
        file.write("lf\n")
    assert [line.text for line in read_lines(path, lines[-1].end)] == ["half"]


def test_files_merge_by_time_and_each_keeps_its_order(tmp_path: Path) -> None:
    a = write(tmp_path, "a", 0, (1, "a1"), (4, "a2"), (4, "a3"))
    b = write(tmp_path, "b", 0, (2, "b1"), (3, "b2"), (9, "b3"))
    assert [line.text for line in merge([read_lines(a, 0), read_lines(b, 0)])] == ["a1", "b1", "b2", "a2", "a3", "b3"]


def test_files_are_chosen_by_role_and_rank(tmp_path: Path) -> None:
    for role, rank in (("actor", 0), ("actor", 1), ("actor-b", 0)):
        write(tmp_path, role, rank, (0, "x"))
    assert list(log_files(tmp_path)) == ["actor/0", "actor/1", "actor-b/0"]
    assert list(log_files(tmp_path, role="actor")) == ["actor/0", "actor/1"]
    assert list(log_files(tmp_path, role="actor", rank=1)) == ["actor/1"]


@pytest.mark.parametrize("count", [0, 1, 7, 900, 5000])
def test_a_tail_is_the_end_of_the_whole(tmp_path: Path, count: int) -> None:
    path = write(tmp_path, "a", 0, *((i, f"line {i} " + "x" * (i % 300)) for i in range(3000)))
    assert path.stat().st_size > 5 * BLOCK_BYTES
    whole = read_lines(path, 0)
    assert tail_lines(path, count) == (whole[-count:] if count else [])


def test_a_tail_of_a_gigabyte_takes_no_longer_than_its_end(tmp_path: Path) -> None:
    path = tmp_path / log_name("a", 0)
    with path.open("w") as file:
        file.truncate(2**30)  # a hole of 1 GiB, then two lines
        file.seek(2**30)
        file.write("\n" + format_line(START, 1, 1, "out", "before") + format_line(START, 1, 1, "out", "last"))
    clock = SystemClock()
    started_s = clock.monotonic_s()
    assert [line.text for line in tail_lines(path, 1)] == ["last"]
    assert clock.monotonic_s() - started_s < 2.0  # reading the hole would take minutes


@pytest.mark.parametrize("since", [-5, 0, 1, 999.5, 1500, 2999, 4000])
def test_the_place_of_a_time_is_the_first_line_at_or_after_it(tmp_path: Path, since: float) -> None:
    path = write(tmp_path, "a", 0, *((i, f"line {i} " + "x" * (i % 300)) for i in range(3000)))
    expected = next((line.offset for line in read_lines(path, 0) if line.ts >= START + since), path.stat().st_size)
    assert find_offset(path, START + since) == expected


def test_following_gives_every_line_once_whatever_the_pieces(tmp_path: Path) -> None:
    offsets: dict[str, int] = {}
    seen: list[str] = []
    for i in range(50):
        write(tmp_path, "a", 0, *((i, f"a{i}.{j}") for j in range(i % 3)))
        write(tmp_path, "b", 0, (i, f"b{i}"))
        if i % 4 == 0:
            seen += [line.text for line in follow_batch(log_files(tmp_path), offsets)]
    seen += [line.text for line in follow_batch(log_files(tmp_path), offsets)]
    assert sorted(seen) == sorted([f"b{i}" for i in range(50)] + [f"a{i}.{j}" for i in range(50) for j in range(i % 3)])
    assert follow_batch(log_files(tmp_path), offsets) == []


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    path = tmp_path / log_name("a", 0)
    assert (read_lines(path, 0), tail_lines(path, 5), find_offset(path, START)) == ([], [], 0)
