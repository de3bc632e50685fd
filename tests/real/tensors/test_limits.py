"""Who may come near the plane, what it refuses by name, and what it gives back when a home is gone."""

from __future__ import annotations

import ast
import math
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.real.tensors.crew import WAITING, Cases, Crew, clean, wait_until

import rota.tensors
from rota.spec.errors import BadInput, RotaError
from rota.tensors import errors
from rota.tensors.api.store import Plane
from rota.tensors.transport import pull

NOBODY = 65534
SOURCE = Path(rota.tensors.__file__).parent


def test_another_user_reaches_neither_the_bytes_nor_the_registry(plane: Plane) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    plane.put("secret", np.zeros(3_000_000, np.uint8))
    (segment,) = plane.folder.glob("seg-*")
    ways = {
        "segment": lambda: os.open(segment, os.O_RDONLY),
        "folder": lambda: list(plane.folder.iterdir()),
        "clients": lambda: list((plane.folder / "c").iterdir()),
        "table": lambda: os.open(plane.folder / "gen", os.O_RDWR),
        "registry": lambda: socket.socket(socket.AF_UNIX).connect(plane.address.path),
    }
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            refused = [name for name, way in ways.items() if _is_refused(way)]
            os.write(into, " ".join(refused).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(into)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with os.fdopen(out) as said:
        assert said.read().split() == list(ways)
    for folder in (plane.folder.parent.parent, Path(plane.address.path).parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert segment.stat().st_mode & 0o777 == 0o600


def _is_refused(way: Any) -> bool:
    try:
        way()
    except PermissionError:
        return True
    return False


def test_nothing_in_shared_memory_or_the_registry_is_ever_executed(plane: Plane) -> None:
    unsafe = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for path in [*SOURCE.rglob("*.py"), *(SOURCE.parent / "runtime").glob("redis_*.py")]:
        tree = ast.walk(ast.parse(path.read_text()))
        for node in tree:
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set[str]()
            assert not names & unsafe, path
            assert not isinstance(node, ast.ImportFrom) or node.module not in unsafe, path
    plane.put("w", np.zeros(10))
    version = plane._space.registry.dump()[f"v:{plane.info('w').version}"]
    path, at = plane._space.segments.path(version["seg"]), int(version["off"]) + 512
    with path.open("r+b") as file:  # what would run on being unpickled
        file.seek(at)
        file.write(b"cposix\nsystem\n(S'touch /tmp/unpickled'\ntR.".ljust(40, b" "))
    plane.release("w")
    with pytest.raises(errors.Corrupt, match="manifest is not valid JSON"):
        plane.get("w", as_="numpy")
    assert not Path("/tmp/unpickled").exists()
    plane.delete("w")


FOUR = np.zeros(4)
BAD: list[tuple[Callable[[Plane], object], type[RotaError], str]] = [
    (lambda p: p.put("w", np.array(["a"])), errors.UnsupportedTensor, "numpy dtype <U1"),
    (lambda p: p.put("w", None), errors.UnsupportedTensor, "numpy dtype object"),
    (lambda p: p.put("w", [[1], [1, 2]]), errors.UnsupportedTensor, "no dense array"),
    (lambda p: p.ref(object()), errors.UnsupportedTensor, "neither a tensor nor an array"),
    (lambda p: p.create("w", (1,), "float7").__enter__(), errors.UnsupportedTensor, "float7"),
    (lambda p: p.create("w", (1,), None).__enter__(), errors.UnsupportedTensor, "dtype None"),
    (lambda p: p.create("w", (1 << 40, 1 << 40), "float32").__enter__(), BadInput, "the limit is"),
    (lambda p: p.create("w", (2, -1), "float32").__enter__(), BadInput, "negative dimension -1"),
    (lambda p: p.create("w", (1.5,), "float32").__enter__(), BadInput, r"shape=\(1.5,\) is not whole numbers"),
    (lambda p: p.create("w", (1,), "float32", as_="jax").__enter__(), BadInput, "as_='jax': torch or numpy"),
    (lambda p: p.put("../w", FOUR), BadInput, r"\.\./w"),
    (lambda p: p.put("a/./w", FOUR), BadInput, r"no level may be"),
    (lambda p: p.put("", FOUR), BadInput, "must not be empty"),
    (lambda p: p.put("a" * 300, FOUR), BadInput, "300 bytes, the limit is 240"),
    (lambda p: p.put("a\0b", FOUR), BadInput, "control characters"),
    (lambda p: p.put("a\udc80", FOUR), BadInput, "text"),
    (lambda p: p.put(None, FOUR), BadInput, "tensor name None: a name is text"),  # type: ignore[arg-type]
    (lambda p: p.get(3), errors.NotFound, "no tensor is named 3"),  # type: ignore[arg-type]
    (lambda p: p.put("w", FOUR, step=1.5), BadInput, "step=1.5 is not a whole number"),  # type: ignore[arg-type]
    (lambda p: p.put("w", FOUR, step=1 << 60), BadInput, "step=1152921504606846976"),
    (lambda p: p.put("w", FOUR, epoch=-1), BadInput, "epoch=-1"),
    (lambda p: p.put("w", FOUR, epoch=1 << 40), BadInput, "epoch=1099511627776"),
    (lambda p: p.put("w", FOUR, label="a b"), BadInput, "label 'a b'"),
    (lambda p: p.put("w", FOUR, retain=99), BadInput, "retain=99"),
    (lambda p: p.put("w", FOUR, retain="x"), BadInput, "retain='x'"),  # type: ignore[arg-type]
    (lambda p: p.put("w", FOUR, orphan="maybe"), BadInput, "orphan='maybe'"),
    (lambda p: p.put("w", FOUR, mutable="yes"), BadInput, "mutable='yes'"),  # type: ignore[arg-type]
    (lambda p: p.put("w", FOUR, device="cuda:7"), BadInput, "device='cuda:7'"),
    (lambda p: p.publish_group("g", {}, part=(2, 2)), BadInput, r"part=\(2, 2\)"),
    (lambda p: p.publish_group("g", {}, part=(0, 1 << 40)), BadInput, "world=1099511627776"),
    (lambda p: p.publish_group("g", {}, step=1, meta="x" * (33 << 20)), BadInput, "names and meta take"),
    (lambda p: p.publish_group("g", {}, step=1, meta=object()), BadInput, "not a JSON value"),
    (lambda p: p.publish_group("g", [FOUR]), BadInput, "not list"),  # type: ignore[arg-type]
    (lambda p: p.publish_group("g", {}, lag_max=-1), BadInput, "lag_max=-1"),
    (lambda p: p.get("w", version=1, min_step=2), BadInput, "give one of"),
    (lambda p: p.get("w", min_step="x"), BadInput, "min_step='x'"),  # type: ignore[arg-type]
    (lambda p: p.get("w", wait_s=math.nan), BadInput, "wait_s=nan is not a number of seconds"),
    (lambda p: p.get("w", wait_s="x"), BadInput, "wait_s='x'"),  # type: ignore[arg-type]
    (lambda p: p.get_many("abc"), BadInput, "an iterable of names"),
    (lambda p: p.limit(-1), BadInput, "bytes_max=-1"),
    (lambda p: p.limit("x"), BadInput, "bytes_max='x'"),  # type: ignore[arg-type]
    (lambda p: p.fence("job", -1), BadInput, "epoch=-1"),
    (lambda p: p.channel("c", items_max=0), BadInput, "items_max=0"),
    (lambda p: p.channel("c", full="spill"), BadInput, "full='spill'"),
    (lambda p: p.watch(after="then"), BadInput, "after='then'"),
    (lambda p: p.pin("nope"), errors.NotFound, "'nope'"),
    (lambda p: p.touch("nope"), errors.NotFound, "'nope'"),
    (lambda p: p.delete("nope"), errors.NotFound, "'nope'"),
    (lambda p: p.locate("nope"), errors.NotFound, "'nope'"),
    (lambda p: rota.tensors.connect(home=p.home, namespace="A B"), BadInput, "namespace 'A B'"),
    (lambda p: rota.tensors.connect("http://me:secret@x:1"), BadInput, r"URL \.\.\.'x:1'"),
    (lambda p: rota.tensors.connect(home=p.home, namespace="x", device="gpu"), BadInput, "device 'gpu'"),
]  # fmt: skip


def test_bad_input_is_named_and_leaves_nothing(plane: Plane) -> None:
    for call, error, words in BAD:
        with pytest.raises(error, match=words):
            call(plane)
    assert plane.stats()["names"] == 0
    assert plane.stats()["versions"] == {}


def test_an_argument_that_has_one_value_says_what_to_do_instead_of_others(plane: Plane) -> None:
    here: dict[str, Any] = {"home": plane.home, "namespace": plane.namespace}
    assert rota.tensors.connect(**here, backend="auto", keeper="auto") is plane
    plane.put("w", FOUR, scope="node", ready="sync")
    assert plane.get("w", device="cpu", source="node", as_="numpy").tolist() == [0] * 4
    assert plane.get("w", device="cpu").tolist() == [0] * 4
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: rota.tensors.connect(**here, backend="cuda"), "backend='cuda' is not supported, 'auto' is: device="),
        (lambda: rota.tensors.connect(**here, keeper="off"), "keeper='off' is not supported, 'auto' is: a keeper"),
        (lambda: plane.put("x", FOUR, scope="job"), "scope='job' is not supported, 'node' is: .*pull"),
        (lambda: plane.put("x", FOUR, ready="event"), "ready='event' is not supported, 'sync' is"),
        (lambda: plane.get("w", source="any"), "source='any' is not supported, 'node' is: .*pull"),
        (lambda: plane.get("w", device="cuda:0"), "device='cuda:0' is not supported, 'cpu' is"),
        (lambda: plane.channel("c", full="spill"), "full='spill': .*ROTA_SPILL_DIR"),
    ]
    for call, words in calls:
        with pytest.raises(BadInput, match=words):
            call()
    assert [row.name for row in plane.ls()] == ["w"]


def test_what_is_published_is_read_only_as_what_it_can_be_read(plane: Plane) -> None:
    plane.put("w", FOUR)
    plane.publish_group("g", {"a": FOUR}, step=1)
    with pytest.raises(BadInput, match="as_='jax': torch or numpy"):
        plane.get("w", as_="jax")
    with pytest.raises(errors.NotFound, match="g is a group"):
        plane.get("g", as_="numpy")
    with pytest.raises(errors.ProtocolBreach, match="g already is a group"):
        plane.put("g", FOUR)
    assert plane.get("w", as_="numpy").tolist() == [0] * 4
    assert plane.stats()["versions"] == {"ready": 2}


def test_a_writer_waits_for_slow_readers_and_names_them(plane: Plane, actors: Crew) -> None:
    plane.publish_group("g", {"x": np.zeros(10)}, step=0)
    code = """
        held = []
        for step in range(3):
            held.append(plane.get_group('g', min_step=step, wait_s=20, as_='numpy'))
            print('has', step, flush=True)
        os.read(os.pipe()[0], 1)
    """
    reader = actors.start(code)
    for step in (1, 2):
        actors.says(reader, f"has {step - 1}")
        plane.publish_group("g", {"x": np.full(10, step)}, step=step, lag_max=2)
    actors.says(reader, "has 2")
    plane.publish_group("g", {"x": np.zeros(10)}, step=3, lag_max=2)
    with pytest.raises(errors.BackPressure, match=f"4 steps are in use, the oldest by process {reader}"):
        plane.publish_group("g", {"x": np.zeros(10)}, step=4, lag_max=2, wait_s=0.05)
    assert plane.info("g").step == 3
    os.kill(reader, signal.SIGKILL)
    plane.publish_group("g", {"x": np.zeros(10)}, step=4, lag_max=2, wait_s=10)
    assert actors.wait(reader) == -signal.SIGKILL
    assert clean(plane)["versions"] == {"ready": 1}


def test_each_node_fetches_a_step_once_whoever_dies_fetching(plane: Plane, actors: Crew, tmp_path: Path) -> None:
    """Two namespaces stand for two nodes; the namespace of the test is the node that fetches."""
    log = tmp_path / "fetches"
    with rota.tensors.connect(home=plane.home, namespace=f"{plane.namespace}-far") as far:
        far.publish_group("weights", {"w": np.arange(1000)}, step=5, epoch=2, meta={"loss": 1})
        code = f"""
            import contextlib, signal, rota.tensors, threading
            from rota.tensors.errors import NotFound, WaitTimeout
            from rota.tensors.transport import elected
            far = rota.tensors.connect(home={str(plane.home)!r}, namespace={far.namespace!r})
            def bring(wait_s):
                with open({str(log)!r}, 'a') as file: file.write(f'{{os.getpid()}}\\n')
                if {{die}}: os.kill(os.getpid(), signal.SIGKILL)
                threading.Event().wait(0.2)
                found = far.get_group('weights', as_='numpy')
                plane.publish_group('weights', found, step=found.step, epoch=found.epoch, meta=found.meta)
            def look(wait_s):
                with contextlib.suppress(NotFound, WaitTimeout):
                    return plane.get_group('weights', min_step=5, wait_s=wait_s, as_='numpy')
            got = elected(plane, 'weights', look, bring, 20.0)
            assert (got.step, got.epoch, got.meta) == (5, 2, {{{{'loss': 1}}}}) and got['w'].sum() == 499500
        """
        assert actors.run(code.replace("{die}", "True").replace("{{", "{").replace("}}", "}")) == -signal.SIGKILL
        living = [actors.start(code.replace("{die}", "False").replace("{{", "{").replace("}}", "}")) for _ in range(4)]
        for pid in living:
            assert actors.wait(pid) == 0, actors.output(pid)
        assert len(log.read_text().splitlines()) == 2  # the one that died, and one of four
        assert pull(plane, "weights", min_step=5, wait_s=1, as_="numpy").step == 5
        with pytest.raises(errors.WaitTimeout, match="wanted step >= 6"):
            pull(plane, "weights", min_step=6, wait_s=0.1)
        far.delete("weights")


def test_gc_removes_the_memory_of_a_home_that_is_gone_and_no_other(plane: Plane, actors: Crew) -> None:
    gone, here = Path(tempfile.mkdtemp(prefix="rt")), Path(tempfile.mkdtemp(prefix="rt"))
    roots = {}
    for home in (gone, here):
        code = f"""
            from rota.tensors import connect
            other = connect(home={str(home)!r}, keep=True)
            other.put('w', np.zeros(100))
            print(other.folder.parent, flush=True)
            os.kill(os.getpid(), 9)
        """
        pid = actors.start(code)
        assert actors.wait(pid) == -signal.SIGKILL
        roots[home] = Path(actors.output(pid).strip())
    rota.tensors.api.store.redis_server.end_running(rota.tensors.api.store.environ.Home.of(gone))
    shutil.rmtree(gone)
    dropped = [each["what"] for each in plane.gc()["dropped"]]
    assert str(roots[gone]) in dropped
    assert not roots[gone].exists()
    assert roots[here].exists(), "its home may come back for it"
    assert plane.folder.exists()
    rota.tensors.down(here)
    shutil.rmtree(here)
    wait_until(lambda: not roots[here].exists())


def test_a_trainer_killed_between_two_publishes_leaves_rollouts_on_a_whole_version(plane: Plane, actors: Crew) -> None:
    trainer = """
        for step in range(1, 1000):
            tensors = {str(i): np.full(5000, step) for i in range(8)}
            plane.publish_group('weights/j/e', tensors, step=step, label='j/a/0')
            print('at', step, flush=True)
    """
    rollout = """
        last = 0
        while True:
            found = plane.get_group('weights/j/e', min_step=last, wait_s=20, as_='numpy')
            steps = {int(t[k]) for t in found.values() for k in (0, 2500, 4999)}
            assert steps == {found.step} and found.step >= last, (steps, found.step, last)
            if found.step != last: print('has', found.step, flush=True)
            last = found.step
    """
    first = actors.start(trainer)
    actors.says(first, "at 5")
    readers = [actors.start(rollout) for _ in range(2)]
    actors.says(first, "at 40")
    actors.kill(first)
    step = plane.info("weights/j/e").step
    for pid in readers:
        actors.says(pid, f"has {step}")
    assert actors.run(trainer.replace("1000", f"{step + 20}").replace("range(1", f"range({step + 1}")) == 0
    for pid in readers:
        actors.says(pid, f"has {step + 19}")
        actors.kill(pid)
    assert clean(plane)["versions"] == {"ready": 1}


def test_thousands_of_names_of_a_killed_process_are_swept_in_slices(plane: Plane, actors: Crew, cases: Cases) -> None:
    """A script's reply holds some thousands of values: 5,000 names at once were never swept."""
    code = f"""
        import numpy as np
        for n in range(4500):
            plane.put(f'd/{{n}}', np.zeros(1), orphan='drop')
            if n % 500 == 499: print('has', n + 1, flush=True)
        {WAITING}
    """
    pid = actors.start(code)
    for count in range(500, 4501, 500):
        actors.says(pid, f"has {count}\n")
    assert len(plane.ls("d/")) == 4500
    actors.kill(pid)

    def swept() -> bool:
        plane._session.sweep()
        return not plane.ls("d/")

    wait_until(swept)
    assert plane.ls("d/") == [] and plane.fsck()["violations"] == []
    cases.done(1, plane)


def test_a_trim_reads_each_free_list_once(plane: Plane) -> None:
    """It read the list of a size once a file: 256 files of small blocks made the registry deaf for seconds."""
    plane.put("keep", np.zeros(16))
    for n in range(600):
        plane.put(f"n/{n}", np.zeros(200_000, np.uint8))
    for n in range(600):
        plane.delete(f"n/{n}")
    plane._space.reap()
    plane._session.machine.client.call("CONFIG", "RESETSTAT")
    assert plane._writer.free_room() > 100 << 20
    reads = plane._session.machine.info("commandstats").get("cmdstat_lrange", "calls=0")
    assert int(reads.split(",")[0].removeprefix("calls=")) <= 4
    assert clean(plane)["versions"] == {"ready": 1}


def test_housekeeping_survives_what_nobody_expected(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(linger: bool) -> None:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(plane._reader, "age", fails)
    wait_until(lambda: plane._session.failure is not None)
    monkeypatch.undo()
    plane.put("w", np.zeros(4))
    plane.get("w", as_="numpy")
    wait_until(lambda: not len(plane._space.leases))
    assert any(check["level"] == "warn" and "changed size" in str(check["value"]) for check in plane.doctor()["checks"])


def test_a_miss_reads_one_page_of_names_that_begin_alike(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(60):
        plane.put(f"a/{n:03d}", np.zeros(1))
    plane.put("weights/layer", np.zeros(1))
    rows = list[int]()
    real = plane._space.registry.ls
    monkeypatch.setattr(plane._space.registry, "ls", lambda *a, **k: rows.append(k.get("n_max", 500)) or real(*a, **k))
    with pytest.raises(errors.NotFound) as missed:
        plane.get("weights/layr")
    assert "weights/layer" in (missed.value.hint or "")
    monkeypatch.undo()
    assert sum(rows) <= 64


def test_a_masked_array_is_refused(plane: Plane) -> None:
    with pytest.raises(errors.UnsupportedTensor, match="masked"):
        plane.put("m", np.ma.masked_array([1.0, 2.0], mask=[True, False]))
