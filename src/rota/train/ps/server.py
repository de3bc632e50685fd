"""Parameter server, one shard: take pushes, apply them as ``ps`` decides, answer pulls; by call or over TCP."""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import socket
import socketserver
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypedDict, cast

import numpy as np

from rota.runtime.clock import Clock, SystemClock
from rota.runtime.frames import receive_exactly
from rota.runtime.undo import undone_if_raised
from rota.spec.errors import BadInput, Fenced, RotaError, TimedOut
from rota.spec.ids import LOOPBACK
from rota.train.plan.hardware import Json
from rota.train.ps.clocks import (
    AdmitWorker,
    ApplyPushes,
    DropPush,
    GradientsPushed,
    GrantTurn,
    PsEffect,
    PsEvent,
    PsShard,
    RefuseWorker,
    Rule,
    TurnAsked,
    WorkerJoined,
    WorkerLeft,
)
from rota.train.ps.table import SGD, Array, Dense, Floats, Ids, ParameterTable, RowOptimizer, State, TableSpec

OPS: Final = "join, leave, turn, offer, pull, push, stats, export"
LOOK_S: Final = 0.25
"""How often a wait looks for workers that are gone."""
HELLO_S: Final = 10.0
"""How long a new connection has to show the token."""
HELLO_BYTES_MAX: Final = 4096
STRANGERS_MAX: Final = 64
"""Connections that have not shown it yet; of more the next is closed at once."""
Arrays: TypeAlias = Mapping[str, Array]
Answer = tuple[Json, Arrays]
"""Head and arrays of a message."""


class TableSize(TypedDict):
    """Live rows of a table on one shard, and their bytes."""

    rows: int
    bytes: int


class ShardStats(TypedDict):
    """Clocks of live workers, largest lead there was, updates applied, pushes dropped, and tables of one shard."""

    clocks: dict[str, int]
    lead_max: int
    version: int
    dropped: int
    tables: dict[str, TableSize]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """Configuration of every shard of a server group. ``gone_s``: a worker without connection for longer has left."""

    rule: Rule
    dense: RowOptimizer = SGD
    tables: tuple[TableSpec, ...] = ()
    gone_s: float = 30.0
    token: str = ""


class PsServer:
    """One shard. Thread-safe: each worker's connection has its thread; one lock guards all state, waits release it."""

    def __init__(self, spec: ServerSpec, *, clock: Clock | None = None) -> None:
        self.spec, self._clock = spec, clock or SystemClock()
        self._core = PsShard(rule=spec.rule)
        self._dense: Dense | None = None
        self._tables = {table.name: ParameterTable(table) for table in spec.tables}
        self._changed = threading.Condition()
        self._payloads: dict[tuple[int, int], Arrays] = {}
        self._granted: dict[int, int] = {}
        self._asked: dict[int, int] = {}  # a worker that asks again on a new connection replaces its older wait
        self._links: dict[int, int] = {}
        self._quiet_since_s: dict[int, float] = {}
        self._lead_max = 0
        self._tcp: _Tcp | None = None

    def join(self, worker: int, epoch: int) -> int:
        """Take part from the clock that is returned. Raises Fenced for an epoch that was replaced."""
        with self._changed:
            effects = self._handle(WorkerJoined(worker=worker, epoch=epoch))
            self._granted.pop(worker, None)
            return next(one.clock for one in effects if isinstance(one, AdmitWorker) and one.worker == worker)

    def leave(self, worker: int, epoch: int) -> None:
        """Take part no longer: the others do not wait for this worker."""
        with self._changed:
            self._handle(WorkerLeft(worker=worker, epoch=epoch))

    def turn(self, worker: int, epoch: int, clock: int, timeout_s: float) -> int:
        """Wait until iteration ``clock`` may run; the clock to run, perhaps a later one. Raises TimedOut, Fenced."""
        end_s = self._clock.monotonic_s() + timeout_s
        with self._changed:
            self._granted.pop(worker, None)
            mine = self._asked[worker] = self._asked.get(worker, 0) + 1
            self._handle(TurnAsked(worker=worker, epoch=epoch, clock=clock))
            while worker not in self._granted:
                left_s = end_s - self._clock.monotonic_s()
                if left_s <= 0:
                    raise TimedOut(
                        f"worker {worker} got no turn for clock {clock} in {timeout_s:g} s: {self._slowest()}"
                    )
                self._changed.wait(min(left_s, LOOK_S))
                self._drop_gone()
                replaced = self._core.epochs.get(worker, epoch) != epoch or self._asked[worker] != mine
                if replaced or worker not in self._core.clocks:
                    raise Fenced(f"worker {worker} of epoch {epoch} has left or was replaced", hint="join again")
            return self._granted.pop(worker)

    def offer_dense(self, weights: Floats) -> None:
        """The first values of this shard's dense range; the first offer counts."""
        with self._changed:
            if self._dense is None:
                self._dense = Dense(weights, self.spec.dense)

    def pull_dense(self) -> Floats:
        """A copy of the dense range. Raises BadInput before the first offer."""
        with self._changed:
            if self._dense is None:
                raise BadInput("pull_dense: no worker has offered dense weights", hint="call offer_dense first")
            return self._dense.weights.copy()

    def pull(self, table: str, ids: Ids) -> Floats:
        """Rows [N, dim] of a table. Raises BadInput for an unknown table, TableFull."""
        with self._changed:
            return self._table(table).pull(ids)

    def push(self, worker: int, epoch: int, clock: int, payload: Arrays) -> int:
        """Gradients of iteration ``clock``: ``dense``, ``ids:<table>`` with ``grads:<table>``; the clock that is next.

        A repeated push changes nothing. Raises Fenced, BadInput.
        """
        for name in payload:
            if name.startswith("ids:"):
                self._table(name[4:])
        with self._changed:
            fresh = (worker, clock) not in self._payloads and clock >= self._core.clocks.get(worker, 0)
            if fresh:
                self._payloads[worker, clock] = payload
            try:
                self._handle(GradientsPushed(worker=worker, epoch=epoch, clock=clock))
            except Fenced:
                if fresh:  # else it is the acknowledged push of a living worker
                    self._payloads.pop((worker, clock), None)
                raise
            return self._core.clocks[worker]

    def stats(self) -> ShardStats:
        """Counters of the shard."""
        with self._changed:
            core = self._core
            return ShardStats(
                clocks={str(worker): clock for worker, clock in sorted(core.clocks.items())},
                lead_max=self._lead_max,
                version=core.version,
                dropped=core.dropped,
                tables={name: TableSize(rows=len(each), bytes=each.bytes) for name, each in self._tables.items()},
            )

    def snapshot(self) -> State:
        """All that a shard needs to continue from here: nested dicts of arrays and numbers."""
        with self._changed:
            core = self._core
            epochs = {str(worker): epoch for worker, epoch in core.epochs.items()}
            return {
                "base": core.low, "version": core.version, "dropped": core.dropped, "epochs": epochs,
                "dense": self._dense.snapshot() if self._dense else {},
                "tables": {name: table.snapshot() for name, table in self._tables.items()},
            }  # fmt: skip

    def restore(self, kept: State) -> None:
        """Continue from a snapshot; workers join again and start at its clock."""
        with self._changed:
            epochs = {int(worker): int(epoch) for worker, epoch in kept["epochs"].items()}
            self._core = PsShard(rule=self.spec.rule, base=kept["base"], version=kept["version"], epochs=epochs)
            self._core.dropped = kept["dropped"]
            self._payloads.clear()
            if kept["dense"]:
                self._dense = Dense(kept["dense"]["weights"], self.spec.dense)
                self._dense.restore(kept["dense"])
            for name, table in self._tables.items():
                table.restore(kept["tables"][name])

    def _handle(self, event: PsEvent) -> list[PsEffect]:
        effects = self._core.handle(event)
        for effect in effects:
            match effect:
                case GrantTurn(worker=worker, clock=clock):
                    self._granted[worker] = clock
                    self._lead_max = max(self._lead_max, clock - self._core.low)
                case ApplyPushes(pushes=pushes, weight=weight):
                    self._apply([self._payloads.pop(push) for push in pushes], weight)
                case DropPush(worker=worker, clock=clock, why=why) if why != "REPEATED":
                    self._payloads.pop((worker, clock), None)
                case RefuseWorker(worker=worker, why=why):
                    raise Fenced(f"{type(event).__name__} of worker {worker}: {why}", hint="join again", worker=worker)
                case _:
                    pass
        self._changed.notify_all()
        return effects

    def _apply(self, payloads: list[Arrays], weight: float) -> None:
        """One update with the sum of the payloads, in their order."""
        dense = [one["dense"] for one in payloads if "dense" in one]
        if dense and self._dense is not None:
            total = dense[0].astype(np.float32)
            for one in dense[1:]:
                total += one
            self._dense.apply(total * np.float32(weight))
        for name, table in self._tables.items():
            given = [one for one in payloads if f"ids:{name}" in one]
            none = np.zeros((0, table.spec.dim), np.float32)
            ids = np.concatenate([np.zeros(0, np.int64), *(one[f"ids:{name}"] for one in given)])
            grads = np.concatenate([none, *(one[f"grads:{name}"] for one in given)])
            table.push(ids, grads * np.float32(weight))

    def _table(self, name: str) -> ParameterTable:
        if name not in self._tables:
            raise BadInput(f"table {name!r}: unknown", hint=f"the tables are {', '.join(self._tables) or 'none'}")
        return self._tables[name]

    def _slowest(self) -> str:
        clocks = self._core.clocks
        worker = min(clocks, key=lambda one: clocks[one], default=None)
        return "no worker is live" if worker is None else f"worker {worker} is at clock {clocks[worker]}"

    def _drop_gone(self) -> None:
        now_s = self._clock.monotonic_s()
        for worker, since_s in list(self._quiet_since_s.items()):
            if now_s - since_s > self.spec.gone_s:
                del self._quiet_since_s[worker]
                if worker in self._core.clocks:
                    self._handle(WorkerLeft(worker=worker, epoch=self._core.epochs[worker]))

    def linked(self, worker: int, change: int) -> None:
        """A connection of a worker opened (+1) or closed (-1)."""
        with self._changed:
            self._links[worker] = self._links.get(worker, 0) + change
            if self._links[worker] > 0:
                self._quiet_since_s.pop(worker, None)
            else:
                self._quiet_since_s[worker] = self._clock.monotonic_s()
                self._changed.notify_all()

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Take connections in threads of this process; the address ``host:port``.

        Raises BadInput for an address that other machines reach when the spec has no token.
        """
        if not self.spec.token and host not in LOOPBACK:
            hint = "give ServerSpec(token=...) and PsClient(token=...) the same secret, or listen at 127.0.0.1"
            raise BadInput(f"host={host}: other machines reach it, and the spec has no token", hint=hint)
        self._tcp = _Tcp((host, port), self)
        threading.Thread(target=self._tcp.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        port = self._tcp.server_address[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self, *, wait_s: float = 0.0) -> None:
        """Take no more connections, after up to ``wait_s`` for all workers to hang up."""
        with self._changed:
            self._changed.wait_for(lambda: not any(self._links.values()), wait_s)
        if self._tcp is not None:
            self._tcp.shutdown()
            self._tcp.server_close()
            self._tcp = None

    def answer(self, head: Json, arrays: Arrays) -> Answer:
        """One request as it came over the wire. Raises BadInput for an unknown ``op``, and as its method."""
        match head.get("op"):
            case "join":
                return {"clock": self.join(head["worker"], head["epoch"])}, {}
            case "leave":
                self.leave(head["worker"], head["epoch"])
                return {}, {}
            case "turn":
                clock = self.turn(head["worker"], head["epoch"], head["clock"], head["timeout_s"])
                return {"clock": clock}, {"dense": self.pull_dense()} if head["dense"] else {}
            case "offer":
                self.offer_dense(arrays["dense"])
                return {}, {}
            case "pull":
                return {}, {"rows": self.pull(head["table"], arrays["ids"])}
            case "push":
                return {"clock": self.push(head["worker"], head["epoch"], head["clock"], arrays)}, {}
            case "stats":
                return cast("Json", self.stats()), {}
            case "export":
                kept = self.snapshot()["tables"][head["table"]]
                return {}, {"ids": kept["ids"], "rows": kept["w"]}
            case other:
                raise BadInput(f"op {other!r}: unknown", hint=f"one of {OPS}")


class _Tcp(socketserver.ThreadingTCPServer):
    daemon_threads, allow_reuse_address = True, True

    def __init__(self, address: tuple[str, int], server: PsServer) -> None:
        self.ps, self.strangers = server, threading.Semaphore(STRANGERS_MAX)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Connection)

    def verify_request(self, request: object, client_address: object) -> bool:
        return self.strangers.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        with undone_if_raised(self.strangers.release):  # no thread could be started
            super().process_request(request, client_address)


class _Connection(socketserver.BaseRequestHandler):
    """The requests of one worker, one after the other."""

    def handle(self) -> None:
        server: PsServer = self.server.ps  # type: ignore[attr-defined]  # it is a _Tcp
        worker: int | None = None
        with contextlib.suppress(OSError, BadInput):
            try:
                worker = self._greet(server.spec.token)
                server.linked(worker, 1)
                while True:
                    head, arrays = receive(self.request)
                    try:
                        answer = server.answer(head, arrays)
                    except RotaError as error:
                        answer = {"error": error.code, "message": error.message, "hint": error.hint}, {}
                    send(self.request, *answer)
            finally:
                if worker is not None:
                    server.linked(worker, -1)

    def _greet(self, token: str) -> int:
        """The number of the worker that shows the token. Raises OSError, BadInput."""
        late = threading.Timer(HELLO_S, self._hang_up)  # after all of that time, also when bytes come one by one
        late.daemon = True
        try:
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            late.start()
            hello, _ = receive(self.request, head_max=HELLO_BYTES_MAX, body_max=0)
            if not hmac.compare_digest(str(hello.get("token")).encode(), token.encode()):
                raise BadInput("a wrong token")
            if not isinstance(worker := hello.get("worker"), int):
                raise BadInput(f"worker={worker!r}: not a number")
            return worker
        finally:
            late.cancel()
            self.server.strangers.release()  # type: ignore[attr-defined]  # it is a _Tcp

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.request.shutdown(socket.SHUT_RDWR)


_SIZES: Final = struct.Struct("<IQ")
HEAD_BYTES_MAX: Final = 1 << 20
BODY_BYTES_MAX: Final = 1 << 33


def send(link: socket.socket, head: Json, arrays: Arrays) -> int:
    """Write one message; its bytes."""
    packed = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    shapes = [(name, array.dtype.str, array.shape) for name, array in packed.items()]
    text = json.dumps({**head, "arrays": shapes}).encode()
    body = sum(array.nbytes for array in packed.values())
    link.sendall(_SIZES.pack(len(text), body) + text)
    for array in packed.values():
        if array.nbytes:
            link.sendall(array.reshape(-1).view(np.uint8).data)
    return _SIZES.size + len(text) + body


def receive(link: socket.socket, *, head_max: int = HEAD_BYTES_MAX, body_max: int = BODY_BYTES_MAX) -> Answer:
    """Read one message with a head of at most ``head_max`` bytes, and ``body_max`` bytes of arrays.

    Raises ConnectionError at its end, BadInput for a message that cannot be one.
    """
    head_bytes, body_bytes = _SIZES.unpack(receive_exactly(link, _SIZES.size))
    if head_bytes > head_max or body_bytes > body_max:
        raise BadInput(f"message of {head_bytes} + {body_bytes} bytes: the limit is {head_max} + {body_max}")
    text, body = receive_exactly(link, head_bytes), receive_exactly(link, body_bytes)
    try:
        head = json.loads(text)
        shapes = head.pop("arrays")
        return head, _unpacked(shapes, body)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BadInput(f"a head of {head_bytes} bytes that cannot be read: {error}") from error


def _unpacked(shapes: list[tuple[str, str, list[int]]], body: bytearray) -> Arrays:
    arrays: dict[str, Array] = {}
    at = 0
    for name, dtype, shape in shapes:
        if not all(type(one) is int and one >= 0 for one in shape):  # before anything is multiplied by it
            raise BadInput(f"array {name!r} of shape {shape}: not whole numbers from 0")
        kind = np.dtype(dtype)
        size = kind.itemsize * math.prod(shape)
        if kind.hasobject or at + size > len(body):
            raise BadInput(f"array {name!r} of {dtype} {shape} is not in the message")
        arrays[name] = np.frombuffer(body, kind, math.prod(shape), at).reshape(shape)
        at += size
    return arrays
