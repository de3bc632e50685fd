"""What user code declares: Workload, op, and the interface read from it.

::

    class Policy(Workload):
        def setup(self, ctx): ...
        @op(send=Shard("dp", pad="repeat"), recv=Concat("dp"))
        def logprobs(self, batch): ...
        @op(send=Shard("dp"), recv=Mean, retry="commit", deadline="10m")
        def update(self, batch): ...
        @op.state
        def state(self): return {"net": self.net.state_dict()}
        @op.publish
        def weights(self): return dict(self.net.named_parameters())
        @op.weights
        def load(self, version, tensors): ...

An operation may be plain or async; its first argument is what is split, the others go to everybody.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from rota.spec.dispatch import (
    Concat,
    EachRule,
    FirstRule,
    OpSpec,
    Rank,
    Receive,
    RetryClass,
    Same,
    Send,
    Shard,
    StreamRule,
    rule_to_text,
)
from rota.spec.errors import BadInput
from rota.spec.job import Interface
from rota.spec.resources import parse_duration

if TYPE_CHECKING:
    from rota.job.instance_context import InstanceContext

F = TypeVar("F", bound=Callable[..., Any])

OP_MARK = "__rota_op__"
ROLE_MARK = "__rota_mark__"
FLOW: ContextVar[Any] = ContextVar("flow")
"""The flow of the loop that runs here: what the handles of a built job act on."""
STATE, PUBLISH, WEIGHTS = "state", "publish", "weights"


class Workload:
    """Base of what the instances of a role run. One object lives in each instance, made without arguments.

    ``setup`` runs once an epoch, before any operation, always in the same thread as the operations. When an instance
    is re-formed under a newer epoch, a fresh object is made and set up with ``ctx.restored``.
    """

    def setup(self, ctx: InstanceContext) -> None:
        """Make models, optimisers and data; override it."""


class _Op:
    """The decorator ``op`` with its marks ``op.state``, ``op.publish`` and ``op.weights``."""

    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(
        self,
        /,
        *,
        send: Send = ...,
        recv: Receive | None = ...,
        retry: RetryClass = ...,
        deadline: str | float | None = ...,
        progress: str | float | None = ...,
    ) -> Callable[[F], F]: ...
    def __call__(
        self,
        function: Any = None,
        /,
        *,
        send: Send = Same,
        recv: Receive | None = None,
        retry: RetryClass = "safe",
        deadline: str | float | None = None,
        progress: str | float | None = None,
    ) -> Any:
        """Declare an operation: how its arguments split, how its results merge, and whether it may be run again.

        ``recv`` defaults to the inverse of ``send``: ``Concat`` for ``Shard`` and ``Each``, else the answer of the
        first member. ``deadline`` bounds one call, ``progress`` the silence inside it (seconds, or ``"10m"``).
        Raises BadInput for a combination that cannot work.
        """

        def declare(target: F) -> F:
            spec = OpSpec(
                name=target.__name__,
                send=rule_to_text(send),
                recv=rule_to_text(recv if recv is not None else _inverse(send)),
                retry=retry,
                deadline_s=_seconds(deadline),
                progress_s=_seconds(progress),
                is_async=inspect.iscoroutinefunction(target),
            )
            _check(spec)
            setattr(target, OP_MARK, spec)
            return target

        return declare if function is None else declare(function)

    def state(self, function: F) -> F:
        """Mark the method that returns everything needed to go on from a commit: nested dicts and lists of tensors,
        numbers and texts."""
        return _marked(function, STATE)

    def publish(self, function: F) -> F:
        """Mark the method of a writer of a weights edge that returns name -> tensor; else all of its state goes."""
        return _marked(function, PUBLISH)

    def weights(self, function: F) -> F:
        """Mark the method of a reader of a weights edge, called as ``load(version, tensors)``."""
        return _marked(function, WEIGHTS)


op = _Op()


def _marked(function: F, mark: str) -> F:
    setattr(function, ROLE_MARK, mark)
    return function


def _inverse(send: Send) -> Receive:
    match send:
        case Shard(axis=axis):
            return Concat(axis)
        case EachRule():
            return Concat()
        case Rank(rank=rank):
            return Rank(rank)
        case _:
            return Rank(0)


def _seconds(value: str | float | None) -> float | None:
    return parse_duration(value) if isinstance(value, str) else value


def _check(spec: OpSpec) -> None:
    recv = spec.recv_rule
    if spec.name.startswith("_"):
        raise BadInput(f"operation {spec.name!r}: its name may not begin with an underscore")
    if spec.retry not in ("safe", "commit", "never"):
        raise BadInput(f"operation {spec.name!r}: retry must be safe, commit or never, not {spec.retry!r}")
    if isinstance(recv, FirstRule) and spec.retry != "safe":
        raise BadInput(
            f"operation {spec.name!r}: recv=First cancels the other members, so retry must be safe, not {spec.retry}"
        )
    if isinstance(recv, FirstRule | Rank) and isinstance(spec.send_rule, EachRule):
        raise BadInput(f"operation {spec.name!r}: send=Each answers each item; recv is Concat, Mean, Sum or Stream")
    if isinstance(recv, StreamRule) and not isinstance(spec.send_rule, EachRule):
        raise BadInput(f"operation {spec.name!r}: recv=Stream gives items as they finish, so it needs send=Each")
    if isinstance(recv, Concat) and recv.axis is not None and isinstance(spec.send_rule, EachRule):
        raise BadInput(f"operation {spec.name!r}: send=Each has no mesh axis; use recv=Concat() or recv=Stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Names of the marked methods of a class; None where there is none."""

    state: str | None = None
    publish: str | None = None
    weights: str | None = None


def marks_of(cls: type) -> Marks:
    """The marked methods of a workload class. Raises BadInput when a mark is used twice."""
    found: dict[str, str] = {}
    for name, member in inspect.getmembers(cls, callable):
        mark = getattr(member, ROLE_MARK, None)
        if mark is None:
            continue
        if mark in found:
            raise BadInput(f"{cls.__name__}: @op.{mark} is on both {found[mark]} and {name}; keep one")
        found[mark] = name
    return Marks(**found)


def interface_of(target: object) -> Interface:
    """What an imported workload declares: a class with operations, the async loop, or a plain function.

    Raises BadInput for anything else, for a mark used twice, and for a ``commit`` operation without ``@op.state``.
    """
    if inspect.isclass(target):
        return _interface_of_class(target)
    if inspect.iscoroutinefunction(target):
        return Interface(kind="loop")
    if callable(target):
        return Interface(kind="function")
    raise BadInput(f"{target!r} is no class, async function or function")


def _interface_of_class(cls: type) -> Interface:
    marks = marks_of(cls)
    found = (getattr(member, OP_MARK, None) for _, member in inspect.getmembers(cls, callable))
    ops = tuple(spec for spec in found if isinstance(spec, OpSpec))
    commits = [spec.name for spec in ops if spec.retry == "commit"]
    if commits and marks.state is None:
        raise BadInput(
            f"{cls.__name__}.{commits[0]} has retry='commit' but the class has no @op.state method",
            hint="add a method marked @op.state that returns what update() changes",
        )
    return Interface(
        kind="class",
        ops=ops,
        has_state=marks.state is not None,
        loads_weights=marks.weights is not None,
        publishes_weights=marks.publish is not None,
    )
