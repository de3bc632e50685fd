"""What runs inside simulated instances: services, loops that commit, commands that end or fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rota.job.core.survival import commits_kept
from rota.job.health.heartbeat import SETTING_UP, ProgressMarks
from rota.job.instance.streams import Streams
from rota.job.rpc.client import ROLLBACK_MAX_S, Refusal, RpcClient
from rota.job.rpc.peers import Peer, PeerTable, master_handle
from rota.runtime.clock import Clock
from rota.runtime.launcher import Call, CallTimeout, Launcher, ProcessGone
from rota.spec.codec import to_json_value
from rota.spec.errors import CallError, DataError
from rota.spec.events import InstanceLost
from rota.spec.ids import Epoch, InstanceId, JobId
from rota.spec.job import JobSpec, RoleSpec
from rota.spec.reasons import Reason
from rota.testing.launcher import SimProcess

BEAT_S = 10.0
GIVE_UP_S = 75.0
RETRY_S = 0.5
OWN_SAVE_S = 1.0
"""A command that is asked to end takes this long to write a checkpoint of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How the code of a role behaves. Times in seconds; probabilities per try, until ``calm_after_s``."""

    setup_s: float = 0.5
    step_s: float = 2.0
    steps: int = 5
    run_s: float = 10.0
    setup_fails_p: float = 0.0
    unfit_p: float = 0.0
    """That the node is found unfit when a process comes up on it."""
    run_fails_p: float = 0.0
    ignores_stop: bool = False
    batch: int = 3
    checkpoint_every: int = 0
    """Commits from one durable checkpoint to the next; 0 for none but those that are asked for."""
    always_fails: bool = False
    calm_after_s: float = 100.0


class Made(NamedTuple):
    """An item as ``generate`` gives it: with the model version that it was made with."""

    item: Any
    version: int


@dataclass(slots=True)
class Store:
    """What the code of jobs knows: acknowledged commits (job, n, loop epoch) in order; who was unfit (job, id, pid).

    ``memory`` is what a host holds of the state of an instance: its last commits (n, loop epoch); ``disk`` what
    checkpoints hold.
    """

    acknowledged: list[tuple[JobId, int, int]] = field(default_factory=list[tuple[JobId, int, int]])
    unfit: set[tuple[JobId, InstanceId, int]] = field(default_factory=set[tuple[JobId, InstanceId, int]])
    memory: dict[tuple[str, JobId, InstanceId], list[tuple[int, int]]] = field(
        default_factory=dict[tuple[str, JobId, InstanceId], list[tuple[int, int]]]
    )
    disk: set[tuple[JobId, InstanceId, int]] = field(default_factory=set[tuple[JobId, InstanceId, int]])
    reached_s: dict[tuple[JobId, InstanceId], float] = field(default_factory=dict[tuple[JobId, InstanceId], float])
    saved_s: dict[tuple[JobId, InstanceId], float] = field(default_factory=dict[tuple[JobId, InstanceId], float])
    """How far each command has come, and how far its own checkpoint goes: it writes one when it is asked to end."""
    hosts: list[str] = field(default_factory=list[str])
    redone: list[tuple[JobId, InstanceId, float]] = field(default_factory=list[tuple[JobId, InstanceId, float]])
    """Commands that began again before the point they had reached, and how much they do twice."""

    def shadow(self, host: str, job: JobId, one: InstanceId, n: int, loop_epoch: int, kept: int = 2) -> None:
        """Memory takes the state of a commit in place of an earlier one of this number, and drops the oldest."""
        held = self.memory.setdefault((host, job, one), [])
        self.memory[(host, job, one)] = [*(kept for kept in held if kept[0] != n), (n, loop_epoch)][-kept:]

    def fetch(self, source: str, host: str, job: JobId, one: InstanceId, n: int) -> bool:
        """The memory of another host takes a copy; False when ``source`` does not have the commit."""
        held = dict(self.memory.get((source, job, one), ()))
        if n in held:
            self.shadow(host, job, one, n, held[n], 3)
        return n in held

    def wipe(self, host: str) -> None:
        """The power of a host was off."""
        self.memory = {key: held for key, held in self.memory.items() if key[0] != host}

    def has(self, host: str, job: JobId, one: InstanceId, n: int) -> bool:
        """True when an instance on this host finds the state of the commit."""
        return self.in_memory(host, job, one, n) or (job, one, n) in self.disk

    def in_memory(self, host: str, job: JobId, one: InstanceId, n: int, loop_epoch: int | None = None) -> bool:
        """True when the memory of the host has the state of the commit, of this loop epoch if one is given."""
        held = dict(self.memory.get((host, job, one), ()))
        return n in held and loop_epoch in (None, held[n])


class SimInstance:
    """One instance as a script; it answers the same calls as the real one."""

    def __init__(
        self,
        *,
        job: JobId,
        spec: JobSpec,
        process: SimProcess,
        host: str,
        launcher: Launcher,
        clock: Clock,
        rng: random.Random,
        script: Script,
        store: Store,
        leave: Any,
    ) -> None:
        self.id = process.handle.instance
        self.role: RoleSpec = spec.role(self.id.role)
        self.epoch = 0
        self._job, self._process, self._launcher, self._clock = job, process, launcher, clock
        self._rng, self._script, self._store, self._leave = rng, script, store, leave
        self._forming: dict[int, asyncio.Task[dict[str, Any]]] = {}
        self._running: dict[int, asyncio.Task[dict[str, Any]]] = {}
        self.failure: dict[str, Any] | None = None
        self._busy: tuple[str, ...] = ()
        self._unfit: bool | None = None
        self._works = False
        """A command has run here since the last time that one was saved."""
        self._spec, self._ready, self._loop_epoch_max = spec, 0, 0
        self._rpc: RpcClient | None = None
        self._host, self._table, self._hurried = host, PeerTable(), False
        process.spawn(self._beats())

    # -- control ----------------------------------------------------------------------------------------------------

    async def assemble(self, *, epoch: int, world: int, restore: int, **more: Any) -> dict[str, Any]:
        if epoch < self.epoch:
            return {"answer": "stale"}
        if epoch > self.epoch:
            for task in (*self._forming.values(), *self._running.values()):
                task.cancel()
            self.epoch, self.failure = epoch, None
        if epoch not in self._forming:
            self._forming[epoch] = self._process.spawn(self._form(epoch, world, restore, more))
        return await _answer(self._forming[epoch])

    async def _form(self, epoch: int, world: int, restore: int, more: Mapping[str, Any]) -> dict[str, Any]:
        self._busy = (SETTING_UP,)
        if self._works and more.get("grace_s", 0.0) >= OWN_SAVE_S:
            await self._save_own()
        await self._work(self._script.setup_s)
        self._busy = ()
        if source := more.get("source", ""):
            self._store.fetch(source, self._host, self._job, self.id, restore)
        if self._keeps and restore > 0 and not self._store.has(self._host, self._job, self.id, restore):
            return self._failed(epoch, f"the state of commit {restore} is gone", "STATE_LOST")
        if self._fails(self._script.setup_fails_p) or (self._script.always_fails and not self.role.finite):
            return self._failed(epoch, "setup raised")
        if world > 1 and await self._meet(epoch, world) is None:
            return {"answer": "stale"}
        self._ready = epoch
        return {"answer": "done"}

    async def _meet(self, epoch: int, world: int) -> Any:
        fields = {"role": self.id.role, "rank": self.id.rank, "epoch": epoch, "world": world, "address": "a"}
        while True:
            try:
                return await self._launcher.call(master_handle(self._job), Call(method="meet", kwargs=fields))
            except (ProcessGone, CallTimeout):
                await self._clock.sleep(RETRY_S)

    async def run(self, *, epoch: int, committed: int, **more: Any) -> dict[str, Any]:
        if epoch != self.epoch:
            return {"answer": "stale"}
        self._learn(PeerTable.from_json(dict(more["table"])))
        if epoch not in self._running:
            self._running[epoch] = self._process.spawn(self._body(epoch, committed, more))
        return await _answer(self._running[epoch])

    async def _body(self, epoch: int, committed: int, more: Mapping[str, Any]) -> dict[str, Any]:
        if self._script.always_fails:
            await self._work(self._script.step_s)
            return self._failed(epoch, "always fails")
        if self.role.is_loop:
            streams = bool(self._spec.streams)
            work = self._stream_loop(Epoch(epoch), committed, more) if streams else self._loop(epoch, committed)
            try:
                return await work
            except CallError as error:
                return self._failed(epoch, str(error))
        await self._run_command()
        if self._fails(self._script.run_fails_p):
            return self._failed(epoch, "exit 1")
        return {"answer": "done"}

    async def _run_command(self) -> None:
        """Continue from its own checkpoint; what was done after that is done again."""
        key, began_s = (self._job, self.id), self._clock.monotonic_s()
        saved_s = self._store.saved_s.get(key, 0.0)
        if (twice_s := self._store.reached_s.get(key, 0.0) - saved_s) > 1e-6:
            self._store.redone.append((*key, twice_s))
        self._works = True
        try:
            whole_s = self._script.run_s * self._rng.uniform(0.5, 1.5)
            await self._clock.sleep(max(whole_s - saved_s, 0.1))
        finally:
            self._store.reached_s[key] = saved_s + self._clock.monotonic_s() - began_s

    async def _save_own(self) -> None:
        await self._clock.sleep(OWN_SAVE_S)
        key = (self._job, self.id)
        self._store.saved_s[key] = self._store.reached_s.get(key, 0.0)
        self._works = False

    async def _loop(self, epoch: int, committed: int) -> dict[str, Any]:
        for n in range(committed + 1, self._script.steps + 1):
            await self._work(self._script.step_s)
            if self._fails(self._script.run_fails_p):
                return self._failed(epoch, "the loop raised")
            if not await self._commit(n, epoch):
                return {"answer": "stale"}
            self._store.acknowledged.append((self._job, n, epoch))
        return {"answer": "done"}

    async def _stream_loop(self, epoch: Epoch, committed: int, more: Mapping[str, Any]) -> dict[str, Any]:
        """The real pumps and ledgers over the simulated instances; a commit a batch, to the end of the source."""
        rpc = RpcClient(
            job=self._job, spec=self._spec, launcher=self._launcher, clock=self._clock, caller=self.id
        )  # fmt: skip
        rpc.enter(epoch)
        rpc.update(PeerTable.from_json(dict(more["table"])))
        self._rpc = rpc
        streams = Streams(
            self._spec,
            rpc=rpc,
            marks=ProgressMarks(self._clock),
            holder=self.id,
            epoch=epoch,
            version=committed,
            cut=more.get("cut", {}).get("streams", {}),
            say=lambda text: None,
            offload=_at_once,
        )
        streams.begin()
        pump, n = streams.find("groups"), committed
        try:
            while (batch := await pump.next_batch(self._script.batch, "admission")) is not None:
                await self._work(self._script.step_s)
                if self._fails(self._script.run_fails_p):
                    return self._failed(epoch, "the loop raised")
                n += 1
                told = {
                    "uids": batch.uids,
                    "ages": batch.ages,
                    "made": [streams.version - one.version for one in batch],
                }
                taken = streams.leased()
                if not await self._commit(n, epoch, metrics=told, cut={"streams": streams.cut()}):
                    return {"answer": "stale"}
                self._store.acknowledged.append((self._job, n, epoch))
                streams.committed(n, taken)
                pump.ledger.check()
        except DataError as error:
            return self._failed(epoch, str(error), "DATA_ERROR")
        finally:
            await streams.close()
        return {"answer": "done"}

    async def call(self, head: list[Any], *args: Any) -> Any:
        _, op, epoch, loop_epoch, weights, _ = head
        if epoch != self._ready or self._ready != self.epoch or loop_epoch < self._loop_epoch_max:
            return Refusal(kind="stale", text=f"{self.id} is at epoch {self.epoch}")
        self._loop_epoch_max = loop_epoch
        await self._work(self._script.step_s)
        if self._fails(self._script.run_fails_p):
            return Refusal(kind="failed", text="ValueError: bad item", traceback="Traceback: bad item")
        if self._spec.streams and op == "generate":
            return Made(args[0], max((n for _, n in weights.values()), default=0))
        return args[0]

    async def _commit(self, n: int, epoch: int, **more: Any) -> bool:
        versions = {edge.name: 1 for edge in self._spec.weights if n % edge.every == 0}
        every = self._script.checkpoint_every
        durable = self._hurried or (every > 0 and n % every == 0)
        await self._saved(n, epoch, durable)
        saved = {"path": f"step-{n}.e{epoch}", "seconds": 0.1} if durable else None
        self._hurried = self._hurried and not durable
        fields: dict[str, Any] = {
            "n": n, "loop_epoch": epoch, "versions": versions, "metrics": {}, "saved": saved, **more
        }  # fmt: skip
        call = Call(method="commit", kwargs=fields, timeout_s=30.0)
        while True:
            try:
                answer = await self._launcher.call(master_handle(self._job), call)
            except (ProcessGone, CallTimeout):
                await self._clock.sleep(RETRY_S)
                continue
            if answer.get("stop"):
                self._store.acknowledged.append((self._job, n, epoch))
                await asyncio.Event().wait()
            self._hurried = self._hurried or bool(answer.get("save"))
            if "table" in answer:
                self._learn(PeerTable.from_json(answer["table"]))
            return answer["answer"] == "done"

    async def _saved(self, n: int, epoch: int, durable: bool) -> None:
        """Every member with state puts it into the memory of its host. Raises CallError as the real loop does."""
        keepers = {role.name for role in self._spec.roles if role.interface is not None and role.interface.has_state}
        peers = [peer for peer in self._table.peers if peer.role in keepers]
        await asyncio.gather(*(self._save_of(peer, n, epoch, durable) for peer in peers))

    async def _save_of(self, peer: Peer, n: int, epoch: int, durable: bool) -> None:
        kwargs = {"n": n, "epoch": peer.epoch, "loop_epoch": epoch, "durable": durable}
        answer = {"answer": "lost"}
        try:
            call = Call(method="save", kwargs=kwargs, timeout_s=30.0)
            answer = await self._launcher.call(peer.handle(self._job), call)
        except CallTimeout as error:
            raise CallError(f"commit {n}: {peer.id} did not save its state in time") from error
        except ProcessGone:
            pass
        if answer["answer"] != "done":
            await self._clock.sleep(ROLLBACK_MAX_S)  # a rollback cancels the loop before
            raise CallError(f"commit {n}: {peer.id} did not save its state")

    async def save(self, *, n: int, epoch: int, loop_epoch: int, durable: bool) -> dict[str, Any]:
        if epoch != self._ready or self._ready != self.epoch or loop_epoch < self._loop_epoch_max:
            return {"answer": "stale"}
        self._loop_epoch_max = loop_epoch
        self._store.shadow(self._host, self._job, self.id, n, loop_epoch, commits_kept(self._spec))
        if durable:
            self._store.disk.add((self._job, self.id, n))
        return {"answer": "done"}

    async def keep(self, *, owner: str, n: int, folder: str, weights: bool) -> dict[str, Any]:
        await self._work(0.2)
        if weights:
            return {"answer": "done"}
        one = InstanceId.parse(owner)
        if not self._store.in_memory(self._host, self._job, one, n):
            return {"answer": "failed", "text": f"no memory of {self._host} has commit {n} of {owner}"}
        self._store.disk.add((self._job, one, n))
        return {"answer": "done"}

    async def copy(self, *, owner: str, n: int, hosts: list[str], weights: bool) -> dict[str, Any]:
        """To the next host in the order of names, as the real one."""
        await self._work(0.5)
        if weights:
            return {"answer": "done", "host": self._host, "epoch": self.epoch}
        others = sorted(
            (one for one in self._store.hosts if one != self._host), key=lambda one: (one < self._host, one)
        )
        one = InstanceId.parse(owner)
        if not others or not self._store.fetch(self._host, others[0], self._job, one, n):
            return {"answer": "failed", "text": f"no copy of commit {n} of {owner}"}
        return {"answer": "done", "host": others[0], "epoch": self.epoch}

    async def prune(self, **which: int) -> None:
        """Disks are large here."""

    @property
    def _keeps(self) -> bool:
        return self.role.interface is not None and self.role.interface.has_state

    def _learn(self, table: PeerTable) -> None:
        if table.version > self._table.version:
            self._table = table
        if self._rpc is not None:
            self._rpc.update(table)

    async def peers(self, table: Mapping[str, Any]) -> None:
        self._learn(PeerTable.from_json(dict(table)))

    async def stacks(self) -> str:
        return "a stack"

    async def check(self) -> dict[str, Any]:
        """Before any code of the job the same answer each time; of a node that is suspected one or the other."""
        await self._work(0.1)
        if self._unfit is None:
            self._unfit = self._fails(self._script.unfit_p)
            self._store.unfit |= {(self._job, self.id, self._process.handle.pid)} if self._unfit else set()
        if self._unfit if self.epoch == 0 else self._fails(0.5):
            reason = self._rng.choice(("OUTPUT_FULL", "NODE_SUSPECT"))
            before, answer = self.failure, self._failed(self.epoch, "unfit", reason)
            self.failure = before
            return answer
        return {"answer": "done"}

    async def stop(self, *more: Any) -> None:
        if not self._script.ignores_stop:
            await self._work(0.1)
            if self._works:
                for task in self._running.values():
                    task.cancel()
                await self._save_own()
            self._leave(self._process)

    # -- beats ------------------------------------------------------------------------------------------------------

    async def _beats(self) -> None:
        heard_s = self._clock.monotonic_s()
        while self._clock.monotonic_s() - heard_s < GIVE_UP_S:
            await self._clock.sleep(BEAT_S)
            beat = {
                "role": self.id.role,
                "rank": self.id.rank,
                "epoch": self.epoch,
                "started_epoch": self._process.handle.epoch,
                "pid": self._process.handle.pid,
                "lost": self.failure,
                "busy": self._busy,
            }
            try:
                answer = await self._launcher.call(
                    master_handle(self._job), Call(method="beat", args=(beat,), timeout_s=5.0)
                )
                if answer.get("table") is not None:
                    await self.peers(answer["table"])
                heard_s = self._clock.monotonic_s()
            except (ProcessGone, CallTimeout):
                continue
        self._leave(self._process)

    def _failed(self, epoch: int, text: str, reason: str = "USER_ERROR") -> dict[str, Any]:
        trace = f"Traceback: {text}"
        lost = InstanceLost(
            role=self.id.role, rank=self.id.rank, epoch=Epoch(epoch), reason=Reason(reason),
            text=text, traceback=trace, alive=True,
        )  # fmt: skip
        self.failure = to_json_value(lost)
        return {"answer": "failed", "failure": self.failure}

    def _fails(self, p: float) -> bool:
        return self._clock.monotonic_s() < self._script.calm_after_s and p > 0 and self._rng.random() < p

    async def _work(self, mean_s: float) -> None:
        await self._clock.sleep(mean_s * self._rng.uniform(0.5, 1.5))


async def _at_once(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


async def _answer(task: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
    """The answer of work that others may wait for too; stale when a newer epoch cancelled it."""
    await asyncio.wait([task])
    return {"answer": "stale"} if task.cancelled() else task.result()
