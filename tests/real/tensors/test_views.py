"""Views in one process: every dtype and shape, leases that end with the last view, sealed reads, the cache."""

from __future__ import annotations

import asyncio
import errno
import gc
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.real.tensors.crew import Cases, Crew, clean, wait_until

import rota.tensors
from rota.spec.errors import BadInput
from rota.tensors import errors
from rota.tensors.api.store import Plane
from rota.tensors.core import ITEM_BYTES

torch = pytest.importorskip("torch")
TORCH_DTYPES = [name for name in ITEM_BYTES if hasattr(torch, name)]


def leases(plane: Plane) -> int:
    plane._session.release_ended()
    return plane.stats()["leases"]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_torch_dtype_comes_back_bit_for_bit(plane: Plane, dtype: str) -> None:
    bits = torch.arange(6 * ITEM_BYTES[dtype], dtype=torch.uint8) % 2
    tensor = bits.view(getattr(torch, dtype)).view(2, 3)
    plane.put("x", tensor)
    back = plane.get("x")
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.contiguous().view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 1, 3, 1)])
def test_every_shape_comes_back_as_array_and_as_tensor(plane: Plane, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    plane.put("x", array)
    assert plane.get("x", as_="numpy").shape == shape
    assert np.array_equal(plane.get("x", as_="numpy"), array)
    assert torch.equal(plane.get("x"), torch.from_numpy(array))


def test_inputs_that_are_not_plain_are_copied_or_refused(plane: Plane) -> None:
    base = torch.arange(12.0).view(3, 4)
    plane.put("t", base.t())
    assert torch.equal(plane.get("t"), base.t())
    plane.put("g", torch.nn.Parameter(base))
    assert not plane.get("g").requires_grad
    plane.put("conj", torch.tensor([1 + 2j]).conj())
    assert plane.get("conj")[0] == 1 - 2j
    plane.put("imag", torch.tensor([1 + 2j]).imag)  # one element with a stride of two
    assert plane.get("imag").tolist() == [2.0]
    with pytest.raises(errors.UnsupportedTensor, match=r"a meta tensor of float32 .*it has no values"):
        plane.put("bad", base.to("meta"))
    for bad in (
        base.to_sparse(),
        torch.nested.nested_tensor([base[0], base[1, :1]]),
        np.array(["text"]),
        np.array([1], dtype=">i4"),
    ):
        with pytest.raises(errors.UnsupportedTensor):
            plane.put("bad", bad)
    with pytest.raises(errors.UnsupportedTensor, match="numpy has no dtype bfloat16"):
        plane.put("b", base.bfloat16())
        plane.get("b", as_="numpy")
    with pytest.raises(BadInput, match="JSON"):
        plane.publish_group("m", {"x": base}, step=1, meta=object())


def test_a_large_tensor_uses_a_file_of_its_own_and_its_block_again(plane: Plane) -> None:
    big = np.arange(3_000_000, dtype=np.uint8)
    for n in range(4):
        plane.put("big", big + n)
        assert np.array_equal(plane.get("big", as_="numpy"), big + n)
        plane.release("big")
        wait_until(lambda: leases(plane) == 0)
    assert len(list(plane._space.folder.glob("seg-*"))) <= 3


@pytest.mark.parametrize("as_", ["torch", "numpy"])
def test_a_lease_lives_exactly_as_long_as_the_last_view(plane: Plane, cases: Cases, as_: str) -> None:
    for _ in cases(11, plane, 3, deep=10):
        plane.put("w", np.arange(1000.0))
        view = plane.get("w", as_=as_)
        plane.release("w")
        part = view[3:10].reshape(7, 1)
        del view
        plane.put("w", np.zeros(1000))
        wait_until(lambda: leases(plane) == 1)
        for n in range(20):
            plane.put("w", np.full(1000, n))
        assert part[2, 0] == 5.0
        del part
        wait_until(lambda: leases(plane) == 0)
        assert clean(plane)["versions"] == {"ready": 1}


def test_a_view_in_another_thread_and_after_close_stays_valid(cases: Cases, space_name: str, tensor_home: Path) -> None:
    other = rota.tensors.connect(home=tensor_home, namespace=space_name + "x")
    other.put("w", np.arange(10))
    kept: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: kept.append(other.get("w", as_="numpy")))
    thread.start()
    thread.join()
    other.close()
    with pytest.raises(errors.ClosedPlane):
        other.get("w")
    again = rota.tensors.connect(home=tensor_home, namespace=space_name + "x")
    assert again is not other
    for n in range(5):
        again.put("w", np.full(10, n))
    assert kept[0].tolist() == list(range(10))
    assert again.stats()["leases"] == 1
    kept.clear()
    wait_until(lambda: again.stats()["clients"] == 1)  # the closed plane left with its last view
    cases.done(11, again)
    again.close()


def test_an_unchanged_name_is_the_same_object_and_a_changed_one_is_not(plane: Plane) -> None:
    plane.put("w", torch.zeros(3))
    first = plane.get("w")
    assert plane.get("w") is first
    plane._reader.age(linger=True)
    assert "w" in plane._cache, "what was read just now keeps its fast path"
    plane.put("w", torch.ones(3))
    assert plane.get("w")[0] == 1
    assert first[0] == 0
    plane.delete("w")
    plane.put("weights", torch.ones(1))
    for name, hint in (("w", "tensors: weights"), ("weigths", "did you mean 'weights'?")):
        with pytest.raises(errors.NotFound, match=f"no tensor is named '{name}'") as refused:
            plane.get(name)
        assert refused.value.hint == hint
    plane.put("w", torch.ones(3) * 2)  # at once usable again, while old readers keep their bytes
    assert plane.get("w")[0] == 2
    assert first[0] == 0


def test_the_cache_lets_go_of_a_replaced_version(plane: Plane, cases: Cases) -> None:
    plane.put("w", torch.zeros(3))
    plane.get("w")
    plane.put("w", torch.ones(3))
    wait_until(lambda: plane.stats()["versions"] == {"ready": 1})  # nobody asked for w again
    wait_until(lambda: plane.stats()["leases"] == 0)
    assert plane.get("w")[0] == 1
    cases.done(11, plane)


def test_names_read_together_are_of_one_moment(plane: Plane) -> None:
    for n in range(5):
        plane.put(f"m/{n}", np.full(4, n))
    first = plane.get_many(prefix="m/", as_="numpy")
    assert [first[f"m/{n}"][0] for n in range(5)] == list(range(5))
    second = plane.get_many(names=[f"m/{n}" for n in range(5)], as_="numpy")
    assert all(second[name] is first[name] for name in first)
    with pytest.raises(errors.NotFound, match="m/9"):
        plane.get_many(["m/1", "m/9"])
    with pytest.raises(BadInput):
        plane.get_many()


def test_a_part_and_some_names_of_a_group_are_read_alone(plane: Plane) -> None:
    for rank in (0, 1):  # both writers use the same names
        tensors = {"w": np.full(2, rank), "b": np.full(1, 10 + rank), f"r{rank}": np.zeros(1)}
        plane.publish_group("g", tensors, step=4, part=(rank, 2), meta={"rank": rank})
    for part, rank in ((0, 0), (1, 1), ((0, 2), 0), ((1, 2), 1)):
        mine = plane.get_group("g", part=part, as_="numpy")
        assert (mine["w"][0], mine["b"][0], mine.meta, mine.step) == (rank, 10 + rank, {"rank": rank}, 4)
        assert set(mine) == set(mine.versions) == {"w", "b", f"r{rank}"}
    some = plane.get_group("g", names=["r1", "r0"], as_="numpy")
    assert (list(some), some.meta) == (["r1", "r0"], [{"rank": 0}, {"rank": 1}])
    assert list(plane.get_group("g", part=1, names=("w",), as_="numpy")) == ["w"]
    assert set(plane.get_group("g", as_="numpy")) == {"w", "b", "r0", "r1"}
    for wrong, error, words in (
        ({"part": 2}, errors.NotFound, "has 2 parts, not part=2"),
        ({"part": (0, 3)}, errors.NotFound, r"not part=\(0, 3\)"),
        ({"part": -1}, BadInput, "rank=-1"),
        ({"names": ["r3"]}, errors.NotFound, "no tensor 'r3'"),
        ({"part": 0, "names": ["r1"]}, errors.NotFound, "no tensor 'r1'"),
        ({"names": "w"}, BadInput, "names='w'"),
        ({"source": "any"}, BadInput, "source='any' is not supported, 'node' is: .*pull"),
    ):
        with pytest.raises(error, match=words):
            plane.get_group("g", as_="numpy", **wrong)  # type: ignore[arg-type]
    del mine, some
    plane.delete("g")
    wait_until(lambda: plane.stats()["versions"] == {})


def test_what_create_gave_up_is_not_used_again_while_its_view_lives(plane: Plane) -> None:
    with pytest.raises(ZeroDivisionError), plane.create("c", (1000,), "int64", as_="numpy") as array:
        kept = array
        _ = 1 / 0
    for n in range(3):
        plane.put(f"{n}", np.zeros(1000, np.int64))
    kept[:] = 5
    assert [plane.get(f"{n}", as_="numpy").any() for n in range(3)] == [False] * 3
    assert plane.fsck()["violations"] == []


def test_create_publishes_on_exit_and_gives_up_on_an_exception(plane: Plane) -> None:
    with plane.create("c", (4,), torch.float32) as tensor:
        torch.add(torch.ones(4), 1, out=tensor)
        with pytest.raises(errors.NotFound):
            plane.get("c")
    assert plane.get("c").tolist() == [2, 2, 2, 2]
    assert plane.version_of(tensor) == ("c", plane.info("c").version)
    with pytest.raises(ZeroDivisionError), plane.create("c", (4,), torch.float32) as other:
        other.fill_(9)
        1 / 0  # noqa: B018
    assert plane.get("c")[0] == 2
    del other
    gc.collect()
    wait_until(lambda: plane.stats()["versions"] == {"ready": 1})


def test_a_mutable_tensor_is_one_memory_for_all(plane: Plane, actors: Crew) -> None:
    plane.put("table", np.zeros(4), mutable=True)
    assert actors.run("plane.get('table', as_='numpy')[2] = 7") == 0
    assert plane.get("table", as_="numpy").tolist() == [0, 0, 7, 0]


def test_an_exact_version_and_a_reference_to_it_stay_readable(plane: Plane) -> None:
    versions = [plane.put("w", np.full(2, n), retain=3).id for n in range(5)]
    assert plane.get("w", version=versions[3], as_="numpy")[0] == 3
    with pytest.raises(errors.VersionGone):
        plane.get("w", version=versions[0])
    ref = pickle.loads(pickle.dumps(plane.ref(plane.get("w", as_="numpy"))))
    assert (ref.name, ref.version) == ("w", versions[4])
    with pytest.raises(errors.NotFound, match="not a view"):
        plane.ref(np.zeros(3))


def test_a_reference_with_a_holder_outlives_the_views_and_the_name(plane: Plane, actors: Crew) -> None:
    versions = [plane.put("w", np.full(2, n), retain=2).id for n in range(2)]
    ref = plane.ref(plane.get("w", version=versions[0], as_="numpy"), holder="job/a")  # not the current one
    assert ref.version == versions[0]
    plane.delete("w")
    plane.recover()  # a rebuilt registry knows of it, too
    wait_until(lambda: plane.stats()["versions"] == {"doomed": 1})
    code = f"import pickle; ref = pickle.loads({pickle.dumps(ref)!r}); assert ref.get().tolist() == [0, 0]; ref.close()"
    assert actors.run(code) == 0
    wait_until(lambda: plane.stats()["versions"] == {})
    with pytest.raises(errors.VersionGone):
        ref.get()
    ref.close()
    plane.put("x", np.ones(2))
    plane.ref(plane.get("x", as_="numpy"), holder="job/a")
    plane.delete("x")
    wait_until(lambda: plane.stats()["leases"] == 1)
    plane.drop_label("job")
    assert plane.stats()["versions"] == {}
    plane.put("w", np.ones(1))
    view = plane.get("w", as_="numpy")
    with pytest.raises(BadInput, match="label 'a b'"):
        plane.ref(view, holder="a b")


def test_a_reader_that_wrote_into_a_published_tensor_is_found_out(
    tensor_home: Path, space_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROTA_TENSORS_CHECK", "1")
    with rota.tensors.connect(home=tensor_home, namespace=space_name) as plane:
        plane.put("w", np.arange(1000))
        plane.publish_group("g", {"x": np.zeros(9), "y": np.ones(3_000_000, np.uint8)}, step=1)
        assert plane.get_group("g", as_="numpy")["y"].all()
        plane.get("w", as_="numpy")[7] = -1
        plane.release("w")
        with pytest.raises(errors.TornRead, match="not those that were published"):
            plane.get("w", as_="numpy")
        for name in ("w", "g"):
            plane.delete(name)


def test_a_sealed_read_cannot_be_written(plane: Plane, actors: Crew) -> None:
    plane.put("w", np.zeros(5000))
    view = plane.get("w", sealed=True, as_="numpy")
    assert not view.flags.writeable
    code = """
        import ctypes
        v = plane.get('w', sealed=True, as_='numpy')
        ctypes.memset(v.__array_interface__['data'][0], 1, 8)
    """
    assert actors.run(code) == -signal.SIGSEGV
    assert plane.get("w", as_="numpy")[0] == 0


def test_evictable_names_make_room_and_then_the_limit_is_an_error(plane: Plane, cases: Cases) -> None:
    plane.limit(12 << 20)
    for n in range(8):
        plane.put(f"kv/{n}", np.full(2 << 20, n, np.uint8), evictable=True)
    assert 0 < len(plane.ls("kv/")) < 8
    assert plane.get("kv/7", as_="numpy")[0] == 7
    with pytest.raises(errors.QuotaExceeded, match="of at most 12582912 bytes"):
        plane.put("big", np.zeros(20 << 20, np.uint8))
    cases.done(9, plane)
    plane.limit(0)
    plane.put("big", np.zeros(20 << 20, np.uint8))
    cases.done(9, plane)


@pytest.mark.parametrize("why", ["ENOSPC", "EDQUOT", "ENOMEM", "EFBIG"])
def test_memory_that_is_refused_is_a_clean_error(
    plane: Plane, cases: Cases, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(getattr(errno, why), why)

    for _ in cases(9, plane, 2, deep=5):
        plane.put("w", np.zeros(10))
        plane.gc()
        with monkeypatch.context() as patched:
            patched.setattr("rota.tensors.segments.os.posix_fallocate", full)
            with pytest.raises(errors.OutOfMemory, match="no room for"):
                plane.put("w", np.ones(5 << 20, np.uint8))
            with pytest.raises(errors.OutOfMemory, match="no room for"):
                plane.publish_group("g", {"x": np.ones(100_000)}, step=1)
        assert plane.get("w", as_="numpy").tolist() == [0.0] * 10
        assert clean(plane)["versions"] == {"ready": 1}
        plane.put("w", np.ones(5 << 20, np.uint8))


def test_the_asyncio_forms_do_the_same(plane: Plane) -> None:
    async def both() -> float:
        await plane.aput("w", np.ones(3))
        await plane.apublish_group("g", {"x": np.ones(3)}, step=4)
        assert (await plane.aget_group("g")).step == 4
        return float((await plane.aget("w", as_="numpy"))[0])

    assert asyncio.run(both()) == 1.0


def test_a_process_that_shares_arrays_never_loads_torch(tensor_home: Path) -> None:
    code = (
        "import sys, numpy as np, rota.tensors as t\n"
        f"with t.connect(home={str(tensor_home)!r}, namespace='light') as p:\n"
        "    p.put('w', np.ones(3)); assert p.get('w', as_='numpy')[0] == 1; p.delete('w')\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.fixture
def small_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Shared memory of 17 MiB, of which 1 MiB goes to the generation table."""
    small = tmp_path / "shm"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=17m", "none", str(small)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    monkeypatch.setenv("ROTA_SHM_DIR", str(small))
    yield small
    subprocess.run(["umount", "-l", small], check=True)


def mib(n: int) -> np.ndarray:
    return np.full(n << 20, n, np.uint8)


def test_a_full_file_system_is_an_error_after_free_and_evictable_bytes_were_given_up(
    small_shm: Path, short_home, cases: Cases
) -> None:
    with short_home() as home, rota.tensors.connect(home=home) as plane:
        plane.put("cache", mib(6), evictable=True)
        plane.put("old", mib(6))
        plane.delete("old")
        plane.put("seven", mib(7))  # trims the free file of "old"
        assert [row.name for row in plane.ls()] == ["cache", "seven"]
        with pytest.raises(errors.OutOfMemory):
            plane.put("vast", mib(40))
        assert [row.name for row in plane.ls()] == ["cache", "seven"], "nothing is evicted in vain"
        plane.put("eight", mib(8))  # evicts the cache
        with pytest.raises(errors.OutOfMemory, match="no room"):
            plane.put("four", mib(4))
        assert [row.name for row in plane.ls()] == ["eight", "seven"]
        assert (plane.get("seven", as_="numpy") == 7).all()
        cases.done(9, plane)
        rota.tensors.down(home)


def test_what_finds_no_room_in_shared_memory_spills_to_disk_and_is_mapped_from_there(
    small_shm: Path, short_home, cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    monkeypatch.setenv("ROTA_SPILL_DIR", str(disk))
    monkeypatch.setenv("ROTA_SPILL_BYTES_MAX", str(22 << 20))
    with short_home() as home, rota.tensors.connect(home=home) as plane:
        plane.put("in", mib(9))
        plane.put("out", mib(10))
        (here,), (there,) = plane.locate("in"), plane.locate("out")
        assert (here.tier, there.tier, there.path.parent) == ("memory", "file", disk)
        assert plane.stats()["spilled_bytes"] == there.path.stat().st_size > 10 << 20
        assert plane.stat_document("out")["versions"][0]["tier"] == "file"
        with there.path.open("rb") as file:
            file.seek(there.offset)
            assert file.read(there.bytes) == mib(10).tobytes()
        with pytest.raises(errors.OutOfMemory, match="of at most 23068672 bytes are taken"):
            plane.put("more", mib(13))
        with plane.create("made", (4 << 20,), "uint8", as_="numpy") as made:  # written in place, in shared memory
            made[:] = 4
        assert plane.fsck()["violations"] == []
        view = plane.get("out", as_="numpy")
        plane.recover()  # headers on disk are headers
        assert [row.name for row in plane.ls()] == ["in", "made", "out"]
        assert (plane.get("out", as_="numpy", sealed=True) == 10).all()
        plane.put("out", mib(10) + 1)
        assert (view == 10).all()
        assert (plane.get("out", as_="numpy") == 11).all()
        del view
        stray = disk / there.path.name.replace("seg-", "seg-9")
        stray.write_bytes(b"left by the killed")
        assert [each["object"] for each in plane.fsck()["violations"]] == [stray.name]
        assert stray.name in [each["what"] for each in plane.gc()["dropped"]]
        plane.delete("out")
        plane.release("out")
        wait_until(lambda: plane.gc() and not list(disk.iterdir()))
        plane.put("out", mib(10))
        assert plane.fsck()["violations"] == []
        assert len(list(disk.iterdir())) == 1
        cases.done(9, plane)
        rota.tensors.down(home)
    assert list(disk.iterdir()) == []


def test_a_get_on_its_way_keeps_the_lease_that_a_later_get_of_the_same_version_ends(plane: Plane) -> None:
    plane.put("x", np.arange(4))
    space = plane._space
    with space.leases.get_number() as seq:  # the first get: leased by the registry after the second one, not held yet
        view = plane.get("x", as_="numpy")
        leased = space.registry.get(space.client, seq, [("x", "")])[0]
        del view
        plane.release("x")
        assert leases(plane) == 1
        held = space.leases.hold(leased.version, seq, leased.blocks, lambda: True, sealed=False)
    assert leases(plane) == 1
    assert plane.fsck()["violations"] == []
    del held
    assert leases(plane) == 0
