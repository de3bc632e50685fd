"""How long the planner searches: processor seconds of one core, each search to its end (gap 0).

``python benchmarks/planning.py [--rounds N] [--json]``. The least of the rounds counts; the last line is 16 sizes of
one model, 8 to 128 devices, that share a table and look only for what beats the sizes before.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace

from rota.train.plan.hardware import A100_80G_DGX
from rota.train.plan.model import ModelShape
from rota.train.plan.search import search
from rota.train.plan.space import CostTable, SearchRequest
from run import Row, hand_in

SEVEN = ModelShape(layers=32, hidden=4096, heads=32, seq=2048, vocab=32000, ffn=11008, gated=True, tied=False)
SEVENTY = ModelShape(
    layers=80, hidden=8192, heads=64, kv_heads=8, seq=4096, vocab=32000, ffn=28672, gated=True, tied=False
)
GPT3 = ModelShape(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)


def asked(model: ModelShape, gpus: int, memory_gib: float, batch: int) -> SearchRequest:
    """On A100 of 80 GB in nodes of eight."""
    return SearchRequest(model=model, hardware=A100_80G_DGX, gpus=gpus, memory_gib=memory_gib, batch=batch)


def sizes() -> None:
    """As ``plan: auto`` does for a role of 1 to 16 instances of eight devices."""
    one = asked(GPT3, 8, 80, 512)
    table, best_s = CostTable(one), float("inf")
    for count in range(1, 17):
        found = search(replace(one, gpus=8 * count), top=2, table=table, under_s=best_s)
        best_s = found.best[0].step.total_s if found.best else best_s


SEARCHES: dict[str, Callable[[], object]] = {
    "7B on 8, 36 GiB, batch 16": lambda: search(asked(SEVEN, 8, 36, 16)),
    "70B on 64, 80 GiB, batch 256": lambda: search(asked(SEVENTY, 64, 80, 256)),
    "175B on 128, 80 GiB, batch 1536": lambda: search(asked(GPT3, 128, 80, 1536)),
    "175B on 8 to 128, 80 GiB, batch 512": sizes,
}


def taken_s(run: Callable[[], object]) -> float:
    """Processor seconds of one call."""
    began_s = time.process_time()
    run()
    return time.process_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = {name: min(taken_s(run) for _ in range(given.rounds)) for name, run in SEARCHES.items()}
    hand_in(Row(f"search, {name}", seconds, "s, CPU") for name, seconds in found.items())
    if given.json:
        print(json.dumps(found))
        return
    for name, seconds in found.items():
        print(f"{name:38} {seconds:6.2f} s")


if __name__ == "__main__":
    main()
