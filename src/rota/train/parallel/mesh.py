"""The device mesh of a plan: its axes and groups, the local part of a tensor, and an all-to-all with a gradient."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from rota.spec.errors import BadInput
from rota.train.plan.model import Mesh

AXES = ("pp", "dp_replicate", "shard_outer", "shard_inner", "cp", "tp")
"""Axes of every mesh, outer to inner. ``dp_shard`` is ``shard_outer x shard_inner``: experts spread over the inner part
and ``cp``, so that both the experts' and everything else's data axes are sub-meshes of one mesh."""

DATA = ("dp_replicate", "shard_outer", "shard_inner", "cp")
"""Axes whose ranks hold equal weights and see other tokens."""


@functools.cache
def plan_mesh(degrees: Mesh, device: torch.device, world: dist.ProcessGroup) -> PlanMesh:
    """The mesh of these degrees in this world, made once: DTensor remembers the groups of equal meshes, and each group
    holds threads and connections until the world ends. Collective the first time. Raises as ``PlanMesh``."""
    assert world is dist.group.WORLD
    return PlanMesh(degrees, device)


class PlanMesh:
    """The ranks of a plan as a ``DeviceMesh``, with the groups that the parts of the runtime ask for.

    ``rows`` sub-meshes have names of ``AXES`` or of the flattened ones: ``data`` (all of ``DATA``), ``fsdp`` (what ZeRO
    shards over), ``ep`` (what experts spread over), ``expert_data`` (what is left for the data axes of an expert).
    """

    def __init__(self, degrees: Mesh, device: torch.device) -> None:
        """Collective over all ranks. Raises BadInput when the world has another size than the plan."""
        world = dist.get_world_size()
        if degrees.world != world:
            shape = f"pp {degrees.pp} x dp_replicate {degrees.dp_replicate} x dp_shard {degrees.dp_shard}"
            raise BadInput(
                f"mesh: {shape} x cp {degrees.cp} x tp {degrees.tp} = {degrees.world} ranks, the world has {world}",
                hint=f"start {degrees.world} processes, or search a plan for {world}",
            )
        self.degrees = degrees
        inner = expert_shards(degrees)
        sizes = (degrees.pp, degrees.dp_replicate, degrees.dp_shard // inner, inner, degrees.cp, degrees.tp)
        self.root: DeviceMesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
        self._flat = {
            "data": self.root[DATA]._flatten("data"),
            "fsdp": self.root[DATA[1:]]._flatten("fsdp"),
            "ep": self.root["shard_inner", "cp"]._flatten("ep"),
            "expert_data": self.root["dp_replicate", "shard_outer"]._flatten("expert_data"),
        }

    def axis(self, name: str) -> DeviceMesh:
        """A one-dimensional mesh: an axis, or a flattened name."""
        return self._flat[name] if name in self._flat else self.root[name]

    def group(self, name: str) -> dist.ProcessGroup:
        """The process group of ``axis(name)`` that this rank is in."""
        return self.axis(name).get_group()

    def index(self, name: str) -> int:
        """This rank's place on an axis, from 0."""
        return self.axis(name).get_local_rank()

    @property
    def data_index(self) -> int:
        """Which share of a global batch this rank trains: 0 to dp - 1; ranks of one cp group have the same."""
        return (
            self.index("dp_replicate") * self.degrees.dp_shard
            + self.index("shard_outer") * expert_shards(self.degrees)
            + self.index("shard_inner")
        )


def expert_shards(degrees: Mesh) -> int:
    """How many ranks of ``dp_shard`` an expert group spans. Raises BadInput when ``ep`` is not a multiple of ``cp``."""
    if degrees.ep == 1:
        return 1
    inner, rest = divmod(degrees.ep, degrees.cp)
    if rest or degrees.dp_shard % max(inner, 1):
        raise BadInput(
            f"mesh.ep = {degrees.ep}: expert groups are whole cp groups (cp {degrees.cp}) inside dp_shard "
            f"{degrees.dp_shard}",
            hint=f"choose ep = cp x a divisor of dp_shard {degrees.dp_shard}",
        )
    return inner


Context: TypeAlias = Any
"""What autograd hands to ``forward`` and ``backward``, to keep values on."""


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, rows: torch.Tensor, sent: list[int] | None, received: list[int] | None, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(
    rows: torch.Tensor, sent: list[int] | None, received: list[int] | None, group: dist.ProcessGroup
) -> torch.Tensor:
    count = rows.shape[0] if received is None else sum(received)
    out = rows.new_empty((count, *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def all_to_all(
    rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int] | None = None, received: list[int] | None = None
) -> torch.Tensor:
    """Send ``sent[i]`` rows to rank i and receive ``received[i]`` from it, in rank order; equal parts when None.

    Backward is the inverse all-to-all.
    """
    return _AllToAll.apply(rows, sent, received, group)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this rank holds of a shard, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread(one: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """Write this rank's shard of a whole value into ``one``. Collective for a DTensor.

    Raises BadInput for a layout that a whole value cannot be given.
    """
    value = value.reshape(one.shape).to(device=one.device, dtype=one.dtype)
    if not isinstance(one, DTensor):
        one.copy_(value)
        return
    part = distribute_tensor(value, one.device_mesh, one.placements, src_data_rank=None)
    one.to_local().copy_(part.to_local())
    if not torch.equal(one.full_tensor(), value):
        raise BadInput(f"weights: {name} cannot be spread as {one.placements}", hint="load them before")


def settle(parameters: Iterable[torch.Tensor]) -> None:
    """Give gradients the layout of their parameters: parts on tensor ranks are summed once, not in every use of them,
    and no rank keeps rows that another one steps."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)
