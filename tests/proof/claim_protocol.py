"""Puts without the registry, as a machine of single steps: what ``rota.tensors.ownership`` relies on.

One name, claimed by the client that published it. The claimant puts and deletes in shared memory alone; a settler tells
the registry what the claimant did and may publish or delete after it; a reader leases what the slot shows, and may make
a replaced version known to the registry; a reclaimer frees what is in limbo and noted nowhere; the registry may be lost
once and is rebuilt from headers. A step is one load or store of shared memory or one script. The claimant and the
settler may be killed before each of their steps; an exception is to the claimant what a kill is, since it forgets all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

from tests.proof.interleavings import STATES_MAX, explore_all

SPARE, FREE = -1, 0
BLOCKS, OPS = 3, 2
OTHER = 100
"""Id of what the settler publishes: above every id of the claim."""

SOUND = "sound"
MARK_LATE = "the settler takes the mark of the claim from the slot after the registry forgot the claim"
NO_MARK = "the claimant does not look at the mark under the lock"
SLOT_TRUSTED = "the settler believes the slot, not the headers"
TOLD_FIRST = "the settler tells the registry before the slot says so"
NO_EPOCH_LOOK = "the claimant does not look at the epoch again before it shows the version"
REUSES = "the claimant uses a replaced block again without a look at the notes"
WORD_LATE = "who makes a version known says so in the table after it strikes its note"
NO_WORD = "the claimant does not look whether a version was made known"
READY_EARLY = "the header says ready before the bytes are copied"
ONE_PLACE = "two versions in a row have one place"
DELETE_UNMARKED = "a delete takes the version from the slot and leaves no mark"
USED_AFTER_ERROR = "after an exception the claimant goes on with the blocks that it had"
PLANTED = (
    USED_AFTER_ERROR, MARK_LATE, NO_MARK, SLOT_TRUSTED, TOLD_FIRST, NO_EPOCH_LOOK, REUSES, WORD_LATE, NO_WORD,
    READY_EARLY, ONE_PLACE, DELETE_UNMARKED,
)  # fmt: skip

LOSES = (NO_EPOCH_LOOK,)
"""Those that only a loss of the registry shows."""


class Block(NamedTuple):
    """What a header says, whether the bytes of that version are whole, and whom the registry gave the block."""

    version: int = 0
    ready: bool = False
    whole: bool = False
    owner: int = FREE


class State(NamedTuple):
    """Shared memory, the registry, and where each actor is."""

    blocks: tuple[Block, ...] = (Block(1, True, True, 1), *(Block(owner=SPARE),) * (BLOCKS - 1))
    current: int = 1
    claimed: bool = True
    limbo: frozenset[int] = frozenset()
    slot: int = 1
    last: int = 1
    mark: bool = True
    deleted: bool = False
    places: tuple[tuple[int, int], ...] = ((0, -1), (1, 0))
    lock: str = ""
    epoch: int = 0
    acked: tuple[int, int] = (1, 0)
    """Newest acknowledged version (0: deleted), and the newest id that was deleted."""
    put: str = "idle"
    putting: int = 0
    into: int = -1
    shown: int = 1
    given: int = 1
    stock: tuple[int, ...] = tuple(range(1, BLOCKS))
    done: tuple[int, ...] = ()
    noted: int = 0
    word: int = 0
    adopted: int = 0
    ops: int = OPS
    settler: str = "ask"
    found: int = 0
    looked: int = 0
    reader: str = "slot"
    seen: int = 0
    at: int = -1
    since: tuple[int, int] = (0, 0)
    note: int = 0
    maps: int = 0
    asked: frozenset[int] = frozenset()
    held: int = 0
    reclaimer: str = "limbo"
    rebuild: str = "none"


_Some = TypeVar("_Some", State, Block)


def replace(what: _Some, **how: object) -> _Some:
    """It with other values."""
    return what._replace(**how)  # type: ignore[arg-type]


class Broken(AssertionError):
    """An invariant does not hold; the text names it."""


Step = Iterator[State]


def _block(state: State, at: int, **how: object) -> State:
    changed = replace(state.blocks[at], **how)
    return replace(state, blocks=tuple(changed if n == at else each for n, each in enumerate(state.blocks)))


def _place(state: State, version: int, at: int, bug: str) -> State:
    which = 0 if bug == ONE_PLACE else version % 2
    return replace(state, places=tuple((version, at) if n == which else p for n, p in enumerate(state.places)))


def _truth(state: State, version: int, since: tuple[int, int], who: str) -> None:
    """What somebody is told must not be older than what was acknowledged before it asked. Raises Broken."""
    acked, gone = since
    deleted = not version and (state.deleted or state.acked[1] >= acked)
    if (version < acked and not deleted) or (version and version <= gone):
        raise Broken(f"{who} gets version {version} after {acked} was published and {gone} deleted: {state}")


def _dooms(state: State, version: int) -> State:
    return replace(state, limbo=state.limbo | {version}) if version else state


def _claimant(state: State, bug: str) -> Step:
    """put: header pending -> copy -> lock -> mark? -> header ready -> place -> epoch? -> last -> slot -> unlock."""
    v, at = state.putting, state.into
    lost = replace(state, put="lost", lock="" if state.lock == "c" else state.lock)
    match state.put:
        case "idle":
            if state.ops and state.stock:
                given = state.given + 1
                given += (given + state.shown) % 2 == 0 if state.shown else 0
                yield replace(state, put="header", into=state.stock[0], stock=state.stock[1:], putting=given,
                              given=given, ops=state.ops - 1)  # fmt: skip
            if state.ops and state.shown:
                yield replace(state, put="delete lock", ops=state.ops - 1)
            if state.done:
                yield replace(state, put="notes")
        case "header" if state.rebuild in ("none", "lost", "done"):  # a rebuild waits for the end of this step
            begun = _block(state, at, version=v, ready=False, whole=False)
            yield replace(begun, put="early" if bug == READY_EARLY else "copy") if state.epoch == 0 else lost
        case "early":
            yield replace(_block(state, at, ready=True), put="copy")
        case "copy":
            yield replace(_block(state, at, whole=True), put="lock")
        case "lock" | "delete lock" if not state.lock:
            yield replace(state, lock="c", put=state.put.replace("lock", "look"))
        case "look" | "delete look":
            valid = (state.mark or bug == NO_MARK) and state.epoch == 0
            yield replace(state, put={"look": "ready", "delete look": "gone"}[state.put]) if valid else lost
        case "ready":
            yield replace(_block(state, at, ready=True), put="place")
        case "place":
            yield replace(_place(state, v, at, bug), put="epoch")
            if bug == ONE_PLACE:
                yield replace(_place(state, state.shown, at, bug), put="place 2")
        case "place 2":
            yield replace(_place(state, v, at, bug), put="epoch")
        case "epoch":  # who rebuilds the registry from now on finds the header ready
            if state.epoch == 0 or bug == NO_EPOCH_LOOK:
                yield replace(state, put="last")
                if bug == USED_AFTER_ERROR:
                    yield replace(state, put="idle", lock="", stock=tuple(sorted((*state.stock, at))))
            elif state.rebuild == "done":  # commit it as any other
                known = state if state.current >= v else replace(_dooms(state, state.current), current=v)
                known = _block(known, at, owner=v)
                yield replace(known, slot=v, last=v, deleted=False, acked=(v, state.acked[1]), put="lost", lock="")
        case "last":
            yield replace(state, last=v, deleted=False, put="slot")
        case "slot":
            yield replace(state, slot=v, put="shown")
        case "shown":
            old = next((n for n, b in enumerate(state.blocks) if b.version == state.shown and b.owner == SPARE), -1)
            done = (*state.done, old) if old >= 0 and state.shown else state.done
            yield replace(state, acked=(v, state.acked[1]), shown=v, done=done, put="idle", lock="")
        case "gone":
            if bug == DELETE_UNMARKED:
                yield replace(state, put="zero")
            else:
                yield replace(state, last=state.given, deleted=True, put="zero")
        case "zero":
            yield replace(state, slot=0, put="told")
        case "told":
            if state.epoch == 0:
                old = next((n for n, b in enumerate(state.blocks) if b.version == state.shown and b.owner == SPARE), -1)
                yield replace(state, acked=(0, max(state.shown, state.acked[1])), shown=0, put="idle", lock="",
                              done=(*state.done, old) if old >= 0 else state.done)  # fmt: skip
            elif state.rebuild == "done":
                dead = replace(_dooms(state, state.current), current=0)
                yield replace(dead, slot=0, acked=(0, max(state.shown, state.acked[1])), put="lost", lock="")
        case "notes":
            yield replace(state, noted=0 if bug == REUSES else state.note, put="word")
        case "word":
            mine = tuple(n for n in state.done if state.blocks[n].owner == SPARE)
            done = mine if state.word != state.adopted and bug != NO_WORD else state.done
            yield replace(state, done=done, word=state.adopted, put="hand in")
        case "hand in":  # what is noted, in one script: a block that is not this client's any more is passed over
            after = state
            lent = [n for n in state.done if state.blocks[n].version == state.noted]
            for n in lent if state.epoch == 0 else ():
                if state.blocks[n].owner == SPARE:
                    after = _dooms(_block(after, n, owner=state.noted), state.noted)
            again = tuple(sorted({*state.stock, *(n for n in state.done if n not in lent)}))
            yield replace(after, done=(), noted=0, stock=again, put="idle")
        case _:
            return


def _shown(state: State) -> State:
    """The slot shows what the settler found."""
    if state.found and state.slot != state.found:
        at = next((n for n, b in enumerate(state.blocks) if b.version == state.found), -1)
        return replace(_place(state, state.found, at, SOUND), last=state.found, slot=state.found, deleted=False)
    return replace(state, slot=0) if state.deleted and not state.found else state


def _settler(state: State, bug: str) -> Step:
    """ask -> lock -> mark off -> look at each header -> one script -> unlock -> publish or delete as today."""
    match state.settler:
        case "ask" if state.claimed and state.rebuild in ("none", "done"):
            yield replace(state, settler="lock")
        case "lock" if not state.lock:
            late = bug == MARK_LATE
            yield replace(state, lock="s", settler="look" if late else "mark", found=0, looked=0)
        case "mark":
            yield replace(state, mark=False, settler="look" if bug != MARK_LATE else "tell")
        case "look":
            each, floor = state.blocks[state.looked], state.last + state.deleted
            fits = each.owner == SPARE and each.ready and each.version >= floor and each.version > state.found
            if bug == SLOT_TRUSTED:
                fits = each.owner == SPARE and each.version == state.slot != 0
            more = state.looked + 1 < BLOCKS
            yield replace(state, found=each.version if fits else state.found, looked=state.looked + 1 if more else 0,
                          settler="look" if more else "script" if bug == TOLD_FIRST else "show")  # fmt: skip
        case "show":
            yield replace(_shown(state), settler="script")
        case "script" if state.rebuild in ("none", "done"):
            after = replace(state, settler="mark" if bug == MARK_LATE else "tell", claimed=False)
            if state.claimed and state.found:
                at = next(n for n, b in enumerate(state.blocks) if b.version == state.found and b.owner == SPARE)
                after = replace(_dooms(_block(after, at, owner=state.found), state.current), current=state.found)
            elif state.claimed and state.deleted:
                after = replace(_dooms(after, state.current), current=0)
            yield after
        case "tell":
            if state.rebuild in ("none", "done"):
                _truth(state, state.current, state.acked, "the registry")
            yield replace(_shown(state) if bug == TOLD_FIRST else state, settler="own", lock="")
        case "own" if not state.lock and not state.claimed and state.rebuild in ("none", "done"):
            free = [n for n, b in enumerate(state.blocks) if b.owner == FREE]
            if free:
                done = replace(_dooms(_block(state, free[0], version=OTHER, ready=True, whole=True, owner=OTHER),
                                      state.current), current=OTHER)  # fmt: skip
                done = replace(_place(done, OTHER, free[0], SOUND), last=OTHER, slot=OTHER, deleted=False, mark=False)
                yield replace(done, settler="end", acked=(OTHER, state.acked[1]))
            if state.current:
                gone = replace(_dooms(state, state.current), current=0, slot=0, deleted=True, settler="end", mark=False,
                               last=max(state.last, state.current))  # fmt: skip
                yield replace(gone, acked=(0, max(state.current, state.acked[1])))
        case _:
            return


def _reader(state: State, bug: str) -> Step:
    """slot -> place -> note -> slot again -> map -> unmap; a slot that shows nothing: ask the registry."""
    match state.reader:
        case "slot":
            yield replace(state, reader="seen", seen=state.slot, since=state.acked)
        case "seen" if not state.seen:
            if not state.claimed and state.rebuild in ("none", "done"):
                _truth(state, state.current, state.since, "a reader of the registry")
                yield replace(state, reader="end")
        case "seen":
            version, at = state.places[0 if bug == ONE_PLACE else state.seen % 2]
            yield replace(state, at=at, reader="note") if version == state.seen else replace(state, reader="slot")
        case "note":
            yield replace(state, note=state.seen, reader="look")
        case "look":
            yield replace(state, reader="map") if state.slot == state.seen else replace(state, note=0, reader="slot")
        case "map":
            _truth(state, state.seen, state.since, "a reader")
            yield replace(state, maps=state.seen, reader="unmap")
        case "unmap":
            yield replace(state, maps=0, note=0, reader="end")
            if state.slot != state.seen:
                yield replace(state, reader="adopt")
        case "adopt" if state.rebuild == "none" and not state.claimed:
            at = next(n for n, b in enumerate(state.blocks) if b.version == state.seen)
            after = state
            if state.blocks[at].owner == SPARE:
                after = _dooms(_block(state, at, owner=state.seen), state.seen)
            after = replace(after, maps=0, note=0) if bug == WORD_LATE else after
            yield replace(after, reader="say")
        case "say":
            yield replace(state, adopted=state.seen, reader="strike")
        case "strike":
            yield replace(state, maps=0, note=0, reader="end")
        case _:
            return


def _reclaimer(state: State, bug: str) -> Step:
    del bug
    match state.reclaimer:
        case "limbo" if state.limbo and state.rebuild in ("none", "done"):
            yield replace(state, asked=state.limbo, reclaimer="notes")
        case "notes":
            yield replace(state, held=state.note, reclaimer="free")
        case "free" if state.rebuild in ("none", "done"):
            ended = (state.asked & state.limbo) - {state.held}
            blocks = tuple(replace(b, owner=FREE) if b.owner in ended else b for b in state.blocks)
            yield replace(state, blocks=blocks, limbo=state.limbo - ended, asked=frozenset(), reclaimer="limbo")
        case _:
            return


def _registry(state: State, bug: str) -> Step:
    """lost -> new epoch and slot := 0 -> look at the headers -> fill and open; a stock that was not shown is free."""
    del bug
    match state.rebuild:
        case "none":
            yield replace(state, rebuild="lost", claimed=False, asked=frozenset(), reclaimer="limbo")
        case "lost":
            yield replace(state, epoch=1, slot=0, rebuild="look", limbo=frozenset(), asked=frozenset(), held=0,
                          reclaimer="limbo")  # fmt: skip
        case "look":
            floor = state.last + state.deleted
            newest = max((b.version for b in state.blocks if b.ready and b.version >= floor), default=0)
            blocks, limbo = list[Block](), frozenset[int]()
            for each in state.blocks:
                pending = not each.ready and each.version == state.putting and state.put not in ("dead", "lost")
                kept = each.version and (each.version in (newest, state.note) or pending)
                limbo |= {each.version} if each.version == state.note != newest and each.version else frozenset()
                blocks.append(replace(each, owner=each.version if kept else FREE))
            filled = replace(state, blocks=tuple(blocks), current=newest, limbo=limbo, rebuild="done")
            yield filled if state.lock else replace(filled, slot=newest)
        case _:
            return


def _kills(state: State, bug: str) -> Step:
    del bug
    if state.put not in ("dead", "lost"):
        yield replace(state, put="dead", lock="" if state.lock == "c" else state.lock)
    if state.settler in ("mark", "look", "show", "script", "tell"):  # another process begins anew
        yield replace(state, settler="ask", lock="" if state.lock == "s" else state.lock)


def check(state: State) -> None:
    """A mapped block is whole, its own, and not free; what a slot shows is whole. Raises Broken."""
    for version in {state.maps, state.slot} - {0}:
        found = [b for b in state.blocks if b.version == version]
        if not found or not found[0].whole:
            raise Broken(f"version {version} is shown or mapped and its bytes are not whole: {state}")
    if state.maps and state.blocks[state.at].version != state.maps:
        raise Broken(f"version {state.maps} is read where another one lies: {state}")
    if state.maps and all(b.owner in (FREE,) for b in state.blocks if b.version == state.maps):
        raise Broken(f"version {state.maps} is mapped and its block is free: {state}")
    if state.epoch == 0 and any(state.blocks[n].owner != SPARE for n in state.stock):
        raise Broken(f"the claimant may use a block that is not its own: {state}")
    if state.rebuild == "done" and state.current and all(b.owner != state.current for b in state.blocks):
        raise Broken(f"the registry says version {state.current}, and no block is its own: {state}")


def explore(bug: str = SOUND, *, ops: int = OPS, loss: bool = True, limit: int = STATES_MAX) -> tuple[int, set[str]]:
    """Every state that can be reached, and the steps that were seen. Raises Broken at the first that breaks a rule."""
    first = State(ops=ops)
    actors: tuple[Callable[[State, str], Step], ...] = (
        _claimant, _settler, _reader, _reclaimer, _kills, *((_registry,) if loss else ()),
    )  # fmt: skip
    bound = [partial(actor, bug=bug) for actor in actors]
    return explore_all(
        first, bound, check, lambda state: {state.put, state.settler, state.reader, state.rebuild}, limit
    )
