"""Puts and deletes without the registry, of names that a client claimed with an ordinary put.

A claimant has a stock of blocks and ids of its own for each name. A put writes a block and then, under the lock of the
slot, marks its header ready and shows it; a delete leaves a mark. Neither makes a call. Whoever needs to know of the
registry what a claimed name is, another writer first of all, **settles** it: under the same lock it takes the mark of
the claim from the slot, finds the newest ready header in the blocks of the claimant, and commits it. A block
that was replaced is used again by its claimant after a look at the notes of all clients.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from rota.runtime.random import SystemRandom
from rota.runtime.undo import undone_if_raised
from rota.tensors import errors
from rota.tensors.core import HEADER_BYTES, SizeClass, describe
from rota.tensors.errors import failpoint
from rota.tensors.locks import fence, noted_in
from rota.tensors.registry import CommitResult, Reserved, ScriptRefused, refusal
from rota.tensors.segments import PENDING, READY, STATE_AT, BlockHeader, SegmentMap, pack_fixed, pack_state

if TYPE_CHECKING:
    from rota.tensors.arrays import Bytes
    from rota.tensors.namespace import Namespace

_R = TypeVar("_R")
_T = TypeVar("_T")
_STOCK_FIRST: Final = 4
_STOCK_MAX: Final = 32
_STOCK_BYTES: Final = 2 << 20
_IDS: Final = 4096
_NAMES_MAX: Final = 4096
_BACK_OFF: Final = 16
"""Puts until a name is claimed again that others had to do with."""
_READY: Final = pack_state(READY)
_PENDING: Final = pack_state(PENDING)
_NEVER: Final = -(1 << 60)


def _full(size: SizeClass) -> int:
    return max(1, min(_STOCK_MAX, _STOCK_BYTES // size.block))


@dataclass(slots=True)
class _Block:
    """A block of this client; ``version`` and what follows is what was put in it last."""

    id: int
    seg: str
    offset: int
    mapping: SegmentMap
    size: SizeClass
    version: int = 0
    step: int = 0
    length: int = 0
    name: str = ""

    def words(self) -> tuple[int, int, int, int, str]:
        """As ``Registry.stock`` has it handed in."""
        return self.id, self.version, self.step, self.length, self.name

    def write(self, at: int, data: bytes) -> None:
        start = self.offset + at
        self.mapping.map[start : start + len(data)] = data

    def has_state(self, state: bytes) -> bool:
        """What the header says of its version; another than ``READY`` was never shown."""
        start = self.offset + STATE_AT
        return self.mapping.map[start : start + len(state)] == state


@dataclass(slots=True)
class _Claim:
    """A name that this client puts by itself. ``marked`` is the id that the slot shows, or did when it was deleted,
    ``next`` the least of the ids up to ``end`` that was not given, ``looked`` what ``marked`` was at the last look."""

    slot: int
    marked: int
    next: int
    end: int
    step: int
    order: tuple[str, int]
    epoch: int
    fences: int
    shown: _Block | None = None
    deleted: bool = False
    looked: int = 0


@dataclass(slots=True, kw_only=True)
class Put:
    """A plain put: bytes of one tensor, and the front of its block."""

    name: str
    label: str
    epoch: int
    step: int | None
    size: SizeClass
    manifest: bytes
    start: int
    data: Bytes


@dataclass(slots=True)
class Claims:
    """The claims of one client. One thread at a time puts by itself."""

    space: Namespace
    in_flight: int = 0
    """The version that was begun last; a rebuilt registry may have taken it for one on its way."""
    _names: dict[str, _Claim] = field(default_factory=dict[str, _Claim])
    _stock: dict[int, list[_Block]] = field(default_factory=dict[int, "list[_Block]"])
    _counts: dict[int, int] = field(default_factory=dict[int, int])
    _used: list[_Block] = field(default_factory=list["_Block"])
    _seen: dict[str, int] = field(default_factory=dict[str, int])
    _gate: threading.RLock = field(default_factory=threading.RLock)
    _epoch: int = 0
    _adopted: int = 0
    _inside: bool = False
    _torn: bool = False
    """An exception ended something in the middle: what is noted here is to be forgotten first."""
    _strays: bool = False
    """The registry may give blocks to this client that it has forgotten."""

    def wants(self, name: str) -> bool:
        """True when a plain put of this name is to claim it: this client has put it a moment before."""
        if len(self._seen) > _NAMES_MAX:
            self._seen.clear()
        count = self._seen[name] = self._seen.get(name, -1) + 1
        return count > 0 and not self.space.table.watched

    def has(self, name: str) -> bool:
        """True when this client may put the name by itself."""
        return name in self._names

    def begin(self, name: str, order: tuple[str, int], done: CommitResult, reserved: Reserved) -> None:
        """Note a claim that came with a commit; the slot's lock is held, and no other may be waited for."""
        table = self.space.table
        self._names[name] = _Claim(
            slot=reserved.slot, marked=done.version, next=done.own, end=done.own + _IDS, step=reserved.step,
            order=order, epoch=table.epoch, fences=table.fences,
        )  # fmt: skip

    def put(self, ask: Put) -> tuple[int, int] | None:
        """Publish without a call: version and step; None when it must be asked for. Raises PublishBlocked."""
        return self._run(self._put, ask)

    def _run(self, action: Callable[[_T], _R], what: _T) -> _R | None:
        """Do one thing at a time; None in the handler of a signal that came in the middle of another. What an exception
        ends, from such a handler too, is forgotten with all else: who settles finds it as of a process that was killed.
        """
        with self._gate:
            if self._inside:
                return None
            self._inside, done = True, False
            try:
                if self._torn:
                    self._forget()
                result = action(what)
                done = True
                return result
            finally:  # no call: another handler would come in the middle
                self._torn, self._inside = not done, False

    def _put(self, ask: Put) -> tuple[int, int] | None:
        self._reset_if_rebuilt()
        claim, table = self._names.get(ask.name), self.space.table
        if claim is None or claim.next + 2 >= claim.end or (ask.label, ask.epoch) != claim.order:
            return None
        step = claim.step + 1 if ask.step is None else ask.step
        if step <= claim.step or claim.epoch != self._epoch or (block := self._take(ask.size)) is None:
            return None
        version = self.in_flight = claim.next + (claim.next + claim.marked + 1) % 2  # the other place
        claim.next = version + 1
        block.version, block.step, block.length, block.name = version, step, ask.data.nbytes, ask.name
        if not self._begin(ask, claim, block):
            return None
        failpoint("copying")
        at = block.offset + ask.start
        block.mapping.array[at : at + ask.data.nbytes] = ask.data
        failpoint("copied")
        with table.hold(claim.slot, ask.name):
            if not self._holds(claim):
                self._lose(ask.name)
                self._stock[ask.size.block].append(block)  # its header says pending
                return None
            self._show(claim, block)
            failpoint("slot-stored")
        return version, step

    def _begin(self, ask: Put, claim: _Claim, block: _Block) -> bool:
        """Write the header; False if the registry was rebuilt, and the block may be another's."""
        space = self.space
        numbers = (
            0, block.version, claim.slot, ask.epoch, block.step, 0, 1, len(ask.manifest), ask.start, block.length, 0,
            ask.size.block, int(space.clock.wall_s() * 1e9),
        )  # fmt: skip
        header = pack_fixed(numbers, space.client, ask.name) + _PENDING + ask.manifest
        with space.file.beginning():
            if space.table.epoch != self._epoch:
                return False
            block.write(STATE_AT, _PENDING)  # before: what was there says ready, of another version
            failpoint("beginning")
            block.write(0, header)
        return True

    def _show(self, claim: _Claim, block: _Block) -> None:
        """Header ready, place, slot: in this order."""
        table, slot, version = self.space.table, claim.slot, block.version
        failpoint("claimed")
        block.write(STATE_AT, _READY)
        failpoint("readied")
        table.store_place(slot, version, block.seg, block.offset, block.size.block)
        fence()
        if table.epoch == claim.epoch:  # who rebuilds the registry from now on finds the header ready
            table.store_claimed(slot, version)
        else:
            self._commit(claim, block)
        if claim.shown is not None:
            self._used.append(claim.shown)
        claim.shown, claim.marked, claim.step, claim.deleted = block, version, block.step, False

    def _commit(self, claim: _Claim, block: _Block) -> None:
        """The registry was rebuilt before it could find the header ready: it has the version as one on its way."""
        space, version, (_, epoch) = self.space, block.version, claim.order
        try:
            done = space.retry(lambda: space.registry.commit(space.client, version))
        except ScriptRefused as refused:
            space.segments.take_back(block.seg, block.offset, version)
            refusal(refused, block.name, epoch=epoch, step=block.step)
        space.table.store(claim.slot, done.current)

    def delete(self, name: str) -> bool:
        """Delete a name that this client claims, without a call; False when it must be asked for."""
        if name not in self._names or (claim := self._run(self._delete, name)) is None:
            return False
        if claim.epoch != self.space.table.epoch:  # the registry was rebuilt meanwhile, maybe before the mark was there
            self._lose(name)
            self.space.delete(name)
        return True

    def _delete(self, name: str) -> _Claim | None:
        claim, table = self._names.get(name), self.space.table
        if claim is None or claim.deleted:
            return None
        with table.hold(claim.slot, name):
            if not self._holds(claim):
                self._lose(name)
                return None
            failpoint("deleting")
            newest = max(claim.next - 1, claim.marked)  # also of puts that failed: none of them may come back
            table.store_claimed_deleted(claim.slot, newest)
            failpoint("deleted")
            if claim.shown is not None:
                self._used.append(claim.shown)
            claim.shown, claim.deleted, claim.marked, claim.step = None, True, newest, _NEVER
            fence()
        return claim

    def _holds(self, claim: _Claim) -> bool:
        table = self.space.table
        valid = table.is_claimed(claim.slot, claim.marked) and table.epoch == claim.epoch
        return valid and table.fences == claim.fences and not table.watched

    def _lose(self, name: str) -> None:
        self._names.pop(name, None)
        self._seen[name] = -_BACK_OFF

    def _reset_if_rebuilt(self, _: object = None) -> None:
        epoch = self.space.table.epoch
        if epoch != self._epoch:
            self._forget_blocks()
            if self.in_flight:  # and was not shown, or is committed
                self.space.retry(lambda: self.space.registry.abort(self.space.client, self.in_flight))
            self._epoch = epoch

    def _forget_blocks(self) -> None:
        self._stock.clear()
        self._counts.clear()
        self._used.clear()

    def _forget(self) -> None:
        self._names.clear()
        self._seen.clear()
        self._forget_blocks()
        self._strays = True

    def _take(self, size: SizeClass) -> _Block | None:
        """A block of the stock. An empty one is made twice as large, and a full one filled with replaced blocks that no
        client reads."""
        found = self._stock.setdefault(size.block, [])
        is_full = self._counts.get(size.block, 0) >= _full(size)
        for fill in (self._reuse, self._fill) if is_full else (self._fill, self._reuse):
            if not found:
                fill(size)
        return found.pop() if found else None

    def _reuse(self, _: SizeClass) -> None:
        """Take into the stock what was replaced and is noted by no client; what is noted is handed in.

        No slot showed these versions any more before the notes are read, so no other note comes. A block that another
        process made known to the registry meanwhile (``adopt``) was noted by it until it had said so in the table.
        """
        space, (used, self._used) = self.space, (self._used, [])
        noted = noted_in(space.clients) if used else {}
        failpoint("reusing")
        if (word := space.table.adopted) != self._adopted:
            own = {each[0] for each in space.retry(lambda: space.registry.claims(space.client)[1])}
            used, self._adopted = [each for each in used if each.id in own], word
        for block in used:
            if block.version not in noted:
                self._stock.setdefault(block.size.block, []).append(block)
        if lent := [each.words() for each in used if each.version in noted]:
            space.retry(lambda: space.registry.stock(space.client, (0, 0, 0), 0, lent))

    def _fill(self, size: SizeClass) -> None:
        space, epoch, had = self.space, self._epoch, self._counts.get(size.block, 0)
        count = min(max(had, _STOCK_FIRST), _full(size))
        try:
            got = space.retry(lambda: space.registry.stock(space.client, (size.block, size.count, size.file), count))
            failpoint("stocked")
            self._counts[size.block] = had + len(got)
            for at, seg, offset in got if space.table.epoch == epoch else ():
                space.segments.ensure(seg, size.file)
                self._stock[size.block].append(_Block(at, seg, offset, space.segments.open(seg), size))
        except (errors.TensorError, ScriptRefused):
            self._strays = True

    def settle_idle(self) -> None:
        """Settle each name that was not put or deleted since the last call; without any, hand in all blocks."""
        for name, claim in list(self._names.items()):
            if claim.looked == claim.marked:
                self._names.pop(name, None)
                self._seen.pop(name, None)
                with undone_if_raised(self._have_strays):
                    self.space.retry(lambda slot=claim.slot: settle(self.space, self.space.client, slot))
            claim.looked = claim.marked
        self._run(self._reset_if_rebuilt, None)
        if self._strays or (not self._names and (self._stock or self._used)):
            self.shed()

    def _have_strays(self) -> None:
        self._strays = True

    def shed(self) -> None:
        """Settle all that this client claims and hand in its blocks. Raises PublishBlocked."""
        self._run(self._shed, self.space)

    def _shed(self, space: Namespace) -> None:
        self._forget()
        space.retry(lambda: settle_client(space, space.client))
        self._strays = False


def _headers(
    space: Namespace, client: str, blocks: list[tuple[int, str, int, int]]
) -> Iterator[tuple[int, BlockHeader]]:
    """What the headers of a client's blocks say that were used for a claimed name."""
    for at, seg, offset, _ in blocks:
        try:
            raw = space.segments.read(seg, offset, HEADER_BYTES)
            header = BlockHeader.unpack(raw, seg, settled=True)
        except (FileNotFoundError, errors.Corrupt):
            continue
        if header.owner == client:
            yield at, header


def settle(space: Namespace, client: str, slot: int = 0) -> None:
    """Commit what a client did by itself with the name of a slot (0: with all its names), and end these
    claims. Raises PublishBlocked when it is stopped in the middle of a put, ScriptRefused."""
    for name, at, base in space.registry.claims(client)[0]:
        if slot in (0, at):
            with space.table.hold(at, name):
                _settle(space, client, name, at, base)


def _settle(space: Namespace, client: str, name: str, slot: int, base: int) -> None:
    table = space.table
    table.end_claim(slot)
    failpoint("settling")
    names, blocks = space.registry.claims(client)  # those of now
    if (name, slot, base) not in names:
        return
    floor = table.last(slot) + table.deleted(slot)
    places = {spare: (seg, offset, block) for spare, seg, offset, block in blocks}
    found = max(
        (
            (header.version, spare, header)
            for spare, header in _headers(space, client, blocks)
            if header.state == READY and header.slot == slot and header.name == name and header.version >= floor
        ),
        key=lambda each: each[0],
        default=None,
    )
    # the slot first, which the claimant may have left as it was when it was killed: the registry dooms what it shows
    if found is None:
        if table.deleted(slot):
            table.store_deleted(slot, 0)
        space.registry.settle(name, base, 0, "" if table.deleted(slot) else 0, 0, 0, "")
    else:
        version, spare, header = found
        seg, offset, block = places[spare]
        if table.current(slot) != version:
            table.store_place(slot, version, seg, offset, block)
            table.store(slot, version)
        space.registry.settle(name, base, spare, version, header.step, header.bytes, _desc(space, seg, offset, header))
    failpoint("settled")


def _desc(space: Namespace, seg: str, offset: int, header: BlockHeader) -> str:
    manifest = json.loads(space.segments.read(seg, offset + HEADER_BYTES, header.manifest_bytes))
    return json.dumps(describe(manifest["tensors"], ""), separators=(",", ":"))


def adopt(space: Namespace, version: int, seg: str, offset: int) -> None:
    """Let the registry know of a replaced version that its claimant still has, and that this process leases."""
    header = BlockHeader.unpack(space.segments.read(seg, offset, HEADER_BYTES), seg, settled=False)
    for spare, *place, _ in space.registry.claims(header.owner)[1]:
        if place == [seg, offset]:
            words = (spare, version, header.step, header.bytes, header.name)
            space.registry.stock(header.owner, (0, 0, 0), 0, [words])
            space.table.adopted = SystemRandom().rng().getrandbits(63)  # never the word of another process


def in_stock(space: Namespace) -> set[int]:
    """Versions that lie in blocks of claimants: put by themselves, shown or replaced."""
    clients = space.registry.members("clients")
    return {h.version for each in clients for _, h in _headers(space, each, space.registry.claims(each)[1])}


def settle_client(space: Namespace, client: str) -> None:
    """Settle all names of a client that is dead or puts nothing now, and hand in its blocks."""
    settle(space, client)
    blocks = space.registry.claims(client)[1]
    if blocks:
        known = dict(_headers(space, client, blocks))
        used = [
            (at, h.version, h.step, h.bytes, h.name) if (h := known.get(at)) is not None else (at, at, 0, 0, "")
            for at, *_ in blocks
        ]
        space.registry.stock(client, (0, 0, 0), 0, used)
