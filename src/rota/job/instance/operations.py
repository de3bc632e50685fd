"""The runner of a class workload: operations, a repeated call once, state at a commit, weights; user code in a thread.

Weights: a reader has a ``Replica`` of each edge that ends in it: the version it holds, how far that is behind, and the
state that follows. Calls name the version they need; with a bounded ``lag`` the reader follows by itself, and the loop
waits at a commit for readers that would get too far behind. Each end of a gradient edge keeps a ``Tape``: its
activations until their gradients arrive.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from rota.job import checkpoint
from rota.job.core.survival import commits_kept
from rota.job.health.heartbeat import Answer
from rota.job.health.stacks import error_summary
from rota.job.inspect import import_target
from rota.job.instance.runners import InstanceConfig, ProcessGroup, Setup, StillRunning, make_context
from rota.job.rpc import dispatch
from rota.job.rpc.client import Refusal, Request
from rota.job.rpc.payload import Box, prefix_of
from rota.job.rpc.peers import PeerTable
from rota.job.workload import ONE_RESULT, Marks, marks_of
from rota.runtime.clock import Clock
from rota.runtime.undo import undone_if_raised
from rota.spec.errors import BadInput, CallLost
from rota.spec.ids import Epoch, InstanceId
from rota.spec.job import WeightsEdge
from rota.spec.states import ReplicaState
from rota.spec.user_code import UserCode
from rota.tensors.core import Tensor

Version = tuple[int, int]
"""(epoch of the writer, commit)."""
NONE: Version = (0, 0)
SYNC = "__sync__"
"""Name of the operation that does nothing, with the weights that it needs."""
PHASE = "__gradient__"
"""Keyword of a call along a gradient edge: [forward, step or back, number of the micro-batch]."""


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

        A newer loop may name an older version, when its job went back: newer versions are treated as not loaded.
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
        """Their rows of a heartbeat."""
        now_s = self._clock.monotonic_s()
        return tuple(one.read(now_s) for one in self.of.values())


class Tape:
    """Activations of one instance that wait for their gradients, by micro-batch; for both ends of gradient edges."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Any]] = {}

    async def run(self, phase: list[str], function: Callable[..., object], args: tuple[Any, ...]) -> object:
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

    def _keep(self, micro: str, made: object) -> object:
        self._waiting[micro] = leaves = []
        return dispatch.map_batch(made, lambda leaf: (leaves.append(leaf), leaf.detach())[1])

    def _back(self, micro: str, gradients: object) -> None:
        found: list[Any] = []
        dispatch.map_batch(gradients, found.append)
        pairs = [(made, came) for made, came in zip(self._waiting.pop(micro), found, strict=True) if made.requires_grad]
        sys.modules["torch"].autograd.backward([made for made, _ in pairs], [came for _, came in pairs])


async def _step(function: Callable[..., object], given: tuple[Any, Any]) -> list[tuple[object, object, int]]:
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


async def _value(found: object) -> object:
    return await found if inspect.isawaitable(found) else found


LET_GO_S = 20.0
"""Limit for an operation after the group of its epoch was left, in seconds; gloo does not give up a collective by
itself while another member keeps its sockets open."""
REPLIES_KEPT_MAX = 256
"""Answers kept by call id: a repeated request gets the first answer, the operation does not run again."""
IDS_KEPT_MAX = 8192
"""Call ids kept after their answers: a repeated request is refused then, the operation does not run again either."""


class _Formed:
    """The object of one epoch and its running operations. Apart from its construction it belongs to the user thread."""

    def __init__(self, epoch: Epoch, marks: Marks, plane: Any, found: Any, replicas: Replicas) -> None:
        self.epoch, self.marks, self.plane, self.object = epoch, marks, plane, found
        self.replies: OrderedDict[str, asyncio.Future[object]] = OrderedDict()
        self.answered: OrderedDict[str, None] = OrderedDict()
        """Ids of calls whose answers were evicted."""
        self.replicas, self.first = replicas, False
        self.loading = asyncio.Lock()
        self.tape = Tape()
        self.active = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def drop_old_replies(self) -> None:
        """Forget answers beyond the limit, the oldest first, but not those of operations that run."""
        over = max(0, len(self.replies) - REPLIES_KEPT_MAX)
        for call_id in [one for one, reply in itertools.islice(self.replies.items(), over) if reply.done()]:
            del self.replies[call_id]
            self.answered[call_id] = None
        while len(self.answered) > IDS_KEPT_MAX:
            self.answered.popitem(last=False)

    def enter(self) -> None:
        """One more operation runs: weights stay as they are."""
        self.active += 1
        self.idle.clear()

    def leave(self) -> None:
        """One fewer runs."""
        self.active -= 1
        if self.active == 0:
            self.idle.set()


class ClassRunner:
    """One object of the user's class at a time, made anew for each epoch."""

    def __init__(self, config: InstanceConfig, on_failure: Callable[[BaseException, Epoch], None]) -> None:
        self._config = config
        self._on_failure = on_failure
        self._meeting: ProcessGroup | None = None
        self._formed: _Formed | None = None

    async def form(self, setup: Setup) -> None:
        """Make the object, restore its state, set it up."""
        config = self._config
        self._meeting = ProcessGroup(config, setup)
        ctx = make_context(config, setup)
        ctx.make_group = self._meeting.make
        cls: Any = await config.user.do(lambda: import_target(config.role.workload or ""))
        marks, plane = marks_of(cls), None
        if any(mark is not None for mark in (marks.state, marks.publish, marks.weights)):
            plane = await config.user.do(lambda: checkpoint.connect(config.place.job, config.id, setup.epoch))
        if setup.restore > 0 and marks.state is not None and plane is not None:
            who, root, source = (config.place.job, config.id), ctx.checkpoint_dir, (setup.source, setup.source_epoch)
            twin = InstanceId(config.id.role, 0) if config.role.splits else None
            find = partial(checkpoint.restored, plane, root, *who, setup.restore, source=source, twin=twin)
            ctx.restored = await config.user.do(find)
        edges = [edge for edge in config.spec.weights if edge.target == config.id.role]
        replicas = Replicas(edges, config.clock)
        formed = _Formed(setup.epoch, marks, plane, await config.user.do(partial(cls, **config.role.args)), replicas)
        formed.first = setup.index == 0
        await self._in_user(formed.object.setup, ctx)
        if setup.restore > 0 and formed.first:
            await self._publish_again(formed, ctx.checkpoint_dir, setup.restore)
        self._formed = formed

    async def run(self, committed: int) -> None:
        """A class has no end of its own; it serves until it is stopped."""
        raise AssertionError("a class workload is not run")

    async def dissolve(self, grace_s: float) -> None:
        """Leave the process group, so that members blocked with this one are released; drop the object.

        Raises StillRunning when the thread of the operations stays blocked.
        """
        formed = self._leave()
        if formed is None or formed.active == 0:
            return
        try:
            async with self._config.clock.timeout(LET_GO_S):
                await self._config.user.do(lambda: None)
        except TimeoutError:
            raise StillRunning(f"an operation of epoch {formed.epoch} still runs {LET_GO_S:g} s later") from None

    def _leave(self) -> _Formed | None:
        """The epoch that was left, if there was one."""
        if self._meeting is not None:
            self._meeting.leave()
        formed, self._formed = self._formed, None
        return formed

    async def stop(self, grace_s: float) -> None:
        """Leave the group; the process ends after this."""
        self._leave()

    async def call(self, request: Request) -> object:
        """Run an operation once: its value or a Refusal; a repeated call id waits for, or gets, the first answer."""
        formed = self._formed
        if formed is None or formed.epoch != request.epoch:
            return Refusal(kind="stale", text=f"{self._config.id} has left epoch {request.epoch}")
        known = formed.replies.get(request.call_id)
        if known is not None:
            return await asyncio.shield(known)
        if request.call_id in formed.answered:
            return self._answer_lost(formed, request)
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        formed.replies[request.call_id] = answer
        formed.drop_old_replies()
        with undone_if_raised(answer.cancel):  # cancelled by its caller: whoever sends it again finds that it ended
            value = await self._operate(formed, request)
        if not answer.done():
            answer.set_result(value)
        return value

    def _answer_lost(self, formed: _Formed, request: Request) -> Refusal:
        """The operation ran, and its answer got lost with a connection; after a ``commit`` one the job goes back."""
        op = self._config.role.interface.op(request.op) if self._config.role.interface else None
        lost = CallLost(f"{self._config.id}.{request.op} ran, but its answer was dropped")
        return self._failed(formed, lost, report=request.report and op is not None and op.retry == "commit")

    async def _operate(self, formed: _Formed, request: Request) -> object:
        op = self._config.role.interface.op(request.op) if self._config.role.interface else None
        if op is None and request.op != SYNC:
            return Refusal(kind="stale", text=f"{self._config.id.role} has no operation {request.op!r}")
        with UserCode() as loading:
            await self._enter(formed, request.weights, request.loop_epoch)
        if loading.failed:  # the operation did not begin, so it may be sent again whatever its retry class
            return Refusal(kind="stale", text=self._failed(formed, loading.take(), report=True).text)
        if op is None:
            formed.leave()
            return None
        marks = self._config.marks
        begun = marks.begin(op.name)
        try:
            with UserCode() as working:
                value = await self._work(formed, op.name, request)
                marks.mark()
                return value
            return self._failed(formed, working.take(), report=request.report and op.retry != "never")
        finally:
            marks.end(begun, op.name, call=request.call_id)
            formed.leave()

    async def _work(self, formed: _Formed, name: str, request: Request) -> object:
        """The method of the user on arrays; what it gives, with Refs for what is large."""
        job = self._config.place.job
        kwargs: dict[str, Any] = dict(request.kwargs)
        phase = kwargs.pop(PHASE, None)
        prefix = prefix_of(job, request.loop_epoch, f"{self._config.id}/{request.call_id}")
        box = Box(partial(self._plane, formed), prefix, None if phase is None else 1)
        function, args = getattr(formed.object, name), box.open(request.args)
        if phase is not None:
            value = await formed.tape.run(phase, function, args)
        else:
            value = await _value(function(*args, **box.open(kwargs)))
        if isinstance(value, Generator | AsyncGenerator):
            raise BadInput(f"operation {name!r} returned a generator", hint=ONE_RESULT)
        return box.close(value)

    def _plane(self, formed: _Formed) -> Any:
        if formed.plane is None:
            formed.plane = checkpoint.connect(self._config.place.job, self._config.id, formed.epoch)
        return formed.plane

    def _failed(self, formed: _Formed, error: BaseException, *, report: bool) -> Refusal:
        text, trace = error_summary(error)
        if report:
            self._on_failure(error, formed.epoch)
        return Refusal(kind="failed", text=text, traceback=trace or text)  # empty: the instance died

    async def _enter(self, formed: _Formed, needed: Mapping[str, Version], loop_epoch: Epoch) -> None:
        """Wait until the weights are as new as the call needs them; they change only while no operation runs."""
        replicas = formed.replicas
        replicas.learn(needed, loop_epoch)
        if formed.loading.locked() or replicas.missing(needed):
            async with formed.loading:
                for replica in replicas.missing(needed):
                    await formed.idle.wait()
                    await self._load(formed, replica, needed[replica.edge.name])
        formed.enter()

    async def follow(self, table: PeerTable) -> None:
        """In the user thread: take newer versions of the edges whose lag is bounded, once no operation runs."""
        formed = self._formed
        if formed is None:
            return
        formed.replicas.learn(table.weights, table.loop_epoch)
        bounded = {name for name, replica in formed.replicas.of.items() if replica.edge.lag is not None}
        needed = {edge: version for edge, version in table.weights.items() if edge in bounded}
        if not formed.replicas.missing(needed):
            return
        with UserCode() as loading:
            await self._enter(formed, needed, table.loop_epoch)
            formed.leave()
        if loading.failed:
            self._failed(formed, loading.take(), report=True)

    async def _load(self, formed: _Formed, replica: Replica, version: Version) -> None:
        edge, replica.syncing = replica.edge, True
        try:
            if formed.marks.weights is not None:
                with self._config.marks.waiting.on(f"{edge.source}/0", "weights", edge.name):
                    writer = self._config.rpc.table.find(edge.source, 0)
                    host = str(writer.node) if writer is not None else ""
                    tensors = checkpoint.fetch(formed.plane, self._config.place.job, edge.name, version, host)
                await _value(getattr(formed.object, formed.marks.weights)(version[1], tensors))
            replica.held = version
        finally:
            replica.syncing = False

    def weights(self) -> tuple[tuple[str, str, int, int, float], ...]:
        """Rows of a heartbeat for the weights edges that end here."""
        return self._formed.replicas.read() if self._formed is not None else ()

    async def _in_user(self, function: Callable[..., Any], *args: Any) -> Any:
        async def call() -> Any:
            return await _value(function(*args))

        return await self._config.user.run(call())

    async def save(self, n: int, edges: tuple[str, ...], folder: str) -> Answer:
        """Put the state of commit ``n`` into shared memory, and into ``folder`` if given; publish ``edges``."""
        formed = self._formed
        assert formed is not None, "form() comes before save()"
        began_s, size = self._config.clock.monotonic_s(), 0
        if formed.marks.state is not None:
            job, config = self._config.place.job, self._config
            kept = commits_kept(config.spec)
            state = await self._in_user(getattr(formed.object, formed.marks.state))
            size = await config.user.do(
                lambda: checkpoint.save(formed.plane, job, config.id, n, formed.epoch, state, kept)
            )
            if folder:
                with config.marks.quiet("checkpoint"):
                    await config.user.do(lambda: checkpoint.write(Path(folder), config.id, state))
        for edge in edges:
            await self._publish(formed, edge, n)
        if folder and formed.first:
            with self._config.marks.quiet("checkpoint"):
                await self._config.user.do(lambda: self._keep_weights(formed, n, Path(folder)))
        return {"answer": "done", "bytes": size, "seconds": round(self._config.clock.monotonic_s() - began_s, 6)}

    def _published(self, formed: _Formed, n: int) -> Iterator[tuple[str, int]]:
        """(edge, commit that published) of the weights edges that leave here, as of commit ``n``."""
        for edge in self._config.spec.weights:
            if edge.source == self._config.id.role and n - n % edge.every > 0:
                yield edge.name, n - n % edge.every

    def _keep_weights(self, formed: _Formed, n: int, folder: Path) -> None:
        """What readers have and the state of commit ``n`` does not hold goes to disk with it."""
        for edge, published in self._published(formed, n):
            found = checkpoint.find_weights(formed.plane, self._config.place.job, edge, published)
            if published < n and found is not None:
                checkpoint.write(folder, edge, dict(found))

    async def _publish_again(self, formed: _Formed, root: Path, n: int) -> None:
        """After a rollback to ``n``: what readers need and memory has no more comes from the state, or from disk."""
        job, user = self._config.place.job, self._config.user
        for edge, published in self._published(formed, n):
            if await user.do(partial(checkpoint.find_weights, formed.plane, job, edge, published)) is not None:
                continue
            path = checkpoint.find(root, edge, n)
            if published == n:
                await self._publish(formed, edge, n)
            elif path is not None:
                kept = cast("Mapping[str, Tensor]", await user.do(partial(checkpoint.read, path)))
                await user.do(partial(checkpoint.publish, formed.plane, job, edge, published, formed.epoch, kept))

    async def _publish(self, formed: _Formed, edge: str, n: int) -> None:
        job, method = self._config.place.job, formed.marks.publish or formed.marks.state
        assert method is not None, "the check of the graph lets no other write"
        tensors = await self._in_user(getattr(formed.object, method))
        if formed.marks.publish is None:
            tensors = checkpoint.tensors_of(tensors)
        await self._config.user.do(lambda: checkpoint.publish(formed.plane, job, edge, n, formed.epoch, tensors))
