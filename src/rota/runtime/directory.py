"""Tensor servers of an installation by machine, and the key with which machines recognise each other.

A process of a job has the ``Directory`` of its engine (``use``, called where the process begins); one that no engine
started has none, and reaches no other machine. Key and addresses travel through the engine, never through a file, a log
or an environment variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Directory(Protocol):
    """``host`` is the name of this machine in the engine, ``address`` the one at which others reach it."""

    host: str
    address: str

    def key(self) -> bytes:
        """The key of the installation, the same on all machines. Raises NotReachable."""
        ...

    def stores(self, *, fresh: bool = False) -> Mapping[str, str]:
        """``address:port`` of the tensor server of each machine, by host, as last read; ``fresh`` reads them again."""
        ...

    def register(self, store: str) -> None:
        """Say where the tensor server of this machine listens. Raises NotReachable."""
        ...

    def note_left(self, job: str, silent: Sequence[str]) -> None:
        """Hosts that did not give back the tensors of a job that ends: they are asked again, as those that are away."""
        ...


@dataclass(slots=True)
class FixedDirectory:
    """A directory without an engine: of a tensor server, which got its key from who started it, and of programs that
    know the other machines."""

    host: str
    address: str
    secret: bytes
    known: dict[str, str] = field(default_factory=dict[str, str])

    def key(self) -> bytes:
        """See Directory."""
        return self.secret

    def stores(self, *, fresh: bool = False) -> Mapping[str, str]:
        """See Directory."""
        del fresh
        return self.known

    def register(self, store: str) -> None:
        """See Directory."""
        self.known[self.host] = store

    def note_left(self, job: str, silent: Sequence[str]) -> None:
        """See Directory: without an engine the hosts are not asked again."""


_own: list[Directory] = []


def use(directory: Directory | None) -> None:
    """Set the directory of this process; None: it has none."""
    _own[:] = [] if directory is None else [directory]


def current() -> Directory | None:
    """The directory of this process."""
    return _own[0] if _own else None
