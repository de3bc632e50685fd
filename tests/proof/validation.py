"""Predictions of the cost model beside published tables, row by row, and multipliers fitted to a few of the rows."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rota.spec.errors import BadInput
from rota.train.plan.hardware import Hardware
from tests.proof.reference_results import MEMORY_TABLES, TIME_TABLES, Predicted, Row, TimeTable

GROUP = ("params_B", "hidden", "heads", "layers", "seq", "gpus", "global_batch")
"""Rows that agree in these ask the same question: which configuration is fastest?"""
GROUP_ROWS_MIN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Fit the multipliers of the parts of a step to ``points`` rows of other groups, drawn under ``seed``."""

    points: int
    seed: int = 0


def validate(
    tables: Sequence[Mapping[str, Any]],
    table_id: str,
    *,
    hardware: Hardware | None = None,
    calibration: Calibration | None = None,
) -> dict[str, Any]:
    """Predict every row of a table; signed errors in percent, in input order.

    Rows marked ``verified: false`` are shown but not counted. Raises BadInput for an unknown table, a table without
    rows, or a row that lacks a field; the message names the known ones.
    """
    known = (*MEMORY_TABLES, *TIME_TABLES)
    if table_id not in known:
        raise BadInput(f"table: {table_id!r} is unknown", hint=f"known: {', '.join(sorted(known))}")
    table = next((one for one in tables if one.get("id") == table_id), None)
    if table is None or not table.get("rows"):
        raise BadInput(f"table: no rows of {table_id!r} in this file")
    rows, timed, fitted = _dicts(table), TIME_TABLES.get(table_id), None
    if timed is None:
        used, predicted = None, _each(rows, MEMORY_TABLES[table_id])
    else:
        used = hardware or timed.hardware
        predicted, fitted = _times(rows, timed, used, calibration)
    out = [line for index, row in enumerate(rows) for line in _lines(index, row, predicted[index])]
    counted = [abs(line["error_pct"]) for line in out if line["counted"]]
    return {
        "api": "rota/v1",
        "kind": "PlanValidation",
        "table": table_id,
        "rows": out,
        "mean_pct": sum(counted) / len(counted) if counted else None,
        "max_pct": max(counted, default=None),
        "by_quantity": _by_quantity(out),
        "regret": None if timed is None else _regret(rows, predicted, timed),
        "hardware": None if used is None else used.name,
        "calibration": fitted,
        "peers": {} if timed is None else timed.peers,
    }


def _dicts(table: Mapping[str, Any]) -> list[Row]:
    columns = table.get("columns")
    try:
        return [dict(zip(columns, row, strict=True)) if columns else row for row in table["rows"]]
    except (TypeError, ValueError) as error:
        raise BadInput(f"table: a row does not have one value for each of the columns {columns}") from error


def _each(rows: Sequence[Row], predict: Callable[[Row], Predicted]) -> list[Predicted]:
    made: list[Predicted] = []
    for index, row in enumerate(rows):
        try:
            made.append(predict(row))
        except BadInput as error:
            raise BadInput(f"rows[{index}].{error}") from error
    return made


def _times(
    rows: Sequence[Row], table: TimeTable, hardware: Hardware, calibration: Calibration | None
) -> tuple[list[Predicted], dict[str, Any] | None]:
    """The quantity of every row, and what was fitted to get it."""
    parts = _each(rows, lambda row: table.step(row, hardware).breakdown_s)
    factors: list[Mapping[str, float]] = [dict.fromkeys(part, 1.0) for part in parts]
    fitted = None
    if calibration is not None:
        factors, fitted = _calibrated(rows, parts, table, calibration)
    seconds = [sum(f[name] * s for name, s in part.items()) for f, part in zip(factors, parts, strict=True)]
    return [{table.quantity: table.value(row, s)} for row, s in zip(rows, seconds, strict=True)], fitted


def _calibrated(
    rows: Sequence[Row], parts: Sequence[Mapping[str, float]], table: TimeTable, calibration: Calibration
) -> tuple[list[Mapping[str, float]], dict[str, Any]]:
    """Multipliers for each row, fitted without the row's own group, and their spread over these fits."""
    groups = [_group(row) for row in rows]
    fits: dict[tuple[Any, ...], dict[str, float]] = {}
    for group in dict.fromkeys(groups):
        others = [index for index, one in enumerate(groups) if one != group]
        if len(others) < calibration.points or calibration.points < 1:
            raise BadInput(
                f"calibrate: {calibration.points} points, a group leaves {len(others)} rows of others",
                hint=f"use 1 to {len(others)}",
            )
        chosen = sorted(others, key=lambda index: _lot(calibration.seed, group, index))[: calibration.points]
        measured_s = [table.seconds(rows[index], _published(index, rows[index], table.quantity)) for index in chosen]
        fits[group] = fit_multipliers([parts[index] for index in chosen], measured_s)
    names = sorted({name for fit in fits.values() for name in fit})
    values = {name: [fit[name] for fit in fits.values()] for name in names}
    spread = {
        name: {"mean": statistics.fmean(found), "low": min(found), "high": max(found)} for name, found in values.items()
    }
    told = {"points": calibration.points, "seed": calibration.seed, "fits": len(fits), "multipliers": spread}
    return [fits[group] for group in groups], told


def _lot(seed: int, group: tuple[Any, ...], index: int) -> bytes:
    """Draws rows: the same ones for the same seed, on any machine."""
    return hashlib.sha256(f"{seed} {group} {index}".encode()).digest()


def _group(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in GROUP)


def _regret(rows: Sequence[Row], predicted: Sequence[Predicted], table: TimeTable) -> dict[str, float] | None:
    """How much slower the configuration that the model picks was measured than the best of its group."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(_group(row), []).append(index)
    found: list[float] = []
    for members in groups.values():
        if len(members) >= GROUP_ROWS_MIN:
            taken_s = {i: table.seconds(rows[i], _published(i, rows[i], table.quantity)) for i in members}
            picked = min(members, key=lambda i: table.seconds(rows[i], predicted[i][table.quantity]))
            found.append(100 * (taken_s[picked] / min(taken_s.values()) - 1))
    return {"groups": len(found), "mean_pct": statistics.fmean(found), "max_pct": max(found)} if found else None


def _published(index: int, row: Row, quantity: str) -> float:
    value = row.get(quantity)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise BadInput(f"rows[{index}].{quantity}: {value!r}, so there is nothing to compare with")
    return value


def _lines(index: int, row: Row, predicted: Predicted) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for quantity, value in predicted.items():
        published = _published(index, row, quantity)
        made.append(
            {
                "row": index,
                "quantity": quantity,
                "published": published,
                "predicted": value,
                "error_pct": 100 * (value - published) / published,
                "counted": bool(row.get("verified", True)),
            }
        )
    return made


def _by_quantity(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["counted"]:
            found.setdefault(row["quantity"], []).append(abs(row["error_pct"]))
    return {name: {"mean_pct": sum(errors) / len(errors), "max_pct": max(errors)} for name, errors in found.items()}


NOISE, SPREAD = 0.1, 0.2
"""Relative error of one measured point, and how far a multiplier is expected to lie from 1."""
OUTLIER = 2 * NOISE
"""Points further off than this weigh less, in proportion (Huber 1964)."""
FITS, ROUNDS = 3, 60


def fit_multipliers(parts: Sequence[Mapping[str, float]], measured_s: Sequence[float]) -> dict[str, float]:
    """Non-negative ridge regression on relative errors, by coordinate descent.

    ``parts`` has the predicted seconds of each point by name, ``measured_s`` what each took. Minimises
    ``sum_i w_i (sum_j x_j a_ij / y_i - 1)^2 + (NOISE / SPREAD)^2 sum_j (x_j - 1)^2``: a part that the points say little
    of keeps its prediction. The weights ``w_i`` of outliers are lowered from fit to fit.
    """
    names = sorted({name for part in parts for name in part})
    shares = [[part.get(name, 0.0) / y for name in names] for part, y in zip(parts, measured_s, strict=True)]
    x, left = [1.0] * len(names), [1 - sum(row) for row in shares]
    for _ in range(FITS):
        weights = [min(1.0, OUTLIER / abs(rest)) if rest else 1.0 for rest in left]
        for _ in range(ROUNDS):
            for j in range(len(names)):
                left = _improve(shares, weights, x, left, j)
    return dict(zip(names, x, strict=True))


def _improve(
    shares: Sequence[Sequence[float]], weights: Sequence[float], x: list[float], left: list[float], j: int
) -> list[float]:
    """Set ``x[j]`` to its best value with the others fixed; returns what is left of each point."""
    prior = (NOISE / SPREAD) ** 2
    square = sum(w * row[j] ** 2 for w, row in zip(weights, shares, strict=True))
    along = sum(w * row[j] * (rest + row[j] * x[j]) for w, row, rest in zip(weights, shares, left, strict=True))
    new = max(0.0, (along + prior) / (square + prior))
    left = [rest - row[j] * (new - x[j]) for row, rest in zip(shares, left, strict=True)]
    x[j] = new
    return left
