"""Runs every benchmark in turn and prints one table at the end: claim, ours, peer, ratio.

``python benchmarks/run.py [NAME...] [--limit SECONDS]``. Less is better in every row, and a ratio is ours over the
peer's. Scripts run in their short form (``SHORT``, else without arguments). One that fails, or runs past its limit,
does not stop the others; the exit status is 1 then. It is 1 also when a ratio to a peer of the same run is more than
``SLOWER`` times the one in ``ratios.json``; ``--record`` writes the ratios of this run there. A claim with null there
is watched once a run has recorded it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
RESULT = "ROTA_BENCH_RESULT"
"""The file that a script writes its rows to, when it is run from here."""
SHORT = {"chaos": ("--minutes", "2"), "ettr": ("--minutes", "2"), "recovery": ("--kills", "5")}
"""Arguments of scripts that take longer than a few minutes without any."""
RATIOS = FOLDER / "ratios.json"
"""Ratios that are watched, as measured last on a quiet machine: ``script: claim`` to ours over the peer's."""
SLOWER = 1.3
LIMIT_S = 600.0
GRACE_S = 60.0
"""For a script that is interrupted, to end what it has started."""


@dataclass(frozen=True, slots=True)
class Row:
    """One claim: our figure beside that of the peer or of the limit that is named. Less is better."""

    claim: str
    ours: float
    unit: str = ""
    peer: float | None = None
    named: str = "limit"

    def cells(self) -> tuple[str, str, str, str]:
        """The columns after the name of the script."""
        ours = f"{figure(self.ours)} {self.unit}".rstrip()
        if self.peer is None:
            return self.claim, ours, "", ""
        shown = f"{self.named} {figure(self.peer)} {self.unit}".rstrip()
        return self.claim, ours, shown, f"{self.ours / self.peer:.3g}" if self.peer else ""


def figure(value: float) -> str:
    """Four digits, and no power of ten."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def hand_in(rows: Iterable[Row]) -> None:
    """Give the rows of a script to the table, when it is run from here; nothing otherwise."""
    _write({"rows": [asdict(row) for row in rows]})


def skip(why: str) -> None:
    """Say in the table why a script measured nothing; it ends with 0 then."""
    _write({"skipped": why})


def _write(result: dict[str, object]) -> None:
    path = os.environ.get(RESULT)
    if path:
        Path(path).write_text(json.dumps(result), encoding="utf-8")


@dataclass(slots=True)
class Outcome:
    """How one script ended."""

    name: str
    took_s: float
    failed: str = ""
    skipped: str = ""
    rows: list[Row] = field(default_factory=list[Row])

    @property
    def text(self) -> str:
        """For the list below the table."""
        if self.failed:
            return f"failed: {self.failed}"
        return f"skipped: {self.skipped}" if self.skipped else "done"


def run_one(script: Path, words: Sequence[str], limit_s: float) -> Outcome:
    """Run a script, which prints as it would alone, and read what it handed in."""
    with tempfile.TemporaryDirectory(prefix="rb") as folder:
        result = Path(folder, "result.json")
        began = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, str(script), *words], env=os.environ | {RESULT: str(result)}, start_new_session=True
        )
        failed = ""
        try:
            status = child.wait(limit_s)
            failed = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            failed = f"over its limit of {limit_s:g} s"
        finally:
            end(child)
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        rows = [Row(**row) for row in found.get("rows", ())]
        return Outcome(script.stem, time.monotonic() - began, failed, found.get("skipped", ""), rows)


def end(child: subprocess.Popen[bytes]) -> None:
    """Interrupt the script, so that it ends what it has started, and kill what is left of its process group."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def table(outcomes: Sequence[Outcome]) -> str:
    """The rows of all scripts in columns, then a line a script."""
    cells = [("script", "claim", "ours", "peer", "ratio")]
    cells += [(one.name, *row.cells()) for one in outcomes for row in one.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines += ["", *(f"{one.name:{widths[0]}s}  {one.took_s:5.0f} s  {one.text}" for one in outcomes)]
    return "\n".join(lines)


def ratios(outcomes: Sequence[Outcome], recorded: Mapping[str, float | None]) -> dict[str, float]:
    """The ratios of this run, of those that are watched."""
    rows = ((f"{one.name}: {row.claim}", row) for one in outcomes for row in one.rows)
    return {name: row.ours / row.peer for name, row in rows if name in recorded and row.peer}


def slower(outcomes: Sequence[Outcome], recorded: Mapping[str, float | None]) -> list[str]:
    """Watched ratios that became worse by more than ``SLOWER``, and those that a script no longer hands in."""
    found = ratios(outcomes, recorded)
    worse = [
        f"slower than recorded: {name}: {found[name]:.3g} times its peer, recorded {was:.3g}"
        for name, was in recorded.items()
        if was is not None and found.get(name, 0.0) > SLOWER * was
    ]
    done = {one.name for one in outcomes if one.rows}
    gone = [f"not measured: {name}" for name in recorded if name not in found and name.partition(":")[0] in done]
    return worse + gone


def main(arguments: Sequence[str]) -> int:
    """Run the scripts that are named, else all; 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="scripts, without .py")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that one script may take")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--ratios", type=Path, default=RATIOS, help="the ratios that are watched")
    parser.add_argument("--record", action="store_true", help="write the ratios of this run to that file")
    given = parser.parse_args(arguments)
    scripts = {path.stem: path for path in sorted(given.folder.glob("[a-z]*.py")) if path != Path(__file__).resolve()}
    unknown = sorted(set(given.names) - set(scripts))
    if unknown:
        parser.error(f"no benchmark is named {', '.join(unknown)}; there are {', '.join(scripts)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # make in the background leaves it ignored
    outcomes: list[Outcome] = []
    try:
        for name in given.names or scripts:
            print(f"== {name} {' '.join(SHORT.get(name, ()))}".rstrip(), flush=True)
            outcomes.append(run_one(scripts[name], SHORT.get(name, ()), given.limit))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        print(f"\n{table(outcomes)}", flush=True)
    known = given.ratios.read_text(encoding="utf-8") if given.ratios.exists() else "{}"
    recorded: dict[str, float | None] = json.loads(known)
    if given.record:
        kept = recorded | {name: float(f"{ratio:.4g}") for name, ratio in ratios(outcomes, recorded).items()}
        given.ratios.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        recorded = kept
    worse = slower(outcomes, recorded)
    for text in worse:
        print(text)
    return int(any(one.failed for one in outcomes) or bool(worse))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
