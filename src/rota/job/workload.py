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
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

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
from rota.spec.errors import BadInput, nearest
from rota.spec.job import Interface
from rota.spec.resources import parse_duration

if TYPE_CHECKING:
    from rota.job.instance.runners import InstanceContext

F = TypeVar("F", bound=Callable[..., Any])

OP_MARK = "__rota_op__"
ROLE_MARK = "__rota_mark__"
FLOW: ContextVar[Any] = ContextVar("flow")
"""The flow of the loop that runs here: what the handles of a built job act on."""
STATE, PUBLISH, WEIGHTS = "state", "publish", "weights"
_ARGUMENTS = {"setup": ("ctx",), STATE: (), PUBLISH: (), WEIGHTS: ("version", "tensors")}
"""What each method that Rota calls is given."""
ONE_RESULT = "return a list; for results as they finish declare send=Each, recv=Stream and return one for each item"


class Workload:
    """Base of what the instances of a role run. One object lives in each instance, made with ``args`` of the role.

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
        Raises BadInput for a combination that cannot work, and for a generator: a call has one result.
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
            _refuse_generator(target, f"operation {spec.name!r}", ONE_RESULT)
            setattr(target, OP_MARK, spec)
            return target

        return declare if function is None else declare(function)

    def state(self, function: F) -> F:
        """Mark the method that returns everything needed to continue from a commit: nested dicts and lists of tensors,
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
    _refuse_generator(function, f"@op.{mark} method {function.__name__!r}", "return the value instead of 'yield'")
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


def interface_of(target: object, args: Mapping[str, object] = MappingProxyType({})) -> Interface:
    """What an imported workload declares: a class with operations, the async loop, or a plain function.

    Raises BadInput for anything else; for a class that cannot be made with ``args`` (field ``arguments``), has no
    ``setup`` or nothing to call, uses a mark twice, or has a ``commit`` operation without ``@op.state``; for a method
    or function that takes other arguments than it is given, or is a generator.
    """
    if inspect.isclass(target):
        return _interface_of_class(target, args)
    if not callable(target):
        raise BadInput(f"{target!r} is not a class, async function or function")
    name, is_loop = getattr(target, "__name__", repr(target)), inspect.iscoroutinefunction(target)
    if args:
        text = f"{name} is a function, and args are for the constructor of a class"
        hint = "read them in the function, for example from ctx.env"
        raise BadInput(text, hint=hint, arguments={"": f"{text}; {hint}"})
    _refuse_generator(
        target, f"function {name!r}", "a function that holds 'yield' does not run; call commit() or log()"
    )
    if is_loop or _parameters(target):
        _check_takes(target, ("f",) if is_loop else ("ctx",), name)
    return Interface(kind="loop" if is_loop else "function")


def _interface_of_class(cls: type, args: Mapping[str, object]) -> Interface:
    marks = marks_of(cls)
    found = (getattr(member, OP_MARK, None) for _, member in inspect.getmembers(cls, callable))
    ops = tuple(spec for spec in found if isinstance(spec, OpSpec))
    commits = [spec.name for spec in ops if spec.retry == "commit"]
    if commits and marks.state is None:
        raise BadInput(
            f"{cls.__name__}.{commits[0]} has retry='commit' but the class has no @op.state method",
            hint="add a method marked @op.state that returns what update() changes",
        )
    _check_class(cls, marks, ops)
    _check_constructor(cls, args)
    return Interface(
        kind="class",
        ops=ops,
        has_state=marks.state is not None,
        loads_weights=marks.weights is not None,
        publishes_weights=marks.publish is not None,
    )


def _check_class(cls: type, marks: Marks, ops: tuple[OpSpec, ...]) -> None:
    """Raises BadInput when an instance could not make an object of the class, set it up, or be given any work."""
    name = cls.__name__
    if abstract := sorted(getattr(cls, "__abstractmethods__", ())):
        raise BadInput(f"{name} is abstract: it lacks {', '.join(abstract)}", hint="add the missing methods")
    if not hasattr(cls, "setup"):
        raise BadInput(f"{name} has no setup(self, ctx)", hint=f"derive it from rota.Workload: class {name}(Workload)")
    if not ops and marks.weights is None:
        public = [key for key, one in inspect.getmembers(cls, inspect.isfunction) if key[0] != "_" and key != "setup"]
        hint = f"mark with @op what other roles call: {', '.join(public)}" if public else "add a method marked with @op"
        raise BadInput(f"{name} has no operation: nothing can be asked of its instances", hint=hint)
    called = {"setup": "setup", STATE: marks.state, PUBLISH: marks.publish, WEIGHTS: marks.weights}
    for mark, method in called.items():
        if method is not None:
            function = getattr(cls, method)
            _refuse_generator(
                function, f"{name}.{method}", "a method that holds 'yield' does not run when it is called"
            )
            given = _ARGUMENTS[mark]
            _check_takes(function, given if _is_bound(cls, method) else ("self", *given), f"{name}.{method}")


def _check_constructor(cls: type, args: Mapping[str, object]) -> None:
    """Raises BadInput for ``args`` that the constructor of a class lacks, does not know or does not take.

    Its ``arguments`` have what is wrong with each, by name; what is missing is under the empty name.
    """
    if wrong := _wrong_arguments(cls, args):
        raise BadInput("; ".join(wrong.values()), arguments=wrong)


def _wrong_arguments(cls: type, args: Mapping[str, object]) -> dict[str, str]:
    """What is wrong with each argument, and what to do."""
    wrong: dict[str, str] = {}
    name, known = f"{cls.__name__}.__init__", {one.name: one for one in _parameters(cls)}
    needed = [one.name for one in known.values() if one.default is one.empty and one.kind not in _COLLECTS]
    if missing := [one for one in needed if one not in args]:
        text = f"{name} needs {', '.join(map(repr, missing))}, and args of the role have no such name"
        wrong[""] = f"{text}; add it to the role, args: {{{missing[0]}: ...}}, or give it a default"
    takes = [one.name for one in known.values() if one.kind in _BY_NAME]
    free = any(one.kind is one.VAR_KEYWORD for one in known.values())
    hints = _hints_of(cls)
    for key, value in args.items():
        if key not in takes and not free:
            wrong[key] = f"{name} has no argument {key!r}; {nearest(key, takes, 'arguments')}"
        if key in takes and not _fits(value, wanted := hints.get(key, Any)):
            text = f"{name}: {key} is {value!r}, and its type is {inspect.formatannotation(wanted)}"
            wrong[key] = f"{text}; change the value, or the annotation"
    return wrong


def _hints_of(cls: type) -> Mapping[str, object]:
    """Annotations of the constructor; none where a name in them is known to a type checker alone."""
    try:
        return get_type_hints(cls.__init__)
    except (NameError, TypeError, AttributeError):
        return {}


def _fits(value: object, wanted: Any) -> bool:
    """Whether a JSON value fits an annotation. A class that JSON does not have takes any value."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in inner)
    kind: Any = origin or wanted
    if kind in (int, float):
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if kind in (bool, str, NoneType, None):
        return value is None if kind in (NoneType, None) else isinstance(value, kind)
    if kind in (dict, Mapping):
        return isinstance(value, dict) and all(_fits(one, inner[-1]) for one in value.values() if inner)
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        return isinstance(value, list) and len(value) == len(inner) and all(map(_fits, value, inner))
    if kind in (list, tuple, Sequence):
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value if inner)
    return True


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_COLLECTS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _is_bound(cls: type, method: str) -> bool:
    """True for a method that takes no ``self``."""
    return isinstance(inspect.getattr_static(cls, method), staticmethod | classmethod)


def _parameters(function: Any) -> tuple[inspect.Parameter, ...]:
    """The parameters of a callable; none for one of C without a signature."""
    try:
        return tuple(inspect.signature(function).parameters.values())
    except ValueError:
        return ()


def _check_takes(function: Any, given: tuple[str, ...], name: str) -> None:
    """Raises BadInput for a function that cannot be called with the positional arguments ``given``."""
    try:
        inspect.signature(function).bind(*given)
    except TypeError as error:
        shown = ", ".join(one for one in given if one != "self")
        raise BadInput(
            f"{name}{inspect.signature(function)} cannot be called as {name.rpartition('.')[2]}({shown}): {error}",
            hint=f"declare it as {name.rpartition('.')[2]}({', '.join(given)})",
        ) from None
    except ValueError:
        return  # a callable of C does not say what it takes


def _refuse_generator(function: Any, what: str, hint: str) -> None:
    """Raises BadInput for a function with ``yield``: what calls it would get a generator, or its first item only."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise BadInput(f"{what} is a generator", hint=hint)
