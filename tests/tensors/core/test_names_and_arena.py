"""What a name may be, how payloads and device memory are cut, and what a header says of its block."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.spec.errors import BadInput
from rota.tensors import core, errors
from rota.tensors.core import (
    DEVICE_BLOCK_BYTES,
    DEVICE_SLAB_BYTES,
    DEVICE_SLAB_STEP_BYTES,
    Range,
    Slabs,
    slab_bytes,
)
from rota.tensors.segments import HEADER_BYTES, PENDING, READY, STATE_AT, BlockHeader, pack_state


@pytest.mark.parametrize("name", ["w", "w/layer0", "weights/j/e", "gewichte/größe", "w[shard=0-of-4]", "a" * 240])
def test_good_names_pass(name: str) -> None:
    assert core.check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "/w", "w/", "a//b", "a" * 241, "ü" * 121, "a\nb", "a\x7f", "w[shard=4-of-4]", "w[shard=x]"]
)
def test_bad_names_are_refused_with_the_rule(name: str) -> None:
    with pytest.raises(BadInput, match="tensor name"):
        core.check_name(name)


@pytest.mark.parametrize("namespace", ["", "A", "a b", "x" * 65, "a/b", ".", "..", ".hidden"])
def test_bad_namespaces_are_refused(namespace: str) -> None:
    with pytest.raises(BadInput, match="1 to 64 characters"):
        core.check_namespace(namespace)


def test_a_label_covers_itself_and_what_lies_below() -> None:
    assert [core.label_covers("job", other) for other in ("job", "job/a/0", "job2", "jo", "")] == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_a_shard_suffix_is_read() -> None:
    assert core.shard_of("w[shard=3-of-8]") == (3, 8)
    assert core.shard_of("w") is None


def test_bytes_and_short_names_of_dtypes() -> None:
    assert core.payload_bytes("bfloat16", (2, 3, 4)) == 48
    assert core.payload_bytes("float8_e5m2", ()) == 1
    assert core.payload_bytes("int64", (0, 5)) == 0
    assert [core.short_dtype(d) for d in ("float32", "bfloat16", "uint8", "bool", "complex64")] == [
        "f32", "bf16", "u8", "bool", "c64",
    ]  # fmt: skip
    with pytest.raises(BadInput, match="quint8"):
        core.payload_bytes("quint8", (1,))
    with pytest.raises(BadInput, match="limit"):
        core.payload_bytes("uint8", (1 << 24, 1 << 24))


@given(st.integers(0, 1 << 34), st.integers(core.HEADER_BYTES, 1 << 16))
def test_every_payload_fits_its_block_aligned_and_without_much_waste(payload: int, front: int) -> None:
    cls = core.size_class(front, payload)
    start = core.payload_offset(front, payload)
    assert start >= front
    assert start + payload <= cls.block
    assert start % (core.ALIGN_BYTES if payload <= core.SMALL_BYTES_MAX else core.PAGE_BYTES) == 0
    assert cls.block % core.ALIGN_BYTES == 0
    assert cls.file >= cls.block * cls.count
    assert cls.file % core.PAGE_BYTES == 0
    share = 4 if payload <= core.SMALL_BYTES_MAX else 16
    assert cls.block <= (front + payload) * (1 + 1 / share) * (1 + 1 / 16) + 2 * core.PAGE_BYTES


@given(st.lists(st.integers(1, 1 << 30), min_size=2, max_size=50))
def test_the_number_of_sizes_is_small(payloads: list[int]) -> None:
    blocks = {core.size_class(600, payload).block for payload in payloads}
    octaves = max(payloads).bit_length() - min(payloads).bit_length() + 1
    assert len(blocks) <= 17 * octaves


@given(st.lists(st.integers(0, 10_000), max_size=30))
def test_packed_tensors_are_aligned_and_do_not_overlap(sizes: list[int]) -> None:
    offsets, end = core.pack(sizes)
    spans = sorted((at, at + size) for at, size in zip(offsets, sizes, strict=True))
    assert all(offset % core.ALIGN_BYTES == 0 for offset in offsets)
    assert all(before[1] <= after[0] for before, after in pairwise(spans) if before[0] != before[1])
    assert all(stop <= end for _, stop in spans)


HEADER = BlockHeader(
    state=PENDING, version=7, slot=3, epoch=2, step=-5, name="gewichte/größe", owner="C" * 20, offset=4096,
    bytes=1 << 33, manifest_bytes=900, block=1 << 34, ctime_ns=1 << 60, part=1, world=4, group=True,
)  # fmt: skip


def test_a_header_comes_back_as_it_was_written() -> None:
    ready = replace(HEADER, state=READY, head=9, kept=(5, 6))
    raw = HEADER.pack()[:STATE_AT] + pack_state(READY, 9, (5, 6))
    assert len(raw) == HEADER_BYTES
    assert BlockHeader.unpack(raw, "f", settled=True) == ready


@pytest.mark.parametrize(("at", "field"), [(0, "magic"), (20, "crc32"), (200, "crc32"), (STATE_AT + 5, "state")])
def test_a_damaged_header_names_file_and_field(at: int, field: str) -> None:
    raw = bytearray(HEADER.pack())
    raw[at] ^= 0xFF
    with pytest.raises(errors.Corrupt) as caught:
        BlockHeader.unpack(bytes(raw), "seg-1", settled=True)
    assert caught.value.fields == {"file": "seg-1", "field": field}


def test_a_reader_does_not_mind_a_state_that_is_being_written() -> None:
    raw = bytearray(HEADER.pack())
    raw[STATE_AT + 5] ^= 0xFF
    assert BlockHeader.unpack(bytes(raw), "f", settled=False).version == 7


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(0, 5000)),
            st.tuples(st.just("give"), st.integers(0, 99)),
            st.tuples(st.just("add"), st.integers(1, 16)),
        ),
        max_size=60,
    )
)
def test_device_ranges_never_overlap_and_a_slab_is_whole_again_when_all_are_given_back(
    calls: list[tuple[str, int]],
) -> None:
    slabs, held = Slabs(), list[Range]()
    for what, value in calls:
        if what == "add":
            slabs.add(f"s{len(slabs.sizes)}", value * 1024)
        elif what == "take":
            found = slabs.take(value)
            if found is None:
                assert all(size < max(value, 1) for free in slabs._free.values() for _, size in free)
                continue
            assert found.size >= value
            assert found.offset % DEVICE_BLOCK_BYTES == 0
            assert found.offset + found.size <= slabs.sizes[found.slab]
            for other in held:
                apart = found.offset >= other.offset + other.size or other.offset >= found.offset + found.size
                assert other.slab != found.slab or apart
            held.append(found)
        elif held:
            slabs.give(held.pop(value % len(held)))
        assert slabs.free_bytes == sum(slabs.sizes.values()) - sum(each.size for each in held)
    for each in held:
        slabs.give(each)
    assert slabs.idle() == list(slabs.sizes)
    for slab in slabs.idle():
        slabs.remove(slab)
    assert slab_bytes(1) == DEVICE_SLAB_BYTES
    assert slab_bytes(DEVICE_SLAB_BYTES + 1) == DEVICE_SLAB_BYTES + DEVICE_SLAB_STEP_BYTES
