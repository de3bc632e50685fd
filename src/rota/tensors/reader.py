"""Reader of tensors: lease, map, view; an unchanged name is answered from a cache by one load from shared memory."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Final, NoReturn, TypeAlias

from rota.runtime.clock import blocking_sleep
from rota.runtime.undo import undone_if_raised
from rota.spec.errors import BadInput, RotaError
from rota.spec.resources import counted
from rota.tensors import errors
from rota.tensors.arrays import Layout, view_of
from rota.tensors.core import (
    HEADER_BYTES,
    SLOTS_MAX,
    STEP_MAX,
    Fields,
    Json,
    Tensor,
    check_count,
)
from rota.tensors.devices.client import DevicePlace
from rota.tensors.errors import failpoint
from rota.tensors.leases import HeldBlock
from rota.tensors.locks import noted_in
from rota.tensors.namespace import Namespace
from rota.tensors.ownership import settle
from rota.tensors.registry import Leased, PartBlock, ScriptRefused
from rota.tensors.segments import BlockHeader

CACHE_MAX: Final = 4096
_POLL_FIRST_S: Final = 0.00005
_POLL_MAX_S: Final = 0.002
_POLL_LONG_S: Final = 0.005
_POLL_SHORT_FOR_S: Final = 0.05
_RECHECK_S: Final = 1.0
_SMALL_MANIFEST_BYTES: Final = 4096
_SELECT: Final = {"version": "v", "step": "s", "min_step": "m", "min_version": "w"}

Parts = list[tuple[dict[str, Tensor], Json]]  # of one version: the tensors and the meta of each writer, by rank


Key: TypeAlias = "str | tuple[str, str, bool] | tuple[str, str, bool, str]"
"""Of a cached answer: the name alone, or (name, as_, sealed), and "group" for a group."""


@dataclass(slots=True, eq=False)
class CachedEntry:
    """One cached answer: ``value`` is right while ``words[word] == version``. ``used`` is aged by the housekeeper."""

    word: int
    version: int
    step: int
    value: Tensor
    used: bool = True


class Snapshot(dict[str, Tensor]):
    """Name -> tensor, all of one moment.

    For a group: ``step``, ``epoch``, ``id`` of that step, and ``meta``, the JSON value its publisher gave (for a step
    of several parts the list of their values, by part). ``versions`` is name -> version id. ``parts`` has what each
    writer of the step brought, and its meta, by rank: names may stand in more than one.
    """

    __slots__ = ("epoch", "id", "meta", "parts", "step", "versions")

    def __init__(
        self, tensors: Mapping[str, Tensor], *, id: int, step: int, epoch: int, meta: Json, versions: Mapping[str, int],
        parts: Sequence[tuple[Mapping[str, Tensor], Json]] = (),
    ) -> None:  # fmt: skip
        super().__init__(tensors)
        self.id, self.step, self.epoch, self.meta, self.versions = id, step, epoch, meta, dict(versions)
        self.parts = tuple(parts)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Snapshot is memory of this machine; send plane.ref(tensor), or copy the tensors")


class TensorReader:
    """The read path of one namespace. ``cache`` and ``words`` are read by the fast path of ``Plane.get``."""

    def __init__(self, space: Namespace, *, sealed: bool, check: bool) -> None:
        self._space = space
        self._check = check
        self.sealed = sealed
        self.words = space.table.words
        self.cache: dict[Key, CachedEntry] = {}
        self._slots: dict[str, int] = {}

    def get(self, name: str, selector: str, *, wait_s: float, sealed: bool, as_: str) -> Tensor:
        """One tensor of a single name, leased by its views. Raises NotFound, VersionGone, WaitTimeout."""
        (leased,), values = self._read([(name, selector)], wait_s, sealed, as_)
        tensors = _merged(values[0])
        if len(tensors) != 1 or name not in tensors:
            raise errors.NotFound(f"{name} is a group", hint=f"get_group({name!r})", name=name)
        if leased.version == leased.current:
            self._remember((name, as_, sealed), leased, tensors[name])
        return tensors[name]

    def get_group(self, group: str, selector: str, *, wait_s: float, sealed: bool, as_: str) -> Snapshot:
        """All tensors of one step of a group."""
        (leased,), values = self._read([(group, selector)], wait_s, sealed, as_)
        tensors, metas = _merged(values[0]), [meta for _, meta in values[0]]
        snapshot = Snapshot(
            tensors, id=leased.version, step=leased.step, epoch=leased.epoch, parts=values[0],
            meta=metas[0] if len(metas) == 1 else metas, versions=dict.fromkeys(tensors, leased.version),
        )  # fmt: skip
        if leased.version == leased.current:
            self._remember((group, as_, sealed, "group"), leased, snapshot)
        return snapshot

    def get_many(self, names: Sequence[str], *, wait_s: float, sealed: bool, as_: str) -> Snapshot:
        """One tensor a name, all as of one moment; those unchanged since the last call are not mapped again."""
        leased, values = self._read([(name, "") for name in names], wait_s, sealed, as_)
        tensors: dict[str, Tensor] = {}
        for name, one, found in zip(names, leased, map(_merged, values), strict=True):
            tensors |= {name: found[name]} if set(found) == {name} else {f"{name}/{key}": t for key, t in found.items()}
            if set(found) == {name} and one.version == one.current:
                self._remember((name, as_, sealed), one, found[name])
        newest = [max(each) for each in zip(*((one.version, one.step, one.epoch) for one in leased), strict=True)]
        versions = {name: one.version for name, one in zip(names, leased, strict=True)}
        return Snapshot(tensors, id=newest[0], step=newest[1], epoch=newest[2], meta=None, versions=versions)

    def find_cached(self, key: Key) -> CachedEntry | None:
        """The cached answer if it still is the newest."""
        entry = self.cache.get(key)
        if entry is None or self.words[entry.word] != entry.version:
            return None
        entry.used = True
        return entry

    def age(self, linger: bool) -> None:
        """Drop cached answers that newer ones replaced and, when ``linger`` is over, those not used since."""
        for key, entry in list(self.cache.items()):
            if self.words[entry.word] != entry.version or (linger and not entry.used):
                self.cache.pop(key, None)
        for entry in list(self.cache.values()) if linger else ():  # afterwards: one entry may stand under two keys
            entry.used = False

    def forget(self, name: str | None = None) -> None:
        """Drop the cached answers of a name, or all."""
        for key in list(self.cache):
            if name is None or key == name or (isinstance(key, tuple) and key[0] == name):
                self.cache.pop(key, None)

    def _remember(self, key: Key, leased: Leased, value: Tensor) -> None:
        if len(self.cache) >= CACHE_MAX:
            self.age(linger=True)
        if len(self.cache) < CACHE_MAX:
            entry = CachedEntry(2 * leased.slot, leased.version, leased.step, value)
            self.cache[key] = entry
            if len(key) == 3 and key[1] == "torch" and key[2] == self.sealed:
                self.cache[key[0]] = entry

    def _read(
        self, wanted: Sequence[tuple[str, str]], wait_s: float, sealed: bool, as_: str
    ) -> tuple[list[Leased], list[Parts]]:
        """Lease and view; wait for what is not there yet. A refusal means that nothing was leased."""
        deadline_s = self._space.deadline_s(wait_s)
        while True:
            seen = self._space.table.creations
            try:
                if (shown := self._get_shown(wanted, sealed, as_)) is not None:
                    return shown
                return self._space.retry(lambda asked=wanted: self._get(asked, sealed, as_), settles=False)
            except ScriptRefused as refused:
                if refused.code == "CLAIMED":
                    self._claimed(refused, wanted)
                    continue
                if (noted := self._noted(refused, wanted)) is not None:
                    wanted = noted
                    continue
                left_s = deadline_s - self._space.clock.monotonic_s()
                if refused.code not in ("NOTFOUND", "BEHIND") or left_s <= 0:
                    self._raise(refused, wanted, wait_s)
                slot = int(refused.words[3]) if refused.code == "BEHIND" else 0
                self.wait_change(slot, int(refused.words[1]) if slot else seen, min(left_s, _RECHECK_S))

    def _get(self, wanted: Sequence[tuple[str, str]], sealed: bool, as_: str) -> tuple[list[Leased], list[Parts]]:
        leased, held = self.lease(wanted, sealed=sealed)
        return leased, [self._views(one, each, as_) for one, each in zip(leased, held, strict=True)]

    def _get_shown(
        self, wanted: Sequence[tuple[str, str]], sealed: bool, as_: str
    ) -> tuple[list[Leased], list[Parts]] | None:
        """What the table shows of known names, leased by notes alone; None when the registry must be asked.

        Several are of one moment when all slots still show the same after the last was leased.
        """
        table, slots, found = self._space.table, self._slots, list[tuple[Leased, HeldBlock, BlockHeader]]()
        for name, selector in wanted:
            one = self._lease_shown(slots[name], name, selector, sealed) if name in slots else None
            if one is None:
                return None
            found.append(one)
        if any(table.current(leased.slot) != leased.version for leased, _, _ in found[:-1]):
            return None
        self._space.check()
        self._space.counters["gets"] += len(found)
        failpoint("mapped")
        return [one[0] for one in found], [
            [self._view(leased.blocks[0], header, held, as_)[1:]] for leased, held, header in found
        ]

    def _lease_shown(
        self, slot: int, name: str, selector: str, sealed: bool
    ) -> tuple[Leased, HeldBlock, BlockHeader] | None:
        """The version that a slot shows, if it is of that name and as new as wanted. A slot may have another name by
        now: the header decides."""
        space, version = self._space, self._space.table.current(slot)
        if not version or selector[:1] in ("v", "s") or (place := space.table.place(slot, version)) is None:
            return None
        block = PartBlock(version=version, seg=f"seg-{place[3]}-{place[1]}", offset=place[2], bytes=place[3])
        if (held := space.leases.hold_shown(slot, block, space.table, sealed=sealed)) is None:
            return None
        header = _header(block, held[0])
        if header.name != name:
            self._slots.pop(name, None)
            return None
        if selector and int(selector[1:]) > (version if selector[0] == "w" else header.step):
            return None
        leased = Leased(
            version=version, slot=slot, epoch=header.epoch, step=header.step, current=version, blocks=(block,)
        )
        return leased, held[0], header

    def _claimed(self, refused: ScriptRefused, wanted: Sequence[tuple[str, str]]) -> None:
        """Look at the slot of a name that its writer puts by itself; settle what the slot did not answer."""
        slot, by, at = int(refused.words[0]), refused.words[1], (int(refused.words[2]) - 5) // 2
        if self._slots.get(wanted[at][0]) == slot:
            self._space.retry(lambda: settle(self._space, by, slot))
        self._slots[wanted[at][0]] = slot

    def _noted(self, refused: ScriptRefused, wanted: Sequence[tuple[str, str]]) -> list[tuple[str, str]] | None:
        """How to ask for an exact version that was replaced, and that a client keeps by a note in its file alone."""
        if refused.code != "GONE" or not refused.words:
            return None
        at = (int(refused.words[0]) - 5) // 2
        name, selector = wanted[at]
        if selector[:1] != "v" or int(selector[1:]) not in noted_in(self._space.clients):
            return None
        return [*wanted[:at], (name, f"h{selector[1:]}"), *wanted[at + 1 :]]

    def lease(self, wanted: Sequence[tuple[str, str]], *, sealed: bool) -> tuple[list[Leased], list[list[HeldBlock]]]:
        """Lease and map one version of each name. Raises ScriptRefused, EpochChanged."""
        space = self._space
        with space.leases.get_number() as seq:
            epoch = space.table.epoch
            try:
                leased = space.registry.get(space.client, seq, wanted)
                self._remember_slots(wanted, leased)
                return leased, self._hold(seq, leased, sealed, epoch)
            except (ScriptRefused, RotaError):
                raise
            except BaseException:  # Ctrl-C: it may have been done, and the leases would never end
                self._release_unheld([one.version for one in space.registry.get(space.client, seq, wanted)], seq)
                raise

    def open_block(self, name: str, selector: str = "") -> tuple[Leased, HeldBlock, int]:
        """Lease the one block of a name, writable whatever the mode, for who knows what is in it; where that begins.

        Raises ScriptRefused.
        """
        (leased,), ((held,),) = self._space.retry(lambda: self.lease([(name, selector)], sealed=False))
        return leased, held, _header(leased.blocks[0], held).offset

    def _hold(self, seq: int, leased: Sequence[Leased], sealed: bool, epoch: int) -> list[list[HeldBlock]]:
        """Map what was just leased. Raises EpochChanged when the registry was rebuilt since ``epoch``."""
        space = self._space
        failpoint("leased")

        def known() -> bool:
            return space.table.epoch == epoch

        with undone_if_raised(self._release_unheld, [one.version for one in leased], seq):
            held = [space.leases.hold(one.version, seq, one.blocks, known, sealed=sealed) for one in leased]
        space.counters["gets"] += len(leased)
        failpoint("mapped")
        return held

    def _release_unheld(self, versions: Sequence[int], seq: int) -> None:
        space = self._space
        space.registry.release(space.client, [(each, seq) for each in versions if not space.leases.has(each)])

    def _views(self, leased: Leased, held: list[HeldBlock], as_: str) -> Parts:
        blocks = zip(leased.blocks, held, strict=True)
        parts = [self._view(block, _header(block, each), each, as_) for block, each in blocks]
        parts.sort(key=lambda part: part[0])
        return [(tensors, meta) for _, tensors, meta in parts]

    def _view(
        self, block: PartBlock, header: BlockHeader, held: HeldBlock, as_: str
    ) -> tuple[int, dict[str, Tensor], Json]:
        """Rank, tensors and meta of one part."""
        raw = memoryview(held.holder)
        if self._check and header.payload_crc:
            payload = raw[held.base + header.offset : held.base + header.offset + header.bytes]
            if (zlib.crc32(payload) or 1) != header.payload_crc:
                text = f"{header.name}: the bytes of version {header.version} are not those that were published"
                raise errors.TornRead(text, name=header.name, version=header.version)
        start = held.base + HEADER_BYTES
        layouts, device, meta = _manifest(
            bytes(raw[start : start + header.manifest_bytes]), header.offset, f"{block.seg}+{block.offset}"
        )
        if device:
            place = DevicePlace.unpack(raw[held.base + header.offset :])
            tensors = self._on_device(header, device, place, layouts, held, as_, sealed=raw.readonly)
        else:
            tensors = {layout.name: view_of(layout, held.holder, held.base, as_) for layout in layouts}
        return header.part, tensors, deepcopy(meta) if isinstance(meta, dict | list) else meta

    def _remember_slots(self, wanted: Sequence[tuple[str, str]], leased: Sequence[Leased]) -> None:
        if len(self._slots) > SLOTS_MAX:
            self._slots.clear()
        self._slots |= {name: one.slot for (name, _), one in zip(wanted, leased, strict=True) if one.current}

    def _on_device(
        self,
        header: BlockHeader,
        device: str,
        place: DevicePlace,
        layouts: list[Layout],
        held: HeldBlock,
        as_: str,
        *,
        sealed: bool,
    ) -> dict[str, Tensor]:
        name, devices = header.name, self._space.devices
        if devices is None:
            hint = "connect(device='memfd')" if device == "memfd" else "connect(device='cuda:0')"
            text = f"{name} is on device {device}; this connection uses none"
            raise errors.WrongDevice(text, hint=hint, name=name, wanted=device, visible=[])
        return devices.view(name, header.version, device, place, layouts, held.holder, as_=as_, sealed=sealed)

    def wait_change(self, slot: int, before: int, limit_s: float) -> None:
        """Wait until a slot shows another version than ``before``; slot 0: the word of creations, for unknown names."""
        table, clock = self._space.table, self._space.clock
        start_s, delay_s = clock.monotonic_s(), _POLL_FIRST_S
        while (now_s := clock.monotonic_s()) < start_s + limit_s:
            self._space.check()
            if (table.current(slot) if slot else table.creations) != before:
                if slot and table.current(slot) == 0:  # inside a publish, or a dead publisher's: the registry knows
                    blocking_sleep(_POLL_MAX_S)
                return
            blocking_sleep(min(delay_s, max(start_s + limit_s - now_s, 0)))
            delay_s = min(2 * delay_s, _POLL_MAX_S if now_s - start_s < _POLL_SHORT_FOR_S else _POLL_LONG_S)

    def _raise(self, refused: ScriptRefused, wanted: Sequence[tuple[str, str]], wait_s: float) -> NoReturn:
        space = self._space
        name, selector = wanted[(int(refused.words[0]) - 5) // 2] if refused.words else wanted[0]
        match refused.code:
            case "NOTFOUND" if wait_s > 0:
                raise errors.WaitTimeout(f"{name}: nothing was published in {wait_s:g} s", name=name, step=None)
            case "NOTFOUND":
                raise space.not_found(name)
            case "BEHIND":
                text = f"{name}: the newest step is {refused.words[2]}, wanted {_wanted(selector)}; waited {wait_s:g} s"
                raise errors.WaitTimeout(text, name=name, step=int(refused.words[2]))
            case "GONE":
                text = f"{name}: {_wanted(selector)} is gone; the newest step is {refused.words[2]}"
                raise errors.VersionGone(text, name=name, wanted=selector[1:], newest=int(refused.words[2]))
            case _:
                raise errors.TensorError(f"{name}: the registry refused: {refused}", name=name) from refused


def chosen(group: str, of: Snapshot, part: int | tuple[int, int] | None, names: Iterable[str] | None) -> Snapshot:
    """The tensors of one part of a step, of these names, or both. Raises BadInput, NotFound."""
    rank, world = part if isinstance(part, tuple) else (part, None)
    tensors, meta, parts = of, of.meta, of.parts
    if rank is not None:
        if check_count("rank", rank, 0) >= len(parts) or world not in (None, len(parts)):
            text = f"{group}: step {of.step} has {counted(len(parts), 'part')}, not part={part}"
            raise errors.NotFound(text, hint=f"part=0 to {len(parts) - 1}, or none for all", name=group)
        tensors, meta = parts[rank]
        parts = parts[rank : rank + 1]
    if isinstance(names, str) or not isinstance(names, Iterable | None):
        raise BadInput(f"names={names!r}: an iterable of names of tensors")
    wanted = list(tensors if names is None else names)
    if missing := [name for name in wanted if name not in tensors]:
        hint = f"it has {', '.join(get_close_matches(str(missing[0]), tensors) or list(tensors)[:5])}"
        raise errors.NotFound(f"{group}: no tensor {missing[0]!r} in step {of.step}", hint=hint, name=group)
    return Snapshot(
        {name: tensors[name] for name in wanted}, id=of.id, step=of.step, epoch=of.epoch, meta=meta,
        versions=dict.fromkeys(wanted, of.id),
        parts=[({name: one[name] for name in wanted if name in one}, said) for one, said in parts],
    )  # fmt: skip


def _header(block: PartBlock, held: HeldBlock) -> BlockHeader:
    """The header of a leased block. Raises Corrupt."""
    raw = memoryview(held.holder)[held.base : held.base + HEADER_BYTES]
    header = BlockHeader.unpack(raw, block.seg, settled=False)
    if header.version != block.version:
        where = f"{block.seg}+{block.offset}"
        text = f"{where}: holds version {header.version}, wanted version {block.version}"
        raise errors.Corrupt(text, file=where, field="version")
    return header


def _merged(parts: Parts) -> dict[str, Tensor]:
    return {name: tensor for tensors, _ in parts for name, tensor in tensors.items()}


def _manifest(raw: bytes, first: int, where: str) -> tuple[list[Layout], str, Json]:
    """Layouts, device and meta that the description before the tensors gives; ``first`` is where the payload begins.

    It is JSON and nothing else, since no content of shared memory is executed.
    """
    try:
        return _small_manifest(raw, first) if len(raw) <= _SMALL_MANIFEST_BYTES else _read_manifest(raw, first)
    except ValueError:
        raise errors.Corrupt(f"{where}: the manifest is not valid JSON", file=where, field="manifest") from None


def _read_manifest(raw: bytes, first: int) -> tuple[list[Layout], str, Json]:
    manifest: Fields = json.loads(raw)
    device = manifest.get("device", "")
    at = 0 if device else first
    layouts = [Layout(name, dtype, tuple(shape), at + off, n) for name, dtype, shape, off, n in manifest["tensors"]]
    return layouts, device, manifest["meta"]


_small_manifest = lru_cache(512)(_read_manifest)  # the versions of one name mostly have the same


def _wanted(selector: str) -> str:
    words = {"s": "step", "m": "step >=", "v": "version", "w": "version >="}
    return f"{words.get(selector[:1], '')} {selector[1:]}".strip()


def selector_of(
    *, version: int | None = None, step: int | None = None, min_step: int | None = None, min_version: int | None = None
) -> str:
    """The selector for get.lua of at most one of these. Raises BadInput for more, or for another type."""
    if version is None and step is None and min_step is None and min_version is None:
        return ""
    given = {"version": version, "step": step, "min_step": min_step, "min_version": min_version}
    chosen = [(what, value) for what, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise BadInput("give one of version, step, min_step, min_version")
    return "".join(f"{_SELECT[what]}{check_count(what, value, -STEP_MAX)}" for what, value in chosen)
