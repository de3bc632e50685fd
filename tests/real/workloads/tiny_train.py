"""An unmodified torchrun script: data-parallel fit of a line, checkpoint every step, resume; knows nothing of Rota."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = int(sys.argv[sys.argv.index("--steps") + 1])
folder = Path(os.environ.get("ROTA_CHECKPOINT_DIR", "."))
output = Path(os.environ.get("ROTA_OUTPUT_DIR", "."))

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
line = torch.nn.Linear(1, 1)
with torch.no_grad():
    line.weight.zero_()
    line.bias.zero_()
RATE = 0.2  # an optimiser of torch imports its compiler, 1.6 s of CPU in each rank
saved = folder / "tiny.pt"
first = 0
if saved.exists():
    kept = torch.load(saved)
    line.load_state_dict(kept["line"])
    first = kept["step"]

for step in range(first, STEPS):
    chance = torch.Generator().manual_seed(step)
    x = torch.rand(8, 1, generator=chance)[rank::world]
    loss = ((line(x) - (3 * x + 1)) ** 2).mean()
    line.zero_grad()
    loss.backward()
    for parameter in line.parameters():
        dist.all_reduce(parameter.grad)
        with torch.no_grad():
            parameter -= RATE * parameter.grad / world
    if rank == 0:
        torch.save({"line": line.state_dict(), "step": step + 1}, saved.with_suffix(".new"))
        saved.with_suffix(".new").replace(saved)
    if step + 1 == int(os.environ.get("PAUSE_AT", "-1")):
        (output / f"paused-{rank}").touch()
        while not (output / "go").exists():
            time.sleep(0.02)
    dist.barrier()

if rank == 0:
    env = " ".join(os.environ[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_NAME"))
    (output / "result.txt").write_text(f"{line.weight.item():.6f} {line.bias.item():.6f} {first} {env} {sys.argv[1:]}")
dist.destroy_process_group()
