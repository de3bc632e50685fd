"""The bridge: commands by bare Redis lists, a C program, bad input, leases that end with their time."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.real.tensors.crew import Crew, wait_until

import rota.tensors
from rota.runtime.redis.client import RedisClient
from rota.tensors import bridge as bridge_module
from rota.tensors.api.store import Plane
from rota.tensors.bridge import Bridge

pytest.importorskip("torch")  # the bridge reads as torch: it is loaded before the first client waits

PROGRAM = Path(__file__).parents[3] / "examples" / "tensor_client" / "client.c"
Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def plane(tensor_home: Path) -> Iterator[Plane]:
    """The namespace of people who choose none, where the plain list names are."""
    with rota.tensors.connect(home=tensor_home, namespace="default", keep=True) as made:
        yield made
        assert made.fsck()["violations"] == []
        assert made.ls() == []


@pytest.fixture
def bridge(plane: Plane) -> Iterator[Bridge]:
    stop, served = threading.Event(), Bridge(plane)
    thread = threading.Thread(target=served.run, args=(stop,))
    thread.start()
    yield served
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def ask(plane: Plane, bridge: Bridge) -> Iterator[Ask]:
    redis = RedisClient(plane.address)

    def exchange(raw: str = "", prefix: str = "", **words: Any) -> dict[str, Any]:
        redis.call("LPUSH", f"{prefix}tensor:cmd", raw or json.dumps({"id": "r", **words}))
        return json.loads(redis.call("BLPOP", f"{prefix}tensor:reply:r", "5")[1])

    yield exchange
    redis.close()


def bytes_at(reply: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.memmap(reply["seg"], np.uint8, "r+", reply["offset"], (reply["bytes"],))


def test_a_c_program_creates_gets_and_deletes(plane: Plane, bridge: Bridge, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler on PATH (cc, gcc)")
    binary = tmp_path / "client"
    subprocess.run([compiler, "-Wall", "-Wextra", "-Werror", "-o", binary, PROGRAM], check=True, timeout=60)

    def run(op: str) -> subprocess.CompletedProcess[str]:
        command = [binary, plane.address.path, op, "c/x"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert run("create").returncode == 0
    view = plane.get("c/x", as_="numpy")
    assert view.dtype == np.float32
    assert view.tolist() == [[0, 1, 2], [3, 4, 5]]
    view[1, 2] = 7.5  # mutable: the same memory for everyone
    assert run("get").stdout.split() == ["0", "1", "2", "3", "4", "7.5"]
    assert run("delete").returncode == 0
    assert run("get").returncode == 1
    assert "TENSOR_NOT_FOUND" in run("get").stderr


def test_what_is_created_is_pending_until_committed_and_then_read_by_all(plane: Plane, ask: Ask) -> None:
    assert ask(op="join", client="go")["ok"]
    made = ask(op="create", name="x", dtype="bf16", shape=[4], client="go")
    assert (made["ok"], made["state"], made["dtype"], made["bytes"]) == (True, "pending", "bf16", 8)
    assert plane.ls() == []
    bytes_at(made)[:] = [0, 63] * 4  # 0.5 as bfloat16
    ready = ask(op="commit", name="x", client="go")
    assert (ready["state"], ready["version"], ready["seg"]) == ("ready", made["version"], made["seg"])
    assert plane.get("x").tolist() == [0.5] * 4
    got = ask(op="get", name="x", client="other", prefix="{default}:")
    assert bytes(bytes_at(got)) == bytes(bytes_at(made))
    assert ask(op="stat", name="x")["shape"] == [4]
    assert ask(op="delete", name="x", client="go")["ok"]
    assert ask(op="create", name="void", dtype="f32", shape=[0, 3], commit=True)["seg"] == ""
    assert ask(op="delete", name="void")["ok"]


def test_a_silent_client_loses_its_leases_and_what_it_was_writing(plane: Plane, ask: Ask) -> None:
    plane.put("y", np.arange(3))
    kept = ask(op="get", name="y", client="slow", ttl_s=60)
    assert ask(op="get", name="y", client="dead", ttl_s=0.3)["ok"]
    assert ask(op="create", name="never", dtype="u8", shape=[9], client="dead", ttl_s=0.3)["ok"]
    assert plane.info("never").pending == 1
    plane.delete("y")
    wait_until(lambda: ask(op="stat", name="never").get("error") == "TENSOR_NOT_FOUND")
    assert ask(op="commit", name="never", client="dead")["error"] == "TENSOR_NOT_FOUND"
    wait_until(lambda: plane.stats()["leases"] == 1)  # the client that is in time keeps the old bytes
    assert bytes(bytes_at(kept)) == np.arange(3).tobytes()
    assert ask(op="leave", client="slow")["ok"]
    wait_until(lambda: plane.stats()["leases"] == 0)


BAD = [
    ({"op": "burn"}, "INVALID", "op"),
    ({"op": "create", "name": "x", "dtype": "f33", "shape": [1]}, "INVALID", "f33"),
    ({"op": "create", "name": "x", "dtype": "f32", "shape": [-1]}, "INVALID", "negative"),
    ({"op": "create", "name": "x", "dtype": "f32", "shape": [1 << 32, 1 << 32]}, "INVALID", "limit"),
    ({"op": "create", "name": "x", "dtype": "f32", "shape": [1.5]}, "INVALID", "shape"),
    ({"op": "create", "name": "/", "dtype": "f32", "shape": [1]}, "INVALID", "name"),
    ({"op": "create", "name": "x", "dtype": "f32", "shape": [1], "device": 0}, "INVALID", "leave device out"),
    ({"op": "create", "name": "x", "dtype": "f32", "shape": [1 << 43]}, "TENSOR_OUT_OF_MEMORY", "room"),
    ({"op": "get", "name": "x", "version": 0}, "INVALID", "version"),
    ({"op": "get", "name": "x", "colour": 1}, "INVALID", "colour"),
    ({"op": "get", "name": "nobody"}, "TENSOR_NOT_FOUND", "nobody"),
]


def test_bad_commands_are_refused_by_name(ask: Ask) -> None:
    for words, error, said in BAD:
        reply = ask(**words)
        assert (reply["ok"], reply["error"]) == (False, error), words
        assert said in reply["message"], words


@pytest.mark.parametrize("given", [7, 1.5, True, "a b", "x" * 65, "half \ud800"])
def test_an_id_that_is_no_word_is_refused_where_its_sender_waits(plane: Plane, bridge: Bridge, given: object) -> None:
    redis = RedisClient(plane.address)
    redis.call("LPUSH", "tensor:cmd", json.dumps({"op": "renew", "id": given}))
    where = given.replace("\ud800", "?") if isinstance(given, str) else json.dumps(given)
    popped = redis.call("BLPOP", f"tensor:reply:{where}", "5")
    assert popped, "no answer"
    reply = json.loads(popped[1])
    assert (reply["id"], reply["ok"], reply["error"]) == (where, False, "INVALID")
    assert reply["message"].startswith("id: ")
    assert bridge.refused == 1
    redis.close()


def test_noise_is_counted_and_a_flood_is_turned_away(
    plane: Plane, bridge: Bridge, ask: Ask, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    redis = RedisClient(plane.address)
    noise = ["", "{", "[1]", "[" * 5000, '{"id":{},"op":"get"}', b"\xff\xfe", "x" * 70_000]
    redis.call("LPUSH", "tensor:cmd", *noise)
    assert ask(op="renew")["ok"]
    assert bridge.refused == len(noise)
    said = [one.getMessage() for one in caplog.records if "without id was refused" in one.getMessage()]
    assert 1 <= len(said) < len(noise)  # not one line for each: whoever floods the list does not fill a disk
    monkeypatch.setattr(bridge_module, "WAITING_MAX", -1)
    assert ask(op="renew")["error"] == "LIMIT_EXCEEDED"
    redis.close()


def test_a_bridge_is_ready_before_the_first_command_comes(plane: Plane, actors: Crew) -> None:
    """To load torch takes seconds, for which whoever sent the command would wait."""
    code = """
        import sys
        from rota.tensors.bridge import Bridge
        assert 'torch' not in sys.modules
        Bridge(plane).close()
        assert 'torch' in sys.modules
    """
    assert actors.run(code) == 0
