"""Bridge for other languages: JSON commands from a Redis list, answered in another; bytes are mapped from a file.

A command is pushed to ``{namespace}:tensor:cmd`` (namespace ``default``: also ``tensor:cmd``) and, when it has an
``id``, answered in ``tensor:reply:<id>`` under the same prefix. What a client leases and has not committed yet
ends ``ttl_s`` after its last command: so a dead client is cleaned up without a disconnect. Each command is done at
most once.
"""

from __future__ import annotations

import json
import logging
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rota.runtime.clock import Clock, SystemClock, blocking_sleep
from rota.runtime.redis.client import RedisClient
from rota.spec.errors import BadInput, LimitExceeded, RegistryUnavailable, RotaError
from rota.tensors import errors
from rota.tensors.api.store import DEFAULT_NAMESPACE, Plane
from rota.tensors.arrays import dtype_name, load_torch
from rota.tensors.core import Fields, Json, Tensor, long_dtype, short_dtype

WAITING_MAX: Final = 10_000
_COMMAND_BYTES_MAX: Final = 1 << 16
_CLIENTS_MAX: Final = 1024
_HELD_MAX: Final = 4096
_POLL_S: Final = 0.25
_REPLY_S: Final = 60
_AWAY_S_MAX: Final = 60.0
_QUIET_S: Final = 5.0

log = logging.getLogger(__name__)

_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{0,64}$")]


class BridgeCommand(BaseModel):
    """One command. ``device`` -1 is the CPU; ``step`` and ``version`` as in ``Plane.put`` and ``Plane.get``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    op: Literal["create", "commit", "get", "release", "delete", "join", "renew", "leave", "stat"]
    name: str = ""
    dtype: str = ""
    shape: list[int] = Field(default=[], max_length=16)
    device: Literal[-1] = -1
    commit: bool = False
    step: int | None = Field(default=None, ge=-(1 << 53), le=1 << 53)
    version: int | None = Field(default=None, ge=1, le=1 << 53)
    id: _Word = ""
    client: _Word = ""
    ttl_s: float = Field(default=60.0, gt=0, le=86_400)


_Draft: TypeAlias = tuple[AbstractContextManager[Tensor], Tensor]
"""A version that is being written: what ends it, and its memory."""


@dataclass(slots=True)
class _Client:
    """What one client of the bridge has: leased views by version, tensors being written by name."""

    until_s: float
    views: dict[int, tuple[str, Tensor]] = field(default_factory=dict[int, tuple[str, Tensor]])
    drafts: dict[str, _Draft] = field(default_factory=dict[str, "_Draft"])

    def check_room(self) -> None:
        """Raise LimitExceeded when this client has as much as one may have."""
        if len(self.views) + len(self.drafts) >= _HELD_MAX:
            raise LimitExceeded(f"this client holds {_HELD_MAX} tensors", hint="release or commit some")

    def release(self, name: str, version: int | None = None) -> None:
        """End the leases on a name, or on one version of it."""
        for held in [v for v, (of, _) in self.views.items() if of == name and version in (None, v)]:
            del self.views[held]

    def abort(self, name: str) -> None:
        """Give up what is being written under a name."""
        draft = self.drafts.pop(name, None)
        if draft is not None:
            given_up = errors.Aborted(f"{name}: given up before its commit", name=name)
            try:
                draft[0].__exit__(errors.Aborted, given_up, None)
            except errors.Aborted as error:
                if error is not given_up:
                    raise


class Bridge:
    """Serves the commands of one namespace with one tensor store, in the thread that calls ``run``."""

    def __init__(self, plane: Plane, *, clock: Clock | None = None) -> None:
        self._plane, self._clock = plane, clock or SystemClock()
        self._redis = RedisClient(plane.address)
        load_torch()  # not with the first command: whoever sent it waits
        self._clients: dict[str, _Client] = {}
        prefixes = [f"{{{plane.namespace}}}:", *([""] if plane.namespace == DEFAULT_NAMESPACE else [])]
        self.lists = [f"{prefix}tensor:cmd" for prefix in prefixes]
        self.done = self.refused = 0
        self._quiet_until_s = 0.0

    def run(self, stop: threading.Event | None = None) -> None:
        """Serve until ``stop`` is set. Raises RegistryUnavailable when the registry stays away for a minute."""
        last_s = self._clock.monotonic_s()
        try:
            while stop is None or not stop.is_set():
                try:
                    self.serve_one()
                    last_s = self._clock.monotonic_s()
                except RegistryUnavailable:
                    if self._clock.monotonic_s() - last_s > _AWAY_S_MAX:
                        raise
                    blocking_sleep(_POLL_S)
        finally:
            self.close()

    def serve_one(self, wait_s: float = _POLL_S) -> bool:
        """Do one command, waiting for it; False when none came. Clients whose time is over are ended."""
        counts = [("LLEN", key) for key in self.lists]
        popped, *waiting = self._redis.pipeline([("BRPOP", *self.lists, str(wait_s)), *counts])
        self._end_silent()
        if popped is None:
            return False
        key, raw = popped
        reply_id, reply = self._answer(raw, sum(waiting))
        if reply_id:
            to = f"{key.decode().removesuffix('cmd')}reply:{reply_id}"
            self._redis.pipeline([("RPUSH", to, json.dumps({"id": reply_id, **reply})), ("EXPIRE", to, _REPLY_S)])
        return True

    def close(self) -> None:
        """End every client."""
        for client in list(self._clients):
            self._end(client)
        self._redis.close()

    def _answer(self, raw: bytes, waiting: int) -> tuple[str, Fields]:
        """The reply to one command, and where it goes. Whatever was sent, the bridge continues."""
        reply_id = ""
        try:
            words = _parse(raw)
            reply_id = _reply_id(words.get("id"))
            if waiting > WAITING_MAX:
                raise LimitExceeded(f"{waiting} commands are waiting, the limit is {WAITING_MAX}")
            reply = self._do(BridgeCommand.model_validate(words))
            self.done += 1
            return reply_id, {"ok": True, **reply}
        except ValidationError as error:
            refusal: RotaError = _fault(error)
        except RotaError as error:
            refusal = error
        self.refused += 1
        now_s = self._clock.monotonic_s()
        if not reply_id and now_s >= self._quiet_until_s:  # its sender waits for no answer
            self._quiet_until_s = now_s + _QUIET_S
            log.warning("a command without id was refused (%d so far): %s: %.200r", self.refused, refusal, raw[:200])
        return reply_id, {"ok": False, "error": refusal.code, "message": str(refusal)}

    def _do(self, command: BridgeCommand) -> Fields:
        client = self._client(command)
        match command.op:
            case "create":
                return self._create(client, command)
            case "commit":
                return self._commit(client, command.name)
            case "get":
                client.check_room()
                view = self._plane.get(command.name, version=command.version, sealed=False, as_="torch")
                return self._held(client, command.name, view)
            case "release":
                client.release(command.name, command.version)
            case "delete":
                client.abort(command.name)
                client.release(command.name)
                self._plane.delete(command.name)
            case "stat":
                return self._stat(command.name)
            case "leave":
                self._end(command.client)
            case "join" | "renew":
                pass
        return {"name": command.name}

    def _create(self, client: _Client, command: BridgeCommand) -> Fields:
        """Memory for a new version: pending, or with ``commit`` published at once, zero-filled and mutable."""
        name, dtype = command.name, long_dtype(command.dtype)
        client.abort(name)
        client.check_room()
        draft = self._plane.create(name, command.shape, dtype, step=command.step, mutable=command.commit)
        view = draft.__enter__()
        client.drafts[name] = draft, view
        if command.commit:
            view.zero_()
            return self._commit(client, name)
        return {"state": "pending", **self._describe(name, view)}

    def _commit(self, client: _Client, name: str) -> Fields:
        if name not in client.drafts:
            raise errors.NotFound(f"this client writes no tensor {name!r}", hint="create it first", name=name)
        draft, view = client.drafts.pop(name)
        draft.__exit__(None, None, None)
        return self._held(client, name, view)

    def _held(self, client: _Client, name: str, view: Tensor) -> Fields:
        described = self._describe(name, view)
        client.views[described["version"]] = name, view
        return {"state": "ready", **described}

    def _describe(self, name: str, view: Tensor) -> Fields:
        """A tensor and where its bytes lie; an empty one lies nowhere."""
        found, place = self._plane.version_of(view), self._plane.find_place(view)
        return {
            "name": name,
            "version": found[1] if found else self._plane.info(name).version,
            "dtype": short_dtype(dtype_name(view.dtype)),
            "shape": list(view.shape),
            "device": -1,
            "bytes": view.nbytes,
            "seg": str(place[0]) if place else "",
            "offset": place[1] if place else 0,
        }

    def _stat(self, name: str) -> Fields:
        row = self._plane.info(name)
        facts = {"version": row.version, "state": row.state, "step": row.step, "bytes": row.payload}
        return {"name": name, **facts, "leases": row.refs, "device": -1, **json.loads(row.desc or "{}")}

    def _client(self, command: BridgeCommand) -> _Client:
        until_s = self._clock.monotonic_s() + command.ttl_s
        client = self._clients.get(command.client)
        if client is None:
            if len(self._clients) >= _CLIENTS_MAX:
                raise LimitExceeded(f"{_CLIENTS_MAX} clients are connected", hint="leave, or choose a short ttl_s")
            client = self._clients[command.client] = _Client(until_s)
        client.until_s = until_s
        return client

    def _end_silent(self) -> None:
        now_s = self._clock.monotonic_s()
        for name in [name for name, client in self._clients.items() if client.until_s < now_s]:
            self._end(name)

    def _end(self, name: str) -> None:
        client = self._clients.pop(name, None)
        for draft in list(client.drafts) if client else ():
            assert client is not None
            client.abort(draft)


def _fault(error: ValidationError) -> BadInput:
    """The first thing that is wrong with a command."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["loc"] == ("device",):
        return BadInput(
            "device: only -1, the memory of this machine, is served by commands",
            hint="leave device out; tensors on a GPU are shared from Python: rota.tensors.connect(device='cuda:0')",
        )
    return BadInput(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")


def _reply_id(given: Json) -> str:
    """Where the sender waits: a number is refused as an ``id`` too, and the error goes to that number as JSON."""
    text = (
        ""
        if given is None or isinstance(given, dict | list)
        else given
        if isinstance(given, str)
        else json.dumps(given)
    )
    return text.encode(errors="replace").decode()  # JSON may hold half a character, a Redis key may not


def _parse(raw: bytes) -> Fields:
    if len(raw) > _COMMAND_BYTES_MAX:
        raise BadInput(f"a command of {len(raw)} bytes, the limit is {_COMMAND_BYTES_MAX}")
    try:
        words = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"a command is not valid JSON: {error}") from None
    if not isinstance(words, dict):
        raise BadInput("a command is not a JSON object")
    return words  # pyright: ignore[reportUnknownVariableType]  # the keys are checked where each command is read
