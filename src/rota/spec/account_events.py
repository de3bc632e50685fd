"""Events of users, their tokens and secrets, and of who is told what happens."""

from __future__ import annotations

from dataclasses import dataclass

from rota.spec.event_roots import ClusterEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class UserChanged(ClusterEvent):
    """What a user may do: a role on each of some queues and all below them (``""`` is the root). No grant: removed."""

    name: str
    grants: tuple[tuple[str, str], ...]
    """Pairs of queue path and role: viewer, user, queue-admin, admin."""
    by: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMade(ClusterEvent):
    """A token of a user exists. Only its SHA-256 is kept; ``role`` and ``queue`` narrow what its user may do."""

    id: str
    user: str
    digest: str
    name: str = ""
    role: str = "admin"
    queue: str = ""
    expires_at: float | None = None
    by: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRevoked(ClusterEvent):
    """A token is worth nothing from now on."""

    id: str
    by: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretChanged(ClusterEvent):
    """A user's secret was set or removed; its value is in no event."""

    owner: str
    name: str
    removed: bool = False
    by: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSet(ClusterEvent):
    """From now on ``url`` is told what happens: kinds of notices (none: all), of jobs of a queue (none: of all)."""

    id: str
    url: str
    on: tuple[str, ...] = ()
    queue: str = ""
    by: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRemoved(ClusterEvent):
    """A webhook is told nothing any more."""

    id: str
    by: str = "local"
