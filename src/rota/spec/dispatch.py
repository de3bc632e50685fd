"""How arguments split and results merge: Same, Shard, Each, Rank; Concat, Mean, Sum, First, Stream.

Dispatch is declared with the operation, never guessed from the shape of a value. These are values only; the arithmetic
of slices is in ``rota.job.rpc.dispatch``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Pad = Literal["none", "repeat", "drop"]


@dataclass(frozen=True, slots=True)
class SameRule:
    """Every member gets the same arguments."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Split along a mesh axis; members that differ only in other axes get the same slice.

    ``pad`` says what happens when the batch does not divide: ``none`` is an error, ``repeat`` fills up by repeating
    the last item (removed again on the way back), ``drop`` leaves the rest out.
    """

    axis: str
    pad: Pad = "none"


@dataclass(frozen=True, slots=True)
class EachRule:
    """Every item of the first argument goes to the least loaded eligible member."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One member only, to send to or to take the answer from."""

    rank: int


@dataclass(frozen=True, slots=True)
class Concat:
    """Slices joined in order along dim 0, padding removed. ``axis`` names the mesh axis; None joins items in order."""

    axis: str | None = None


@dataclass(frozen=True, slots=True)
class MeanRule:
    """Mean over members, weighted by the real (unpadded) count of items each had."""


@dataclass(frozen=True, slots=True)
class SumRule:
    """Sum over members."""


@dataclass(frozen=True, slots=True)
class FirstRule:
    """The first answer; the others are cancelled. Only for operations that are safe to repeat."""


@dataclass(frozen=True, slots=True)
class StreamRule:
    """Items as they finish."""


Same = SameRule()
Each = EachRule()
Mean = MeanRule()
Sum = SumRule()
First = FirstRule()
Stream = StreamRule()

Send = SameRule | Shard | EachRule | Rank
Receive = Concat | MeanRule | SumRule | FirstRule | StreamRule | Rank
RetryClass = Literal["safe", "commit", "never"]


_NAMED: dict[str, Send | Receive] = {
    "Same": Same,
    "Each": Each,
    "Mean": Mean,
    "Sum": Sum,
    "First": First,
    "Stream": Stream,
}


def rule_to_text(rule: Send | Receive | type) -> str:
    """Canonical text of a rule, for JSON and people: ``Shard(dp,repeat)``, ``Concat(dp)``, ``Mean``.

    ``Concat`` without an axis may be the class. Raises ValueError for a class that needs an argument.
    """
    match rule:
        case Shard(axis=axis, pad=pad):
            return f"Shard({axis},{pad})"
        case Concat(axis=axis):
            return f"Concat({axis})" if axis else "Concat"
        case Rank(rank=rank):
            return f"Rank({rank})"
        case type():
            if rule is not Concat:
                raise ValueError(f'{rule.__name__} needs its argument: Shard("dp"), Rank(0)')
            return rule.__name__
        case _:
            return type(rule).__name__.removesuffix("Rule")


@lru_cache(256)
def rule_from_text(text: str) -> Send | Receive:
    """Inverse of ``rule_to_text``. Raises ValueError for an unknown rule."""
    head, _, rest = text.partition("(")
    body = rest.removesuffix(")")
    if head in _NAMED and not rest:
        return _NAMED[head]
    if head == "Shard":
        axis, _, pad = body.partition(",")
        if pad not in ("none", "repeat", "drop"):
            raise ValueError(f"{text!r}: pad must be none, repeat or drop")
        return Shard(axis, pad)
    if head == "Concat":
        return Concat(body or None)
    if head == "Rank":
        return Rank(int(body))
    raise ValueError(f"{text!r} is not a dispatch rule")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """One declared operation of a workload, as a value that can be written to JSON.

    ``send`` and ``recv`` are the canonical texts of ``rule_to_text``. ``retry``: ``safe`` may be run again anywhere,
    ``commit`` has effects that count only at a commit, ``never`` raises CallLost to the caller. ``deadline_s`` bounds
    one call, ``progress_s`` the silence inside it.
    """

    name: str
    send: str = "Same"
    recv: str = "Rank(0)"
    retry: RetryClass = "safe"
    deadline_s: float | None = None
    progress_s: float | None = None
    is_async: bool = False

    @property
    def send_rule(self) -> Send:
        """How the arguments split."""
        rule = rule_from_text(self.send)
        if not isinstance(rule, SameRule | Shard | EachRule | Rank):
            raise ValueError(f"{self.send} cannot send")
        return rule

    @property
    def recv_rule(self) -> Receive:
        """How the results merge."""
        rule = rule_from_text(self.recv)
        if not isinstance(rule, Concat | MeanRule | SumRule | FirstRule | StreamRule | Rank):
            raise ValueError(f"{self.recv} cannot receive")
        return rule
