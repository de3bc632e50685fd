"""Process group ``rota_shm``: collectives of CPU tensors on one machine through shared memory of the tensor store.

``register()`` makes it known; then ``dist.init_process_group("rota_shm")`` or ``new_group(backend="rota_shm")``. What
the arena does not carry (point to point, gather, scatter, other dtypes) goes to an inner Gloo group, and so does all
when the ranks are not on one machine. A collective is done when its call returns, in the order of the calls.

The arena exchanges in rounds. In round n every rank writes its slot, stores n in its sequence word, waits until all
words are at least n and reads the other slots. A rank writes round n + 1 before it waits for round n, so copies
overlap. Slots have ``DEPTH`` buffers: a peer whose word is at least n has read round n - 2, and a writer of round n + 1
knows that all words are at least n - 1, so all have read n - 3 and the buffer (n + 1) mod 4 is free without a further
word. Words are aligned 64-bit stores. Their order behind the stores of the slot holds on x86-64 (total store order) and
is proved by the tests; on other processors ``make_group`` keeps to Gloo.
"""

# torch's stubs name the parameters of these methods otherwise than its own callers, which pass them by position.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

import os
import platform
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from rota import tensors
from rota.runtime import process
from rota.runtime.clock import Clock, SystemClock, blocking_sleep
from rota.runtime.random import SystemRandom
from rota.spec.errors import RotaError, TrainError

CHUNK_BYTES: Final = 512 * 1024
"""Bytes of one slot: four buffers of two ranks stay in the last-level cache."""
DEPTH: Final = 4
LINE: Final = 64
_WORDS: Final = LINE // 8
_SEQ, _TAG, _PID, _STARTED = 0, 1, 5, 6
"""Words of a rank: sequence, tag of each of the four buffers, process id, start time in milliseconds since boot."""
_TAG_NAMES: Final = 48
LOOK_S: Final = 0.05
SPINS: Final = 2_000
NAP_S: Final = 0.0001


Tensors = Sequence[torch.Tensor]
Put = Callable[[int, torch.Tensor], object]
"""Writes round i to the slot of this rank."""
Take = Callable[[int, list[torch.Tensor]], object]
"""Reads round i from the slots of all ranks."""


class PeerLost(TrainError):
    """A rank of the group died or did not come in time; fields: rank, operation, sequence. The group is of no use."""

    code, http = "PEER_LOST", 503


class CollectiveMismatch(TrainError):
    """Two ranks are in different collectives; fields: rank, operation, peer, peer_operation."""

    code, http = "COLLECTIVE_MISMATCH", 409


class Arena:
    """One rank's view of the shared memory of a group of ``size`` ranks. Not thread-safe."""

    def __init__(self, memory: torch.Tensor, rank: int, size: int, *, timeout_s: float, clock: Clock) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._clock, self._memory = clock, memory
        words = memory[: size * LINE].numpy()
        view = memoryview(words)  # pyright: ignore[reportArgumentType]  # numpy arrays are buffers, the stub forgets
        self._words = view.cast("B").cast("Q")
        data = memory[size * LINE :].view(size, DEPTH, CHUNK_BYTES)
        self._slots = [[data[peer, depth] for peer in range(size)] for depth in range(DEPTH)]
        self._peers = [peer for peer in range(size) if peer != rank]
        self._typed: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._next, self._operation = 1, ""
        self._lost: PeerLost | None = None
        self._ids: dict[int, process.ProcessId] = {}
        own = process.own_id()
        self._words[rank * _WORDS + _STARTED] = round(own.start_time * 1000)
        self._words[rank * _WORDS + _PID] = own.pid

    @staticmethod
    def bytes_for(size: int) -> int:
        """Bytes of the shared tensor of a group."""
        return size * (LINE + DEPTH * CHUNK_BYTES)

    def slots(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """The slots as flat tensors of ``dtype``: [buffer][rank]."""
        found = self._typed.get(dtype)
        if found is None:
            found = [[slot.view(dtype) for slot in buffers] for buffers in self._slots]
            self._typed[dtype] = found
        return found

    def run(
        self,
        operation: str,
        like: torch.Tensor,
        total: int,
        rounds: int,
        put: Put | None,
        take: Take | None,
    ) -> None:
        """``rounds`` rounds of a collective: ``put(i, slot)`` writes round i, ``take(i, slots)`` reads it.

        ``total`` is the number of elements that all ranks must agree on, with the dtype of ``like``; slots come as
        flat tensors of that dtype. Raises PeerLost, CollectiveMismatch.
        """
        if self._lost is not None:
            raise self._lost
        typed = self.slots(like.dtype)
        tag = _tag_of(operation, like.dtype, total)
        first, self._operation = self._next, operation
        self._next = first + rounds
        words, base = self._words, self.rank * _WORDS
        for i in range(rounds + 1):
            if i < rounds:
                buffer = (first + i) % DEPTH
                if put is not None:
                    put(i, typed[buffer][self.rank])
                words[base + _TAG + buffer] = tag
                words[base + _SEQ] = first + i
            if i > 0:
                self._wait(first + i - 1, tag)
                if take is not None:
                    take(i - 1, typed[(first + i - 1) % DEPTH])

    def _wait(self, sequence: int, tag: int) -> None:
        words = self._words
        for peer in self._peers:
            at = peer * _WORDS
            if words[at + _SEQ] < sequence:
                self._wait_for(peer, sequence)
            if words[at + _TAG + sequence % DEPTH] != tag:
                raise self._mismatch(peer, tag, words[at + _TAG + sequence % DEPTH])

    def _wait_for(self, peer: int, sequence: int) -> None:
        """Spin, then yield the processor, then nap; look whether the peer lives every ``LOOK_S``."""
        words, at = self._words, peer * _WORDS
        for _ in range(SPINS):
            if words[at] >= sequence:
                return
            os.sched_yield()
        start_s = look_s = self._clock.monotonic_s()
        while words[at] < sequence:
            blocking_sleep(NAP_S)
            now_s = self._clock.monotonic_s()
            if now_s - look_s > LOOK_S:
                look_s = now_s
                dead = next((one for one in self._peers if not self._lives(one)), None)
                if dead is not None and words[at] < sequence:
                    raise self._lose(dead, sequence, "died")
            if now_s - start_s > self.timeout_s:
                raise self._lose(peer, sequence, f"did not come within {self.timeout_s:g} s")

    def _lives(self, peer: int) -> bool:
        known = self._ids.get(peer)
        if known is None:
            at = peer * _WORDS
            if not self._words[at + _PID]:
                return True  # not yet here: the time-out decides
            started = self._words[at + _STARTED] / 1000
            known = self._ids[peer] = process.ProcessId(pid=self._words[at + _PID], start_time=started)
        return process.is_alive(known)

    def _lose(self, peer: int, sequence: int, how: str) -> PeerLost:
        text = f"rank {peer} {how} in {self._operation}, round {sequence} of the group"
        hint = "form a new group of the ranks that live; this one is of no use any more"
        self._lost = PeerLost(text, hint=hint, rank=peer, operation=self._operation, sequence=sequence)
        return self._lost

    def _mismatch(self, peer: int, own_tag: int, peer_tag: int) -> CollectiveMismatch:
        mine, theirs = _tag_text(own_tag), _tag_text(peer_tag)
        return CollectiveMismatch(
            f"rank {self.rank} is in {mine}, rank {peer} in {theirs}: all ranks call the same collectives in one order",
            rank=self.rank, operation=mine, peer=peer, peer_operation=theirs,
        )  # fmt: skip


OPERATIONS: Final = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
_DTYPES: Final = tuple(
    torch.empty(0, dtype=getattr(torch, name)).dtype
    for name in ("uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64")
)


def carries(tensor: torch.Tensor) -> bool:
    """True for a dense CPU tensor of a dtype that the arena exchanges."""
    return tensor.dtype in _DTYPES and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _tag_of(operation: str, dtype: torch.dtype, total: int) -> int:
    return (OPERATIONS.index(operation) + 1) << 56 | _DTYPES.index(dtype) << _TAG_NAMES | total


def _tag_text(tag: int) -> str:
    operation, dtype, total = tag >> 56, tag >> _TAG_NAMES & 0xFF, tag & ((1 << _TAG_NAMES) - 1)
    return f"{OPERATIONS[operation - 1]} of {total} {str(_DTYPES[dtype]).removeprefix('torch.')}"


def pieces(total: int, most: int) -> Iterator[tuple[int, int]]:
    """``[begin, end)`` of pieces of at most ``most`` elements."""
    return ((at, min(at + most, total)) for at in range(0, total, most))


def reduce_into(out: torch.Tensor, parts: Sequence[torch.Tensor], op: str) -> None:
    """Combine ``parts`` in the order given, so that all ranks and all runs get the same bits."""
    combine = _COMBINE[op]
    combine(parts[0], parts[1], out=out) if len(parts) > 1 else out.copy_(parts[0])
    for part in parts[2:]:
        combine(out, part, out=out)


_COMBINE: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul,
}  # fmt: skip


C10d: TypeAlias = Any
"""An object of torch's c10d (a store, a group, options) whose class or methods its stubs lack."""
c10d: C10d = _distributed_c10d
NAME: Final = "rota_shm"
_OPS: Final = {
    dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
}  # fmt: skip
_DIRECT_MAX: Final = 16 * 1024
"""Bytes up to which an all-reduce of more than two ranks takes one round of everything instead of two of parts."""


def register() -> None:
    """Make the backend ``rota_shm`` known to torch.distributed; harmless when it is."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, make_group, devices=["cpu"])


def make_group(store: C10d, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """The group of this rank: a ShmGroup, or a Gloo group (with a warning) when shared memory cannot serve all ranks.

    Every rank takes part; ``timeout`` bounds the meeting and later each wait.
    """
    gloo = c10d.ProcessGroupGloo(c10d.PrefixStore("gloo/", store), rank, size, timeout)
    reason, memory = _share(store, rank, size, timeout)
    if memory is None:
        if rank == 0:
            warnings.warn(f"rota_shm falls back to gloo: {reason}", RuntimeWarning, stacklevel=2)
        return ShmGroup(rank, size, gloo, None)
    arena = Arena(memory, rank, size, timeout_s=timeout.total_seconds(), clock=SystemClock())
    return ShmGroup(rank, size, gloo, arena)


def _share(store: C10d, rank: int, size: int, timeout: timedelta) -> tuple[str, torch.Tensor | None]:
    """The shared memory of the group, or why there is none; the same answer on all ranks."""
    store.set_timeout(timeout)
    store.set(f"machine/{rank}", _machine())
    machines = {store.get(f"machine/{peer}") for peer in range(size)}
    if len(machines) > 1:
        return f"the ranks are on {len(machines)} machines", None
    if platform.machine() != "x86_64":
        return f"stores may be reordered on {platform.machine()}", None
    name, memory = "", None
    if rank == 0:
        try:
            name = f"collectives/{SystemRandom().new_id()}"
            with tensors.connect().create(name, (Arena.bytes_for(size),), "uint8", mutable=True, orphan="drop") as made:
                made[: Arena.bytes_for(size) - size * CHUNK_BYTES].zero_()
            memory = made
            store.set("arena", name)
        except RotaError as error:
            store.set("arena", f"!{error.message}")
    name = store.get("arena").decode()
    if name.startswith("!"):
        return name[1:], None
    if memory is None:
        memory = tensors.connect().get(name, wait_s=timeout.total_seconds(), sealed=False)
    if store.add("mapped", 1) == size:
        store.set("all_mapped", "1")
    store.wait(["all_mapped"], timeout)
    if rank == 0:
        tensors.connect().delete(name)  # from now on the memory ends with the last rank, however it ends
    return "", memory


def _machine() -> str:
    return f"{process.boot_id()} {Path('/proc/self/ns/pid').readlink()}"


def _by_gloo(name: str) -> Callable[..., dist.Work]:
    """A method that has Gloo do it."""

    def forward(self: ShmGroup, *args: object, **kwargs: object) -> dist.Work:
        return getattr(self._gloo, name)(*args, **kwargs)

    return forward


class ShmGroup(dist.ProcessGroup):
    """The collectives of one rank. Raises PeerLost when a rank died or is late, CollectiveMismatch, BadInput."""

    def __init__(self, rank: int, size: int, gloo: C10d, arena: Arena | None) -> None:
        c10d.ProcessGroup.__init__(self, rank, size)
        self._rank, self._size, self._gloo, self._arena = rank, size, gloo, arena
        self._lock, self._name = threading.Lock(), ""

    def size(self) -> int:
        """Ranks of the group."""
        return self._size

    def getBackendName(self) -> str:  # torch's name
        """The name that torch shows."""
        return NAME

    def _set_group_name(self, name: str) -> None:  # torch keeps names in C++ backends, which this group has none of
        self._name = name

    @property
    def group_name(self) -> str:
        """The name under which torch finds this group."""
        return self._name

    @property
    def shared(self) -> bool:
        """False when the group fell back to Gloo."""
        return self._arena is not None

    def allreduce(self, tensor_list: Sequence[torch.Tensor], opts: C10d = None) -> dist.Work:
        """Combine over all ranks in rank order: the same bits on all ranks."""
        opts = opts or c10d.AllreduceOptions()
        op = self._op(opts.reduceOp, tensor_list)
        if op is None:
            return self._gloo.allreduce(list(tensor_list), opts)
        return self._on(tensor_list, lambda flats: [self._all_reduce(flat, op) for flat in flats])

    def allreduce_coalesced(self, tensor_list: Sequence[torch.Tensor], opts: C10d = None) -> dist.Work:
        """``allreduce`` of each."""
        plain = c10d.AllreduceOptions()
        if opts is not None:
            plain.reduceOp = opts.reduceOp
        return self.allreduce(tensor_list, plain)

    def broadcast(self, tensor_list: Sequence[torch.Tensor], opts: C10d = None) -> dist.Work:
        """Copy from ``opts.rootRank`` to all."""
        opts = opts or c10d.BroadcastOptions()
        if not self._carried(tensor_list):
            return self._gloo.broadcast(list(tensor_list), opts)
        return self._on(tensor_list, lambda flats: [self._broadcast(flat, opts.rootRank) for flat in flats])

    def allgather(
        self, output_tensors: Sequence[Tensors], input_tensor: Sequence[torch.Tensor], opts: C10d = None
    ) -> dist.Work:
        """Every rank's tensor to every rank, as lists; equal shapes go through shared memory."""
        (outputs,), (given,) = output_tensors, input_tensor
        if not self._carried((given, *outputs)) or any(each.shape != given.shape for each in outputs):
            return self._gloo.allgather(output_tensors, input_tensor, opts or c10d.AllgatherOptions())
        return self._on(outputs, lambda flats: self._all_gather(flats, _flat(given)), [outputs])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: C10d = None) -> dist.Work:
        """Every rank's tensor to every rank, joined along dim 0."""
        if not self._carried((output, input)):
            return self._gloo._allgather_base(output, input, opts or c10d.AllgatherOptions())
        return self._on([output], lambda flats: self._all_gather(self._parts(flats[0]), _flat(input)))

    def reduce_scatter(
        self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[Tensors], opts: C10d = None
    ) -> dist.Work:
        """Combine lists over all ranks and give each rank its entry; equal shapes go through shared memory."""
        opts = opts or c10d.ReduceScatterOptions()
        (output,), (given,) = output_tensors, input_tensors
        op = self._op(opts.reduceOp, (output, *given))
        if op is None or any(each.shape != output.shape for each in given):
            return self._gloo.reduce_scatter(output_tensors, input_tensors, opts)
        return self._on([output], lambda flats: self._reduce_scatter(flats[0], [_flat(each) for each in given], op))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: C10d = None) -> dist.Work:
        """Combine over all ranks and give each rank its part along dim 0."""
        opts = opts or c10d.ReduceScatterOptions()
        op = self._op(opts.reduceOp, (output, input))
        if op is None:
            return self._gloo._reduce_scatter_base(output, input, opts)
        return self._on([output], lambda flats: self._reduce_scatter(flats[0], self._parts(_flat(input)), op))

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: C10d = None) -> dist.Work:
        """``all_gather_single`` of each."""
        for output, given in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, given).wait()
        return _done(list(outputs))

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: C10d = None) -> dist.Work:
        """``reduce_scatter_single`` of each."""
        for output, given in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, given, opts).wait()
        return _done(list(outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: C10d = None,
    ) -> dist.Work:
        """Part j of rank i goes to part i of rank j, along dim 0; even parts go through shared memory."""
        uneven = len(set(output_splits)) > 1 or len(set(input_splits)) > 1 or output.shape != input.shape
        # each rank sees its own splits alone, so that only a call without any is known to be even everywhere
        if output_splits or input_splits or uneven or not self._carried((output, input)):
            opts = opts or c10d.AllToAllOptions()
            return self._gloo.alltoall_base(output, input, output_splits, input_splits, opts)
        return self._on(
            [output],
            lambda flats: self._all_to_all(self._parts(flats[0]), self._parts(_flat(input))),
        )

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def barrier(self, opts: C10d = None) -> dist.Work:
        """Wait for all ranks."""
        arena = self._arena
        if arena is None:
            return self._gloo.barrier(opts or c10d.BarrierOptions())
        return self._on([], lambda flats: arena.run("barrier", _NOTHING, 0, 1, None, None))

    alltoall, gather, scatter, reduce, send, recv, recv_anysource = map(
        _by_gloo, ("alltoall", "gather", "scatter", "reduce", "send", "recv", "recv_anysource")
    )

    def _all_reduce(self, flat: torch.Tensor, op: str) -> None:
        if self._size > 2 and flat.nbytes > _DIRECT_MAX and flat.numel() % self._size == 0:
            parts = self._parts(flat)
            self._reduce_scatter(parts[self._rank], parts, op)
            self._all_gather(parts, parts[self._rank])
            return
        spans = list(pieces(flat.numel(), CHUNK_BYTES // flat.element_size()))

        def take(i: int, slots: Tensors) -> None:
            begin, end = spans[i]
            part = flat[begin:end]
            reduce_into(part, [slot[: end - begin] for slot in slots], op)
            if op == "avg":
                part.div_(self._size)

        self._run("all_reduce", flat, len(spans), _whole(flat, spans), take)

    def _reduce_scatter(self, output: torch.Tensor, parts: Tensors, op: str) -> None:
        room = CHUNK_BYTES // output.element_size() // self._size
        spans, me = list(pieces(output.numel(), room)), self._rank

        def take(i: int, slots: Tensors) -> None:
            begin, end = spans[i]
            mine = slice(me * room, me * room + end - begin)
            given = [parts[me][begin:end] if rank == me else slot[mine] for rank, slot in enumerate(slots)]
            if self._size > 2 and me > 1 and output.data_ptr() == parts[me].data_ptr():
                given[me] = given[me].clone()  # it would be overwritten before its turn comes
            reduce_into(output[begin:end], given, op)
            if op == "avg":
                output[begin:end].div_(self._size)

        self._run("reduce_scatter", output, len(spans), _dealt(parts, spans, self._others, room), take)

    def _all_gather(self, outputs: Tensors, given: torch.Tensor) -> None:
        spans, others = list(pieces(given.numel(), CHUNK_BYTES // given.element_size())), self._others
        own = outputs[self._rank]
        if own.data_ptr() != given.data_ptr():
            own.copy_(given)

        def take(i: int, slots: Tensors) -> None:
            begin, end = spans[i]
            for peer in others:
                outputs[peer][begin:end].copy_(slots[peer][: end - begin])

        self._run("all_gather", given, len(spans), _whole(given, spans), take)

    def _broadcast(self, flat: torch.Tensor, root: int) -> None:
        spans = list(pieces(flat.numel(), CHUNK_BYTES // flat.element_size()))

        def take(i: int, slots: Tensors) -> None:
            begin, end = spans[i]
            flat[begin:end].copy_(slots[root][: end - begin])

        is_root = self._rank == root
        self._run("broadcast", flat, len(spans), _whole(flat, spans) if is_root else None, None if is_root else take)

    def _all_to_all(self, outputs: Tensors, parts: Tensors) -> None:
        room = CHUNK_BYTES // parts[0].element_size() // self._size
        spans, me, others = list(pieces(parts[0].numel(), room)), self._rank, self._others
        outputs[me].copy_(parts[me])

        def take(i: int, slots: Tensors) -> None:
            begin, end = spans[i]
            for peer in others:
                outputs[peer][begin:end].copy_(slots[peer][me * room : me * room + end - begin])

        self._run("all_to_all", parts[0], len(spans), _dealt(parts, spans, others, room), take)

    @property
    def _others(self) -> list[int]:
        return [peer for peer in range(self._size) if peer != self._rank]

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return list(_rows(flat, self._size))

    def _run(self, operation: str, flat: torch.Tensor, rounds: int, put: Put | None, take: Take | None) -> None:
        assert self._arena is not None
        self._arena.run(operation, flat, flat.numel(), rounds, put, take)

    def _carried(self, given: Sequence[torch.Tensor]) -> bool:
        return self._arena is not None and all(carries(tensor) for tensor in given)

    def _op(self, reduce_op: C10d, given: Sequence[torch.Tensor]) -> str | None:
        """The name of the operation, or None when Gloo has to do it."""
        op = next((name for known, name in _OPS.items() if reduce_op == known), None)
        fits = self._carried(given) and all(each.dtype is not torch.bool for each in given)
        return op if fits and (op != "avg" or all(each.is_floating_point() for each in given)) else None

    def _on(self, outputs: Tensors, act: Callable[[list[torch.Tensor]], object], result: object = None) -> dist.Work:
        """Act on flat forms of ``outputs``; a future of ``result``, or of the outputs, which is done."""
        flats = [_flat(tensor) for tensor in outputs]
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("two threads are in one rota_shm group: give each its own group")
        try:
            with torch.no_grad():
                act(flats)
        finally:
            self._lock.release()
        for tensor, flat in zip(outputs, flats, strict=True):
            if not tensor.is_contiguous():  # its flat form is a copy
                tensor.detach().copy_(flat.view(tensor.shape))
        return _done(list(outputs) if result is None else result)


def _whole(flat: torch.Tensor, spans: Sequence[tuple[int, int]]) -> Put:
    """Write piece i of ``flat`` to the slot."""

    def put(i: int, slot: torch.Tensor) -> None:
        begin, end = spans[i]
        slot[: end - begin].copy_(flat[begin:end])

    return put


def _dealt(parts: Tensors, spans: Sequence[tuple[int, int]], peers: Sequence[int], room: int) -> Put:
    """Write piece i of each peer's part to that peer's place in the slot, ``room`` elements apart."""

    def put(i: int, slot: torch.Tensor) -> None:
        begin, end = spans[i]
        for peer in peers:
            slot[peer * room : peer * room + end - begin].copy_(parts[peer][begin:end])

    return put


_NOTHING: Final = torch.empty(0)


def _rows(flat: torch.Tensor, count: int) -> torch.Tensor:
    return flat.view(count, flat.numel() // count)  # -1 has no meaning for an empty tensor


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor with the elements of ``tensor``: its memory, or a copy when it has gaps."""
    return tensor.detach().contiguous().view(-1)


def _done(result: object) -> dist.Work:
    future: torch.futures.Future[object] = torch.futures.Future()
    future.set_result(result)
    return c10d._create_work_from_future(future)
