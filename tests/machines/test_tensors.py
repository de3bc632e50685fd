"""Versions of tensors between machines: once over the wire for each machine, whole or not at all, whoever dies."""

from __future__ import annotations

import os
import random
import signal
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.machines.bed import Machine, bed
from tests.machines.stores import KEY, Crew, crew

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PUBLISH = """
for step in range(1, {steps} + 1):
    both = {{"x": np.arange({count}, dtype=np.float32) + step, "y": np.full(3, step)}}
    plane.publish_group("w", both, step=step, epoch=2, retain=8, meta={{"n": step}})
plane.put("one", np.arange(10))
say(done=True)
threading.Event().wait()
"""
PULL = """
began = time.perf_counter()
try:
    found = transport.pull(plane, "w", step={step}, epoch_min=2, near="m0", wait_s={wait_s}, as_="numpy")
    base = np.arange({count}, dtype=np.float32)
    whole = bool((found["x"] == base + {step}).all() and (found["y"] == {step}).all() and found.meta == {{"n": {step}}})
    say(whole=whole, step=found.step, epoch=found.epoch, s=time.perf_counter() - began)
except TensorError as error:
    say(error=type(error).__name__, text=str(error), left=[row.name for row in plane.ls() if row.version],
        s=time.perf_counter() - began)
"""


PARTS = (0.0, 0.2, 0.5, 0.8, 0.97, 1.0) if os.environ.get("ROTA_DEEP") else (0.0, 0.5, 0.97, 1.0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """After which part of a version its publisher loses power; as many more moments as ``--stops`` asks for."""
    if "part" in metafunc.fixturenames:
        stops = int(metafunc.config.getoption("--stops", None) or 0)
        chance = random.Random(stops)
        more = [round(chance.random(), 3) for _ in range(stops - len(PARTS))]
        metafunc.parametrize("part", [*PARTS, *more])


@pytest.fixture(scope="module")
def four() -> Iterator[list[Machine]]:
    with bed(4, subnet=79) as made:
        yield made


@pytest.fixture
def scripts(four: list[Machine]) -> Iterator[Crew]:
    for machine in four:
        machine.link(up=True)
        machine.shape()
        if not machine.pid:
            machine.start()
    with crew(four) as made:
        yield made

    def restart(machine: Machine) -> None:
        machine.kill()  # with the tensor servers and registries that the test started
        machine.start()

    with ThreadPoolExecutor() as pool:
        list(pool.map(restart, four))


def test_a_version_is_read_on_another_machine_bit_by_bit(scripts: Crew, four: list[Machine]) -> None:
    scripts.start(four[0], PUBLISH.format(steps=3, count=3_000_000)).said()
    for step in (3, 1):  # an older one after a newer one too: a reader wants exactly the version of its commit
        found = scripts.start(four[1], PULL.format(step=step, wait_s=20, count=3_000_000)).said()
        assert found == {"whole": True, "step": step, "epoch": 2, "s": found["s"]}
    code = (
        'say(one=transport.pull(plane, "one", near="m0", as_="numpy")["one"].tolist(), bad=plane.fsck()["violations"])'
    )
    assert scripts.start(four[1], code).said() == {"one": list(range(10)), "bad": []}
    # A second reader of the machine finds it there: nothing more was sent.
    sent = scripts.stat(four[0])["sent"]
    scripts.start(four[1], PULL.format(step=3, wait_s=20, count=3_000_000)).said()
    assert scripts.stat(four[0])["sent"] == sent == 3


def test_what_is_nowhere_is_an_error_that_names_it(scripts: Crew, four: list[Machine]) -> None:
    scripts.start(four[0], PUBLISH.format(steps=1, count=10)).said()
    found = scripts.start(four[1], PULL.format(step=9, wait_s=1, count=10)).said()
    assert found["error"] == "WaitTimeout" and "w: not here" in found["text"] and "wanted step 9" in found["text"]
    mutable = 'plane.put("m", np.arange(3), mutable=True); say(ok=1); threading.Event().wait()'
    scripts.start(four[0], mutable).said()
    code = """
    try: transport.pull(plane, "m", near="m0", wait_s=1)
    except TensorError as error: say(error=type(error).__name__)
    """
    assert scripts.start(four[1], code).said() == {"error": "UnsupportedTensor"}


def test_the_publisher_sends_a_version_at_most_twice(scripts: Crew, four: list[Machine]) -> None:
    """Three machines with three readers each; beyond the second machine a version comes from those that have it."""
    count = 2_000_000
    scripts.start(four[0], PUBLISH.format(steps=1, count=count)).said()
    code = PULL.format(step=1, wait_s=30, count=count)
    readers = [scripts.start(machine, code) for machine in four[1:] for _ in range(3)]
    assert [reader.said()["whole"] for reader in readers] == [True] * 9
    stats = [scripts.stat(machine) for machine in four]
    size = 4 * count
    assert size * 2 <= stats[0]["sent_bytes"] <= size * 2 + 4096
    assert sum(stat["sent"] for stat in stats) == 3  # one for each machine, whatever the number of readers


def test_a_machine_that_dies_is_passed_over_in_the_tree(scripts: Crew, four: list[Machine]) -> None:
    scripts.start(four[0], PUBLISH.format(steps=1, count=1000)).said()
    for machine in four[1:3]:
        assert scripts.start(machine, PULL.format(step=1, wait_s=20, count=1000)).said()["whole"]
    for machine in four[1:3]:
        machine.kill()
    found = scripts.start(four[3], PULL.format(step=1, wait_s=30, count=1000)).said()
    assert found["whole"], found
    assert scripts.stat(four[0])["redirected"] >= 1


def sent_by(machine: Machine) -> int:
    """Bytes that a machine has sent over its interface."""
    (line,) = [line for line in Path(f"/proc/{machine.pid}/net/dev").read_text().splitlines() if "eth0:" in line]
    return int(line.partition(":")[2].split()[8])


def until_sent(machine: Machine, since: int, size: float) -> None:
    """Wait until a machine has sent ``size`` bytes more than ``since``."""
    deadline = time.monotonic() + 60
    while sent_by(machine) - since < size:
        assert time.monotonic() < deadline, f"{sent_by(machine) - since} of {size} bytes"
        time.sleep(0.01)


def test_no_torn_version_when_the_machine_of_the_publisher_dies(
    scripts: Crew, four: list[Machine], part: float
) -> None:
    """The power goes before, in the middle, and just at the end."""
    count = 16 << 20
    scripts.start(four[0], PUBLISH.format(steps=1, count=count)).said()
    four[0].shape("tbf", "rate", "400mbit", "burst", "1mb", "latency", "200ms")
    before = sent_by(four[0])  # of a reader that has said that it is up, some may be on its way
    reader = scripts.start(four[1], "say(up=True)" + PULL.format(step=1, wait_s=6, count=count))
    reader.said()
    until_sent(four[0], before, part * 4 * count)
    four[0].kill()
    found = reader.said()
    if "error" in found:
        assert found["error"] in ("TransferFailed", "WaitTimeout") and "w: not here" in found["text"], found
        assert found["left"] == []
    else:
        assert found["whole"], found
    assert scripts.start(four[1], 'say(bad=plane.fsck()["violations"])').said() == {"bad": []}


CUT_COUNT = 16 << 20


def pulled_through_a_cut(
    scripts: Crew, four: list[Machine], *, cut_s: float, wait_s: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a reader says whose publisher is cut off after 20 MiB, and what the publisher's server has sent then."""
    scripts.start(four[0], PUBLISH.format(steps=2, count=CUT_COUNT)).said()
    four[0].shape("tbf", "rate", "100mbit", "burst", "1mb", "latency", "200ms")
    reader = scripts.start(four[1], "say(up=True)" + PULL.format(step=2, wait_s=wait_s, count=CUT_COUNT))
    before = sent_by(four[0])
    reader.said()
    until_sent(four[0], before, 20 << 20)
    four[0].link(up=False)
    time.sleep(cut_s)
    four[0].link(up=True)
    found = reader.said()
    assert found["whole"], found
    return found, scripts.stat(four[0])


def test_versions_are_equal_after_a_cut_of_five_seconds(scripts: Crew, four: list[Machine]) -> None:
    found, stat = pulled_through_a_cut(scripts, four, cut_s=5, wait_s=30)
    assert found["s"] > 5
    # What had arrived before the cut was not sent again, but for the chunk that was under way.
    assert stat["sent_bytes"] <= 4 * CUT_COUNT + (8 << 20)


def test_a_broken_connection_resumes_at_the_last_whole_chunk(scripts: Crew, four: list[Machine]) -> None:
    """The cut is longer than a connection stays silent, so another one brings the rest."""
    # twice the limit of silence, and more: it begins anew with bytes that had arrived
    _, stat = pulled_through_a_cut(scripts, four, cut_s=20, wait_s=40)
    assert stat["sent"] == 1  # the connection that broke is not counted
    assert stat["sent_bytes"] < 4 * CUT_COUNT - (4 << 20), "all of it was sent anew"


def test_whoever_has_another_key_is_refused(scripts: Crew, four: list[Machine]) -> None:
    scripts.start(four[0], PUBLISH.format(steps=1, count=10)).said()
    other = KEY.replace("6b", "6c")
    code = """
    try:
        transport.ask(known.known["m0"], {"op": "stat"})
        say(open=True)
    except OSError as error:
        say(error=type(error).__name__)
    """
    assert scripts.start(four[1], code, key=other).said() == {"error": "HandshakeRefused"}
    raw = """
    import socket
    host, port = known.known["m0"].split(":")
    link = socket.create_connection((host, int(port)))
    link.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n' * 10)
    link.settimeout(20)
    got = b''
    try:
        while (data := link.recv(4096)): got += data
    except ConnectionError: pass
    say(got=len(got))
    """
    assert scripts.start(four[1], raw).said()["got"] < 64  # its challenge, and nothing else
    stat = scripts.stat(four[0])
    assert stat["refused"] >= 2 and stat["sent"] == 0


def test_one_process_of_a_machine_fetches_and_another_does_when_it_is_killed(
    scripts: Crew, four: list[Machine]
) -> None:
    count = 4 << 20
    scripts.start(four[0], PUBLISH.format(steps=1, count=count)).said()
    four[0].shape("tbf", "rate", "10mbit", "burst", "1mb", "latency", "200ms")
    code, before = PULL.format(step=1, wait_s=30, count=count), sent_by(four[0])
    scripts.start(four[1], "say(first=True)" + code).said()
    until_sent(four[0], before, 2 << 20)
    second = scripts.start(four[1], "say(up=True)" + code)
    second.said()
    (first,) = [pid for pid, line in four[1].processes().items() if "say(first=True)" in line]
    os.kill(first, signal.SIGKILL)
    assert second.said()["whole"]
    assert scripts.stat(four[0])["sent"] == 1


def test_a_group_is_replicated_and_deleted_everywhere(scripts: Crew, four: list[Machine]) -> None:
    code = """
    plane.publish_group("shadow", {"s": np.arange(1000)}, step=4, epoch=3, meta={"outline": []})
    transport.replicate(plane, "shadow", "m2", step=4, epoch=3)
    plane.put("value", np.arange(5))
    say(done=True)
    threading.Event().wait()
    """
    scripts.start(four[0], code).said()
    look = """
    rows = [row for row in plane.ls() if row.version]
    say(names=sorted(row.name for row in rows), labels=sorted({row.label for row in rows}))
    """
    assert scripts.start(four[2], look).said() == {"names": ["shadow"], "labels": ["job/m0"]}
    fetch = 'transport.pull(plane, "value", near="m0", as_="numpy"); say(ok=1)'
    for machine in four[1:]:
        scripts.start(machine, fetch).said()
    four[3].link(up=True)
    scripts.start(four[1], f'transport.delete(plane, [("value", {scripts.stores["m0"]!r})]); say(ok=1)').said()
    for machine in four:
        assert "value" not in scripts.start(machine, look).said()["names"], machine.name
    # The machine that published is lost; a third one still finds its state at the second.
    four[0].kill()
    found = """
    got = transport.pull(plane, "shadow", step=4, near="m0", wait_s=20, as_="numpy")
    say(sum=int(got["s"].sum()), epoch=got.epoch)
    """
    assert scripts.start(four[1], found).said() == {"sum": 499500, "epoch": 3}
    # So does the tensor server of one more, which is told the host that has it.
    brought = 'transport.bring(plane, "shadow", step=4, epoch=3, near="m2", wait_s=20)\n' + textwrap.dedent(look)
    assert "shadow" in scripts.start(four[3], brought).said()["names"]


def test_weights_that_no_state_gives_again_survive_the_machine_that_published_them(
    scripts: Crew, four: list[Machine]
) -> None:
    code = """
    from rota.job import checkpoint
    checkpoint.publish(plane, "j-1", "actor->ref", 2, 1, {"x": np.arange(10.0)})
    say(host=checkpoint.copy(plane, "j-1", "actor->ref", 2, ["m0", "m2"])[0])
    threading.Event().wait()
    """
    assert scripts.start(four[0], code).said() == {"host": "m2"}
    four[0].kill()
    found = """
    from rota.job import checkpoint
    got = checkpoint.find_weights(plane, "j-1", "actor->ref", 2)
    say(sum=None if got is None else float(np.asarray(got["x"]).sum()))
    """
    assert scripts.start(four[1], found).said() == {"sum": 45.0}


def test_after_a_partition_the_version_of_the_newer_epoch_is_the_one_everywhere(
    scripts: Crew, four: list[Machine]
) -> None:
    """The writer on m0 is cut off; its successor on m1 publishes the same step under the next epoch."""
    publish = """
    plane.publish_group("w", {{"x": np.full(1000, {value})}}, step=5, epoch={epoch}, label="job/actor/0")
    say(done=True)
    threading.Event().wait()
    """
    read = """
    got = transport.pull(plane, "w", step=5, epoch_min={epoch}, near="{near}", wait_s=15, as_="numpy")
    say(value=int(got["x"][0]), epoch=got.epoch)
    """
    scripts.start(four[0], publish.format(value=1, epoch=1)).said()
    assert scripts.start(four[2], read.format(epoch=1, near="m0")).said() == {"value": 1, "epoch": 1}
    four[0].link(up=False)
    scripts.start(four[1], publish.format(value=2, epoch=2)).said()
    newer = {"value": 2, "epoch": 2}
    # m2 has a copy of the older epoch, and asks for the newer one.
    assert scripts.start(four[2], read.format(epoch=2, near="m1")).said() == newer
    four[0].link(up=True)
    # A reader that the old table sends to m0 is refused there, and finds the newer version elsewhere.
    assert scripts.start(four[3], read.format(epoch=2, near="m0")).said() == newer
    assert scripts.start(four[2], read.format(epoch=1, near="m0")).said() == newer
    assert scripts.start(four[0], read.format(epoch=2, near="m0")).said() == newer
