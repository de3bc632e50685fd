"""Tensor server of a machine: sends versions to other machines, straight from shared memory.

``python -m rota.tensors.server HOME HOST ADDRESS`` reads the key of the installation from its standard input and
listens at a free port of ``ADDRESS``, which it writes to ``store.json`` beside the namespaces. The first process of the
machine that needs it starts it; it exits as a keeper does. A connection begins with ``runtime.handshake``;
after that every request is answered in turn:

- ``get``: a version of a name, its manifest and its bytes. The first two machines that ask get them from here, later
  ones are sent to those two (``redirect``), which do the same: bytes leave this machine twice, whatever the number of
  readers. The version stays leased until the receiver acknowledges the last byte.
- ``bring``: fetch a version from another machine and keep it here.
- ``delete``: delete names here and wherever they were sent to. ``sweep``: all of a prefix but those of another.
- ``drop``: delete what a label published. ``stat``: what was sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rota.runtime import directory, environ, process
from rota.runtime.clock import SystemClock, blocking_sleep
from rota.runtime.handshake import AttemptGuard, HandshakeRefused, server_handshake_blocking
from rota.runtime.random import SystemRandom
from rota.spec.errors import NotReachable, RotaError
from rota.tensors import errors, messages, transport
from rota.tensors.api.store import DEFAULT_NAMESPACE, Plane
from rota.tensors.core import HEADER_BYTES, Fields
from rota.tensors.registry import Leased, ScriptRefused
from rota.tensors.segments import BlockHeader
from rota.tensors.session import is_last

CONNECTIONS_MAX: Final = 256
BRINGERS_MAX: Final = 8
CHILDREN: Final = 2
"""Machines that get a version from here; further ones get it from them."""
DOUBTS_MAX: Final = 2
"""Machines that could not reach another one before none is sent to it."""
_SENT_MAX: Final = 100_000
_TICK_S: Final = 0.2
_LONELY_S: Final = 1.0
_RECHECK_S: Final = 1.0
_WAIT_MAX_S: Final = 2.0
_IDLE_S: Final = 60.0
"""A connection over which nothing was asked for this long is closed: its machine may have vanished without a word."""


class TensorServer:
    """Answers the machines of an installation for the namespaces of one registry."""

    def __init__(self, home: environ.Home, url: str, own: directory.FixedDirectory) -> None:
        self._home, self._url, self._own = home, url, own
        self._planes = dict[str, Plane]()
        self._lock = threading.RLock()
        self._sent: OrderedDict[tuple[str, str, int, int], Receivers] = OrderedDict()
        self._guard = AttemptGuard()
        self._counts = {"sent_bytes": 0, "sent": 0, "redirected": 0, "refused": 0}
        self.serial = SystemRandom().new_id(48)
        family = socket.AF_INET6 if ":" in own.address else socket.AF_INET
        self._listen = socket.create_server((own.address, 0), family=family, backlog=CONNECTIONS_MAX)
        self.address = f"{own.address}:{self._listen.getsockname()[1]}"
        self._open = 0
        self._bringing = dict[tuple[str, str, object, int], Future[Fields]]()
        self._bringers = ThreadPoolExecutor(BRINGERS_MAX, thread_name_prefix="bring")
        own.register(self.address)

    def plane(self, namespace: str = DEFAULT_NAMESPACE) -> Plane:
        """The store of a namespace, joined at its first use."""
        with self._lock:
            if namespace not in self._planes:
                self._planes[namespace] = Plane.join(
                    self._home, self._url, namespace, sealed=False, keep=False, keeper=True
                )
            return self._planes[namespace]

    def serve_for(self, seconds: float) -> None:
        """Accept what comes within a while; each connection is answered by a thread of its own."""
        self._listen.settimeout(seconds)
        try:
            link, (address, *_) = self._listen.accept()
        except TimeoutError:
            return
        except OSError as error:  # of one connection, or too many open files: neither is a reason to end
            _say(f"a connection could not be taken: {error}")
            blocking_sleep(seconds)
            return
        if self._open >= CONNECTIONS_MAX or self._guard.closed(str(address)):
            self._counts["refused"] += 1
            link.close()
            return
        self._open += 1
        known = self._guard.suspects(str(address))
        threading.Thread(target=self._converse, args=(link, known), name=f"store-{address}", daemon=True).start()

    def _converse(self, link: socket.socket, known: bool) -> None:
        """Answer the requests of one connection; of a ``known`` suspect address no refusal is written."""
        try:
            link.settimeout(None)
            server_handshake_blocking(link, self._own.key(), messages.PURPOSE, self._guard)
            # At its end, what is still under way in the kernel may be memory of another version by then.
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            messages.limit_silence(link, _IDLE_S)
            while True:
                self._answer(link, messages.receive(link))
        except HandshakeRefused as refused:
            self._counts["refused"] += 1
            if not known:
                _say(str(refused))
        except OSError:
            pass  # the other side is done, or gone
        finally:
            link.close()
            self._open -= 1

    def _answer(self, link: socket.socket, request: Fields) -> None:
        """Handle one request; errors are sent back as the reply. Raises OSError."""
        operations: dict[str, Callable[[Plane, Fields], Fields]] = {
            "bring": self._bring, "delete": self._delete, "sweep": self._sweep, "drop": self._drop, "stat": self._stat,
        }  # fmt: skip
        try:
            plane = self.plane(str(request.get("namespace") or DEFAULT_NAMESPACE))
            op = str(request.get("op"))
            if op == "get":
                self._send(link, plane, request)
                return
            if op not in operations:
                raise errors.ProtocolBreach(f"op {op!r}: get, {', '.join(operations)}", rule="op")
            reply = {"ok": True, **operations[op](plane, request)}
        except RotaError as error:
            reply = {"ok": False, "error": error.code, "text": str(error)}
        except (KeyError, ValueError, TypeError) as error:
            reply = {"ok": False, "error": "BAD_REQUEST", "text": f"{type(error).__name__}: {error}"}
        link.sendall(messages.pack(reply))

    def _send(self, link: socket.socket, plane: Plane, request: Fields) -> None:
        """The version that is asked for, or where to ask. Raises TensorError before a byte is sent, OSError."""
        name, resume = str(request["name"]), request.get("resume") or {}
        if resume.get("serial") != self.serial:
            resume = {}
        select = f"v{int(resume['version'])}" if resume else str(request.get("select", ""))
        try:
            leased, parts = self._lease(plane, name, select, float(request.get("wait_s", 0.0)))
        except errors.WaitTimeout:
            if not (request.get("sent_here") and transport.is_coming(plane, name)):
                raise
            link.sendall(messages.pack({"ok": True, "coming": True}))
            return
        except errors.NotFound:
            if not resume:
                raise
            resume = {}  # what was sent in part is gone; the whole of a newer one may be here
            leased, parts = self._lease(plane, name, str(request.get("select", "")), 0.0)
        if leased.epoch < int(request.get("epoch_min", 0)):
            text = f"{name}: step {leased.step} is of epoch {leased.epoch}, wanted {request['epoch_min']} or later"
            raise errors.VersionGone(text, name=name)
        key = (plane.namespace, name, leased.epoch, leased.step)
        child = "" if resume else self._route(key, str(request.get("to", "")), list(request.get("failed", [])))
        if child:
            self._counts["redirected"] += 1
            link.sendall(messages.pack({"ok": True, "redirect": child}))
            return
        row = [[part.manifest.decode(), len(part.memory), part.rank, part.world] for part in parts]
        reply = {
            "ok": True, "serial": self.serial, "version": leased.version, "epoch": leased.epoch, "step": leased.step,
            "group": parts[0].group, "parts": row, "resumed": bool(resume),
        }  # fmt: skip
        skip = (int(resume.get("part", 0)), int(resume.get("at", 0)))
        messages.limit_silence(link)
        sent = messages.send_payload(link, messages.pack(reply), parts, skip)
        self._counts["sent_bytes"] += sent
        self._counts["sent"] += 1
        messages.receive(link)  # the lease of parts lives until the other side has it all
        messages.limit_silence(link, _IDLE_S)

    def _lease(self, plane: Plane, name: str, select: str, wait_s: float) -> tuple[Leased, list[LeasedPart]]:
        """Lease a version and find the bytes of its parts. Raises NotFound, VersionGone, WaitTimeout, WrongDevice."""
        reader, space = plane._session.reader, plane._session.space
        deadline_s = space.deadline_s(min(wait_s, _WAIT_MAX_S))
        while True:
            seen = space.table.creations
            try:
                (leased,), (held,) = space.retry(lambda: reader.lease([(name, select)], sealed=False))
                break
            except ScriptRefused as refused:
                left_s = deadline_s - space.clock.monotonic_s()
                if refused.code not in ("NOTFOUND", "BEHIND") or left_s <= 0:
                    reader._raise(refused, [(name, select)], wait_s)
                slot = int(refused.words[3]) if refused.code == "BEHIND" else 0
                reader.wait_change(slot, int(refused.words[1]) if slot else seen, min(left_s, _RECHECK_S))
        parts = list[LeasedPart]()
        for block, each in zip(leased.blocks, held, strict=True):
            raw = memoryview(each.holder)[each.base :]
            header = BlockHeader.unpack(raw[:HEADER_BYTES], block.seg, settled=False)
            if header.version != block.version:
                text = f"{block.seg}+{block.offset}: holds version {header.version}, the registry says {block.version}"
                raise errors.Corrupt(text, file=block.seg, field="version")
            manifest = bytes(raw[HEADER_BYTES : HEADER_BYTES + header.manifest_bytes])
            facts = json.loads(manifest)
            if facts.get("device") or facts.get("mutable"):
                what = f"on device {facts['device']}" if facts.get("device") else "written in place"
                raise errors.UnsupportedTensor(f"{name} is {what}; between machines go versions in shared memory")
            parts.append(
                LeasedPart(
                    path=space.segments.path(block.seg),
                    offset=block.offset + header.offset,
                    memory=raw[header.offset : header.offset + header.bytes],
                    manifest=manifest,
                    rank=header.part,
                    world=header.world,
                    group=header.group,
                    holder=each.holder,
                )
            )
        return leased, sorted(parts, key=lambda part: part.rank)

    def _route(self, key: tuple[str, str, int, int], to: str, failed: list[str]) -> str:
        """Where machine ``to`` gets a version: empty for here. ``failed`` are those it was sent to in vain."""
        with self._lock:
            receivers = self._sent.setdefault(key, Receivers())
            self._sent.move_to_end(key)
            while len(self._sent) > _SENT_MAX:
                self._sent.popitem(last=False)
            return receivers.route(to, failed)

    def _bring(self, plane: Plane, request: Fields) -> Fields:
        """Fetch a version in a thread of its own; ``coming`` while it is on its way, and the asker asks again."""
        step, epoch_min = request.get("step"), int(request.get("epoch_min", 0))
        key = (plane.namespace, str(request["name"]), step, epoch_min)

        def fetch() -> Fields:
            try:
                found = transport.pull(
                    plane, key[1], step=None if step is None else int(step), near=str(request["near"]),
                    epoch_min=epoch_min, wait_s=float(request.get("wait_s", 20.0)), as_="numpy",
                )  # fmt: skip
                return {"step": found.step, "epoch": found.epoch}  # without the version itself, which would stay leased
            finally:
                with self._lock:  # whoever asks now, also because the asker is gone, finds it in the store
                    del self._bringing[key]

        with self._lock:
            work = self._bringing.get(key)
            if work is None:
                work = self._bringing[key] = self._bringers.submit(fetch)
        try:
            return work.result(_RECHECK_S)
        except FutureTimeout:
            return {"coming": True}

    def _delete(self, plane: Plane, request: Fields) -> Fields:
        names = [str(name) for name in request["names"]]
        onward: dict[str, list[str]] = {}
        with self._lock:
            for key in [key for name in names for key in self._keys(plane.namespace, name)]:
                for store in self._sent.pop(key).stores:
                    onward.setdefault(store, []).append(key[1])
        for name in names:
            plane.delete(name, missing_ok=True)
        for store, sent in onward.items():  # a copy that cannot be reached goes with the job
            transport.notify(store, {"op": "delete", "namespace": plane.namespace, "names": sent})
        return {}

    def _keys(self, namespace: str, name: str) -> list[tuple[str, str, int, int]]:
        """What was sent of a name: a value that is deleted by name has one version, of epoch and step as published."""
        space = self.plane(namespace)._session.space
        row = space.retry(lambda: space.find_row(name))
        key = (namespace, name, row.epoch, row.step) if row is not None else None
        return [key] if key in self._sent else []

    def _sweep(self, plane: Plane, request: Fields) -> Fields:
        prefix, keep = str(request["prefix"]), str(request["keep"])
        gone = [row.name for row in plane.ls(prefix) if not row.name.startswith(keep)]
        for name in gone:
            plane.delete(name, missing_ok=True)
        return {"deleted": len(gone)}

    def _drop(self, plane: Plane, request: Fields) -> Fields:
        return {"deleted": plane.drop_label(str(request["label"]))}

    def _stat(self, plane: Plane, request: Fields) -> Fields:
        del request
        return {**self._counts, "serial": self.serial, "pid": os.getpid(), "names": len(plane.ls())}


@dataclass(slots=True)
class Receivers:
    """The machines to which a version was sent, in order, by the address of their tensor servers.

    The first ``CHILDREN`` of them get it from here; each later one from one of those. None is forgotten because an
    asker could not reach it, for what is deleted here is deleted there; it is passed over for that asker, and for all
    once ``DOUBTS_MAX`` machines said so.
    """

    stores: list[str] = field(default_factory=list[str])
    doubts: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def route(self, to: str, failed: Sequence[str]) -> str:
        """Where ``to`` gets the version: empty for here. ``failed`` are those it was sent to in vain."""
        if not to:
            return ""
        for store in failed:
            if store in self.stores:
                self.doubts.setdefault(store, set()).add(to)
        if to not in self.stores:
            self.stores.append(to)
        place = self.stores.index(to)
        before = [
            store
            for store in self.stores[:place]
            if store not in failed and len(self.doubts.get(store, ())) < DOUBTS_MAX
        ]
        return "" if len(before) < CHILDREN else before[place % CHILDREN]


class LeasedPart(messages.VersionPart):
    """A part whose lease lives as long as this does."""

    __slots__ = ("group", "holder")

    def __init__(
        self, *, path: Path, offset: int, memory: memoryview, manifest: bytes, rank: int, world: int, group: bool,
        holder: object,
    ) -> None:  # fmt: skip
        super().__init__(path=path, offset=offset, memory=memory, manifest=manifest, rank=rank, world=world)
        self.group, self.holder = group, holder


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the log of the server


def main() -> None:
    """Serve until the registry ends, the last client of one that is not kept has left, or a SIGTERM."""
    root, host, address = sys.argv[1:4]
    key = bytes.fromhex(sys.stdin.readline().strip())
    if os.fork():  # a grandchild is not ended together with the children of who started it
        os._exit(0)
    home, url = environ.Home.of(root), environ.get(environ.REDIS_URL)
    own = directory.FixedDirectory(host=host, address=address, secret=key)
    directory.use(own)
    server = TensorServer(home, url, own)
    plane = server.plane()
    session, clock = plane._session, SystemClock()
    identity = process.own_id()
    record = {"address": server.address, "pid": identity.pid, "start_time": identity.start_time}
    process.write_private(transport.record_of(plane), json.dumps({**record, "key": transport.mark_of(key)}))
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: ended.append(signum))
    alone_s = clock.monotonic_s()
    with contextlib.suppress(NotReachable, ScriptRefused, FileNotFoundError):
        while not ended and session.space.file.path.exists():
            server.serve_for(_TICK_S)
            if (now_s := clock.monotonic_s()) - alone_s >= _LONELY_S:
                alone_s = now_s
                if is_last(home, session.server, session.space.client):
                    plane.close()
                    return
    os._exit(0)  # whoever ended it waits for this, and sweeps what it leaves


if __name__ == "__main__":
    main()
