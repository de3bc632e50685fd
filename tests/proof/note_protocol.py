"""Leases by a note alone, as a machine of single loads and stores: what ``hold_shown`` and ``reap`` rely on.

One name. A writer publishes versions into two blocks, a reader leases what the slot shows without the registry, a
reclaimer frees blocks. Each step is one load or store of shared memory, or one script of the registry, which is atomic.
Memory is sequentially consistent here; ``rota.tensors.locks.fence`` makes a note and the next look at the slot so.
``explore`` walks every interleaving, and lets each actor be killed before each of its steps: it then does nothing more,
what it noted stays until its file goes, which is a step of its own, and the kernel has freed its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tests.proof.interleavings import STATES_MAX, explore_all

BLOCKS = 2
READERS = 2
PUBLISHES = 2
GETS = 1

SOUND = "sound"
NO_SECOND_LOOK = "a reader does not look at the slot again"
LOOK_THEN_NOTE = "a reader looks again before it notes"
NOTES_BEFORE_LIMBO = "the reclaimer reads the notes before it asks what is in limbo"
SLOT_AFTER_DOOM = "the writer takes the old version from the slot after the registry doomed it"
NO_NOTES = "the reclaimer reads no notes"
DEAD_NOT_COUNTED = "the notes of forked children, whose parent is dead, do not count"
LISTED_ONCE = "the reclaimer does not look for files that came while it read the others"
PLANTED = (NO_SECOND_LOOK, LOOK_THEN_NOTE, NOTES_BEFORE_LIMBO, SLOT_AFTER_DOOM, NO_NOTES, DEAD_NOT_COUNTED, LISTED_ONCE)


@dataclass(frozen=True, slots=True)
class Reader:
    """Where a reader is: ``at`` its next step, the version it saw, the block its place said, what it noted and maps."""

    at: str = "slot"
    seen: int = 0
    block: int = -1
    note: int = 0
    maps: int = 0
    gets: int = 0
    alive: bool = True
    child: int = 0
    """Version that a forked child maps; it noted the same in a hold, which it keeps when the parent dies."""


@dataclass(frozen=True, slots=True)
class State:
    """Shared memory, the registry, and where each actor is."""

    slot: int = 0
    place: tuple[int, int] = (0, -1)
    blocks: tuple[int, ...] = (0,) * BLOCKS
    """Version whose bytes lie in each block."""
    owner: tuple[int, ...] = (0,) * BLOCKS
    """Version that the registry gave each block to; 0: it is free."""
    current: int = 0
    limbo: frozenset[int] = frozenset()
    writer: str = "reserve"
    writing: int = 0
    made: int = 0
    readers: tuple[Reader, ...] = (Reader(),) * READERS
    reclaimer: str = "limbo"
    asked: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    listed: bool = False


class Broken(AssertionError):
    """An invariant does not hold; the text names it."""


Step = Iterator[State]


def _block_of(state: State, version: int) -> int:
    return state.owner.index(version)


def _writer(state: State, bug: str) -> Step:
    """reserve -> copy -> slot := 0 -> commit (dooms the old one) -> place -> slot := new; the slot's lock is implied,
    there is one writer."""
    match state.writer:
        case "reserve" if state.made < PUBLISHES and 0 in state.owner:
            block, version = state.owner.index(0), state.made + 1
            owner = tuple(version if at == block else v for at, v in enumerate(state.owner))
            yield replace(state, owner=owner, writing=version, made=version, writer="copy")
        case "copy":
            at = _block_of(state, state.writing)
            blocks = tuple(state.writing if each == at else v for each, v in enumerate(state.blocks))
            yield replace(state, blocks=blocks, writer="commit" if bug == SLOT_AFTER_DOOM else "zero")
        case "zero":
            yield replace(state, slot=0, writer="place" if bug == SLOT_AFTER_DOOM else "commit")
        case "commit":
            limbo = state.limbo | ({state.current} if state.current else set())
            follows = "zero" if bug == SLOT_AFTER_DOOM else "place"
            yield replace(state, current=state.writing, limbo=limbo, writer=follows)
        case "place":
            yield replace(state, place=(state.writing, _block_of(state, state.writing)), writer="show")
        case "show":
            yield replace(state, slot=state.writing, writer="reserve")
        case _:  # it has published all, waits for a block, or is dead
            return


def _reader(state: State, index: int, bug: str) -> Step:
    """slot -> place -> note -> slot again -> map; later unmap, then strike the note. A fork maps and notes the same."""
    me = state.readers[index]

    def become(**how: object) -> State:
        mine = replace(me, **how)  # type: ignore[arg-type]
        return replace(state, readers=tuple(mine if at == index else r for at, r in enumerate(state.readers)))

    if not me.alive:
        if me.note:  # the sweep removes the file of the dead; what its child holds stays
            yield become(note=0)
    elif me.at == "slot" and me.gets < GETS:
        if state.slot:
            yield become(seen=state.slot, at="place", gets=me.gets + 1)
    elif me.at == "place":
        version, block = state.place
        shown = version == me.seen
        first = "look" if bug == LOOK_THEN_NOTE else "note"
        yield become(block=block, at=first) if shown else become(at="slot")
    elif me.at == "note":
        yield become(note=me.seen, at="map" if bug in (NO_SECOND_LOOK, LOOK_THEN_NOTE) else "look")
    elif me.at == "look":
        follows = "note" if bug == LOOK_THEN_NOTE else "map"
        yield become(at=follows) if state.slot == me.seen else become(at="strike")
    elif me.at == "map":
        yield become(maps=me.seen, at="unmap")
    elif me.at == "unmap":
        yield become(maps=0, at="strike")
        if index == 0 and not me.child:
            yield become(child=me.seen)
    elif me.at == "strike":
        yield become(note=0, at="slot")
    if me.child:
        yield become(child=0)


def _reclaimer(state: State, bug: str) -> Step:
    """ask for limbo -> list the files -> read one after the other -> list again, and read again if one came -> free, in
    one script, what was in limbo and is noted nowhere; then all over."""
    order = ("list", "read 0", "read 1", "hold", "again")
    order = (*order, "limbo", "free") if bug == NOTES_BEFORE_LIMBO else ("limbo", *order, "free")
    at, none = state.reclaimer, frozenset[int]()
    follows = order[(order.index(at) + 1) % len(order)]
    hold = state.readers[0].child
    match at:
        case "limbo" if state.limbo or bug == NOTES_BEFORE_LIMBO:
            yield replace(state, asked=state.limbo, reclaimer="free" if bug == NO_NOTES else follows)
        case "list":
            yield replace(state, listed=bool(hold), held=none, reclaimer=follows)
        case "read 0" | "read 1":
            yield replace(state, held=state.held | {state.readers[int(at[-1])].note}, reclaimer=follows)
        case "hold":
            counts = state.listed and not (bug == DEAD_NOT_COUNTED and not state.readers[0].alive)
            yield replace(state, held=state.held | {hold} if counts else state.held, reclaimer=follows)
        case "again":
            came = hold and not state.listed and bug != LISTED_ONCE
            yield replace(state, reclaimer="list" if came else follows)
        case "free":
            ended = (state.asked - state.held) & state.limbo
            owner = tuple(0 if v in ended else v for v in state.owner)
            yield replace(state, owner=owner, limbo=state.limbo - ended, asked=none, held=none, listed=False,
                          reclaimer=order[0])  # fmt: skip
        case _:
            return


def _kills(state: State, bug: str) -> Step:
    if state.writer != "dead":
        yield replace(state, writer="dead")
    start = "list" if bug == NOTES_BEFORE_LIMBO else "limbo"
    if state.reclaimer != start:  # another process takes over, from the start
        yield replace(state, reclaimer=start, asked=frozenset(), held=frozenset(), listed=False)
    for index, reader in enumerate(state.readers):
        if reader.alive:
            dead = replace(reader, alive=False, maps=0)
            yield replace(state, readers=tuple(dead if at == index else r for at, r in enumerate(state.readers)))


def check(state: State) -> None:
    """No block that a process maps is free, has other bytes, or has gone to another version. Raises Broken."""
    for reader in state.readers:
        for version in (reader.maps, reader.child):
            if version and version not in state.owner:
                raise Broken(f"I4: version {version} is mapped and its block is not its own any more: {state}")
            if version and state.blocks[_block_of(state, version)] != version:
                raise Broken(f"I2: the block of version {version}, which is mapped, has other bytes: {state}")


def explore(bug: str = SOUND, limit: int = STATES_MAX) -> tuple[int, set[str]]:
    """Every state that can be reached, and where readers got to. Raises Broken at the first that breaks a rule."""
    first = State(reclaimer="list") if bug == NOTES_BEFORE_LIMBO else State()
    actors: list[Callable[[State], Step]] = [
        lambda state: _writer(state, bug),
        lambda state: _reclaimer(state, bug),
        lambda state: _kills(state, bug),
        *(lambda state, at=at: _reader(state, at, bug) for at in range(READERS)),
    ]
    return explore_all(first, actors, check, lambda state: {reader.at for reader in state.readers}, limit)
