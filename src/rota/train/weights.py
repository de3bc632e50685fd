"""Weights in and out as Hugging Face holds them: safetensors files with an index, one tensor in memory at a time.

The file format is 8 bytes of header length, a JSON header of dtype, shape and offsets, and the values
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from rota.spec.errors import BadInput
from rota.train.apply import Parallel
from rota.train.checkpoint import candidates, newest, verify
from rota.train.parallel.mesh import local, spread
from rota.train.structure.rules import LocalForward

SHARD_BYTES = 5 << 30
"""Size of a file beyond which the next tensor goes into another one."""
ADAPTER = re.compile(r"(\.lora_\w+)\.\w+(?=\.|$)")
INDEX = "model.safetensors.index.json"
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightEntry:
    """One tensor: its whole shape, its dtype, and the lowest rank that has a part of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int

    @property
    def size(self) -> int:
        """Bytes of the whole tensor."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


def save_weights(trained: Parallel, folder: Path | str, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the whole model, by the names it has without a plan, and its ``config.json`` where it has one. Collective.

    ``transformers`` loads the folder; a weight with several names is written under its first. Raises BadInput for a
    folder that has weights.
    """
    folder, first = Path(folder), dist.get_rank() == 0
    taken = [first and folder.exists() and any(folder.glob("*.safetensors"))]
    dist.broadcast_object_list(taken, src=0)
    if taken[0]:
        raise BadInput(f"folder: {folder} has weights", hint="give an empty one")
    own, joined = own_tensors(trained), joined_dims(trained)
    entries = all_entries(own, joined)
    files = in_files(entries, shard_bytes)
    with ExitStack() as ends:
        for file, names in files.items():
            out = (
                ends.enter_context(begin_file(folder / file, {name: entries[name] for name in names}))
                if first
                else None
            )
            for name in names:
                value = _whole(own.get(name), joined.get(name), entries[name])
                if out is not None and value is not None:
                    out.write(value.contiguous().flatten().view(torch.uint8).numpy().data)
    if first:
        _describe(trained, folder, files, entries)
    dist.barrier()


def load_weights(trained: Parallel, folder: Path | str) -> None:
    """Take the weights of a folder of safetensors, each rank its part; before the first step. Collective.

    Raises BadInput for a tensor that the folder lacks, or has in another shape; then no weight has changed.
    """
    own, joined, where = own_tensors(trained), joined_dims(trained), find_tensors(Path(folder))
    for name, one in own.items():
        shape = whole_shape(one.shape, joined.get(name))
        if name not in where:
            raise BadInput(f"weights: {folder} has no {name}", hint="give the folder of this model's weights")
        if tuple(where[name][1]["shape"]) != shape:
            raise BadInput(f"weights: {name} has shape {where[name][1]['shape']} in {folder}, the model has {shape}")
    with torch.no_grad():
        for name, one in own.items():
            spread(one, read_tensor(*where[name]), name)


def export_checkpoint(folder: Path, target: Path, *, shard_bytes: int = SHARD_BYTES) -> int:
    """Write the weights of the newest good checkpoint of ``fit`` as transformers has them, one tensor in memory at a
    time: with ``config.json``, or the adapters alone as peft has them. Returns its step. Files have their names when
    all are whole.

    Raises BadInput for a folder without a checkpoint, and for a target that has weights.
    """
    if target.exists() and any(target.glob("*.safetensors")):
        raise BadInput(f"folder: {target} has weights", hint="give an empty one")
    found = newest(folder, candidates(folder), verify) if folder.is_dir() else None
    if found is None:
        raise BadInput(f"checkpoint: {folder} has none", hint="give the folder that fit(checkpoint=) writes")
    of_model = cast("dict[str, Any]", found.extra.get("model", {}))
    adapter, joined = of_model.get("adapter"), of_model.get("joined", {})
    saved = FileSystemReader(found.path).read_metadata().state_dict_metadata
    entries = {
        name.removeprefix("model."): WeightEntry(
            shape=whole_shape(kept.size, joined.get(name.removeprefix("model."))), dtype=kept.properties.dtype, owner=0
        )
        for name, kept in saved.items()
        if isinstance(kept, TensorStorageMetadata) and name.startswith("model.") and (not adapter or ".lora_" in name)
    }
    files = in_files(entries, shard_bytes)
    if adapter:
        files = {"adapter_model.safetensors": list(entries)}
    for file, names in files.items():
        with begin_file(target / f"{file}.part", {_in_file(name): entries[name] for name in names}) as out:
            for name in names:
                kept = cast("TensorStorageMetadata", saved[f"model.{name}"])
                value = torch.empty(kept.size, dtype=kept.properties.dtype)
                load({f"model.{name}": value}, storage_reader=FileSystemReader(found.path), no_dist=True)
                out.write(value.flatten().view(torch.uint8).numpy().data)
    for file in files:
        (target / f"{file}.part").rename(target / file)
    _index(target, files, entries)
    for name, config in (
        ("adapter_config.json", adapter),
        ("config.json", None if adapter else of_model.get("config")),
    ):
        if config:
            (target / name).write_text(json.dumps(config, indent=2))
    return found.step


def _in_file(name: str) -> str:
    """The name of a weight in a file: adapters have none of their own there."""
    return ADAPTER.sub(r"\1", name)


def described(model: nn.Module) -> dict[str, object]:
    """What a folder says of a model beside its weights, as JSON: ``config`` of transformers, ``adapter`` of peft."""
    config, adapters = getattr(model, "config", None), getattr(model, "peft_config", None)
    found: dict[str, object] = {}
    if hasattr(config, "to_json_string"):
        found["config"] = json.loads(cast("Any", config).to_json_string())
    if isinstance(adapters, dict) and adapters:
        first = next(iter(cast("dict[str, Any]", adapters).values())).to_dict()
        found["adapter"] = json.loads(
            json.dumps(first, default=lambda one: sorted(one) if isinstance(one, set) else str(one))
        )
    return found


def own_tensors(trained: Parallel) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers on this rank by name; one with several names under its first alone."""
    found: dict[str, torch.Tensor] = {}
    for piece in trained.pieces:
        for name, tensor in piece.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and not any(tensor is other for other in found.values()):
                found[trained.first_name(name)] = tensor
    return {name: tensor.detach() for name, tensor in found.items()}


def joined_dims(trained: Parallel) -> dict[str, int]:
    """The dim of the parts of each joined weight, which the model has side by side in one dim."""
    return {
        f"{path}.{key}": dim
        for piece in trained.pieces
        for path, module in piece.named_modules()
        if isinstance(module.forward, LocalForward)
        for key, dim in module.forward.joined.items()
    }


def whole_shape(shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
    """The shape that the model gives a tensor of ``shape`` without a plan."""
    shape = tuple(shape)
    return shape if dim is None else (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])


def all_entries(own: Mapping[str, torch.Tensor], joined: Mapping[str, int]) -> dict[str, WeightEntry]:
    """The tensors of all ranks by name, in one order on all. Collective."""
    rank = dist.get_rank()
    mine = {
        name: WeightEntry(shape=whole_shape(one.shape, joined.get(name)), dtype=one.dtype, owner=rank)
        for name, one in own.items()
    }
    every: list[dict[str, WeightEntry]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    found: dict[str, WeightEntry] = {}
    for ones in every:
        for name, entry in ones.items():
            found.setdefault(name, entry)
    return found


def in_files(entries: Mapping[str, WeightEntry], shard_bytes: int) -> dict[str, list[str]]:
    """Names of the tensors of each file."""
    groups: list[list[str]] = [[]]
    for name in entries:
        held = sum(entries[one].size for one in groups[-1])
        if groups[-1] and held + entries[name].size > shard_bytes:
            groups.append([])
        groups[-1].append(name)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{at:05}-of-{len(groups):05}.safetensors": names for at, names in enumerate(groups, 1)}


def _whole(tensor: torch.Tensor | None, dim: int | None, entry: WeightEntry) -> torch.Tensor | None:
    """The whole tensor on rank 0, None elsewhere. Collective."""
    value = None
    if tensor is not None:
        value = (tensor.full_tensor() if isinstance(tensor, DTensor) else local(tensor)).cpu().reshape(entry.shape)
    if entry.owner == 0:
        return value if dist.get_rank() == 0 else None
    if dist.get_rank() == entry.owner and value is not None:
        dist.send(value.contiguous(), dst=0)
    if dist.get_rank() != 0:
        return None
    value = torch.empty(entry.shape, dtype=entry.dtype)
    dist.recv(value, src=entry.owner)
    return value


def begin_file(path: Path, entries: Mapping[str, WeightEntry]) -> BinaryIO:
    """A file with its header; the values follow in the same order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in entries.items():
        ends = [offset, offset + entry.size]
        header[name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": ends}
        offset += entry.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = path.open("wb")
    file.write(struct.pack("<Q", len(text)) + text)
    return file


def _describe(
    trained: Parallel, folder: Path, files: Mapping[str, list[str]], entries: Mapping[str, WeightEntry]
) -> None:
    _index(folder, files, entries)
    config = getattr(trained.pieces[0], "config", None)
    if hasattr(config, "save_pretrained"):
        cast("Any", config).save_pretrained(folder)


def _index(folder: Path, files: Mapping[str, list[str]], entries: Mapping[str, WeightEntry]) -> None:
    if len(files) > 1:
        places = {name: file for file, names in files.items() for name in names}
        total = {"total_size": sum(entry.size for entry in entries.values())}
        (folder / INDEX).write_text(json.dumps({"metadata": total, "weight_map": places}, indent=2))


def find_tensors(folder: Path) -> dict[str, tuple[Path, dict[str, Any], int]]:
    """(file, header entry, where the values begin) of each tensor. Raises BadInput for what is not such a folder."""
    found: dict[str, tuple[Path, dict[str, Any], int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0]
            try:
                header = json.loads(file.read(min(size, path.stat().st_size)))
            except ValueError as error:
                raise BadInput(f"weights: {path} has no header of safetensors: {error}") from error
        header.pop("__metadata__", None)
        found |= {name: (path, entry, 8 + size) for name, entry in header.items()}
    if not found:
        raise BadInput(f"weights: no *.safetensors in {folder}", hint="give the folder of a saved model")
    return found


def read_tensor(path: Path, entry: Mapping[str, Any], begin: int) -> torch.Tensor:
    """A copy of one tensor of a file. Raises BadInput when the file ends before it."""
    first, last = entry["data_offsets"]
    if begin + last > path.stat().st_size:
        raise BadInput(f"weights: {path} is cut off: {begin + last} bytes are named, it has {path.stat().st_size}")
    dtype = next(kind for kind, name in NAMES.items() if name == entry["dtype"])
    if first == last:
        return torch.empty(entry["shape"], dtype=dtype)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return torch.frombuffer(bytearray(mapped[begin + first : begin + last]), dtype=dtype).reshape(entry["shape"])
