"""Random calls on a registry, for the machine alone and for the machine beside the scripts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from tests.proof.tensor_protocol import ProtocolMachine

from rota.tensors.registry import Registry, ScriptRefused, VersionRequest

CLIENTS = ("c1", "c2", "c3")
NAMES = ("a", "b", "g", "ch/#1", "ch/#2")
BLOCKS = ((1024, 2), (8192, 1))

_client = st.sampled_from(CLIENTS)
_name = st.sampled_from(NAMES)
_asks = st.builds(
    lambda name, epoch, step, label, block, orphan, retain, part, direct, copied: VersionRequest(
        name=name,
        kind="g" if name[0] in "gc" else "t",
        epoch=epoch,
        step=step,
        label=label,
        block=block[0],
        count=block[1],
        file=block[0] * block[1],
        payload=100,
        desc="",
        orphan=orphan,
        retain=retain,
        part=part if name == "g" else 0,
        world=2 if name == "g" else 1,
        direct=direct and name != "g",
        copied=copied,
    ),
    _name,
    st.integers(0, 3),
    st.none() | st.integers(-1, 3),
    st.sampled_from(["", "j", "j/a/0", "k"]),
    st.sampled_from(BLOCKS),
    st.sampled_from(["keep", "keep", "drop"]),
    st.integers(1, 3),
    st.integers(0, 1),
    st.booleans(),
    st.booleans(),
)
_index = st.integers(0, 30)
call = st.one_of(
    st.tuples(st.just("join"), _client),
    st.tuples(st.just("publish"), _client, _asks),
    st.tuples(st.just("reserve"), _client, _asks),
    st.tuples(st.just("reserve_again"), _client),
    st.tuples(st.just("commit"), _index),
    st.tuples(st.just("commit"), _index),
    st.tuples(st.just("claim"), _client, _asks),
    st.tuples(st.just("claim"), _client, _asks),
    st.tuples(st.just("stock"), _client, st.sampled_from(BLOCKS), st.integers(0, 3), st.none() | _index),
    st.tuples(st.just("settle"), _index, st.sampled_from(["new", "new", "none", "deleted"])),
    st.tuples(st.just("claims"), _client),
    st.tuples(st.just("abort"), _index),
    st.tuples(st.just("get"), _client, _name, st.sampled_from(["", "", "s1", "s2", "m2", "w5"])),
    st.tuples(st.just("get_version"), _client, _index, st.sampled_from("vh")),
    st.tuples(st.just("reap"), _index),
    st.tuples(st.just("release"), _index, st.booleans()),
    st.tuples(
        st.just("delete"),
        _name,
        st.sampled_from([0, 0, 0, 1]),
        st.booleans(),
        st.sampled_from(["", "", "j/a", "k"]),
        st.integers(0, 3),
    ),
    st.tuples(st.just("sweep"), _client, st.integers(1, 3)),
    st.tuples(st.just("hold"), _client),
    st.tuples(st.just("gone")),
    st.tuples(st.just("touch"), _name),
    st.tuples(st.just("check"), st.sampled_from(["", "j", "j/a/0", "k"]), st.integers(0, 3)),
    st.tuples(st.just("fence"), st.sampled_from(["j", "j/a", "k"]), st.integers(0, 3)),
)


class Driver:
    """Makes the calls on one registry and remembers what later calls refer to."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.reserved: list[tuple[str, int, str]] = []
        self.leases: list[tuple[str, int, int]] = []
        self.slots: dict[str, int] = {}
        self.last: dict[str, tuple[str, VersionRequest]] = {}
        self.claimed: list[tuple[str, str, int]] = []
        self.spares: list[tuple[str, int]] = []
        self.seq = self.requests = self.own = 0
        for client in CLIENTS:
            registry.join(client, "")

    def make(self, what: tuple[Any, ...]) -> Any:
        """The reply, or the refusal, of one call."""
        try:
            return getattr(self, what[0])(*what[1:])
        except ScriptRefused as refused:
            return refused.code, refused.words

    def join(self, client: str) -> Any:
        return self.registry.join(client, "", [(v, seq) for c, v, seq in self.leases if c == client][-2:])

    def reserve(self, client: str, ask: VersionRequest) -> Any:
        self.requests += 1
        self.last[client] = (f"r{self.requests}", ask)
        done = self.registry.reserve(client, *self.last[client])
        self.reserved.append((client, done.version, ask.name))
        self.slots[ask.name] = done.slot
        return done

    def publish(self, client: str, ask: VersionRequest) -> Any:
        done = self.reserve(client, ask)
        return done, self.registry.commit(client, done.version)

    def claim(self, client: str, ask: VersionRequest) -> Any:
        plain = replace(ask, retain=1, orphan="keep")
        done = self.registry.commit(client, self.reserve(client, plain).version, claim=True)
        if done.own:
            self.claimed.append((client, ask.name, done.own))
        return done

    def stock(self, client: str, block: tuple[int, int], n: int, used: int | None) -> Any:
        words = list[tuple[int, int, int, int, str]]()
        if used is not None and self.spares and self.claimed:
            client, spare = self.spares[used % len(self.spares)]
            words = [(spare, self._own_id(), 7, 100, self.claimed[used % len(self.claimed)][1])]
        done = self.registry.stock(client, (*block, block[0] * block[1]), n, words)
        self.spares += [(client, spare) for spare, *_ in done]
        return done

    def _own_id(self) -> int:
        """An id that a claim gave, or one that no version has."""
        self.own += 1
        return (self.claimed[-1][2] if self.claimed else 1 << 40) + self.own

    def settle(self, index: int, how: str) -> Any:
        if not self.claimed:
            return None
        client, name, base = self.claimed[-1 - index % len(self.claimed)]
        own = [spare for who, spare in self.spares if who == client]
        if how != "new" or not own:
            return self.registry.settle(name, base, 0, "" if how == "deleted" else 0, 0, 0, "")
        return self.registry.settle(name, base, own[index % len(own)], self._own_id(), 1000 + self.own, 100, "")

    def claims(self, client: str) -> Any:
        names, blocks = self.registry.claims(client)
        return sorted(names), sorted(blocks)

    def reserve_again(self, client: str) -> Any:
        return self.registry.reserve(client, *self.last[client]) if client in self.last else None

    def commit(self, index: int) -> Any:
        if self.reserved:
            client, version, _ = self.reserved[-1 - index % len(self.reserved)]
            return self.registry.commit(client, version)
        return None

    def abort(self, index: int) -> Any:
        if self.reserved:
            client, version, _ = self.reserved[-1 - index % len(self.reserved)]
            return self.registry.abort(client, version)
        return None

    def get(self, client: str, name: str, selector: str) -> Any:
        self.seq += 1
        done = self.registry.get(client, self.seq, [(name, selector)])
        self.leases += [(client, one.version, self.seq) for one in done]
        return done

    def get_version(self, client: str, index: int, mode: str) -> Any:
        if not self.reserved:
            return None
        _, version, name = self.reserved[index % len(self.reserved)]
        return self.get(client, name, f"{mode}{version}")

    def reap(self, index: int) -> Any:
        """All but one of those that were ever reserved, which somebody notes."""
        noted = self.reserved[index % len(self.reserved)] if self.reserved else None
        return self.registry.reap(one[1] for one in self.reserved if one is not noted)

    def check(self, label: str, epoch: int) -> Any:
        return self.registry.check(label, epoch)

    def touch(self, name: str) -> Any:
        return self.registry.touch(name)

    def release(self, index: int, right: bool) -> Any:
        if not self.leases:
            return None
        client, version, seq = self.leases[index % len(self.leases)]
        return self.registry.release(client, [(version, seq if right else seq + 1)])

    def delete(self, name: str, moved: int, idle: bool, label: str, epoch: int) -> Any:
        return self.registry.delete(name, self.slots.get(name, 0) + moved, idle=idle, label=label, epoch=epoch)

    def sweep(self, client: str, n_max: int) -> Any:
        return self.registry.sweep(client, n_max)

    def gone(self) -> Any:
        return self.registry.gone(version for _, version, _ in self.reserved)

    def hold(self, client: str) -> Any:
        known = client in getattr(self.registry.machine, "clients", {client})
        return self.registry.hold(client, f"{client}.fork") if known else None

    def fence(self, label: str, epoch: int) -> Any:
        return self.registry.fence(label, epoch)


def broken_rules(machine: ProtocolMachine) -> list[str]:
    """Which invariants the content of a machine breaks: I1, I2, I4 and what follows from the life of a version."""
    bad: list[str] = []
    for v, version in machine.versions.items():
        refs = sum(v in client.leases for client in machine.clients.values())
        if refs != version.refs:
            bad.append(f"I1: version {v} counts {version.refs} refs of {refs}")
        if version.st == "d" and refs == 0 and v not in machine.limbo:
            bad.append(f"I1: version {v} is doomed, unleased, and still there")
    bad += [f"I1: limbo holds version {v}, which is gone" for v in machine.limbo - machine.versions.keys()]
    for name, client in machine.clients.items():
        bad += [f"I1: {name} leases version {v}, which is gone" for v in client.leases if v not in machine.versions]
    places = [(version.seg, version.off) for version in machine.versions.values()]
    places += [place for blocks in machine.free.values() for place in blocks]
    every = [(seg, n * s.blk) for seg, s in machine.segments.items() for n in range(s.next)]
    if sorted(places) != sorted(every):
        bad.append(f"I2: blocks {sorted(every)} are held as {sorted(places)}")
    for name, entry in machine.names.items():
        bad += [f"I3: {name} shows version {v}" for v in [entry.v, *entry.hist] if v and machine.versions[v].st != "r"]
        on_the_way = sum(version.name == name and version.st in "pq" for version in machine.versions.values())
        if on_the_way != entry.pend:
            bad.append(f"I2: {name} counts {entry.pend} pending of {on_the_way}")
    slots = [entry.slot for entry in machine.names.values()] + machine.slots_free
    if sorted(slots) != list(range(1, machine.slots + 1)):
        bad.append(f"slots {sorted(slots)} of {machine.slots}")
    return bad
