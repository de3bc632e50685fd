"""Who may do what: users with roles on subtrees of the queues, their tokens, and what a caller may do to a job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, TypeVar

from rota.service.views.job_history import JobHistory
from rota.spec.errors import BadInput, NotAllowed
from rota.spec.events import Record, TokenMade, TokenRevoked, UserChanged
from rota.spec.ids import JobId

LOCAL = "local"
"""The user of the installation's own token: an admin who is always there."""
REDACTED = "(another tenant's)"


class UserRole(IntEnum):
    """Rights of a user on a queue and all below it; each role includes those before it, but MACHINE."""

    MACHINE = 0
    """Joins machines to the installation, and sees nothing: for tokens that lie on machines."""
    VIEWER = 1
    """Sees jobs, why they wait, who holds what."""
    USER = 2
    """Also submits, and reads and steers own jobs."""
    QUEUE_ADMIN = 3
    """Also reads and steers the jobs of others there, and sets what queues below get."""
    ADMIN = 4
    """Also nodes, users and the tree; means something on the root alone."""

    @property
    def word(self) -> str:
        """The name people use: ``queue-admin``."""
        return self.name.lower().replace("_", "-")

    @staticmethod
    def of(word: str) -> UserRole:
        """The role of that name. Raises BadInput."""
        found = next((role for role in UserRole if role.word == word), None)
        if found is None:
            raise BadInput(f"no role {word!r}", hint=f"roles: {', '.join(role.word for role in UserRole)}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, how they proved it (``token`` or ``cookie``), under which token, and what they may do where."""

    user: str
    by: str
    token: str = ""
    grants: tuple[tuple[str, UserRole], ...] = (("", UserRole.ADMIN),)

    def role_on(self, queue: str) -> UserRole | None:
        """The highest role on a queue path; ``""`` asks for one on the root. None: this queue is not theirs to see."""
        return max((role for path, role in self.grants if is_below(queue, path)), default=None)

    def has(self, role: UserRole, queue: str = "") -> bool:
        """True for that role or a higher one."""
        found = self.role_on(queue)
        return found is not None and found >= role

    def need(self, role: UserRole, queue: str = "") -> None:
        """Raises NotAllowed without that role on the queue."""
        if not self.has(role, queue):
            where = f"queue {queue!r}" if queue else "the whole installation"
            mine = ", ".join(f"{one.word} of {path or 'all queues'}" for path, one in self.grants) or "nothing"
            raise NotAllowed(f"this needs the role {role.word} on {where}", hint=f"{self.user} is {mine}")

    def need_machines(self) -> None:
        """Raises NotAllowed for who may not join machines: all but admins and tokens of the role machine."""
        if self.role_on("") not in (UserRole.MACHINE, UserRole.ADMIN):
            hint = "an admin makes a token for it: rota token create --role machine"
            raise NotAllowed("this needs the role machine or admin on the whole installation", hint=hint)

    @property
    def joins_only(self) -> bool:
        """True for who may join machines and do nothing else."""
        return bool(self.grants) and all(role is UserRole.MACHINE for _, role in self.grants)

    def sees(self, history: JobHistory) -> bool:
        """True when a job may be known to exist."""
        return self.has(UserRole.VIEWER, history.queue)

    def reads(self, history: JobHistory) -> bool:
        """True when the output, the text and the events of a job may be read: its owner, and who runs its queue."""
        return self.has(UserRole.QUEUE_ADMIN, history.queue) or (
            self.sees(history) and history.submitted.user == self.user
        )

    def steers(self, history: JobHistory) -> bool:
        """True when a job may be stopped or changed."""
        own = history.submitted.user == self.user and self.has(UserRole.USER, history.queue)
        return own or self.has(UserRole.QUEUE_ADMIN, history.queue)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token as it was made, and when it was revoked."""

    made: TokenMade
    at: float
    revoked_at: float | None = None

    def valid(self, now: float) -> bool:
        """True while it is neither revoked nor expired."""
        return self.revoked_at is None and (self.made.expires_at is None or now < self.made.expires_at)


@dataclass(slots=True)
class AccountBook:
    """Users and tokens, folded from the log; changed by ``apply`` alone."""

    users: dict[str, dict[str, UserRole]] = field(default_factory=dict)
    tokens: dict[str, Token] = field(default_factory=dict)

    def apply(self, record: Record) -> None:
        """Take in one record, in order."""
        match record.event:
            case UserChanged(name=name, grants=()):
                self.users.pop(name, None)
            case UserChanged(name=name, grants=grants):
                self.users[name] = {queue: UserRole.of(role) for queue, role in grants}
            case TokenMade(id=one):
                self.tokens[one] = Token(made=record.event, at=record.at)
            case TokenRevoked(id=one) if (known := self.tokens.get(one)) is not None:
                self.tokens[one] = Token(made=known.made, at=known.at, revoked_at=record.at)
            case _:
                pass

    def caller(self, token: TokenMade, *, by: str) -> Caller:
        """What the holder of a token may do: the roles of its user, cut down to those of the token."""
        mine = {"": UserRole.ADMIN} if token.user == LOCAL else self.users.get(token.user, {})
        most = UserRole.of(token.role)
        if most is UserRole.MACHINE:  # to bring machines is up to admins, whatever the order of roles says
            mine = {"": most} if mine.get("") in (UserRole.MACHINE, UserRole.ADMIN) else {}
        cut = ((narrower(path, token.queue), min(role, most)) for path, role in mine.items())
        grants = tuple((path, role) for path, role in cut if path is not None)
        return Caller(user=token.user, by=by, token=token.id, grants=grants)


def is_below(queue: str, path: str) -> bool:
    """True for ``path`` itself and everything below it; the root ``""`` is above all."""
    return not path or queue == path or queue.startswith(f"{path}/")


def narrower(one: str, other: str) -> str | None:
    """The lower of two paths of which one is below the other, else None."""
    return one if is_below(one, other) else other if is_below(other, one) else None


T = TypeVar("T")

_WORD = re.compile(r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9_-])?")
_NAMED = frozenset({"user", "by", "marked_by"})


class Redactor:
    """Takes from documents the names of jobs that the caller may not see, wherever they stand, and their owners.

    Numbers stay: how much is ahead is everybody's business, whose it is is not. Made once for an answer: whom the
    caller may know of is gathered when it is first asked for.
    """

    def __init__(self, jobs: Mapping[JobId, JobHistory], caller: Caller) -> None:
        self._jobs, self._caller = jobs, caller
        self._sees_all = caller.has(UserRole.VIEWER)

    def redact(self, document: T) -> T:
        """The document as the caller may see it."""
        return document if self._sees_all else self._redacted(document)

    @cached_property
    def _known(self) -> set[str]:
        visible = (one.submitted.user for one in self._jobs.values() if self._caller.sees(one))
        return {self._caller.user, *visible}

    def _word(self, found: re.Match[str]) -> str:
        history = self._jobs.get(JobId(found[0]))
        return found[0] if history is None or self._caller.sees(history) else REDACTED

    def _redacted(self, value: Any) -> Any:
        if isinstance(value, str):
            return _WORD.sub(self._word, value)
        if isinstance(value, dict):
            return {
                self._redacted(key): REDACTED
                if key in _NAMED and isinstance(one, str) and one and one not in self._known
                else self._redacted(one)
                for key, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._redacted(one) for one in value]
        return value
