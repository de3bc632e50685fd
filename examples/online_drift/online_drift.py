"""The job: events that drift, features made by two instances, a model that learns each row after it predicted it.

There is no loop: the path `events -> feat.map -> train.step` drives itself, and a commit a second makes it durable. The
state of `train` is the whole model with its counters, so after a death rows are neither lost nor learned twice.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from river import datasets
from river.datasets import synth
from river.linear_model import LogisticRegression
from river.preprocessing import StandardScaler

from rota import Each, Workload, op

CHUNK, REAL, HALF, SEED = 25, 1250, int(os.environ.get("DRIFT_HALF", "4000")), 11
"""Rows of an item; real ones, then as many before the drift as after it."""
WINDOW = 500
"""Rows over which the recent accuracy is taken."""
Row = tuple[dict[Any, float], bool]


def rows() -> Iterator[Row]:
    """Phishing (1,250 real rows), then SEA: `HALF` rows of one concept and, without notice, as many of another."""
    yield from datasets.Phishing()
    for variant in (0, 3):
        for x, y in synth.SEA(variant=variant, noise=0.05, seed=SEED).take(HALF):
            yield {f"sea{name}": value for name, value in x.items()}, bool(y)


def events() -> Iterator[list[Row]]:
    """The source of the job: rows in chunks, the same at each reading."""
    found = rows()
    while chunk := list(itertools.islice(found, CHUNK)):
        yield chunk


def features(row: Row) -> Row:
    """The row with the squares of its numbers."""
    x, y = row
    return {**{str(k): float(v) for k, v in x.items()}, **{f"{k}^2": float(v) ** 2 for k, v in x.items()}}, bool(y)


class Model:
    """Standardised logistic regression by stochastic gradient descent (river), judged before it learns."""

    def __init__(self) -> None:
        self.scaler, self.classifier = StandardScaler(), LogisticRegression()
        self.right: list[bool] = []

    def step(self, row: Row) -> None:
        """Predict the row, note whether that was right, then learn it."""
        x, y = row
        self.scaler.learn_one(x)
        scaled = self.scaler.transform_one(x)
        self.right.append((self.classifier.predict_one(scaled) or False) == y)
        self.classifier.learn_one(scaled, y)

    def state(self) -> dict[str, Any]:
        """Everything that the next row depends on, as plain values."""
        scaler, classifier = self.scaler, self.classifier
        return {
            "counts": dict(scaler.counts),
            "means": dict(scaler.means),
            "vars": dict(scaler.vars),
            "weights": {name: float(value) for name, value in classifier.weights.items()},
            "intercept": float(classifier.intercept),
            "steps": classifier.optimizer.n_iterations,
            "right": np.array(self.right),
        }

    def restore(self, kept: dict[str, Any]) -> None:
        """Inverse of `state`."""
        scaler, classifier = self.scaler, self.classifier
        scaler.counts.update(kept["counts"])
        scaler.means.update(kept["means"])
        scaler.vars.update(kept["vars"])
        classifier._weights.update(kept["weights"])
        classifier.intercept = kept["intercept"]
        classifier.optimizer.n_iterations = kept["steps"]
        self.right = [bool(one) for one in kept["right"]]

    def accuracy(self, last: int | None = None) -> float:
        """Prequential accuracy of all rows, or of the `last` ones."""
        return float(np.mean(self.right[-last:] if last else self.right))

    def figures(self) -> dict[str, float]:
        """How well it did: over all, before the drift, and 2,000 rows after it."""
        drift = len(self.right) - HALF
        return {
            "rows": len(self.right),
            "accuracy": self.accuracy(),
            "before_drift": float(np.mean(self.right[drift - WINDOW : drift])),
            "after_drift": float(np.mean(self.right[drift : drift + WINDOW])),
            "recovered": float(np.mean(self.right[drift + 2000 - WINDOW : drift + 2000])),
        }


class Features(Workload):
    """Makes features; two instances share the work, any may die."""

    @op(send=Each, retry="safe")
    def map(self, chunk: list[Row]) -> list[Row]:
        """The features of a chunk."""
        return [features(row) for row in chunk]


class Trainer(Workload):
    """Holds the model."""

    def setup(self, ctx: Any) -> None:
        self.model, self.ctx = Model(), ctx
        if ctx.restored is not None:
            self.model.restore(ctx.restored)

    @op(retry="commit")
    def step(self, chunks: list[list[Row]]) -> dict[str, float]:
        """Predict and learn every row of a batch of chunks; the figures so far."""
        for row in itertools.chain.from_iterable(chunks):
            self.model.step(row)
        if len(self.model.right) == REAL + 2 * HALF:
            (self.ctx.output_dir / "result.json").write_text(json.dumps(self.model.figures(), indent=1) + "\n")
        return {"rows": len(self.model.right), "accuracy": self.model.accuracy(), "recent": self.model.accuracy(WINDOW)}

    @op.state
    def state(self) -> dict[str, Any]:
        """The whole model."""
        return self.model.state()

    @op.publish
    def weights(self) -> dict[str, Any]:
        """What a server needs: names and numbers."""
        kept = self.model.state()
        names = sorted(kept["weights"])
        return {
            "names": np.frombuffer("\n".join(names).encode() or b"\n", dtype=np.uint8),
            "weights": np.array([kept["weights"][name] for name in names] or [0.0]),
            "rows": np.array([len(self.model.right)]),
        }


class Server(Workload):
    """Serves the model; follows its versions by itself, because its weights edge bounds their lag."""

    def setup(self, ctx: Any) -> None:
        self.ctx, self.rows = ctx, 0

    @op.weights
    def load(self, version: int, tensors: dict[str, Any]) -> None:
        """Take over a version."""
        names = bytes(tensors["names"]).decode().split("\n")
        self.weights = dict(zip(names, tensors["weights"].tolist(), strict=False))
        self.rows = int(tensors["rows"][0])
        self.ctx.log(f"version {version}, {self.rows} rows")

    @op(send=Each, retry="safe")
    def rows_known(self, item: int) -> int:
        """How many rows the served model has learned."""
        return self.rows
