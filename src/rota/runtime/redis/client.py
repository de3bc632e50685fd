"""A small, fast socket client of the Redis protocol: one socket a thread, scripts by hash, reconnect once."""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import hiredis

from rota.spec.errors import BadInput, RegistryUnavailable

Argument = bytes | str | int
"""What a command may hold."""
Exchange = Callable[[Sequence[tuple[Argument, ...]]], list[Any]]
"""Sends commands over one connection; their replies."""
_RECEIVE_BYTES = 65_536
_SILENT_S = 1.0
_DEFAULT_PORT = 6379


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryAddress:
    """Where a registry server listens: a unix socket, or a host and port; with its database and credentials."""

    path: str = ""
    host: str = ""
    port: int = _DEFAULT_PORT
    db: int = 0
    user: str = ""
    password: str = ""

    @staticmethod
    def parse(url: str) -> RegistryAddress:
        """Read ``unix:///path?db=0`` or ``redis://[user:password@]host[:port][/db]``. Raises BadInput otherwise."""
        try:
            parts = urlsplit(url)
            query = parse_qs(parts.query)
            user, password = unquote(parts.username or ""), unquote(parts.password or "")
            if parts.scheme == "unix" and parts.path:
                return RegistryAddress(path=parts.path, db=int(query.get("db", ["0"])[0]), user=user, password=password)
            if parts.scheme == "redis" and parts.hostname:
                db, port = int(parts.path.lstrip("/") or 0), parts.port or _DEFAULT_PORT
                return RegistryAddress(host=parts.hostname, port=port, db=db, user=user, password=password)
        except ValueError:  # a port or database that is not a number is refused below, as every other form
            pass
        shown = url.rpartition("@")[2]  # a password is shown nowhere
        raise BadInput(f"registry URL ...{shown!r}: unix:///PATH?db=N or redis://HOST:PORT/DB")

    @property
    def url(self) -> str:
        """The address without its credentials; also its identity."""
        return f"unix://{self.path}?db={self.db}" if self.path else f"redis://{self.host}:{self.port}/{self.db}"


class Script:
    """A Lua script and its SHA-1, by which the server is asked to run it."""

    __slots__ = ("body", "name", "sha")

    def __init__(self, name: str, body: str) -> None:
        self.name = name
        self.body = body
        self.sha = hashlib.sha1(body.encode(), usedforsecurity=False).hexdigest()

    @staticmethod
    def load(folder: Path, name: str, *, prelude: str = "prelude") -> Script:
        """The script ``name.lua`` of a folder, after its shared ``prelude.lua``."""
        return Script(name, (folder / f"{prelude}.lua").read_text() + (folder / f"{name}.lua").read_text())


class ReplyError(Exception):
    """The server answered with an error; ``code`` is its first word, ``words`` the rest."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code, *self.words = text.split()


class _Connection:
    """One socket with its parser."""

    def __init__(self, address: RegistryAddress, timeout_s: float, silent: Callable[[], None] | None = None) -> None:
        self._timeout_s, self._silent = timeout_s, silent
        if address.path:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.settimeout(timeout_s)
            self.socket.connect(address.path)
        else:
            self.socket = socket.create_connection((address.host, address.port), timeout=timeout_s)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(None)  # the kernel keeps the limits: with Python's own each call polls first
        for option, limit_s in ((socket.SO_RCVTIMEO, min(_SILENT_S, timeout_s)), (socket.SO_SNDTIMEO, timeout_s)):
            whole_s, part_us = divmod(ceil(1e6 * limit_s), 10**6)
            self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole_s, part_us))
        self.reader = hiredis.Reader()
        if address.password:
            self.exchange([("AUTH", address.user or "default", address.password)])
        if address.db:
            self.exchange([("SELECT", address.db)])

    def exchange(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Send all commands in one write, then read as many replies; error replies come back as values."""
        # pack_command crashes when a signal's handler raises while it writes a number, which is therefore written here
        texts = [tuple([str(w) if isinstance(w, int) else w for w in command]) for command in commands]
        packed = [hiredis.pack_command(each) for each in texts]  # pyright: ignore[reportArgumentType] - its stub wants a tuple of one word
        try:
            self.socket.sendall(b"".join(packed))
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        return [self._read() for _ in commands]

    def _receive(self) -> bytes:
        """The next bytes. ``silent`` is called for each second without any."""
        until_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return self.socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise TimeoutError("timed out") from None
                if self._silent is not None:
                    self._silent()

    def _read(self) -> Any:
        while (reply := self.reader.gets()) is False:
            chunk = self._receive()
            if not chunk:
                raise ConnectionError("the registry closed the connection")
            self.reader.feed(chunk)
        return reply

    def close(self) -> None:
        if hasattr(self, "socket"):  # else it was never made
            self.socket.close()

    __del__ = close


class RedisClient:
    """Commands to one server; thread-safe, since each thread has a socket of its own.

    A command whose reply was lost is sent once more over a new socket: callers make every command repeatable. Raises
    RegistryUnavailable when the server cannot be reached or does not answer within ``timeout_s``, ReplyError when it
    refuses. ``on_connect`` is called with each new connection before any command goes over it, ``silent`` for each
    second that a command waits for its answer.
    """

    def __init__(
        self,
        address: RegistryAddress,
        *,
        timeout_s: float = 10.0,
        on_connect: Callable[[Exchange], None] | None = None,
        silent: Callable[[], None] | None = None,
    ) -> None:
        self.address = address
        self._silent = silent
        self._on_connect = on_connect
        self._timeout_s = timeout_s
        self._local = threading.local()
        self._open: weakref.WeakSet[_Connection] = weakref.WeakSet()  # a thread's socket ends with its thread
        self._lock = threading.RLock()

    def call(self, *command: Argument) -> Any:
        """Run one command."""
        return _checked(self._exchange([command])[0])

    def pipeline(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Run commands in one round trip. Raises the first refusal after all were read."""
        return [_checked(reply) for reply in self._exchange(commands)]

    def run(self, script: Script, key: str, *args: Argument) -> Any:
        """Run a script by its hash; the server is taught it when it does not know it."""
        command = ("EVALSHA", script.sha, 1, key, *args)
        reply = self._exchange([command])[0]
        if _is_unknown(reply):
            self.call("SCRIPT", "LOAD", script.body)
            return self.call(*command)
        return _checked(reply)

    def run_many(self, script: Script, key: str, calls: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Run a script once for each tuple of arguments, in one round trip; refusals come back as values."""
        commands = [("EVALSHA", script.sha, 1, key, *args) for args in calls]
        replies = self._exchange(commands)
        if unknown := [at for at, reply in enumerate(replies) if _is_unknown(reply)]:
            self.call("SCRIPT", "LOAD", script.body)
            for at, reply in zip(unknown, self._exchange([commands[at] for at in unknown]), strict=True):
                replies[at] = reply
        return [ReplyError(str(reply)) if isinstance(reply, hiredis.ReplyError) else reply for reply in replies]

    def close(self) -> None:
        """Close the sockets of all threads."""
        with self._lock:
            connections = list(self._open)
            self._open.clear()
        for connection in connections:
            connection.close()
        self._local = threading.local()

    def _exchange(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Send on the connection of this thread, or on one of its own for a handler or finalizer that interrupts.

        A connection with replies that were not read is never used again.
        """
        local = self._local
        connection: _Connection | None = local.__dict__.pop("connection", None)
        if connection is not None:
            try:
                replies = connection.exchange(commands)
            except TimeoutError:
                raise self._unavailable("no answer in time") from None
            except OSError:  # the server went away or was started anew: the command is repeatable, ask once more
                connection = None
            else:
                local.connection = connection
                return replies
        try:
            connection = self._connect()
            replies = connection.exchange(commands)
        except OSError as error:
            raise self._unavailable(str(error)) from error
        local.connection = connection
        return replies

    def _connect(self) -> _Connection:
        connection = _Connection(self.address, self._timeout_s, self._silent)
        if self._on_connect is not None:
            try:
                self._on_connect(lambda commands: [_checked(reply) for reply in connection.exchange(commands)])
            except ReplyError as error:  # it is still loading what it had written
                raise self._unavailable(str(error)) from None
        with self._lock:
            self._open.add(connection)
        return connection

    def _unavailable(self, why: str) -> RegistryUnavailable:
        return RegistryUnavailable(
            f"tensor registry at {self.address.url}: {why}", hint="rota doctor, or rota tensors recover"
        )


def _is_unknown(reply: Any) -> bool:
    """True when the server was not taught the script that it should run."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT")


def _checked(reply: Any) -> Any:
    if isinstance(reply, hiredis.ReplyError):
        raise ReplyError(str(reply))
    return reply
