"""The body of a class workload: operations, state at a commit, weights before work; user code runs in one thread."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rota.job import checkpoint, shadow
from rota.job.bodies import Forming, Seat, make_context
from rota.job.calls import Reply, Request
from rota.job.inspect import import_target
from rota.job.rendezvous import Meeting
from rota.job.workload import Marks, marks_of
from rota.spec.ids import Epoch

REPLIES_KEPT_MAX = 32
"""Answers kept by call id: a repeated request gets the first answer, the operation does not run again."""


class ClassBody:
    """One object of the user's class at a time, made anew for each epoch."""

    def __init__(self, seat: Seat, on_failure: Callable[[Exception, Epoch], None]) -> None:
        self._seat = seat
        self._on_failure = on_failure
        self._forming: Forming | None = None
        self._object: Any = None
        self._marks = Marks()
        self._meeting: Meeting | None = None
        self._plane: Any = None
        self._loaded: dict[str, tuple[int, int]] = {}
        self._active: set[object] = set()
        self._idle = asyncio.Condition()
        self._replies: OrderedDict[str, asyncio.Future[Reply]] = OrderedDict()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def form(self, forming: Forming) -> None:
        """Make the object, restore its state, set it up."""
        seat = self._seat
        self._forming = forming
        self._loaded.clear()
        self._replies.clear()
        self._active = set()
        self._meeting = Meeting(seat, forming)
        ctx = make_context(seat, forming)
        ctx.make_group = self._meeting.make
        cls: Any = await seat.user.do(lambda: import_target(seat.role.workload or ""))
        self._marks = marks_of(cls)
        if self._needs_plane:
            self._plane = await seat.user.do(lambda: shadow.connect(seat.place.job, seat.id, forming.epoch))
        if forming.restore > 0 and self._marks.state is not None:
            ctx.restored = await seat.user.do(lambda: self._restored(ctx.checkpoint_dir, forming.restore))
        self._object = await seat.user.do(cls)
        await self._in_user(self._object.setup, (ctx,), {})

    def _restored(self, checkpoints: Path, n: int) -> Any:
        """The state of commit ``n``: from memory, else from a checkpoint. Raises StateLost when neither has it."""
        try:
            return shadow.load(self._plane, self._seat.place.job, self._seat.id, n)
        except shadow.StateLost:
            path = checkpoint.find(checkpoints, self._seat.id, n)
            if path is None:
                raise
            return checkpoint.read(path)

    async def run(self, committed: int) -> None:
        """A class has no end of its own; it serves until it is stopped."""
        raise AssertionError("a class workload is not run")

    async def dissolve(self) -> None:
        """Leave the process group, so that members blocked with this one are released; drop the object."""
        if self._meeting is not None:
            self._meeting.leave()
        self._object = None

    async def stop(self, grace_s: float) -> None:
        """Leave the group; the process ends after this."""
        await self.dissolve()

    @property
    def _needs_plane(self) -> bool:
        return any(mark is not None for mark in (self._marks.state, self._marks.publish, self._marks.weights))

    # -- calls --------------------------------------------------------------------------------------------------------

    async def call(self, request: Request) -> Reply:
        """Run an operation once; a repeated call id waits for, or gets, the first answer."""
        known = self._replies.get(request.call_id)
        if known is not None:
            return await asyncio.shield(known)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[request.call_id] = answer
        while len(self._replies) > REPLIES_KEPT_MAX:
            self._replies.popitem(last=False)
        reply = await self._operate(request)
        if not answer.done():
            answer.set_result(reply)
        return reply

    async def _operate(self, request: Request) -> Reply:
        op = self._seat.role.interface.op(request.op) if self._seat.role.interface else None
        if op is None:
            return Reply(kind="stale", text=f"{self._seat.id.role} has no operation {request.op!r}")
        try:
            token = await self._enter(request.weights)
        except Exception as error:  # noqa: BLE001 - user code in load() may raise anything; it is reported as a loss
            return self._failed(error, report=True)
        try:
            with self._seat.pulse.running(op.name):
                value = await self._in_user(getattr(self._object, op.name), request.args, request.kwargs)
            self._seat.pulse.mark()
            return Reply(kind="ok", value=value)
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it is reported as a loss
            return self._failed(error, report=op.retry != "never")
        finally:
            await self._leave(token)

    def _failed(self, error: Exception, *, report: bool) -> Reply:
        text = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        if report and self._forming is not None:
            self._on_failure(error, self._forming.epoch)
        return Reply(kind="failed", text=text, traceback=trace)

    async def _in_user(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        async def call() -> Any:
            value = function(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value

        return await self._seat.user.run(call())

    # -- weights ------------------------------------------------------------------------------------------------------

    async def _enter(self, needed: Mapping[str, tuple[int, int]]) -> object:
        """Wait until the weights are as new as the call needs them; they change only while no operation runs."""
        async with self._idle:
            while missing := [edge for edge, version in needed.items() if self._loaded.get(edge, (0, 0)) < version]:
                if self._active:
                    await self._idle.wait()
                    continue
                for edge in missing:
                    await self._load(edge, needed[edge])
            token = object()
            self._active.add(token)
            return token

    async def _leave(self, token: object) -> None:
        async with self._idle:
            self._active.discard(token)
            self._idle.notify_all()

    async def _load(self, edge: str, version: tuple[int, int]) -> None:
        if self._marks.weights is not None:
            job, plane = self._seat.place.job, self._plane
            source = next((one.source for one in self._seat.spec.weights if one.name == edge), edge)
            with self._seat.pulse.waiting.on(f"{source}/0", "weights", edge):
                tensors = await self._seat.user.do(lambda: shadow.fetch(plane, job, edge, version))
            await self._in_user(getattr(self._object, self._marks.weights), (version[1], tensors), {})
        self._loaded[edge] = version

    # -- commit -------------------------------------------------------------------------------------------------------

    async def save(self, n: int, edges: tuple[str, ...], folder: str) -> dict[str, Any]:
        """Put the state of commit ``n`` into shared memory, and into ``folder`` if given; publish ``edges``."""
        assert self._forming is not None, "form() comes before save()"
        began_s, epoch = self._seat.clock.monotonic_s(), self._forming.epoch
        size = 0
        if self._marks.state is not None:
            job, seat, plane = self._seat.place.job, self._seat, self._plane
            state = await self._in_user(getattr(self._object, self._marks.state), (), {})
            size = await seat.user.do(lambda: shadow.save(plane, job, seat.id, n, epoch, state))
            if folder:
                with seat.pulse.quiet("checkpoint"):
                    await seat.user.do(lambda: checkpoint.write(Path(folder), seat.id, state))
        for edge in edges:
            await self._publish(edge, n)
        return {"bytes": size, "seconds": round(self._seat.clock.monotonic_s() - began_s, 6)}

    async def _publish(self, edge: str, n: int) -> None:
        if self._marks.publish is None or self._seat.id.rank != 0 or self._forming is None:
            return
        job, plane, epoch = self._seat.place.job, self._plane, self._forming.epoch
        tensors = await self._in_user(getattr(self._object, self._marks.publish), (), {})
        await self._seat.user.do(lambda: shadow.publish(plane, job, edge, n, epoch, tensors))
