"""A worker's side of the parameter server: turns, pulls and pushes over all shards as one."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Final, cast

import numpy as np

from rota.runtime.clock import SystemClock, blocking_sleep
from rota.runtime.undo import undone_if_raised
from rota.spec.errors import BadInput, Fenced, RotaError, TimedOut, TrainError
from rota.train.plan.hardware import Json
from rota.train.ps.server import Answer, Arrays, ShardStats, receive, send
from rota.train.ps.table import Floats, Ids, TableFull, dense_range, owners

AGAIN_S: Final = 0.05
GRACE_S: Final = 10.0
"""How much longer than its own limit a server may take to answer."""
_ERRORS: Final[dict[str, type[RotaError]]] = {
    error.code: error for error in (BadInput, Fenced, TimedOut, TableFull)
}  # fmt: skip


class ServerLost(TrainError):
    """A server did not answer within ``retry_s``; field: address. Its state is that of its last snapshot."""

    code, http, exit = "PS_SERVER_LOST", 503, 3


class PsClient:
    """One worker in the server group at ``addresses``, in the order of the servers. Not thread-safe.

    An iteration is ``wait_turn``, pulls, pushes, ``tick``. Requests that got no answer are sent again after a new
    connection, for up to ``retry_s``; servers apply a repeated push once. One that does not take part has no clock:
    it pulls, exports and asks for stats alone. Raises ServerLost, Fenced, TimedOut.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        worker: int,
        *,
        epoch: int = 1,
        token: str = "",
        retry_s: float = 10.0,
        takes_part: bool = True,
    ) -> None:
        self.addresses, self.worker, self.epoch = tuple(addresses), worker, epoch
        self._links = [_Link(address, worker, token, retry_s) for address in addresses]
        self._clocks = [0] * len(self._links)
        self._takes_part = takes_part
        if takes_part:
            joined = self._ask_all([({"op": "join"}, {})] * len(self._links))
            self._clocks = [int(head["clock"]) for head, _ in joined]
        self._dense: list[Floats] = []
        self._pending: list[dict[str, list[Floats | Ids]]] = [{} for _ in self._links]

    @property
    def clock(self) -> int:
        """The iteration that runs or comes next."""
        return max(self._clocks)

    def offer_dense(self, flat: Floats) -> None:
        """First values [N] of the dense parameters; those of the first worker to offer count."""
        parts = self._split_dense(flat)
        self._ask_all([({"op": "offer"}, {"dense": part}) for part in parts])

    def wait_turn(self, timeout_s: float = 60.0, *, dense: bool = False) -> int:
        """Wait until every shard lets this worker run; the clock. ``dense`` fetches the dense weights with it."""
        heads = [{"op": "turn", "clock": clock, "timeout_s": timeout_s, "dense": dense} for clock in self._clocks]
        answers = self._ask_all([(head, {}) for head in heads], timeout_s)
        self._clocks = [int(head["clock"]) for head, _ in answers]
        self._dense = [arrays["dense"] for _, arrays in answers] if dense else []
        return self.clock

    def pull_dense(self) -> Floats:
        """The dense weights [N] that came with the turn."""
        if not self._dense:
            raise BadInput("pull_dense: the turn did not fetch them", hint="wait_turn(dense=True)")
        return np.concatenate(self._dense)

    def pull(self, table: str, ids: Ids) -> Floats:
        """Rows [N, dim] of ids [N]; each distinct id is asked for once."""
        distinct, back = np.unique(np.asarray(ids, np.int64), return_inverse=True)
        owner = owners(distinct, len(self._links))
        parts = [distinct[owner == server] for server in range(len(self._links))]
        answers = self._ask_all([({"op": "pull", "table": table}, {"ids": part}) for part in parts])
        rows = np.empty((len(distinct), answers[0][1]["rows"].shape[1]), np.float32)
        for server, (_, arrays) in enumerate(answers):
            rows[owner == server] = arrays["rows"]
        return rows[back]

    def push(self, table: str, ids: Ids, grads: Floats) -> None:
        """Gradients [N, dim] of rows, sent with the next ``tick``; those of equal ids are summed."""
        distinct, back = np.unique(np.asarray(ids, np.int64), return_inverse=True)
        summed = np.zeros((len(distinct), grads.shape[1]), np.float32)
        np.add.at(summed, back, grads)
        owner = owners(distinct, len(self._links))
        for server, pending in enumerate(self._pending):
            pending.setdefault(f"ids:{table}", []).append(distinct[owner == server])
            pending.setdefault(f"grads:{table}", []).append(summed[owner == server])

    def push_dense(self, grads: Floats) -> None:
        """Gradients [N] of the dense weights, sent with the next ``tick``."""
        for pending, part in zip(self._pending, self._split_dense(grads), strict=True):
            pending["dense"] = [part]

    def tick(self) -> None:
        """Send what was pushed, which may be nothing, and finish the iteration."""
        payloads = [{name: np.concatenate(parts) for name, parts in one.items()} for one in self._pending]
        heads = [{"op": "push", "clock": clock} for clock in self._clocks]
        answers = self._ask_all(list(zip(heads, payloads, strict=True)))
        self._clocks = [int(head["clock"]) for head, _ in answers]
        self._pending = [{} for _ in self._links]

    def export(self, table: str) -> tuple[Ids, Floats]:
        """All ids [N] and rows [N, dim] of a table."""
        answers = self._ask_all([({"op": "export", "table": table}, {})] * len(self._links))
        return tuple(np.concatenate([arrays[name] for _, arrays in answers]) for name in ("ids", "rows"))  # type: ignore[return-value]  # two

    def stats(self) -> list[ShardStats]:
        """``PsServer.stats`` of each shard."""
        return [cast("ShardStats", head) for head, _ in self._ask_all([({"op": "stats"}, {})] * len(self._links))]

    def close(self, *, leave: bool = True) -> None:
        """Hang up; with ``leave`` others stop waiting for this worker."""
        if leave and self._takes_part:
            with contextlib.suppress(ServerLost, Fenced):
                self._ask_all([({"op": "leave"}, {})] * len(self._links))
        self._hang_up()

    def _hang_up(self) -> None:
        for link in self._links:
            link.close()

    def _split_dense(self, flat: Floats) -> list[Floats]:
        count = len(self._links)
        spans = [dense_range(len(flat), count, server) for server in range(count)]
        return [flat[begin:end] for begin, end in spans]

    def _ask_all(self, requests: Sequence[Answer], timeout_s: float = 0.0) -> list[Answer]:
        """Ask every server at once; their answers in order."""
        # No answer may be left on a line: the next request would take it for its own.
        with undone_if_raised(self._hang_up):
            for link, (head, arrays) in zip(self._links, requests, strict=True):
                link.begin({**head, "worker": self.worker, "epoch": self.epoch}, arrays, timeout_s + GRACE_S)
            answers = [link.finish() for link in self._links]
        for head, _ in answers:
            if "error" in head:
                raise _ERRORS.get(head["error"], RotaError)(head["message"], hint=head["hint"])
        return answers


class _Link:
    """The connection to one server."""

    def __init__(self, address: str, worker: int, token: str, retry_s: float) -> None:
        self._address, self._retry_s, self._clock = address, retry_s, SystemClock()
        self._hello = {"token": token, "worker": worker}
        self._line: socket.socket | None = None
        self._request: tuple[Json, Arrays, float] = ({}, {}, 0.0)

    def begin(self, head: Json, arrays: Arrays, timeout_s: float) -> None:
        self._request = (head, arrays, timeout_s)
        if self._line is not None:
            with contextlib.suppress(OSError):  # finish() sends it again
                self._send(self._line)

    def finish(self) -> Answer:
        end_s = self._clock.monotonic_s() + self._retry_s
        while True:
            try:
                if self._line is None:
                    self._line = self._connect()
                    self._send(self._line)
                return receive(self._line)
            except OSError as error:
                self.close()
                if self._clock.monotonic_s() > end_s:
                    text = f"parameter server {self._address} gave no answer for {self._retry_s:g} s: {error}"
                    raise ServerLost(text, address=self._address) from error
                blocking_sleep(AGAIN_S)

    def _connect(self) -> socket.socket:
        host, _, port = self._address.rpartition(":")
        line = socket.create_connection((host.strip("[]"), int(port)), timeout=self._retry_s)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send(line, self._hello, {})
        return line

    def _send(self, line: socket.socket) -> None:
        head, arrays, timeout_s = self._request
        line.settimeout(timeout_s)
        send(line, head, arrays)

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
