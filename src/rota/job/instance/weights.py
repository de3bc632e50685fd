"""Weights edges as their reader sees them, and gradient edges.

Weights: a reader has a ``Replica`` of each edge that ends in it: the version it holds, how far that is behind, and the
state that follows. Calls name the version they need; with a bounded ``lag`` the reader follows by itself, and the loop
waits at a commit for readers that would get too far behind.

Gradients: ``vision.encode -> speller.read`` with ``kind: grad``: the loop gives a batch to the edge. For each
micro-batch, in order, ``encode`` makes activations, ``read`` its loss from them (and calls ``backward()`` on it), and
what came to the activations goes back through ``encode``. Gradients add up in the parameters of both ends as in one
process; the loop then calls the operations that step the optimisers, and commits. At most ``inflight`` micro-batches
are between the ends, where their activations are kept; for the loop they are Refs.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rota.job.core.graph import Endpoint, endpoint
from rota.job.rpc import dispatch
from rota.job.rpc.client import all_results
from rota.runtime.clock import Clock
from rota.spec.dispatch import Concat, MeanRule, OpSpec, Rank, Shard, SumRule, rule_to_text
from rota.spec.errors import BadInput
from rota.spec.ids import Epoch
from rota.spec.job import Edge, JobSpec, RoleSpec, WeightsEdge
from rota.spec.states import ReplicaState

Version = tuple[int, int]
"""(epoch of the writer, commit)."""
NONE: Version = (0, 0)
SYNC = "__sync__"
"""Name of the operation that does nothing, with the weights that it needs."""
PHASE = "__gradient__"
"""Keyword of a call along a gradient edge: [forward, step or back, number of the micro-batch]."""
Call = Callable[[RoleSpec, OpSpec, tuple[Any, ...], Mapping[str, Any]], Awaitable[Any]]


class Replica:
    """The weights of one edge in one instance."""

    def __init__(self, edge: WeightsEdge) -> None:
        self.edge = edge
        self.held = self.newest = NONE
        self.syncing = False
        self._behind_since_s = 0.0

    def learn(self, newest: Version, now_s: float) -> None:
        """``newest`` is the version that the last commit names."""
        if self.held == self.newest != newest:
            self._behind_since_s = now_s
        self.newest = newest

    def read(self, now_s: float) -> tuple[str, str, int, int, float]:
        """(edge, state, commit held, commits behind, seconds behind)."""
        behind = abs(self.newest[1] - self.held[1])
        behind_s = round(now_s - self._behind_since_s, 3) if self.held != self.newest else 0.0
        return self.edge.name, self._state(behind, behind_s), self.held[1], behind, behind_s

    def _state(self, behind: int, behind_s: float) -> ReplicaState:
        if self.held == self.newest:
            return ReplicaState.SYNCED if self.held != NONE else ReplicaState.STALE
        lag = self.edge.lag
        if lag is not None and (behind > lag.versions or (lag.seconds is not None and behind_s > lag.seconds)):
            return ReplicaState.SUSPECT
        return ReplicaState.SYNCING if self.syncing else ReplicaState.STALE


class Replicas:
    """The weights edges that end in one instance under one epoch."""

    def __init__(self, edges: Iterable[WeightsEdge], clock: Clock) -> None:
        self._clock = clock
        self._loop_epoch = Epoch(0)
        self.of = {edge.name: Replica(edge) for edge in edges}

    def learn(self, newest: Mapping[str, Version], loop_epoch: Epoch) -> None:
        """The versions that the last commit names, as the loop of ``loop_epoch`` sees it.

        A newer loop may name an older version, when its job went back: what else is held counts as nothing.
        """
        if loop_epoch < self._loop_epoch:
            return
        went_back = loop_epoch > self._loop_epoch
        self._loop_epoch, now_s = loop_epoch, self._clock.monotonic_s()
        for one in (self.of[name] for name in newest if name in self.of):
            one.learn(newest[one.edge.name], now_s)
            if went_back and one.held > one.newest:
                one.held = NONE

    def missing(self, needed: Mapping[str, Version]) -> list[Replica]:
        """Those that are older than ``needed``."""
        return [self.of[name] for name, version in needed.items() if name in self.of and self.of[name].held < version]

    def read(self) -> tuple[tuple[str, str, int, int, float], ...]:
        """What a beat tells of them."""
        now_s = self._clock.monotonic_s()
        return tuple(one.read(now_s) for one in self.of.values())


class Tape:
    """Both ends of gradient edges inside one instance: activations that wait for their gradients, by micro-batch."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Any]] = {}

    async def run(self, phase: list[str], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """One phase of one micro-batch. Raises BadInput when the step sends no gradient back."""
        kind, micro = phase
        match kind:
            case "forward":
                return self._keep(micro, await _value(function(*args)))
            case "step":
                return await _step(function, *args)
            case _:
                self._back(micro, args[0])
                return None

    def _keep(self, micro: str, made: Any) -> Any:
        self._waiting[micro] = leaves = []
        return dispatch.map_batch(made, lambda leaf: (leaves.append(leaf), leaf.detach())[1])

    def _back(self, micro: str, gradients: Any) -> None:
        found: list[Any] = []
        dispatch.map_batch(gradients, found.append)
        pairs = [(made, came) for made, came in zip(self._waiting.pop(micro), found, strict=True) if made.requires_grad]
        sys.modules["torch"].autograd.backward([made for made, _ in pairs], [came for _, came in pairs])


async def _step(function: Callable[..., Any], given: tuple[Any, Any]) -> list[tuple[Any, Any, int]]:
    """[(what the operation gave, the gradients of its activations, rows)]."""
    made, rest = given
    made = dispatch.map_batch(made, lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point()))
    value = await _value(function(made, *rest))

    def gradient(leaf: Any) -> Any:
        if not leaf.requires_grad:
            return leaf
        if leaf.grad is None:
            raise BadInput(
                "no gradient came to the activations of a gradient edge", hint="call backward() on the loss in it"
            )
        return leaf.grad

    return [(value, dispatch.map_batch(made, gradient), dispatch.length(made))]


async def _value(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


@dataclass(slots=True, kw_only=True)
class GradientEdge:
    """One gradient edge as the loop drives it; ``call`` sends one operation to the members of a role."""

    edge: Edge
    source: tuple[RoleSpec, OpSpec]
    target: tuple[RoleSpec, OpSpec]
    call: Call
    epoch: int
    _numbers: Any = field(default_factory=itertools.count)

    async def run(self, batch: Any, rest: tuple[Any, ...]) -> Any:
        """Forward, step and back for every micro-batch; the answers of the target merged over all as it declares.

        Raises BadInput when the rows do not divide over the micro-batches, else what the calls raise.
        """
        parts = self._parts(batch, rest)
        room = asyncio.Semaphore(self.edge.inflight)
        made: asyncio.Queue[tuple[str, Any, Any]] = asyncio.Queue(len(parts))
        learned: asyncio.Queue[tuple[str, Any]] = asyncio.Queue(len(parts))
        answers: list[tuple[Any, int]] = []

        async def forward() -> None:
            for value, others in parts:
                await room.acquire()
                micro = f"{self.edge.source}/{self.epoch}/{next(self._numbers)}"
                made.put_nowait((micro, await self._send(self.source, "forward", micro, value), others))

        async def step() -> None:
            for _ in parts:
                micro, activations, others = await made.get()
                found = await self._send(self.target, "step", micro, (activations, others), Concat())
                answers.extend((value, rows) for value, _, rows in found)
                learned.put_nowait((micro, dispatch.concat([gradients for _, gradients, _ in found])))

        async def back() -> None:
            for _ in parts:
                micro, gradients = await learned.get()
                await self._send(self.source, "back", micro, gradients, Rank(0))
                room.release()

        await all_results([forward(), step(), back()])
        return _merged(answers, self.target[1])

    def _parts(self, batch: Any, rest: tuple[Any, ...]) -> list[tuple[Any, tuple[Any, ...]]]:
        micro = self.edge.micro
        rows = dispatch.length((batch, *rest))
        if rows % micro:
            raise BadInput(
                f"{self.edge.source} -> {self.edge.target}: {rows} rows do not divide over {micro} micro-batches",
                hint="give a multiple of micro, or change micro of the edge",
            )
        found = dispatch.split((batch, rest), Shard("micro"), mesh=(("micro", micro),), world=micro)
        return [found[rank].value for rank in range(micro)]

    async def _send(self, end: tuple[RoleSpec, OpSpec], phase: str, micro: str, value: Any, recv: Any = None) -> Any:
        role, op = end
        op = op if recv is None else replace(op, recv=rule_to_text(recv))
        return await self.call(role, op, (value,), {PHASE: [phase, micro]})


def gradient_edges(spec: JobSpec, call: Call, epoch: int) -> dict[str, GradientEdge]:
    """The gradient edges of a job by what they leave."""
    found: dict[str, GradientEdge] = {}
    for edge in spec.edges:
        source, target = endpoint(spec, edge.source), endpoint(spec, edge.target)
        if edge.kind == "grad" and source.role is not None and target.role is not None:
            first, second = _end(spec, source), _end(spec, target)
            found[edge.source] = GradientEdge(edge=edge, source=first, target=second, call=call, epoch=epoch)
    return found


def _end(spec: JobSpec, end: Endpoint) -> tuple[RoleSpec, OpSpec]:
    role = spec.role(end.vertex)
    op = role.interface.op(end.op) if role.interface else None
    assert op is not None, f"{end.text} was checked before the start"
    return role, op


def _merged(answers: list[tuple[Any, int]], op: OpSpec) -> Any:
    values, rows = [value for value, _ in answers], [count for _, count in answers]
    match op.recv_rule:
        case MeanRule():
            return dispatch.weighted_sum(values, [count / sum(rows) for count in rows])
        case SumRule():
            return dispatch.weighted_sum(values, None)
        case Concat():
            return dispatch.concat(values)
        case _:
            return values[-1]
