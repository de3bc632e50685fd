"""``python -m tests.world --seeds N`` runs N seeds; ``--seed S`` replays one and prints its log."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter

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
    args = parser.parse_args()
    if args.seed is not None:
        try:
            show(play(args.seed))
        except BaseException as error:
            if getattr(error, "world", None):
                show(error.world)
            raise
        return 0
    began_s, failed, seen = time.monotonic(), list[int](), Counter[str]()
    for seed in range(args.first, args.first + args.seeds):
        try:
            seen.update(type(record.event).__name__ for record in play(seed).log.read(limit=10**9))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failed.append(seed)
            print(f"seed {seed}: {''.join(traceback.format_exception_only(error)).strip()}", flush=True)
    seconds = time.monotonic() - began_s
    print(", ".join(f"{kind} {n}" for kind, n in seen.most_common()))
    print(f"{args.seeds} seeds in {seconds:.1f} s, {len(failed)} failed{': ' + str(failed[:20]) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets must be the same in every run of a seed.
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.world", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    sys.exit(main())
