"""The exception tree; code, HTTP status and exit status of each.

::

    RotaError                       1  500  INTERNAL
    +-- BadInput                    2  422  INVALID            what the user can fix in what they gave
    |   +-- JobFileError            2  422  INVALID            all problems of a job file at once
    |   +-- UnknownName             2  404  UNKNOWN_NAME       no such job, queue, node, role ("did you mean")
    |   +-- NotAllowed              2  403  NOT_ALLOWED
    |   +-- NoToken                 2  401  NO_TOKEN
    |   +-- Conflict                2  409  CONFLICT           wrong state for this request
    |   +-- VersionMismatch         2  412  VERSION_MISMATCH   modified concurrently since it was read
    |   +-- IdempotencyConflict     2  409  IDEMPOTENCY_CONFLICT
    |   +-- LimitExceeded           2  429  LIMIT_EXCEEDED
    |   +-- SchemaTooNew            2  409  SCHEMA_TOO_NEW     the database was written by a newer version
    +-- Infeasible                  4  422  INFEASIBLE         fits no set of nodes
    +-- NotReachable                3  503  NOT_REACHABLE      the service or a store does not answer
    |   +-- RegistryUnavailable     3  503  REGISTRY_UNAVAILABLE
    |   +-- EngineUnavailable       3  503  ENGINE_UNAVAILABLE
    |   +-- StoreUnavailable        3  503  STORE_UNAVAILABLE
    +-- StoreCorrupt                1  500  STORE_CORRUPT      the event log fails its checksum or lost its tail
    +-- TimedOut                    5  504  TIMED_OUT
    +-- MissingExtra                2  501  MISSING_EXTRA      a package of an extra is not installed
    +-- Fenced                      1  409  FENCED             the writer's epoch is older than the fence
    +-- SeqConflict                 1  409  SEQ_CONFLICT       another writer appended first
    +-- CallError                   1  502  CALL_ERROR         a call from role to role did not give an answer
    |   +-- RoleDown                1  502  ROLE_DOWN          no instance of the role took it before the deadline
    |   +-- CallLost                1  502  CALL_LOST          the callee died; not repeated by Rota
    |   +-- CallFailed              1  502  CALL_FAILED        the operation raised; carries its traceback
    |   +-- DataError               1  502  DATA_ERROR         more items of a stream are bad than the contract allows
    |   +-- BadLoss                 1  502  NAN_LOSS           a commit reports a loss that is not a number
    |   +-- RolledBack              1  502  ROLLED_BACK        the job went back to a commit; re-enter from there
    +-- TensorError                 1  500  TENSOR_ERROR       subclasses: see rota.tensors.errors
    +-- TrainError                  1  500  TRAIN_ERROR        subclasses: in rota.train.ps and rota.train.shm
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

NAMED_MAX = 20
"""Names that a hint lists."""


class RotaError(Exception):
    """Root of everything Rota raises on purpose.

    ``code`` is stable and documented, ``http`` the status of the REST answer, ``exit`` the exit status of the command
    line. ``hint`` says the next step; ``fields`` are the numbers and names behind the message.
    """

    code: ClassVar[str] = "INTERNAL"
    http: ClassVar[int] = 500
    exit: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "", **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.fields: dict[str, Any] = fields

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else str(self.message)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.fields))


def _rebuild(cls: type[RotaError], message: Any, hint: str, fields: Mapping[str, object]) -> RotaError:
    return cls(message, hint=hint, **fields)


class BadInput(RotaError):
    """Invalid input: the message names the field, the value and the rule."""

    code, http, exit = "INVALID", 422, 2


class UnknownName(BadInput):
    """No job, queue, node, role or tensor of that name; the hint lists the nearest."""

    code, http = "UNKNOWN_NAME", 404


class NotAllowed(BadInput):
    """The token is valid but may not do this."""

    code, http = "NOT_ALLOWED", 403


class NoToken(BadInput):
    """No token, or one that is unknown, expired or revoked."""

    code, http = "NO_TOKEN", 401


class Conflict(BadInput):
    """The object is in a state where the request makes no sense."""

    code, http = "CONFLICT", 409


class VersionMismatch(BadInput):
    """The object was modified since the version that a change was made from."""

    code, http = "VERSION_MISMATCH", 412


class IdempotencyConflict(BadInput):
    """The same idempotency key came with another body."""

    code, http = "IDEMPOTENCY_CONFLICT", 409


class LimitExceeded(BadInput):
    """A named limit (``..._max``) of the user or the installation is reached."""

    code, http = "LIMIT_EXCEEDED", 429


class JobFileError(BadInput):
    """Every problem of one job file, in file order; ``problems`` holds them."""

    def __init__(self, problems: tuple[object, ...], *, hint: str = "", **fields: object) -> None:
        lines = "\n".join(str(problem) for problem in problems)
        super().__init__(lines, hint=hint, **fields)
        self.problems: tuple[Any, ...] = problems

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (JobFileError, self.problems, self.hint, self.fields))


class SchemaTooNew(BadInput):
    """The database was written by a newer version of Rota, which this one must not touch."""

    code, http = "SCHEMA_TOO_NEW", 409


class Infeasible(RotaError):
    """No set of existing or declared nodes could ever hold this; the hint names the nearest feasible request."""

    code, http, exit = "INFEASIBLE", 422, 4


class NotReachable(RotaError):
    """A server does not answer; the message has its address, the hint the remedy."""

    code, http, exit = "NOT_REACHABLE", 503, 3


class RegistryUnavailable(NotReachable):
    """No tensor registry could be found or started; the message lists what was tried."""

    code = "REGISTRY_UNAVAILABLE"


class EngineUnavailable(NotReachable):
    """The engine (Ray) could not be started or reached."""

    code = "ENGINE_UNAVAILABLE"


class StoreUnavailable(NotReachable):
    """The event log cannot be read or written now."""

    code = "STORE_UNAVAILABLE"


class StoreCorrupt(RotaError):
    """A record of the event log fails its checksum, or acknowledged records are gone; never repaired in place."""

    code = "STORE_CORRUPT"


class TimedOut(RotaError):
    """The caller's limit ran out; what was asked may still happen."""

    code, http, exit = "TIMED_OUT", 504, 5


class MissingExtra(RotaError):
    """A feature needs packages of an extra that is not installed; the hint has the command."""

    code, http, exit = "MISSING_EXTRA", 501, 2


class Fenced(RotaError):
    """A writer of an older epoch was refused; ``fields`` has scope, epoch and fence."""

    code, http = "FENCED", 409


class SeqConflict(RotaError):
    """The log moved on since the caller read it; read again, decide again."""

    code, http = "SEQ_CONFLICT", 409


class CallError(RotaError):
    """A call from role to role gave no answer; see the leaves."""

    code, http = "CALL_ERROR", 502


class RoleDown(CallError):
    """No instance of the role took the call before the deadline; fields: role, cause, since_s."""

    code = "ROLE_DOWN"


class CallLost(CallError):
    """The callee died while it ran an operation that Rota must not repeat; fields: role, rank, op."""

    code = "CALL_LOST"


class CallFailed(CallError):
    """The operation raised; fields: role, rank, op, traceback."""

    code = "CALL_FAILED"


class DataError(CallError):
    """More items of a stream were bad than ``bad_data`` of the role allows; ``traceback_text`` is of the last one."""

    code = "DATA_ERROR"
    reason: ClassVar[str] = "DATA_ERROR"

    @property
    def traceback_text(self) -> str:
        """What the operation raised on its last instance."""
        return str(self.fields.get("traceback", ""))


class RolledBack(CallError):
    """The job went back to a commit while the call was open; the loop is entered again from there."""

    code = "ROLLED_BACK"


class BadLoss(CallError):
    """A reported loss is not finite and a role has ``fail: {nan: rollback}``: the job goes back to its last commit."""

    code = "NAN_LOSS"
    reason = "NAN_LOSS"


class TensorError(RotaError):
    """Root of the tensor store's errors; the leaves are in ``rota.tensors.errors``."""

    code = "TENSOR_ERROR"


class TrainError(RotaError):
    """Root of the errors of a training group: of its parameter servers, and of its ranks on one machine."""

    code = "TRAIN_ERROR"


def did_you_mean(word: str, known: Iterable[str], parts: Mapping[str, str] = MappingProxyType({})) -> str:
    """``did you mean 'x'?`` for the nearest of ``known``, case aside; empty when none is near.

    ``parts`` are other names that are near, and how each is written.
    """
    by_fold = {name.casefold(): text for name, text in parts.items()} | {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word.casefold(), by_fold, n=1)
    return f"did you mean '{by_fold[near[0]]}'?" if near else ""


def first_of(names: Sequence[str], most: int = NAMED_MAX) -> str:
    """The first of these names, and how many more there are: ``a, b and 3 more``; empty for none."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def nearest(word: str, known: Iterable[str], what: str = "") -> str:
    """The hint for a word that is not known: the nearest one, else the first of those that are, named as ``what``."""
    names = list(known)
    there = first_of(names) or "none"
    return did_you_mean(word, names) or (f"{what}: {there}" if what else f"there is {there}")


def unknown(text: str, word: str, known: Iterable[str], what: str) -> UnknownName:
    """The error for a name that is not there."""
    return UnknownName(text, hint=nearest(word, known, what))
