"""Near relatives of a request: fewer instances, fewer devices each, without a constraint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rota.cluster.core.asks import Shape, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A changed request: what changed (``change``, one sentence in ``text``) and the shape that results."""

    change: dict[str, Any]
    text: str
    shape: Shape


def roles_of(shape: Shape) -> dict[str, list[int]]:
    """Slots of each role, in order of first appearance."""
    roles: dict[str, list[int]] = {}
    for i in range(len(shape.slots)):
        roles.setdefault(shape.role(i), []).append(i)
    return roles


def without(shape: Shape, gone: set[int]) -> Shape:
    """The shape with some slots left out; constraints follow."""
    kept = [i for i in range(len(shape.slots)) if i not in gone]
    new = {old: i for i, old in enumerate(kept)}

    def moved(group: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new[i] for i in group if i in new)

    return Shape(
        slots=tuple(shape.slots[i] for i in kept),
        together=tuple((moved(group), level) for group, level in shape.together if len(moved(group)) > 1),
        apart=tuple((moved(a), moved(b), level) for a, b, level in shape.apart if moved(a) and moved(b)),
        names=tuple(shape.names[i] for i in kept) if shape.names else (),
        tied=tuple(moved(group) for group in shape.tied if len(moved(group)) > 1),
        close=tuple(moved(group) for group in shape.close if len(moved(group)) > 1),
    )


def with_instances(shape: Shape, role: str, count: int) -> Shape:
    """The shape with only the first ``count`` slots of a role."""
    return without(shape, set(roles_of(shape)[role][count:]))


def with_slots(shape: Shape, role: str, change: Callable[[Slot], Slot]) -> Shape:
    """The shape with every slot of a role changed."""
    mine = set(roles_of(shape)[role])
    return replace(shape, slots=tuple(change(s) if i in mine else s for i, s in enumerate(shape.slots)))


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number in ``low..high`` that fits, by bisection (fitting is monotone), or None."""
    if low > high or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def smaller(shape: Shape, fits: Callable[[Shape], bool]) -> Iterator[Variant]:
    """The least single changes that make the shape fit: instances, devices, cores, memory of a role; a constraint.

    A role with tied slots has the instances and devices that its plan is for.
    """
    planned = {shape.role(i) for group in shape.tied for i in group}
    for role, slots in roles_of(shape).items():
        rest = 1 if len(slots) == len(shape.slots) else 0
        most = 0 if role in planned else len(slots) - 1
        count = largest(max(rest, 1), most, lambda n, r=role: fits(with_instances(shape, r, n)))
        if count is not None:
            yield Variant(
                change={"set": f"roles.{role}.replicas", "value": count},
                text=f"{count} instead of {len(slots)} instances of {role}",
                shape=with_instances(shape, role, count),
            )
        yield from _smaller_slots(shape, role, shape.slots[slots[0]], fits, planned=role in planned)
    yield from _unbound(shape, fits)


def _smaller_slots(
    shape: Shape, role: str, slot: Slot, fits: Callable[[Shape], bool], *, planned: bool
) -> Iterator[Variant]:
    def attempt(name: str, n: int) -> Shape:
        return with_slots(shape, role, lambda s: replace(s, **{name: min(n, getattr(s, name))}))

    core = 1000 if fits(attempt("cpu_milli", 1000)) else 100  # below one core a tenth counts
    for name, unit, key in (("gpus", 1, "gpus"), ("cpu_milli", core, "cpus"), ("mem", 2**30, "memory")):
        if name == "gpus" and planned:
            continue
        have: int = getattr(slot, name)
        count = largest(1, -(-have // unit) - 1, lambda n, a=name, u=unit: fits(attempt(a, n * u)))
        if count is not None:
            value = f"{count}GiB" if name == "mem" else count if unit != 100 else count / 10
            was = {"mem": f"{have / 2**30:g}GiB", "cpu_milli": f"{have / 1000:g}"}.get(name, have)
            yield Variant(
                change={"set": f"roles.{role}.resources.{key}", "value": value},
                text=f"{key} {value} instead of {was} for each instance of {role}",
                shape=attempt(name, count * unit),
            )
    if slot.type is not None:
        other = with_slots(shape, role, lambda s: replace(s, type=None))
        if fits(other):
            yield Variant(
                change={"set": f"roles.{role}.resources.gpu_type", "value": None},
                text=f"any type of device instead of {slot.type} for {role}",
                shape=other,
            )


def _unbound(shape: Shape, fits: Callable[[Shape], bool]) -> Iterator[Variant]:
    for kind in ("together", "apart"):
        rules = getattr(shape, kind)
        for i, rule in enumerate(rules):
            free = replace(shape, **{kind: (*rules[:i], *rules[i + 1 :])})
            if fits(free):
                roles = list(dict.fromkeys(shape.role(s) for group in rule[:-1] for s in group))
                word = "collocate" if kind == "together" else "apart"
                yield Variant(
                    change={"drop": word, "roles": roles, "level": rule[-1]},
                    text=f"without {word} ({rule[-1]}) of {' and '.join(roles)}",
                    shape=free,
                )
