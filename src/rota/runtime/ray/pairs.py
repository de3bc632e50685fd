"""Checks between machines of an engine: names, clocks, ports and bandwidth of each pair, versions on each.

On each machine runs an actor for the time of the check; it listens at the address of its node for the others, who
prove with the handshake of ``runtime.handshake`` that they know a key that was drawn for this check.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rota.runtime.frames import receive_exactly
from rota.runtime.handshake import KEY_BYTES, AttemptGuard, client_handshake_blocking, server_handshake_blocking
from rota.runtime.packages import installed_version
from rota.runtime.undo import undone_if_raised
from rota.spec.codec import JsonObject
from rota.spec.measured import CheckFacts, MachineFacts, PairFacts

PACKAGES = ("ray", "rota", "torch")
PURPOSE = "check of machines"
CONNECT_S = 3.0
SEND_BYTES_MAX, SEND_S = 64 * 2**20, 0.5
"""The most that one pair sends: bytes, and time."""
MACHINES_MAX = 16
"""Of more machines each is paired with the next two alone."""
START_S, PAIR_S = 60.0, 20.0
_TIME, _SINK = b"t", b"s"
_DOUBLE = struct.Struct(">d")
_CHUNK = bytes(256 * 1024)


class Checker:
    """One machine of a check, as an actor."""

    def __init__(self, key: bytes, host: str = "") -> None:
        self._key, self._guard = key, AttemptGuard()
        self._host = host or ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._server = socket.create_server((self._host, 0), family=family, backlog=64)
        threading.Thread(target=self._serve, daemon=True).start()

    def facts(self) -> JsonObject:
        """Host name, address and port of this machine, and versions."""
        found = {"python": platform.python_version(), **{name: installed_version(name) for name in PACKAGES}}
        port = self._server.getsockname()[1]
        return {"host_name": socket.gethostname(), "address": self._host, "versions": found, "port": port}

    def look(self, name: str, address: str, port: int) -> JsonObject:
        """Look at another machine: its name, its clock against this one, and how fast it is sent to."""
        found: JsonObject = {"resolves": _resolves(name, address), "error": ""}
        found |= {"latency_s": None, "skew_s": None, "bytes_per_s": None}
        try:
            found |= self._clock(address, port)
            found |= {"bytes_per_s": self._send(address, port)}
        except (OSError, struct.error) as error:
            found["error"] = f"{address}:{port}: {getattr(error, 'strerror', None) or error or type(error).__name__}"
        return found

    def _connected(self, address: str, port: int, what: bytes) -> socket.socket:
        made = socket.create_connection((address, port), timeout=CONNECT_S)
        with undone_if_raised(made.close):
            client_handshake_blocking(made, self._key, PURPOSE)
            made.sendall(what)
        return made

    def _clock(self, address: str, port: int) -> dict[str, float]:
        """The best of five: the answer that took the least time says most exactly how the clocks differ."""
        best: tuple[float, float] | None = None
        for _ in range(5):
            with self._connected(address, port, _TIME) as there:
                sent = time.time()
                there.sendall(b"?")
                theirs = float(_DOUBLE.unpack(receive_exactly(there, _DOUBLE.size))[0])
                took = time.time() - sent
            if best is None or took < best[0]:
                best = (took, theirs - (sent + took / 2))
        assert best is not None
        return {"latency_s": best[0], "skew_s": best[1]}

    def _send(self, address: str, port: int) -> float:
        """Bytes a second, of at most ``SEND_BYTES_MAX`` in about ``SEND_S``; counted where they arrive."""
        with self._connected(address, port, _SINK) as there:
            began, sent = time.monotonic(), 0
            there.settimeout(CONNECT_S + SEND_S)
            while sent < SEND_BYTES_MAX and time.monotonic() - began < SEND_S:
                there.sendall(_CHUNK)
                sent += len(_CHUNK)
            there.shutdown(socket.SHUT_WR)
            arrived = float(_DOUBLE.unpack(receive_exactly(there, _DOUBLE.size))[0])
            return arrived / max(1e-9, time.monotonic() - began)

    def _serve(self) -> None:
        while True:  # a thread that ends with its process
            there, _ = self._server.accept()
            threading.Thread(target=self._answer, args=(there,), daemon=True).start()

    def _answer(self, there: socket.socket) -> None:
        with there, contextlib.suppress(OSError, EOFError):
            there.settimeout(CONNECT_S + SEND_S)
            server_handshake_blocking(there, self._key, PURPOSE, self._guard)
            if receive_exactly(there, 1) == _TIME:
                receive_exactly(there, 1)
                there.sendall(_DOUBLE.pack(time.time()))
                return
            arrived = 0
            while part := there.recv(len(_CHUNK)):
                arrived += len(part)
            there.sendall(_DOUBLE.pack(float(arrived)))


def _resolves(name: str, address: str) -> bool:
    try:
        return address in {row[4][0] for row in socket.getaddrinfo(name, None)}
    except OSError:
        return False


def pairs_of(nodes: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs to look at, each in both directions; of many machines each with the next two."""
    count = len(nodes)
    if count <= MACHINES_MAX:
        return [(one, other) for one in nodes for other in nodes if one != other]
    return [(nodes[i], nodes[(i + step) % count]) for i in range(count) for step in (1, 2)]


async def check_machines(nodes: Iterable[tuple[str, str]]) -> CheckFacts:
    """Check machines, given by name and Ray's id; one pair after the other, so that none slows another."""
    key = secrets.token_bytes(KEY_BYTES)
    as_actor: Any = ray.remote(Checker)
    actors = dict[str, Any]()
    facts, ports = list[MachineFacts](), dict[str, tuple[str, str, int]]()
    try:
        for name, identity in nodes:
            here = NodeAffinitySchedulingStrategy(identity, soft=False)
            actors[name] = as_actor.options(num_cpus=0, scheduling_strategy=here, max_concurrency=4).remote(key)
        said = await asyncio.gather(*(_answer(actor.facts.remote(), START_S) for actor in actors.values()))
        for name, one in zip(actors, said, strict=True):
            error = str(one.get("error", ""))
            facts.append(
                {
                    "node": name,
                    "host_name": str(one.get("host_name", "")),
                    "address": str(one.get("address", "")),
                    "versions": dict(one.get("versions", {})),
                    "error": error,
                }
            )
            if not error:
                ports[name] = (str(one["host_name"]), str(one["address"]), int(one["port"]))
        pairs = [await _pair(actors, ports, *pair) for pair in pairs_of(sorted(ports))]
        return {"machines": facts, "pairs": pairs}
    finally:
        for actor in actors.values():
            ray.kill(actor)


async def _pair(actors: dict[str, Any], ports: dict[str, tuple[str, str, int]], source: str, target: str) -> PairFacts:
    found = await _answer(actors[source].look.remote(*ports[target]), PAIR_S)
    return {
        "source": source,
        "target": target,
        "resolves": bool(found.get("resolves")),
        "latency_s": found.get("latency_s"),
        "skew_s": found.get("skew_s"),
        "bytes_per_s": found.get("bytes_per_s"),
        "error": str(found.get("error", "")),
    }


async def _answer(reference: Any, limit_s: float) -> JsonObject:
    try:
        async with asyncio.timeout(limit_s):
            return await reference
    except (TimeoutError, RayError) as error:
        return {"error": " ".join(f"{type(error).__name__} {error}".split())[:300]}
