"""The record of a run: a row a commit as JSON lines and TensorBoard events; at the end a picture and the figures."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import grpo
import numpy as np
import sft
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

Row = dict[str, float]


class Curve:
    """Rows 1..committed of an earlier entry are kept, later ones are dropped: the steps they belong to run again."""

    def __init__(self, folder: Path, committed: int) -> None:
        self._folder = folder
        self._path = folder / "metrics.jsonl"
        self.rows = {n: row for n, row in read_rows(self._path).items() if n <= committed}
        self._path.write_text("".join(_line(n, row) for n, row in self.rows.items()))
        events = folder / "tensorboard"
        for old in events.glob("events.out.*"):
            old.unlink()
        self._events = EventFileWriter(str(events))
        for n, row in self.rows.items():
            self._show(n, row)

    def add(self, n: int, row: Row) -> None:
        """Append the row of step n."""
        self.rows[n] = row
        with self._path.open("a") as file:
            file.write(_line(n, row))
        self._show(n, row)

    def _show(self, n: int, row: Row) -> None:
        phase = "sft" if n <= sft.STEPS else "grpo"
        values = [Summary.Value(tag=f"{phase}/{name}", simple_value=value) for name, value in row.items()]
        self._events.add_event(Event(step=n, wall_time=time.time(), summary=Summary(value=values)))
        self._events.flush()

    def finish(self, accuracy_after: float) -> Row:
        """Write `result.json` and `curve.png`; the figures of the run."""
        self._events.close()
        steps = [row for n, row in sorted(self.rows.items()) if n > sft.STEPS]
        rewards = [row["reward"] for row in steps]
        figures = {
            "reward_before": float(np.mean(rewards[: grpo.WINDOW])),
            "reward_after": float(np.mean(rewards[-grpo.WINDOW :])),
            "accuracy_before": steps[0]["accuracy"],
            "accuracy_after": accuracy_after,
        }
        (self._folder / "result.json").write_text(json.dumps(figures, indent=1) + "\n")
        draw(self.rows, accuracy_after, self._folder / "curve.png")
        return figures


def _line(n: int, row: Row) -> str:
    return json.dumps({"n": n, **row}) + "\n"


def read_rows(path: Path) -> dict[int, Row]:
    """Rows by step; a last line that a death cut short is left out."""
    rows: dict[int, Row] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        rows[row.pop("n")] = row
    return rows


def draw(rows: Mapping[int, Row], accuracy_after: float, path: Path) -> None:
    """Reward and held-out accuracy over the reinforcement steps as PNG."""
    from matplotlib.figure import Figure  # 0.3 s to import: only at the end

    steps = sorted(n for n in rows if n > sft.STEPS)
    reward = np.array([rows[n]["reward"] for n in steps])
    window = min(grpo.WINDOW, len(steps))
    smooth = np.convolve(reward, np.ones(window) / window, mode="valid")
    measured = [n for n in steps if "accuracy" in rows[n]]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, reward, color="#9ecae1", linewidth=1, label="sampled reward")
    axes.plot(steps[window - 1 :], smooth, color="#08519c", label=f"sampled reward, mean of {window}")
    accuracy = [*(rows[n]["accuracy"] for n in measured), accuracy_after]
    axes.plot([*measured, steps[-1]], accuracy, "o-", color="#d95f02", label="greedy accuracy, held out")
    axes.set(xlabel="commit", ylabel="share", ylim=(0, 1), title="GRPO on one-digit sums")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
