"""The process that owns one device's memory for one namespace, and gives it to versions as long as they live.

``python -m rota.tensors.keeper HOME NAMESPACE DRIVER UUID`` is started by the first process that needs it. It answers
JSON lines on a unix socket: ``take`` (a range for a version), ``descriptor`` (of a slab of host memory, sent along),
``blocks`` (what it gave), ``stat``. It gets no command to free: after each event it asks the
registry which of its versions are gone. A killed client thus costs nothing; when the keeper is killed its versions are
lost, and a get says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Final

from rota.runtime import environ
from rota.runtime.clock import blocking_sleep
from rota.runtime.process import write_private
from rota.spec.errors import RegistryUnavailable, RotaError
from rota.tensors import errors
from rota.tensors.api.store import Plane
from rota.tensors.core import (
    PAYLOAD_BYTES_MAX,
    Fields,
    Range,
    Slabs,
    count_of,
    slab_bytes,
)
from rota.tensors.devices.client import load, socket_folder
from rota.tensors.locks import take_if_dead
from rota.tensors.registry import ScriptRefused
from rota.tensors.session import is_last

_TICK_S: Final = 0.05
_LONELY_S: Final = 1.0
_IDLE_S: Final = 30.0
_FULL_TRIES: Final = 10
_LINE_BYTES_MAX: Final = 1 << 16
_SLAB: Final = "ROTA_TENSORS_SLAB_BYTES"


class DeviceKeeper:
    """The slabs of one device and which version has which range of them."""

    def __init__(self, plane: Plane, driver: str, uuid: str) -> None:
        self._plane, self._space = plane, plane._session.space
        self.driver, self.uuid = load(driver), uuid
        self._device = self.driver.uuids().index(uuid)
        self._folder = self._space.folder / "k"
        self._addresses: dict[str, int] = {}
        self._idle_since: dict[str, float] = {}
        self._seen = ""
        self._count = 0
        self._slab_bytes = count_of(_SLAB, environ.get(_SLAB, str(self.driver.slab_bytes)), 0, PAYLOAD_BYTES_MAX)
        self.slabs = Slabs()
        self.blocks: dict[int, Range] = {}

    def answer(self, words: Fields) -> Fields:
        """One command; a refusal is an answer too."""
        try:
            match words.get("op"):
                case "take":
                    return self.take(int(words["version"]), int(words["bytes"]))
                case "descriptor" if self.driver.host:
                    handle = self.driver.export(self._addresses[str(words["slab"])])
                    return {"descriptor": int.from_bytes(handle, "little")}
                case "blocks":
                    self.free_gone()
                    return {"blocks": [[v, each.slab, each.offset, each.size] for v, each in self.blocks.items()]}
                case "stat":
                    total = sum(self.slabs.sizes.values())
                    facts = {"slabs": len(self.slabs.sizes), "bytes": total, "free_bytes": self.slabs.free_bytes}
                    return {**facts, "keeper": self._space.client, "pid": os.getpid()}
                case other:
                    return {"error": f"op {other!r}: take, descriptor, blocks or stat"}
        except errors.ProtocolBreach as error:
            return {"error": str(error), "rule": error.fields.get("rule", "")}
        except (RotaError, KeyError, ValueError, TypeError) as error:
            return {"error": str(error)}

    def take(self, version: int, size: int) -> Fields:
        """A range for a version; the same one when it is asked for again. Raises OutOfMemory."""
        found = self.blocks.get(version)
        if found is None:
            found = self.slabs.take(size) or self._grow(size)
            address = self._addresses[found.slab] + found.offset
            try:
                self.driver.reuse(address, found.size)
            except errors.ProtocolBreach:
                self.slabs.give(found)
                raise
            self.blocks[version] = found
        return {"keeper": self._space.client, "slab": found.slab, "offset": found.offset, "bytes": found.size}

    def free_gone(self) -> int:
        """Free the ranges of versions that the registry knows no more; how many."""
        if not self.blocks:
            return 0
        gone = self._space.retry(lambda: self._space.registry.gone(self.blocks))
        for version in gone:
            self.slabs.give(self.blocks.pop(version))
        return len(gone)

    def tick(self, now_s: float) -> None:
        """Free what is gone, if anything happened; give back slabs that were free for long and are open nowhere."""
        seen = self._space.retry(self._plane._session.machine.last_event)
        if seen != self._seen:
            self._seen = seen
            self.free_gone()
        idle = set(self.slabs.idle())
        self._idle_since = {slab: since for slab, since in self._idle_since.items() if slab in idle}
        for slab in idle:
            if now_s - self._idle_since.setdefault(slab, now_s) >= _IDLE_S:
                self._drop(slab)

    def close(self) -> None:
        """Free all that no process has open; the rest goes with this process."""
        for slab in list(self._addresses):
            self._drop(slab)

    def _grow(self, size: int) -> Range:
        """Room for ``size`` bytes: what was freed a moment ago, else a new slab."""
        self.free_gone()
        found = self.slabs.take(size)
        for attempt in range(_FULL_TRIES):
            if found is not None:
                return found
            try:
                return self._add(size, self._slab_bytes)
            except errors.OutOfMemory:
                with contextlib.suppress(errors.OutOfMemory):  # a device nearly full has room for this alone, maybe
                    return self._add(size, 0)
                if attempt == _FULL_TRIES - 1:
                    raise
                blocking_sleep(_TICK_S / 10)  # leases of the dead and views just dropped end within milliseconds
                self.free_gone()
                found = self.slabs.take(size)
        raise AssertionError("unreachable")

    def _add(self, size: int, preferred: int) -> Range:
        slab_size = slab_bytes(size, preferred)
        address = self.driver.allocate(self._device, slab_size)
        self._count += 1
        slab = f"{self._space.client}.{self._count}"
        facts = {"handle": self.driver.export(address).hex(), "bytes": slab_size, "device": self.uuid}
        write_private(self._folder / slab, json.dumps(facts))
        self._addresses[slab] = address
        self.slabs.add(slab, slab_size)
        found = self.slabs.take(size)
        assert found is not None
        return found

    def _drop(self, slab: str) -> None:
        """Free one slab unless an importer has it open, which its lock on the slab's file shows."""
        fd = take_if_dead(self._folder, slab)
        if fd is not None:
            (self._folder / slab).unlink()
            self.slabs.remove(slab)
            self._idle_since.pop(slab, None)
            self.driver.free(self._addresses.pop(slab))
            os.close(fd)


class KeeperServer:
    """Answers clients of a keeper, one line at a time."""

    def __init__(self, keeper: DeviceKeeper, folder: Path) -> None:
        self._keeper = keeper
        self._select = selectors.DefaultSelector()
        self._partial: dict[socket.socket, bytes] = {}
        self._listen = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = folder / f"{keeper.uuid}.sock"
        path.unlink(missing_ok=True)
        with socket_folder(folder) as near:
            self._listen.bind(f"{near}/{path.name}")
        path.chmod(environ.PRIVATE_FILE)
        self._listen.listen(64)
        self._select.register(self._listen, selectors.EVENT_READ)

    def serve_for(self, seconds: float) -> None:
        """Answer what comes within a while."""
        for key, _ in self._select.select(seconds):
            if key.fileobj is self._listen:
                client, _ = self._listen.accept()
                client.settimeout(1.0)
                self._partial[client] = b""
                self._select.register(client, selectors.EVENT_READ)
            elif isinstance(key.fileobj, socket.socket):
                self._read(key.fileobj)

    def _read(self, client: socket.socket) -> None:
        try:
            data = client.recv(_LINE_BYTES_MAX)
            *lines, rest = (self._partial[client] + data).split(b"\n")
            self._partial[client] = rest
            for line in lines:
                try:
                    reply = self._keeper.answer(json.loads(line))
                except (ValueError, AttributeError) as error:
                    reply = {"error": f"no JSON object: {error}"}
                raw = json.dumps(reply).encode() + b"\n"
                if "descriptor" in reply:
                    socket.send_fds(client, [raw], [int(reply["descriptor"])])
                else:
                    client.sendall(raw)
            if data and len(rest) <= _LINE_BYTES_MAX:
                return
        except OSError:
            pass
        self._select.unregister(client)
        del self._partial[client]
        client.close()


def main() -> None:
    """Keep a device until the last client of the namespace left, its registry ended, or a SIGTERM."""
    root, namespace, driver, uuid = sys.argv[1:5]
    home, url = environ.Home.of(root), environ.get(environ.REDIS_URL)
    plane = Plane.join(home, url, namespace, sealed=False, keep=False, keeper=True)
    session, clock = plane._session, plane._session.clock
    keeper = DeviceKeeper(plane, driver, uuid)
    server = KeeperServer(keeper, session.space.folder / "k")
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: ended.append(signum))
    alone_s = clock.monotonic_s()
    with contextlib.suppress(RegistryUnavailable, ScriptRefused, FileNotFoundError):
        while True:
            server.serve_for(_TICK_S)
            if ended or not session.space.file.path.exists():
                break
            keeper.tick(now_s := clock.monotonic_s())
            if now_s - alone_s >= _LONELY_S:
                alone_s = now_s
                if is_last(home, session.server, session.space.client):
                    keeper.close()
                    plane.close()
                    return
    keeper.close()
    os._exit(0)  # whoever ended it waits for this, and sweeps what it leaves


if __name__ == "__main__":
    main()
