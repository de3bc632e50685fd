"""The loop instance: Flow, its calls to roles, and commit, the only durable point.

::

    async def loop(f):
        for n in range(f.committed + 1, N + 1):
            out = await f.roles.rollout.generate(items)
            await f.commit({"reward": out.mean()})

After a recovery that touched state, the function is cancelled and entered again with ``f.committed`` at the commit that
survived. So what it holds in variables is rebuilt from ``f.committed``, and an uncommitted effect never counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rota.job import checkpoint
from rota.job.checkpoint import CheckpointTimer, prune
from rota.job.core.ledger import FlowCut
from rota.job.core.progress import bad_losses
from rota.job.core.survival import commits_kept
from rota.job.health.heartbeat import QUIET_MAX_S
from rota.job.inspect import import_target
from rota.job.instance.handles import (
    DeviceLease,
    PendingCall,
    RoleHandle,
    Roles,
    StreamHandles,
    UnawaitedCalls,
    absent,
    gradient_edges,
)
from rota.job.instance.operations import SYNC
from rota.job.instance.runners import InstanceConfig, Setup, StillRunning, make_context
from rota.job.instance.streams import Streams
from rota.job.place import folder_of
from rota.job.rpc import payload
from rota.job.rpc.client import Request, in_order
from rota.job.rpc.commit import CommitAgain, CommitCheckpoint, CommitDone, CommitRefused
from rota.job.rpc.dispatch import of_items
from rota.job.rpc.peers import Peer, PeerTable, master_handle
from rota.job.workload import FLOW
from rota.runtime import directory
from rota.runtime.launcher import Call, CallTimeout, ProcessGone
from rota.spec.codec import JsonObject
from rota.spec.dispatch import EachRule, OpSpec
from rota.spec.errors import BadInput, BadLoss, CallError, Fenced, RolledBack
from rota.spec.ids import Epoch
from rota.spec.job import Checkpoint, RoleSpec
from rota.tensors.api.store import Plane

T = TypeVar("T")
COMMIT_ANSWER_S = 10.0
"""A commit without an answer is sent again after this; the master answers a repeated one from the log."""
SAVE_MAX_S = 1800.0
"""Longest wait for one instance to save its state at a commit."""
PACE_MAX_S = 60.0
"""Longest wait of a commit for one reader to load the weights."""
CANCEL_MAX_S = 30.0
"""Longest wait for a cancelled loop to let go."""


class Flow:
    """What the loop of a job gets. Its methods belong to the event loop that runs the function."""

    def __init__(self, config: InstanceConfig, setup: Setup, committed: int, cut: FlowCut) -> None:
        ctx = make_context(config, setup)
        self.job: str = config.place.job
        self.committed = committed
        """Number of the last commit; 0 at the start of a job."""
        self.spec = config.spec
        self.seed = config.spec.seed
        self.kept: JsonObject = dict(cut.get("kept", {}))
        """JSON values of the loop, such as the state of a random generator: part of each commit."""
        self.output_dir: Path = ctx.output_dir
        self.checkpoint_dir: Path = ctx.checkpoint_dir
        self.roles = Roles(
            {role.name: RoleHandle(self, role) for role in config.spec.roles if role.name != config.id.role}
        )
        self.over = False
        """Its epoch is over: the function was cancelled, and whatever it still asks for is refused."""
        self.unawaited = UnawaitedCalls()
        """Calls that have not been awaited."""
        self._config = config
        self._epoch: Epoch = setup.epoch
        self._setup = setup
        self._pending: asyncio.Task[int] | None = None
        self._paced: dict[str, int] = {}
        self._waited = defaultdict[str, float](float)
        """Seconds since the last commit in which it waited for calls of each role."""
        self._cadence = CheckpointTimer.of(config.spec.checkpoint, config.clock.monotonic_s())
        self.pumps = Streams(
            config.spec,
            rpc=config.rpc,
            marks=config.marks,
            holder=config.id,
            epoch=setup.epoch,
            version=committed,
            cut=cut.get("streams", {}),
            say=self.log,
        )
        self.streams = StreamHandles(self, self.pumps)
        self._edges = gradient_edges(config.spec, self._send, setup.epoch)
        self._leases = DeviceLease(config.spec, config.rpc, self._send)
        payload.HELD.owner = True

    if not TYPE_CHECKING:  # a type checker knows by itself what there is

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises what it raised
            kinds = (("roles", self.spec.roles), ("streams", self.spec.streams))
            named = [f"{kind}.{name}" for kind, ones in kinds if any(one.name == name for one in ones)]
            known = named or [one for one in dir(self) if not one.startswith("_")]
            raise absent(f"the flow has no {name!r}", (named or [name])[0], known)

    @property
    def weights_version(self) -> int:
        """The commit whose weights the readers of the weights edges use; 0 before the first."""
        return max((n for _, n in self.table.weights.values()), default=0)

    @property
    def table(self) -> PeerTable:
        """Who is where and ready, as last reported by the master."""
        return self._config.rpc.table

    def quiet(self, why: str, max_s: float = QUIET_MAX_S) -> AbstractContextManager[None]:
        """Declare a legal silence: ``with f.quiet("waiting for data", max_s=3600):``.

        A loop that neither calls nor commits for its ``progress`` limit counts as hung.
        """
        return self._config.marks.quiet(why, max_s)

    def log(self, message: str) -> None:
        """One line in the log of the loop; the log adds the time."""
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()

    def warn_of_unawaited(self) -> None:
        """A line in the log of the loop for each place whose calls were never awaited."""
        for line in self.unawaited.lines():
            sys.stderr.write(f"rota: warning: {line}\n")
        sys.stderr.flush()

    async def call(self, role: RoleSpec, op: OpSpec, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Call an operation; raises what ``RpcClient.call`` raises."""
        await self.settle()
        rpc, epoch = self._config.rpc, self._epoch
        async with self._leases.of(role), self._waits_for(role):
            if isinstance(op.send_rule, EachRule):
                items = _items(op, args)
                found = rpc.stream(role, op, items, args[1:], kwargs, loop_epoch=epoch)
                return of_items(await self.in_control(in_order(found, len(items))), op.recv_rule)
            try:
                return await self._send(role, op, args, kwargs)
            finally:
                self._config.marks.touch()

    @asynccontextmanager
    async def _waits_for(self, role: RoleSpec) -> AsyncGenerator[None]:
        began_s = self._config.clock.monotonic_s()
        try:
            yield
        finally:
            self._waited[role.name] += self._config.clock.monotonic_s() - began_s

    async def _send(self, role: RoleSpec, op: OpSpec, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        return await self._config.rpc.call(role, op, args, kwargs, loop_epoch=self._epoch)

    async def stream(
        self, role: RoleSpec, op: OpSpec, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> AsyncGenerator[tuple[int, object], None]:
        """(index, result) of each item as it finishes."""
        await self.settle()
        async with self._leases.of(role):
            found = self._config.rpc.stream(role, op, _items(op, args), args[1:], kwargs, loop_epoch=self._epoch)
            try:
                while True:
                    try:
                        yield await self.in_control(anext(found))
                    except StopAsyncIteration:
                        return
            finally:
                await self.in_control(found.aclose())

    def gradients(self, source: str, batch: object, *rest: object) -> PendingCall:
        """Train over the gradient edge that leaves ``source`` (``role.op``): the merged answers of its other end.

        ``batch`` goes to ``source``, what that makes and ``rest`` to the other end, gradients back. The roles step
        their optimisers in an operation of their own. Raises BadInput for another source, else as a call does.
        """
        return self.unawaited.call("gradients", partial(self._gradients, source, batch, rest))

    async def _gradients(self, source: str, batch: object, rest: tuple[object, ...]) -> object:
        await self.settle()
        edge = self._edges.get(source)
        if edge is None:
            names = ", ".join(self._edges) or "none"
            raise BadInput(f"no gradient edge of {self.job} leaves {source!r}; edges leave {names}")
        async with self._leases.of(edge.source[0], edge.target[0]):
            try:
                return await edge.run(batch, rest)
            finally:
                self._config.marks.touch()

    def commit(
        self,
        given: Mapping[str, object] | int | None = None,
        /,
        *,
        n: int | None = None,
        metrics: Mapping[str, object] | None = None,
        **named: object,
    ) -> Awaitable[int]:
        """Make everything since the last commit durable: ``commit(metrics)`` or ``commit(loss=0.1)``.

        The number of the commit may be given, as ``n=`` or in the place of the metrics, ``commit(n, metrics=...)``: it
        must be ``committed + 1``. Returns an awaitable of n that runs whether it is awaited or not; the next
        call waits for it. Raises BadInput for another n, for metrics that are not JSON, and while the commit before is
        under way; what the commit before raised, if it was not awaited.
        """
        if self.over:
            raise RolledBack(f"loop epoch {self._epoch} of {self.job} is over; the loop is entered again")
        number, shown = _commit_arguments(given, n, metrics, named)
        if any(role.fail.nan == "rollback" for role in self._config.spec.roles) and (bad := bad_losses(shown)):
            values = ", ".join(f"{name}={shown[name]}" for name in bad)
            raise BadLoss(f"commit {self.committed + 1} is refused: {values}; the job goes back to {self.committed}")
        if self._pending is not None:
            if not self._pending.done():
                raise BadInput("the commit before is still under way: await it")
            before, self._pending = self._pending, None
            before.result()
        if number is not None and number != self.committed + 1:
            raise BadInput(f"commit {number} cannot follow {self.committed}; the next one is {self.committed + 1}")
        self._pending = asyncio.ensure_future(self._commit(self.committed + 1, shown, _plain("kept", self.kept)))
        return asyncio.shield(self._pending)

    async def settle(self) -> None:
        """Wait for a commit that was not awaited. Raises what it raised, or RolledBack when the epoch is over.

        It stays pending until it is done, so of several tasks that wait none begins another one of the same number.
        """
        if self.over:
            raise RolledBack(f"loop epoch {self._epoch} of {self.job} is over; the loop is entered again")
        pending = self._pending
        if pending is None:
            return
        try:
            await asyncio.shield(pending)
        finally:
            if self._pending is pending and pending.done():
                self._pending = None

    async def close(self) -> None:
        """Cancel a commit that is under way; the loop is given up."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.done():
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)

    async def _commit(self, n: int, metrics: JsonObject, kept: JsonObject) -> int:
        await self.in_control(self._save_and_commit(n, metrics, kept))
        self._config.marks.mark(n, "commits")
        self.committed = n
        return n

    async def in_control(self, work: Awaitable[T]) -> T:
        """Run a coroutine in the control thread, where streams and calls live.

        Each result counts as progress: between two results the user's own code runs.
        """
        try:
            return await self._config.control.run(_as_coroutine(work))
        finally:
            self._config.marks.touch()

    def call_in_control(self, function: Callable[[], None]) -> None:
        """Call a plain function in the control thread, soon."""
        self._config.control.loop.call_soon_threadsafe(function)

    async def begin(self, *, keeps: bool) -> None:
        """In the control thread: resume the streams from the cut; ``keeps``: store items that no source can repeat."""
        if self._epoch > 1 and (checkpoint.in_use(self._config.place.home) or directory.current() is not None):
            await asyncio.to_thread(payload.sweep, self.plane, self._config.place.job, self._epoch)
        if keeps:
            place, who, n = self._config.place, self._config.id, self.committed
            source = (self._setup.source, self._setup.source_epoch)
            find = partial(checkpoint.restored, self.plane, self.checkpoint_dir, place.job, who, n, source=source)
            kept = cast("Mapping[str, list[list[object]]]", await asyncio.to_thread(find))
            self.pumps.restore(kept)
        self.pumps.begin()

    async def _save_and_commit(self, n: int, metrics: JsonObject, kept: JsonObject) -> None:
        spec, rpc = self._config.spec, self._config.rpc
        due = {edge.name: edge for edge in spec.weights if n % edge.every == 0}
        keepers = {role.name for role in spec.roles if role.interface is not None and role.interface.has_state}
        roles = keepers | {edge.source for edge in due.values()}
        began_s = self._config.clock.monotonic_s()
        durable = self._cadence.due(n, began_s)
        folder = str(folder_of(self.checkpoint_dir, n, self._epoch)) if durable else ""
        writers = {name: rpc.table.find(edge.source, 0) for name, edge in due.items()}
        published = {name: int(peer.epoch) for name, peer in writers.items() if peer is not None}
        saves = [
            self._save(peer, n, tuple(name for name in published if writers[name] is peer), folder)
            for role in sorted(roles)
            for peer in rpc.table.of_role(role)
        ]
        # Of one moment: another task of the loop may put items in, or take a batch, while the members save.
        items, taken = self.pumps.kept(), self.pumps.leased()
        cut: FlowCut = {"streams": self.pumps.cut(), "kept": kept, "keeps": bool(items)}
        await asyncio.gather(*saves, *([asyncio.to_thread(self._keep, n, items, folder)] if items else ()))
        took_s = self._config.clock.monotonic_s() - began_s
        saved: CommitCheckpoint | None = {"path": folder, "seconds": round(took_s, 6)} if folder else None
        table = await self._commit_at_master(n, published, metrics, saved, cut)
        self._config.rpc.update(table)
        await self._pace(n)
        self.pumps.committed(n, taken)
        if payload.HELD.released:
            await asyncio.to_thread(payload.HELD.give_back, self.plane)
        if saved is not None:
            self._cadence.saved(self._config.clock.monotonic_s(), took_s)
            keep = (spec.checkpoint or Checkpoint()).keep
            await asyncio.to_thread(prune, self.checkpoint_dir, keep, n)

    async def _pace(self, n: int) -> None:
        """Readers of an edge with a bounded lag that could fall further behind load commit ``n`` first.

        One that is not ready serves no call; one that does not load in time is judged by its own limits.
        """
        due = [
            edge
            for edge in self._config.spec.weights
            if edge.lag is not None and n - self._paced.get(edge.name, 0) >= edge.lag.versions
        ]
        readers = [(edge, peer) for edge in due for peer in self.table.of_role(edge.target) if peer.ready]
        await asyncio.gather(*(self._load_weights(n, edge.name, peer) for edge, peer in readers))
        self._paced |= {edge.name: n for edge in due}

    async def _load_weights(self, n: int, edge: str, peer: Peer) -> None:
        request = Request(
            call_id=f"{self._config.id}/{self._epoch}/{edge}/{n}",
            op=SYNC,
            args=(),
            kwargs={},
            epoch=peer.epoch,
            loop_epoch=self._epoch,
            weights={name: version for name, version in self.table.weights.items() if name == edge},
        )
        with (
            self._config.marks.waiting.on(str(peer.id), "weights", edge),
            contextlib.suppress(ProcessGone, CallTimeout),
        ):
            await self._config.launcher.call(peer.handle(self._config.place.job), request.to_call(PACE_MAX_S))

    def _keep(self, n: int, kept: Mapping[str, list[list[object]]], folder: str) -> None:
        """Items that no source gives again are state of the loop, saved like that of any other instance."""
        place, copies = self._config.place, commits_kept(self._config.spec)
        checkpoint.save(self.plane, place.job, self._config.id, n, self._epoch, kept, copies)
        if folder:
            checkpoint.write(Path(folder), self._config.id, kept)

    @cached_property
    def plane(self) -> Plane:
        """The tensor store as this instance."""
        return checkpoint.connect(self._config.place.job, self._config.id, self._epoch)

    async def _save(self, peer: Peer, n: int, edges: tuple[str, ...], folder: str) -> None:
        kwargs = {"n": n, "epoch": peer.epoch, "loop_epoch": self._epoch, "edges": edges, "folder": folder}
        call = Call(method="save", kwargs=kwargs, control=True, timeout_s=SAVE_MAX_S)
        try:
            with self._config.marks.waiting.on(str(peer.id), "commit", f"save {n}"):
                reply = await self._config.launcher.call(peer.handle(self._config.place.job), call)
        except CallTimeout as error:
            raise CallError(f"commit {n}: {peer.id} did not save its state in {SAVE_MAX_S:g} s") from error
        except ProcessGone as error:
            reply = {"answer": "lost", "text": str(error)}
        if reply["answer"] != "done":
            # State is lost, so a rollback follows and cancels this loop.
            await self._config.rpc.wait_rollback()
            raise CallError(f"commit {n}: {peer.id} did not save its state: {reply.get('text', '')}")

    async def _commit_at_master(
        self,
        n: int,
        published: dict[str, int],
        metrics: JsonObject,
        saved: CommitCheckpoint | None,
        cut: FlowCut,
    ) -> PeerTable:
        kwargs = {
            "n": n,
            "loop_epoch": self._epoch,
            "versions": published,
            "metrics": metrics,
            "saved": saved,
            "cut": {name: value for name, value in cut.items() if value},
        }
        if any(role.splits for role in self._config.spec.roles):
            kwargs["waited"] = {name: round(seconds, 6) for name, seconds in self._waited.items()}
        self._waited.clear()
        answer: CommitDone | CommitRefused | CommitAgain
        call = Call(method="commit", kwargs=kwargs, timeout_s=COMMIT_ANSWER_S)
        while True:  # without a master for FENCE_EXIT_S this process ends itself
            try:
                with self._config.marks.waiting.on("master", "commit", str(n)):
                    answer = await self._config.launcher.call(master_handle(self._config.place.job), call)
            except (ProcessGone, CallTimeout):
                await self._config.clock.sleep(0.2)  # the master comes back; the commit is the same by (loop epoch, n)
                continue
            if answer["answer"] == "again":
                await self._config.clock.sleep(0.2)
                continue
            if answer["answer"] == "refused":
                await self._config.rpc.wait_rollback()
                raise Fenced(f"commit {n} of loop epoch {self._epoch} was refused: {answer['text']}")
            if answer.get("stop"):
                # The job stops at this commit: whatever the loop did now would be for nothing.
                await asyncio.Event().wait()
            if answer.get("save"):
                self._cadence.hurry()
            return PeerTable.from_json(answer["table"])


LoopFunction = Callable[[Flow], Coroutine[object, object, object]]


class LoopRunner:
    """The body of the loop role: runs the user's function, cancels it when its epoch is over."""

    def __init__(self, config: InstanceConfig) -> None:
        self._config = config
        self.cut: FlowCut = {}
        """What the commit that is entered next says of the streams."""
        self._setup: Setup | None = None
        self._function: LoopFunction | None = None
        self._task: asyncio.Task[None] | None = None
        self._flow: Flow | None = None
        self._left = asyncio.Event()
        self._first = threading.Lock()
        """Taken once a run: by the function as it begins, or by ``dissolve``, after which it does not begin."""

    async def form(self, setup: Setup) -> None:
        """Import the function; it is entered by ``run``."""
        self._setup = setup
        self._config.rpc.enter(setup.epoch)
        workload = self._config.role.workload or ""
        found: Any = await self._config.user.do(lambda: import_target(workload))
        self._function = found

    async def run(self, committed: int) -> None:
        """Enter the function at a commit and wait for its end."""
        assert self._setup is not None and self._function is not None, "form() comes before run()"
        flow = self._flow = Flow(self._config, self._setup, committed, self.cut)
        self._task = asyncio.current_task()
        self._left, self._first = asyncio.Event(), threading.Lock()
        try:
            await flow.begin(keeps=bool(self.cut.get("keeps")))
            with self._config.marks.running(self._function.__name__):
                await self._config.user.run(self._enter(self._function, flow, self._first, self._left))
        finally:
            await flow.pumps.close()
            self._task = None

    async def _enter(self, function: LoopFunction, flow: Flow, first: threading.Lock, left: asyncio.Event) -> None:
        """Runs in the user thread: call the function, then signal that it has returned."""
        if not first.acquire(blocking=False):
            return
        FLOW.set(flow)
        try:
            await function(flow)
            await flow.settle()
        except Exception as error:
            for line in flow.unawaited.lines():
                error.add_note(line)
            raise
        finally:
            if not flow.over:
                flow.warn_of_unawaited()
            await flow.close()
            self._config.control.loop.call_soon_threadsafe(left.set)

    async def dissolve(self, grace_s: float) -> None:
        """Cancel the function and wait until it has let go. Raises StillRunning when it does not."""
        task, flow = self._task, self._flow
        if task is None or flow is None:
            return
        flow.over = True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if self._first.acquire(blocking=False):
            return
        try:
            async with self._config.clock.timeout(CANCEL_MAX_S):
                await self._left.wait()
        except TimeoutError:
            raise StillRunning(f"the loop was cancelled {CANCEL_MAX_S:g} s ago and has not let go") from None

    async def stop(self, grace_s: float) -> None:
        """Cancel the function; the process ends after this."""
        with contextlib.suppress(StillRunning):
            await self.dissolve(grace_s)


async def _as_coroutine(work: Awaitable[T]) -> T:
    return await work


def _items(op: OpSpec, args: tuple[Any, ...]) -> list[object]:
    if not args:
        raise BadInput(f"{op.name} has send=Each: give it the items as its first argument")
    try:
        return list(args[0])
    except TypeError:
        raise BadInput(f"{op.name} has send=Each: {type(args[0]).__name__} is not a sequence of items") from None


def _commit_arguments(
    given: object, n: int | None, metrics: Mapping[str, object] | None, named: Mapping[str, object]
) -> tuple[int | None, JsonObject]:
    if isinstance(given, int) and not isinstance(given, bool) and n is None:
        n = given
    elif isinstance(given, Mapping) and metrics is None:
        metrics = given
    elif given is not None:
        raise BadInput(f"commit takes the metrics as a dict, or its number, not {given!r}", hint="commit(loss=0.1)")
    shown = {**(metrics or {}), **named}
    return n, {str(key): _plain(str(key), value) for key, value in shown.items()}


def _plain(key: str, value: Any) -> Any:
    """A metric as JSON: numbers of numpy and torch become Python's, those that are not finite a text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, item) for item in value]
    if getattr(value, "size", None) == 1 or (hasattr(value, "numel") and value.numel() == 1):
        return _plain(key, value.item())
    raise BadInput(f"metric {key!r} is a {type(value).__name__}; give numbers, texts, lists or dicts of them")
