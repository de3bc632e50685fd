"""``python -m tests.mutants`` breaks sampled lines one at a time and prints which of them no unit test finds."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import runner
from tests.mutants.areas import AREAS, ROOT, Area
from tests.mutants.mutate import mutations
from tests.mutants.runner import Mutant

EQUIVALENT = Path(__file__).with_name("equivalent.txt")
MEANT = 0.85


def sampled(area: Area, lines: int, seed: int) -> list[Mutant]:
    """``lines`` lines of an area, each as likely, and one mutation of each."""
    rng = random.Random(f"{seed} {area.name}")
    by_line: dict[tuple[Path, int], list[Mutant]] = {}
    for path in area.files():
        for one in mutations(path.read_bytes()):
            by_line.setdefault((path, one.line), []).append(Mutant(path=path, mutation=one))
    chosen = rng.sample(sorted(by_line), min(lines, len(by_line)))
    found = list[Mutant]()
    for place in sorted(chosen):
        kinds = sorted({one.mutation.kind for one in by_line[place]})
        kind = rng.choice(kinds)
        found.append(rng.choice([one for one in by_line[place] if one.mutation.kind == kind]))
    return found


def equivalent() -> dict[str, str]:
    """``path | before -> after`` of changes that change nothing a caller can see -> why."""
    rows = [line.split(" | ") for line in EQUIVALENT.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {f"{path} | {change}": reason for path, change, reason in rows}


Result = tuple[Mutant, str, int]
"""A mutant, what came of it, and how many tests ran."""


def run_area(area: Area, mutants: list[Mutant], workers: int) -> list[Result]:
    """All mutants of an area: those inside functions from one collected session, the others with an import each."""

    def work() -> tuple[list[Result], list[tuple[Mutant, list[str]]], list[str]]:
        results = list[Result]()
        session = runner.Session(mutants, workers, lambda *row: results.append(row))
        status = pytest.main([*runner.QUIET, *area.tests], plugins=[session])
        if status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise RuntimeError(f"the tests of {area.name} were not collected: {status}")
        return results, session.left, session.failed

    results, left, failed = runner.in_child(work)
    if failed:
        print(f"left out, they fail without a change: {', '.join(failed)}")
    jobs = [(mutant, len(tests), runner.anew(mutant, tests)) for mutant, tests in left]
    runner.run_all(jobs, workers, lambda *row: results.append(row))
    return results


def report(results: list[Result], known: dict[str, str], show_all: bool) -> Counter[str]:
    """Print the survivors; how often each result came."""
    counts: Counter[str] = Counter()
    for mutant, result, tests in sorted(results, key=lambda row: (row[0].name, row[0].mutation.line)):
        shown = mutant.mutation.shown(mutant.path.read_bytes())
        if result == runner.SURVIVED and f"{mutant.name} | {shown}" in known:
            result = "equivalent"
        counts[result] += 1
        if result == runner.SURVIVED or show_all:
            by = f"{tests} tests" if tests else "no test runs it"
            print(f"{result} {mutant.name}:{mutant.mutation.line}: {shown}  [{mutant.mutation.kind}; {by}]", flush=True)
    return counts


def share(counts: Counter[str]) -> tuple[int, int]:
    """Those that a test found, of those that change something; one that runs without an end was found."""
    found = counts[runner.FOUND] + counts[runner.ENDLESS]
    return found, found + counts[runner.SURVIVED]


def line_of(name: str, counts: Counter[str], seconds: float) -> str:
    """One row of the result."""
    found, of = share(counts)
    rest = f"{counts[runner.ENDLESS]} of them without an end, {counts['equivalent']} equivalent"
    return f"{name}: {found} of {of} found, {100 * found / max(of, 1):.1f} % ({rest}); {seconds:.0f} s"


def main() -> int:
    """Run the mutants; 1 when too few are found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lines", type=int, default=300, help="of all areas together, an equal share of each")
    parser.add_argument("--area", choices=[area.name for area in AREAS], action="append")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="print those that were found, too")
    args = parser.parse_args()
    os.chdir(ROOT)
    known, total, began_s = equivalent(), Counter[str](), time.monotonic()
    for area in AREAS:
        if args.area and area.name not in args.area:
            continue
        area_s = time.monotonic()
        counts = report(
            run_area(area, sampled(area, args.lines // len(AREAS), args.seed), args.workers), known, args.all
        )
        total += counts
        print(line_of(area.name, counts, time.monotonic() - area_s), flush=True)
    print(line_of(f"seed {args.seed}, all", total, time.monotonic() - began_s))
    found, of = share(total)
    return 0 if found >= MEANT * of else 1


if __name__ == "__main__":
    sys.exit(main())
