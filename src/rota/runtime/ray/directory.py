"""Directory of an installation in the key-value table of Ray's GCS: the key of its machines, their tensor servers.

Who can read that table can start processes on every machine of the engine, so that the key gives it nothing more.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping, Sequence

from ray.exceptions import RayError
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)

from rota.runtime.directory import Directory
from rota.runtime.handshake import KEY_BYTES
from rota.runtime.ray.machines import hosts
from rota.spec.errors import EngineUnavailable
from rota.spec.ids import JobId

_KEY = "key"
_STORE = "store/"
_LEFT = "left/"
LEFT_MAX = 1000
"""Notes of jobs whose tensors a machine still has; beyond it no more are made for machines that are away."""


class RayDirectory:
    """``namespace`` is the one that an installation has in Ray; each call that reads or writes the table blocks."""

    def __init__(self, namespace: str, host: str, address: str) -> None:
        self.host, self.address = host, address
        self._table = f"rota directory {namespace}"
        self._key = b""
        self._stores = dict[str, str]()

    def key(self) -> bytes:
        """See Directory. The first process of the installation that asks makes it; of two at once Ray takes one."""
        if not self._key:
            try:
                _internal_kv_put(_KEY, secrets.token_hex(KEY_BYTES), overwrite=False, namespace=self._table)
                self._key = bytes.fromhex(_text(_internal_kv_get(_KEY, namespace=self._table)))
            except (RayError, RuntimeError) as error:
                raise EngineUnavailable(f"the key of the installation cannot be read: {error}") from error
        return self._key

    def stores(self, *, fresh: bool = False) -> Mapping[str, str]:
        """See Directory: of machines that are in the engine now; what was read last while the engine is away."""
        if fresh or not self._stores:
            try:
                alive = hosts()
                found = {host: _internal_kv_get(f"{_STORE}{host}", namespace=self._table) for host in alive}
            except (RayError, RuntimeError):
                return self._stores
            self._stores = {host: _text(store) for host, store in found.items() if store}
        return self._stores

    def register(self, store: str) -> None:
        """See Directory."""
        try:
            _internal_kv_put(f"{_STORE}{self.host}", store, namespace=self._table)
        except (RayError, RuntimeError) as error:
            raise EngineUnavailable(f"the tensor server of {self.host} cannot be registered: {error}") from error
        self._stores[self.host] = store

    def note_left(self, job: str, silent: Sequence[str]) -> None:
        """See Directory."""
        try:
            known = {row.decode().removeprefix(_STORE) for row in _internal_kv_list(_STORE, namespace=self._table)}
            away = known - {self.host} - set(hosts())
            if len(_internal_kv_list(_LEFT, namespace=self._table)) >= LEFT_MAX:
                away.clear()
            for host in away.union(silent):
                _internal_kv_put(f"{_LEFT}{host}/{job}", "", namespace=self._table)
        except (RayError, RuntimeError) as error:
            raise EngineUnavailable(f"what {job} left on other machines cannot be noted: {error}") from error

    def left(self) -> set[tuple[str, JobId]]:
        """Hosts in the engine, each with a job that ended and whose tensors it still has. Raises EngineUnavailable."""
        try:
            rows = _internal_kv_list(_LEFT, namespace=self._table)
            there = set(hosts()) if rows else set[str]()
        except (RayError, RuntimeError) as error:
            raise EngineUnavailable(f"what jobs left on other machines cannot be read: {error}") from error
        noted = (row.decode().removeprefix(_LEFT).rpartition("/") for row in rows)
        return {(host, JobId(job)) for host, _, job in noted if host in there}

    def settle(self, host: str, job: JobId) -> None:
        """A host gave back what a job had left there. Raises EngineUnavailable."""
        try:
            _internal_kv_del(f"{_LEFT}{host}/{job}", namespace=self._table)
        except (RayError, RuntimeError) as error:
            raise EngineUnavailable(f"that {host} gave back the tensors of {job} cannot be noted: {error}") from error


def key_of_job(directory: Directory, job: JobId) -> bytes:
    """The key of a job, the same for each of its masters while the engine lives. Blocks. Raises EngineUnavailable.

    Instances outlive a master; one that is made anew, also by another gateway, must derive the keys that they have.
    """
    return hmac.digest(directory.key(), f"master of {job}".encode(), "sha256")


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
