"""``python -m tests.world --seeds N`` runs N seeds; ``--seed S`` replays one and prints its log."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter

from tests.world.kept import keep_seed, kept_seeds
from tests.world.world import World, play


def show(world: World) -> None:
    """The log of a run, a line a record."""
    start_s = 1_700_000_000.0
    print(world.swarm)
    for record in world.log.read(limit=10**9):
        print(f"{record.at - start_s:9.3f} {record.job or '-':4} {record.seq:4} {record.event}")


def main() -> int:
    """Run the seeds; 1 when one of them found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
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
    for seed in seeds:
        try:
            seen += play(seed, log=args.log).seen
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failed.append(seed)
            keep_seed(seed, f"{type(error).__name__}: {error}")
            print(f"seed {seed}: {''.join(traceback.format_exception_only(error)).strip()}", flush=True)
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
