"""Buffers that training changes, as the running mean of a BatchNorm: equal on all ranks that hold the module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from rota.train.mesh import PlanMesh


class Buffers:
    """Those of the pieces of this rank. After a step the first data rank's are everyone's, as in
    ``DistributedDataParallel``: statistics are of the rows of one rank, and a checkpoint holds those of one."""

    def __init__(self, pieces: Sequence[nn.Module], mesh: PlanMesh) -> None:
        self._pieces = pieces
        self._groups = [mesh.group(name) for name in ("tp", "data") if mesh.axis(name).size() > 1]
        self._device = mesh.root.device_type
        norms = {name for name, module, _ in self._all() if isinstance(module, _NormBase)}
        self._statistics = norms  # torch writes these without counting a new version
        self._seen = {name: (one, one._version) for name, one in self._held().items()}

    def agree(self) -> None:
        """Send the changed ones. Collective over the ranks with equal weights; nothing is sent without buffers."""
        held = self._held() if self._groups else {}
        if not held:
            return
        changed = torch.tensor([self._is_new(name, one) for name, one in held.items()], device=self._device)
        changed = changed.to(torch.int32)
        for group in self._groups:  # ranks may take other ways through the model: all send what any has changed
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=group)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for one, new in zip(held.values(), changed.tolist(), strict=True):
            if new:
                by_dtype[one.dtype].append(one)
        for same in by_dtype.values():
            flat = torch.cat([one.detach().flatten() for one in same]).to(self._device)
            for group in self._groups:
                dist.broadcast(flat, group=group, group_src=0)
            for one, new in zip(same, flat.split([one.numel() for one in same]), strict=True):
                one.detach().copy_(new.view_as(one))
        self._seen = {name: (one, one._version) for name, one in held.items()}

    def _is_new(self, name: str, one: torch.Tensor) -> bool:
        before = self._seen.get(name)
        return name in self._statistics or before is None or before[0] is not one or before[1] != one._version

    def _held(self) -> dict[str, torch.Tensor]:
        return {name: one for name, _, one in self._all()}

    def _all(self) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
        for index, piece in enumerate(self._pieces):
            for path, module in piece.named_modules():
                for name, one in module.named_buffers(recurse=False):
                    if not isinstance(one, DTensor):
                        yield f"{index}.{path}.{name}", module, one
