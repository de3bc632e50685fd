"""Synchronisation of replicas, as a plan's ``sync`` says: compressed, hierarchical, local SGD or parameter server.

The exact meaning of each is in docs/explanation/sync.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from rota.runtime import environ
from rota.runtime.node import NODE_ADDRESS, machine_identity
from rota.runtime.random import SystemRandom
from rota.spec.errors import BadInput
from rota.train import compress
from rota.train.parallel.mesh import PlanMesh
from rota.train.plan.model import ParallelPlan
from rota.train.ps.client import PsClient
from rota.train.ps.clocks import Rule
from rota.train.ps.server import LOOPBACK, PsServer, ServerSpec
from rota.train.ps.table import Floats, RowOptimizer
from rota.train.ps.table import State as SyncState

TURN_S: Final = 600.0
CLOSE_S: Final = 10.0


class Synchroniser(ABC):
    """One way to make replicas agree, made once for each ``Parallel``; what is below fits one without state.

    ``reduces`` True: ``attach`` gets the ``DistributedDataParallel`` and sets its communication hook; gradients are
    means over the replicas when backward ends. ``reduces`` False: ``attach`` gets the bare model, whose gradients are
    of this replica's tokens, scaled so that their mean over the replicas is that of all tokens; ``update`` makes the
    replicas agree.
    """

    reduces: ClassVar[bool]

    @abstractmethod
    def attach(self, model: nn.Module) -> None:
        """Called once, before the first step."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """In place of ``optimizer.step()``, with all gradients of this step in ``.grad``."""
        optimizer.step()

    def state_dict(self) -> SyncState:
        """What a checkpoint must keep: tensors and numbers, by name."""
        return {}

    def load_state_dict(self, state: SyncState) -> None:  # noqa: B027 - most have no state
        """Inverse of ``state_dict``."""

    def close(self) -> None:  # noqa: B027 - most have started nothing
        """End what it started; no update comes after. Not collective: a rank that failed calls it alone."""


def synchroniser(plan: ParallelPlan, mesh: PlanMesh) -> Synchroniser | None:
    """The synchroniser that a checked plan asks for; None for the plain all-reduce."""
    sync = plan.sync
    match sync.mode:
        case "local_sgd":
            return LocalSgd(sync.H, mesh.group("data"))
        case "ps_sync" | "ps_async" | "ps_ssp":
            return PsSync(Rule(mode=sync.mode, s=sync.s, backup=sync.backup), sync.servers, mesh.group("data"))
        case "allreduce" if sync.compression != "none":
            return Compressed(compress.Compression(kind=sync.compression))
        case "allreduce" if sync.hierarchical:
            return Hierarchical(int(environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size()))
        case "allreduce":
            return None


class Compressed(Synchroniser):
    """Gradients are means over the replicas, sent compressed with error feedback."""

    reduces = True

    def __init__(self, how: compress.Compression) -> None:
        self._how = how
        self.compressor: compress.Compressor | None = None

    def attach(self, model: nn.Module) -> None:
        """Set the hook of a DistributedDataParallel."""
        assert isinstance(model, DistributedDataParallel)
        self.compressor = compress.make_compressor(self._how, model.module)
        model.register_comm_hook(self.compressor, compress.hook)

    def state_dict(self) -> SyncState:
        """Residues of this rank."""
        return {} if self.compressor is None else dict(self.compressor.state_dict())

    def load_state_dict(self, state: SyncState) -> None:
        """Residues of this rank."""
        if self.compressor is not None:
            self.compressor.load_state_dict(cast("compress.Residues", state))


class Hierarchical(Synchroniser):
    """Gradients are means over the replicas, summed in the node first. Nodes hold LOCAL_WORLD_SIZE ranks (torchrun)."""

    reduces = True

    def __init__(self, ranks_per_node: int) -> None:
        self._levels = make_levels(ranks_per_node)

    def attach(self, model: nn.Module) -> None:
        """Set the hook of a DistributedDataParallel."""
        assert isinstance(model, DistributedDataParallel)
        model.register_comm_hook(self._levels, _hierarchical_hook)


def _hierarchical_hook(levels: Levels, bucket: compress.Bucket) -> compress.Future:
    future: compress.Future = torch.futures.Future()
    future.set_result(hierarchical_all_reduce(bucket.buffer(), levels).div_(dist.get_world_size()))
    return future


# DDP compares annotations with these classes, and postponed ones are texts.
_hierarchical_hook.__annotations__.update({"bucket": compress.Bucket, "return": torch.futures.Future[torch.Tensor]})


class LocalSgd(Synchroniser):
    """``every`` steps of each replica alone, then the mean of the weights.

    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (ICLR 2020), algorithm 1.
    """

    reduces = False

    def __init__(self, every: int, group: dist.ProcessGroup) -> None:
        if every < 1:
            raise BadInput(f"sync.H: {every} is below 1", hint="take at least 1 local step")
        self._every, self._group = every, group
        self._weights: list[nn.Parameter] = []
        self._steps = 0

    def attach(self, model: nn.Module) -> None:
        """Remember the weights that are averaged."""
        self._weights = list(model.parameters())

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """A local step; the mean when the round is over."""
        optimizer.step()
        self._steps += 1
        if self._steps % self._every:
            return
        mean = _flat(self._weights)
        dist.all_reduce(mean, group=self._group)
        mean /= dist.get_world_size(self._group)
        with torch.no_grad():
            compress.write(self._weights, mean)

    def state_dict(self) -> SyncState:
        """Steps that were taken, so that a round continues where it was."""
        return {"steps": self._steps}

    def load_state_dict(self, state: SyncState) -> None:
        """Inverse of ``state_dict``."""
        self._steps = int(state["steps"])


class PsSync(Synchroniser):
    """Weights live on parameter servers, which the first ``servers`` ranks host; each update is push, turn, pull.

    The optimizer is read once for its kind and rate (SGD, Adagrad or Adam without decay and momentum) and runs on the
    servers in fp32; a rate that changes later is refused. In ps_async and ps_ssp each push is applied by itself, so the
    rate is that of one replica. Over several machines the servers listen where a job reaches their node.
    """

    reduces = False

    def __init__(self, rule: Rule, servers: int, group: dist.ProcessGroup) -> None:
        self._rule, self._servers, self._group = rule, servers, group
        self._weights: list[nn.Parameter] = []
        self._server: PsServer | None = None
        self._kept: SyncState = {}
        self._lr = 0.0
        self.client: PsClient | None = None

    def attach(self, model: nn.Module) -> None:
        """Servers start with the first update, when the optimizer is known."""
        self._weights = list(model.parameters())

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Push this replica's gradients, wait for the next turn, take over the weights.

        Raises TimedOut, Fenced, and BadInput when the optimizer does not run on servers or its rate has changed.
        """
        client = self.client or self._start(optimizer)
        if (rate := optimizer.param_groups[0]["lr"]) != self._lr:
            text = f"optimizer: its rate went from {self._lr:g} to {rate:g}, parameter servers keep the first"
            raise BadInput(text, hint="train at a constant rate, or use another sync.mode")
        client.push_dense(_array(torch.cat([_grad(one) for one in self._weights])))
        client.tick()
        client.wait_turn(TURN_S, dense=True)
        with torch.no_grad():
            compress.write(self._weights, torch.from_numpy(client.pull_dense()))

    def _start(self, optimizer: torch.optim.Optimizer) -> PsClient:
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        if not 1 <= self._servers <= size:
            raise BadInput(f"sync.servers: {self._servers}, hosted by the {size} replicas", hint=f"use 1 to {size}")
        chosen = row_optimizer(optimizer)
        said = [("", "", "")] * size
        own = (SystemRandom().new_id(), environ.get(NODE_ADDRESS, ""), machine_identity())
        dist.all_gather_object(said, own, group=self._group)
        (token, *_), machines = said[0], len({machine for *_, machine in said})
        if machines > 1 and not all(host and host not in LOOPBACK for _, host, _ in said):
            text = f"sync.mode: {self._rule.mode} on {machines} machines, and {NODE_ADDRESS} is not set on all"
            raise BadInput(text, hint="run it as a job, or set that to the address at which others reach the machine")
        place = ("", "")
        if rank < self._servers:
            self._server = PsServer(ServerSpec(rule=self._rule, dense=chosen, token=token))
            if self._kept:
                self._server.restore(self._kept)
            host = own[1] if machines > 1 else "127.0.0.1"
            try:
                place = (self._server.serve(host), "")
            except OSError as error:  # the others wait for what this rank says
                place = ("", f"rank {rank} cannot listen at {host}: {error}")
        places = [place] * size
        dist.all_gather_object(places, place, group=self._group)
        if faults := [fault for _, fault in places if fault]:
            self._end_server()
            raise BadInput(f"sync.mode: {self._rule.mode}: {faults[0]}", hint=f"see {NODE_ADDRESS} there")
        self._lr = chosen.lr
        self.client = client = PsClient([one for one, _ in places[: self._servers]], rank, token=token)
        dist.barrier(group=self._group)  # all have joined before anybody pushes
        client.offer_dense(_array(_flat(self._weights)))
        client.wait_turn(TURN_S, dense=True)
        return client

    def state_dict(self) -> SyncState:
        """The shard that this rank hosts; empty on the others and before the first update."""
        return {} if self._server is None else {"shard": self._server.snapshot()}

    def load_state_dict(self, state: SyncState) -> None:
        """Inverse of ``state_dict``; before the first update."""
        assert self.client is None, "load_state_dict() comes before the first update"
        self._kept = state.get("shard", {})

    def close(self) -> None:
        """Hang up; servers of this rank end when the others have hung up too, or after ``CLOSE_S``."""
        if self.client is not None:  # no barrier: a rank that failed comes here alone
            self.client.close(leave=False)
            self._end_server()

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.close(wait_s=CLOSE_S)


def row_optimizer(optimizer: torch.optim.Optimizer) -> RowOptimizer:
    """The server's optimizer that does what a torch one would. Raises BadInput for one that servers do not have."""
    (group, *more), kind = optimizer.param_groups, type(optimizer).__name__.lower()
    absent = ("momentum", "weight_decay", "lr_decay", "amsgrad", "maximize", "initial_accumulator_value")
    off = [name for name in absent if group.get(name)]
    if kind not in ("sgd", "adagrad", "adam") or off or more:
        raise BadInput(
            f"optimizer: {kind} with {', '.join(off) or f'{1 + len(more)} groups'} does not run on parameter servers",
            hint="use SGD, Adagrad or Adam with one group and without momentum or decay",
        )
    return RowOptimizer(kind=kind, lr=group["lr"], betas=group.get("betas", (0.9, 0.999)), eps=group.get("eps"))


def _flat(weights: Sequence[nn.Parameter]) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1) for one in weights])


def _array(flat: torch.Tensor) -> Floats:
    return flat.float().cpu().numpy()


def _grad(weight: nn.Parameter) -> torch.Tensor:
    return (torch.zeros_like(weight) if weight.grad is None else weight.grad).detach().reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Two groups of one rank: ``inner`` is its node, ``outer`` the ranks of its place on every node."""

    inner: dist.ProcessGroup
    outer: dist.ProcessGroup


def make_levels(ranks_per_node: int) -> Levels:
    """Groups for nodes of consecutive ranks; every rank of the world calls it, and the world divides by their size."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size % ranks_per_node:
        text = f"sync.hierarchical: {size} ranks are not nodes of {ranks_per_node}"
        raise BadInput(text, hint="start as many ranks on every node, or turn hierarchical off")
    inner, _ = dist.new_subgroups(ranks_per_node)
    lists = [list(range(place, size, ranks_per_node)) for place in range(ranks_per_node)]
    outer, _ = dist.new_subgroups_by_enumeration(lists)
    assert rank in lists[rank % ranks_per_node]
    return Levels(inner=cast("dist.ProcessGroup", inner), outer=cast("dist.ProcessGroup", outer))


def hierarchical_all_reduce(flat: torch.Tensor, levels: Levels) -> torch.Tensor:
    """Sum a flat tensor [N] in place: reduce-scatter in the node, all-reduce across, all-gather in the node."""
    size = dist.get_world_size(levels.inner)
    padded = pad(flat, (0, -flat.numel() % size))
    mine = torch.empty_like(padded.view(size, -1)[0])
    dist.reduce_scatter_single(mine, padded, group=levels.inner)
    dist.all_reduce(mine, group=levels.outer)
    dist.all_gather_single(padded, mine, group=levels.inner)
    return flat.copy_(padded[: flat.numel()])


class ShardedEmbedding(nn.Module):
    """An embedding whose rows [V, dim] live in a table of the servers; only those of a batch are here.

    The iteration is the caller's: ``client.wait_turn()``, forward, backward, ``push()`` of each embedding,
    ``client.tick()``. A module has no parameters, so DistributedDataParallel and the dense optimizer leave it alone.
    Gradients are those of this worker's loss: ps_sync applies their mean, as all-reduce does for the dense part.
    """

    def __init__(self, client: PsClient, table: str) -> None:
        super().__init__()
        self._client, self._table = client, table
        self._fetched: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [..., dim] of ids [...]; each distinct id is fetched once."""
        distinct, back = torch.unique(ids, return_inverse=True)
        rows = torch.from_numpy(self._client.pull(self._table, distinct.numpy()))
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._fetched.append((distinct, rows))
        return rows[back]

    def push(self) -> None:
        """Hand the gradients since the last ``push`` to the client, which sends them with its tick."""
        for distinct, rows in self._fetched:
            if rows.grad is not None:
                self._client.push(self._table, distinct.numpy(), rows.grad.numpy())
        self._fetched.clear()
