"""A training script of the tests: ``fit_script.py FOLDER STEPS`` appends ``[step, loss]`` lines to FOLDER/losses, and
``[ranks, step, samples]`` of every rank to FOLDER/samples."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch

from rota.train.apply import StepResult
from rota.train.checkpoint import candidates
from rota.train.data import StaticOrder
from rota.train.loop import fit
from rota.train.models.gpt import Gpt
from rota.train.plan.model import ModelShape

SHAPE = ModelShape(layers=2, hidden=16, heads=2, seq=16, vocab=32, tied=False)
BATCH = 4


SAMPLES = 16
ORDER = StaticOrder(SAMPLES, seed=5)


def data(step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.randint(0, SHAPE.vocab, (SAMPLES, SHAPE.seq + 1), generator=torch.Generator().manual_seed(1))
    ids = whole[ORDER.rows(step, BATCH, rows)]
    return ids[:, :-1], ids[:, 1:]


def main(folder: Path, steps: int) -> None:
    def note(step: int, result: StepResult) -> None:
        if torch.distributed.get_rank() == 0:
            with (folder / "losses").open("a") as file:
                file.write(json.dumps([step, result.loss]) + "\n")
        if str(step) == os.environ.get("DIE_AT") and torch.distributed.get_rank() == 1:
            while not candidates(folder / "checkpoints"):  # they are written in the background
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if str(step) == os.environ.get("STOP_AT"):
            os.kill(os.getpid(), signal.SIGTERM)

    def counted(step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        with (folder / "samples").open("a") as file:
            file.write(json.dumps([torch.distributed.get_world_size(), step, ORDER.rows(step, BATCH, rows)]) + "\n")
        return data(step, rows)

    torch.set_num_threads(1)
    done = fit(
        partial(Gpt, SHAPE),
        counted,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        steps=steps,
        batch=BATCH,
        clip_norm=1.0,
        checkpoint=folder / "checkpoints",
        save_every_s=0.0,
        on_step=note,
    )
    print(f"done {done}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
