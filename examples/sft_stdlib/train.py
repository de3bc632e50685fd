"""A plain torchrun script: a byte model of Python's standard library; knows nothing of Rota but three variables.

``torchrun --nproc-per-node 2 train.py`` and ``rota run job.yaml`` run this same file. Every step sees the same samples
whatever the number of ranks: each takes its share of ``ROTA_GLOBAL_BATCH``.
"""

import argparse
import json
import math
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CONTEXT = 8
HELD_OUT = 20
"""Every so manyth file is never trained on."""


def corpus(bytes_max: int) -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's source, in order of path: for training, and held out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(files):
        parts[number % HELD_OUT == 0].append(path.read_bytes())
    whole = [torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts]
    return whole[0][:bytes_max], whole[1][: bytes_max // HELD_OUT]


def windows(data: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes before each position (B, CONTEXT) and the byte there (B,)."""
    found = data[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return found[:, :CONTEXT], found[:, CONTEXT]


def unigram_bits(train: Tensor, held_out: Tensor) -> float:
    """Bits a byte of the held-out text under the frequencies of single bytes in the training text."""
    p = (torch.bincount(train.long(), minlength=256) + 1.0) / (len(train) + 256)
    return float(-p.log2()[held_out.long()].mean())


def model() -> nn.Module:
    """A perceptron over the embedded last bytes: some 130,000 parameters."""
    return nn.Sequential(
        nn.Embedding(256, 24), nn.Flatten(), nn.Linear(24 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 256)
    )


def main() -> None:
    """Train from the newest checkpoint to the last step; rank 0 writes the curve and the result."""
    args = argparse.ArgumentParser()
    args.add_argument("--steps", type=int, default=600)
    args.add_argument("--save-every", type=int, default=20)
    args.add_argument("--bytes", type=int, default=8_000_000)
    args.add_argument("--pause-at", type=int, default=0, help="wait there until the file 'go' is in the output folder")
    given = args.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    batch = int(os.environ.get("ROTA_GLOBAL_BATCH", "1024"))
    assert batch % world == 0, f"a batch of {batch} cannot be divided over {world} ranks"
    output = Path(os.environ.get("ROTA_OUTPUT_DIR", "."))
    saved = Path(os.environ.get("ROTA_CHECKPOINT_DIR", ".")) / "sft.pt"

    train, held_out = corpus(given.bytes)
    net = DistributedDataParallel(model())
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3)
    loss_of = nn.CrossEntropyLoss()
    first, curve = 0, list[float]()
    if saved.exists():
        kept = torch.load(saved)
        net.module.load_state_dict(kept["net"])
        optimiser.load_state_dict(kept["optimiser"])
        first, curve = kept["step"], kept["curve"]

    for step in range(first, given.steps):
        chance = torch.Generator().manual_seed(step)
        starts = torch.randint(len(train) - CONTEXT, (batch,), generator=chance)[rank::world]
        before, target = windows(train, starts)
        loss = loss_of(net(before), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        curve.append(float(mean))
        if rank == 0 and (step + 1) % given.save_every == 0:
            kept = {"net": net.module.state_dict(), "optimiser": optimiser.state_dict(), "step": step + 1}
            torch.save({**kept, "curve": curve}, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
            (output / "worlds.txt").open("a").write(f"{step + 1} {world}\n")
        while step + 1 == given.pause_at and not (output / "go").exists():
            (output / f"paused-{rank}").touch()
            time.sleep(0.05)

    if rank == 0:
        net.eval()
        with torch.no_grad():
            starts = torch.arange(0, len(held_out) - CONTEXT, max(1, len(held_out) // 20_000))
            before, target = windows(held_out, starts)
            bits = float(loss_of(net.module(before), target)) / math.log(2)
        result = {"bits": bits, "unigram_bits": unigram_bits(train, held_out), "resumed_at": first, "world": world}
        result |= {"share": result["bits"] / result["unigram_bits"], "curve": curve}
        (output / "result.json").write_text(json.dumps(result))
        print({name: value for name, value in result.items() if name != "curve"})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
