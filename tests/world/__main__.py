"""``python -m tests.world --seeds N`` runs N seeds; ``--seed S`` replays one and prints its log."""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tests.world.kept import keep_seed, kept_seeds
from tests.world.world import World, play

REPORT_EVERY = 500
"""Seeds from one line of progress to the next."""


def show(world: World) -> None:
    """The log of a run, a line a record."""
    start_s = 1_700_000_000.0
    print(world.swarm)
    for record in world.log.read(limit=10**9):
        print(f"{record.at - start_s:9.3f} {record.job or '-':4} {record.seq:4} {record.event}")


@dataclass(frozen=True, slots=True)
class Played:
    """What a seed gave: how often each kind of event was written, and what it found."""

    seed: int
    seen: Counter[str]
    found: str = ""


def play_one(seed: int, log: Literal["memory", "sql"]) -> Played:
    """Play a seed; what it finds is a text, since it may come from another process."""
    try:
        return Played(seed, play(seed, log=log).seen)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Played(seed, Counter(), "".join(traceback.format_exception_only(error)).strip())


def play_all(seeds: list[int], log: Literal["memory", "sql"], jobs: int) -> Iterator[Played]:
    """Play the seeds in ``jobs`` processes, in their order."""
    if jobs == 1:
        yield from (play_one(seed, log) for seed in seeds)
        return
    with multiprocessing.Pool(jobs) as pool:
        yield from pool.imap(functools.partial(play_one, log=log), seeds, chunksize=5)


def main() -> int:
    """Run the seeds; 1 when one of them found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (one for each core)")
    parser.add_argument("--log", choices=("memory", "sql"), default="memory", help="sql: on SQLite, opened again")
    args = parser.parse_args()
    if args.seed is not None:
        try:
            show(play(args.seed, log=args.log))
        except BaseException as error:
            if (world := getattr(error, "world", None)) is not None:
                show(world)
            raise
        return 0
    began_s, failed, seen = time.monotonic(), list[int](), Counter[str]()
    seeds = sorted({*range(args.first, args.first + args.seeds), *kept_seeds()})
    for n, one in enumerate(play_all(seeds, args.log, args.jobs), 1):
        seen += one.seen
        if one.found:
            failed.append(one.seed)
            keep_seed(one.seed, one.found)
            print(f"seed {one.seed}: {one.found}", flush=True)
        if n % REPORT_EVERY == 0:
            print(f"{n} of {len(seeds)} seeds, at {one.seed}, {len(failed)} failed", flush=True)
    seconds = time.monotonic() - began_s
    print(", ".join(f"{kind} {n}" for kind, n in seen.most_common()))
    print(f"{len(seeds)} seeds in {seconds:.1f} s ({len(seeds) / seconds:.1f} a second), {len(failed)} failed")
    if failed:
        print(f"failed, and kept: {failed[:20]}")
    return 1 if failed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets must be the same in every run of a seed.
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.world", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    sys.exit(main())
