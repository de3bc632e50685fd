"""Train a byte-level GPT on the source of Python's standard library, under any plan.

torchrun --nproc-per-node 4 pretrain.py --steps 100                # the planner finds a plan for four ranks
torchrun --nproc-per-node 2 pretrain.py --steps 200                # continues with two, same global batch
torchrun --nproc-per-node 2 pretrain.py --plan plan.json           # a plan of your own
python pretrain.py --data s3://bucket/corpus.txt                   # alone, on data of your own
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from functools import partial
from pathlib import Path

import torch

from rota.train.apply import StepResult
from rota.train.data import DataCache, StaticOrder
from rota.train.loop import fit
from rota.train.models.gpt import Gpt
from rota.train.plan.model import ModelShape, ParallelPlan

SHAPE = ModelShape(layers=4, hidden=64, heads=4, seq=128, vocab=256, tied=False)
BATCH = 16
WARMUP, RATE = 20, 3e-3
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rota-data"


def corpus(source: str) -> torch.Tensor:
    """All bytes of a file or URL, cached on this node; by default those of the top of the standard library."""
    if source:
        files = [DataCache(CACHE).fetch(source)]
    else:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def rows_of(data: torch.Tensor, order: StaticOrder, step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences ``rows`` of the global batch of ``step``: they depend on the step alone, not on the ranks, so a run
    that continues with other ranks trains each sequence once an epoch."""
    starts = [SHAPE.seq * sample for sample in order.rows(step, BATCH, rows)]
    bytes_BT = torch.stack([data[start : start + SHAPE.seq + 1] for start in starts]).long()
    return bytes_BT[:, :-1], bytes_BT[:, 1:]


def show(step: int, result: StepResult) -> None:
    if step % 10 == 0 and torch.distributed.get_rank() == 0:
        print(f"step {step:4d}  loss {result.loss:.4f}  norm {result.grad_norm:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--data", default="", help="file or fsspec URL to train on")
    parser.add_argument("--checkpoint", type=Path, default=Path(os.environ.get("ROTA_CHECKPOINT_DIR", "checkpoints")))
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = corpus(given.data)
    fit(
        partial(Gpt, SHAPE),
        partial(rows_of, data, StaticOrder((len(data) - 1) // SHAPE.seq)),
        plan=ParallelPlan.from_json(given.plan.read_text()) if given.plan else "auto",
        optimizer=partial(torch.optim.AdamW, lr=RATE),
        rate=lambda step: RATE * min(1.0, (step + 1) / WARMUP),
        steps=given.steps,
        batch=BATCH,
        clip_norm=1.0,
        checkpoint=given.checkpoint,
        on_step=show,
    )


if __name__ == "__main__":
    main()
