"""Sweeps: points of parameters as ``--set`` values of jobs, survivors of successive halving, and the table of results.

A sweep is a set of jobs that share a label; nothing else is stored. All functions are pure: the same sweep gives the
same points, names and keys, so that whoever submits it again continues it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import PurePath
from types import MappingProxyType
from typing import Literal, TypedDict

from rota.runtime.random import RandomSource, SeededRandom
from rota.service.api import SWEEP_LABELS
from rota.spec.errors import BadInput

SWEEP_POINTS_MAX = 2_000
DRAWS_PER_POINT = 100
"""Draws for each sample of a random sweep, until as many different points were found."""
SWEEP, RUNG, POINT, METRIC = SWEEP_LABELS
NAME_CHARS_MAX = 63
FIXED = ("name", "labels", "roles", "$schema")
"""Fields of a job file that no parameter replaces as a whole."""
_RANGE = re.compile(r"^(log:)?(-?[\d.]+(?:e-?\d+)?)\.\.(-?[\d.]+(?:e-?\d+)?)$", re.IGNORECASE)
NEAR = 0.85
"""Ratio of difflib from which on a name counts as a mistyped field: queu, seeds; not steps, dataset."""
SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish")
_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_IN_WORD = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")

Point = Mapping[str, str]
Goal = Literal["min", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter: the texts it may have, or the range from ``low`` to ``high`` that is drawn from."""

    name: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def draw(self, source: RandomSource) -> str:
        """One of the values, or a number of the range with six digits."""
        rng = source.rng()
        if self.values:
            return self.values[rng.randrange(len(self.values))]
        if self.log:
            return f"{math.exp(rng.uniform(math.log(self.low), math.log(self.high))):.6g}"
        return f"{rng.uniform(self.low, self.high):.6g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What the jobs of a sweep are compared by."""

    name: str
    goal: Goal = "min"

    @staticmethod
    def parse(text: str) -> Metric:
        """Of ``NAME``, ``NAME:min`` or ``NAME:max``. Raises BadInput."""
        name, _, goal = text.partition(":")
        if not name or goal not in ("", "min", "max"):
            raise BadInput(f"--metric {text}: not a metric", hint="for example loss, or accuracy:max")
        return Metric(name=name, goal="max" if goal == "max" else "min")

    def __str__(self) -> str:
        return f"{self.name}:{self.goal}"

    def key(self, value: float | None) -> float:
        """Place in an order with the best first; a missing value, or one that is not a number, comes last."""
        if value is None or math.isnan(value):
            return math.inf
        return value if self.goal == "min" else -value


def parse_parameter(text: str, flag: str = "--sweep") -> Parameter:
    """Of ``name=a,b``, ``name=1..5`` (whole numbers), ``name=0.1..0.5`` or ``name=log:1e-5..1e-1``. Raises BadInput."""
    name, equals, given = (part.strip() for part in text.partition("="))
    if not name or not equals or not given:
        raise BadInput(f"{flag} {text}: not NAME=VALUES", hint=f"for example {flag} lr=1e-4,3e-4 or {flag} seed=1..5")
    found = _RANGE.match(given)
    if found is None:
        values = _split(given)
        if "" in values or len(set(values)) < len(values):
            raise BadInput(f"{flag} {text}: a value is empty or given twice")
        return Parameter(name=name, values=values)
    try:
        low, high = float(found[2]), float(found[3])
    except ValueError:
        raise BadInput(f"{flag} {text}: {found[2]}..{found[3]} is not a range of numbers") from None
    if not low < high or (found[1] and low <= 0):
        raise BadInput(f"{flag} {text}: a range goes from a lower to a higher number{', above 0' if found[1] else ''}")
    whole = not found[1] and re.fullmatch(r"-?\d+", found[2]) and re.fullmatch(r"-?\d+", found[3])
    if not whole:
        return Parameter(name=name, low=low, high=high, log=bool(found[1]))
    if high - low >= SWEEP_POINTS_MAX:
        raise BadInput(f"{flag} {text}: more than {SWEEP_POINTS_MAX} values")
    return Parameter(name=name, values=tuple(str(n) for n in range(int(low), int(high) + 1)))


def _split(given: str) -> tuple[str, ...]:
    """The values between commas; a comma in brackets is a part of its value."""
    values, depth = [""], 0
    for char in given:
        depth += (char in "[{") - (char in "]}")
        if char == "," and not depth:
            values.append("")
        else:
            values[-1] += char
    return tuple(value.strip() for value in values)


def points(parameters: Sequence[Parameter], samples: int | None, seed: str) -> tuple[Point, ...]:
    """Every combination, the last parameter changing fastest; or ``samples`` different points drawn from ``seed``.

    More samples of the same seed begin with the same points. Raises BadInput.
    """
    names = [one.name for one in parameters]
    if doubled := next((name for name in names if names.count(name) > 1), ""):
        raise BadInput(f"--sweep {doubled}: given twice", hint=f"all values in one: --sweep {doubled}=a,b")
    ranges = [one.name for one in parameters if not one.values]
    total = math.inf if ranges else math.prod(len(one.values) for one in parameters)
    if samples is None and ranges:
        raise BadInput(f"--sweep {ranges[0]}: a range of fractions has no last value", hint="add --samples N")
    if min(total, samples or total) > SWEEP_POINTS_MAX:
        raise BadInput(f"the sweep has more than {SWEEP_POINTS_MAX} points", hint="add --samples N")
    if samples is None or total <= samples:
        return tuple(dict(zip(names, values)) for values in product(*(one.values for one in parameters)))
    source = SeededRandom(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8]))
    found: dict[tuple[str, ...], Point] = {}
    for _ in range(samples * DRAWS_PER_POINT):
        drawn = tuple(one.draw(source) for one in parameters)
        found.setdefault(drawn, dict(zip(names, drawn)))
        if len(found) == samples:
            break
    return tuple(found.values())


def budgets(text: str) -> tuple[Parameter, tuple[float, ...]]:
    """The parameter of ``--budget`` and its numbers, one a rung, each above the one before. Raises BadInput."""
    parameter = parse_parameter(text, "--budget")
    try:
        numbers = tuple(float(value) for value in parameter.values)
    except ValueError:
        numbers = ()
    if len(numbers) < 2 or numbers[0] <= 0 or any(a >= b for a, b in pairwise(numbers)):
        raise BadInput(f"--budget {text}: expected growing numbers above 0", hint="for example --budget epochs=1,3,9")
    return parameter, numbers


def survivors(
    ran: Sequence[tuple[Point, float | None]], metric: Metric, before: float, after: float
) -> tuple[Point, ...]:
    """The points that are in the next rung, the best first.

    Successive halving (Jamieson and Talwalkar, AISTATS 2016): each rung costs the same, so of n points with the budget
    ``before``, n * before / after get ``after``, and at least one. A point without a value is never among them.
    """
    ranked = sorted((one for one in ran if math.isfinite(metric.key(one[1]))), key=lambda one: metric.key(one[1]))
    return tuple(point for point, _ in ranked[: max(1, math.floor(len(ran) * before / after + 1e-9))])


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepJob:
    """One job of a sweep: the ``--set`` values that make it, and the key under which it is submitted once."""

    sets: tuple[str, ...]
    key: str


def is_variable(name: str, fields: Collection[str]) -> bool:
    """Whether a parameter is a variable: its name has no dot and is none of the ``fields`` of the job file."""
    return name not in fields and "." not in name


def unread(names: Iterable[str], fields: Collection[str], text: str, flag: str = "--sweep") -> list[str]:
    """The variables that the ``text`` of the job does not name; a program may read them, so they are no mistake.

    Raises BadInput for one that is nearly the name of a field.
    """
    found = [one for one in names if is_variable(one, fields) and not re.search(rf"\b{re.escape(one)}\b", text)]
    for name in found:
        if near := difflib.get_close_matches(name, fields, n=1, cutoff=NEAR):
            message = f"{flag} {name}: not a field of the job file, and nothing in it names a variable {name}"
            hint = f"did you mean {near[0]!r}? A variable of that name: {flag} env.{name}=..."
            raise BadInput(message, hint=hint)
    return found


def with_values(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """A command with ``$NAME`` and ``${NAME}`` of ``values`` put in; commands of a shell are returned unchanged."""
    if words and PurePath(words[0]).name in SHELLS:
        return [*words]
    return [_IN_WORD.sub(lambda found: values.get(found[1] or found[2], found[0]), word) for word in words]


def job_of(
    sweep: str,
    point: Point,
    fields: Iterable[str],
    *,
    rung: int | None,
    metric: Metric | None,
    commands: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> SweepJob:
    """The job of a point. A name with a dot or of ``fields`` is a field of the job file; any other is a variable.

    ``commands`` are the lists of words that roles run: no shell reads them, so they get the values of variables here.
    Raises BadInput for a name that is neither field nor variable.
    """
    known = set(fields)
    sets: list[str] = []
    for name, value in point.items():
        if name in FIXED:
            raise BadInput(f"--sweep {name}: this field cannot be a parameter", hint="a field inside it can")
        if is_variable(name, known) and _VARIABLE.match(name) is None:
            raise BadInput(f"--sweep {name}: neither a field of the job file nor the name of a variable")
        sets.append(f"env.{name}={value}" if is_variable(name, known) else f"{name}={value}")
    values = {
        name.removeprefix("env."): value
        for name, value in point.items()
        if is_variable(name.removeprefix("env."), known)
    }
    for role, words in commands.items():
        if (filled := with_values(words, values)) != [*words]:
            sets.append(f"roles.{role}.run={json.dumps(filled, ensure_ascii=False)}")
    words = shlex.join(f"{name}={value}" for name, value in point.items())
    labels = {SWEEP: sweep, POINT: words, METRIC: metric, RUNG: rung}
    sets += [f"labels.{label}={value}" for label, value in labels.items() if value is not None]
    digest = hashlib.sha256(json.dumps([sorted(point.items()), rung]).encode()).hexdigest()
    return SweepJob(sets=(*sets, f"name={_name(sweep, point, rung, digest)}"), key=f"sweep/{sweep}/{digest[:24]}")


def _name(sweep: str, point: Point, rung: int | None, digest: str) -> str:
    """The name of a job: the sweep and the point where that is a name, else the sweep and a hash."""
    parts = [f"{name.rpartition('.')[2]}-{value}" for name, value in point.items()]
    parts += [] if rung is None else [f"rung-{rung}"]
    words = ".".join([sweep, *(re.sub(r"[^A-Za-z0-9_-]+", "_", part) for part in parts)])
    return words if len(words) <= NAME_CHARS_MAX else f"{sweep[: NAME_CHARS_MAX - 13]}.{digest[:12]}"


def point_of(labels: Mapping[str, str]) -> dict[str, str]:
    """The point of a job, from its labels."""
    try:
        words = shlex.split(labels.get(POINT, ""))
    except ValueError:  # a label of that name that no sweep gave
        return {}
    return {name: value for name, equals, value in (word.partition("=") for word in words) if equals}


def value_in(lines: Iterable[str], name: str) -> float | None:
    """The last number that these lines of output give a metric: ``loss=0.3``, ``loss: 0.3``, ``"loss": 0.3``."""
    number = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|[-+]?inf)"
    wanted = re.compile(rf"(?<![\w.]){re.escape(name)}[\"']?\s*[=: ]\s*{number}(?![\w.])")
    found = [match[1] for line in lines for match in wanted.finditer(line)]
    return float(found[-1]) if found else None


class SweepRow(TypedDict):
    """One job of a sweep as documents show it; ``value`` is that of the metric, None until it was reported."""

    job: str
    state: str
    rung: int | None
    point: dict[str, str]
    value: float | None
    run_s: float


class SweepDocument(TypedDict):
    """A sweep: its jobs with the best first, and the best of those that succeeded in the last rung."""

    kind: Literal["Sweep"]
    sweep: str
    metric: str | None
    goal: Goal | None
    parameters: list[str]
    states: dict[str, int]
    items: list[SweepRow]
    best: SweepRow | None


def sweep_document(sweep: str, rows: Iterable[SweepRow], metric: Metric | None) -> SweepDocument:
    """The document of a sweep; without a metric the jobs are in the order of their points."""
    items = list(rows)
    if metric is not None:
        items.sort(key=lambda row: (-(row["rung"] or 0), metric.key(row["value"])))
    best = next((row for row in items if row["state"] == "SUCCEEDED" and row["value"] is not None), None)
    states = [row["state"] for row in items]
    return {
        "kind": "Sweep",
        "sweep": sweep,
        "metric": None if metric is None else metric.name,
        "goal": None if metric is None else metric.goal,
        "parameters": list(dict.fromkeys(name for row in items for name in row["point"])),
        "states": {state: states.count(state) for state in dict.fromkeys(states)},
        "items": items,
        "best": best if metric is not None and best is not None and math.isfinite(metric.key(best["value"])) else None,
    }


PLOT_ROWS_MAX, PLOT_WIDTH = 12, 40


def plot(document: SweepDocument, name: str) -> list[str]:
    """Text lines of the metric over one parameter: a row a value, from the best to the worst run, ``o`` the mean.

    More than 12 numbers are put into 12 ranges with equally many runs. Empty with fewer than two values.
    """
    runs = [(row["point"][name], row["value"]) for row in document["items"] if name in row["point"]]
    known = [(text, value) for text, value in runs if value is not None and math.isfinite(value)]
    groups = _groups(known)
    if len(groups) < 2:
        return []
    low, high = min(value for _, value in known), max(value for _, value in known)

    def at(value: float) -> int:
        return round((value - low) / (high - low or 1.0) * (PLOT_WIDTH - 1))

    wide = max(len(text) for text in groups)
    lines = [f"{document['metric']} by {name}, from {low:g} to {high:g}"]
    for text, values in groups.items():
        row = [" "] * PLOT_WIDTH
        first, last = at(min(values)), at(max(values))
        row[first : last + 1] = "-" * (last - first + 1)
        row[at(sum(values) / len(values))] = "o"
        lines.append(f"  {text:>{wide}} |{''.join(row)}| {sum(values) / len(values):g}")
    return lines


def _groups(known: Sequence[tuple[str, float]]) -> dict[str, list[float]]:
    """Values of the metric by the text of the parameter; numbers in order, many of them in ranges."""
    try:
        ordered = sorted(known, key=lambda one: float(one[0]))
        numbers = True
    except ValueError:
        ordered, numbers = sorted(known), False
    texts = list(dict.fromkeys(text for text, _ in ordered))
    found: dict[str, list[float]] = {}
    for index, (text, value) in enumerate(ordered):
        label = text
        if numbers and len(texts) > PLOT_ROWS_MAX:
            bin_at = index * PLOT_ROWS_MAX // len(ordered)
            first = -(-bin_at * len(ordered) // PLOT_ROWS_MAX)
            last = -(-(bin_at + 1) * len(ordered) // PLOT_ROWS_MAX) - 1
            label = f"{ordered[first][0]}..{ordered[last][0]}"
        found.setdefault(label, []).append(value)
    return found
