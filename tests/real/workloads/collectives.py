"""A torchrun script without an optimizer: plain collectives in a loop until the file ``go`` is there."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

output = Path(os.environ["ROTA_OUTPUT_DIR"])
dist.init_process_group("gloo")
rank = dist.get_rank()
value = torch.zeros(1)
over = False
while not over:
    time.sleep(0.05)
    value.fill_(float(rank == 0 and (output / "go").exists()))
    dist.all_reduce(value)
    (output / f"rank-{rank}").write_text(str(os.getpid()))
    over = value.item() > 0
dist.destroy_process_group()
