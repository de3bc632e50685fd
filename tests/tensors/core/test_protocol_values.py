"""Every call of the protocol by values: what it answers, what it refuses, and what is free afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from tests.proof.tensor_protocol import ProtocolMachine
from tests.tensors.core.calls import broken_rules

from rota.tensors.core import SLOTS_MAX
from rota.tensors.registry import ScriptRefused

FIELDS = {
    "request": "r", "name": "n", "kind": "t", "epoch": 0, "step": "", "label": "", "block": 1024, "count": 2,
    "file": 2048, "length": 10, "desc": "", "orphan": "keep", "retain": 1, "mutable": 0, "evictable": 0, "part": 0,
    "world": 1,
}  # fmt: skip


@pytest.fixture
def m() -> ProtocolMachine:
    machine = ProtocolMachine()
    for client in ("w", "x", "r"):
        assert machine.run("join", client, "") == []
    return machine


def reserve(m: ProtocolMachine, client: str = "w", **how: Any) -> list[Any]:
    row = {**FIELDS, "request": f"{how} {len(m.versions)} {m.ids}", **how}
    return m.run("reserve", client, *row.values())


def publish(m: ProtocolMachine, client: str = "w", **how: Any) -> int:
    v = reserve(m, client, **how)[0]
    m.run("commit", client, v)
    return v


def refused(m: ProtocolMachine, *call: Any) -> tuple[str, list[str]]:
    with pytest.raises(ScriptRefused) as caught:
        m.run(*call)
    assert broken_rules(m) == []
    return caught.value.code, caught.value.words


def refused_reserve(m: ProtocolMachine, client: str = "w", **how: Any) -> tuple[str, list[str]]:
    with pytest.raises(ScriptRefused) as caught:
        reserve(m, client, **how)
    return caught.value.code, caught.value.words


def test_places_are_given_block_after_block_and_then_in_a_new_file(m: ProtocolMachine) -> None:
    assert reserve(m, name="a") == [2, 1, "seg-1024-1", 0, 0]
    assert reserve(m, name="b") == [3, 2, "seg-1024-1", 1024, 0]
    assert reserve(m, name="c") == [5, 3, "seg-1024-4", 0, 0]
    assert reserve(m, name="d", block=4096) == [7, 4, "seg-4096-6", 0, 0]
    segment = m.segments["seg-1024-1"]
    assert (segment.blk, segment.count, segment.file, segment.next, segment.used) == (1024, 2, 2048, 2, 2)
    version = m.versions[2]
    assert (version.name, version.owner, version.length, version.st, version.refs) == ("a", "w", 10, "p", 0)


def test_a_block_that_was_given_back_is_used_before_a_new_one(m: ProtocolMachine) -> None:
    first = reserve(m, name="a")
    assert m.run("abort", "w", first[0]) == 1
    assert m.segments["seg-1024-1"].used == 0
    assert reserve(m, name="b")[2:4] == first[2:4]
    assert m.segments["seg-1024-1"].used == 1
    assert reserve(m, name="c")[2:4] == ["seg-1024-1", 1024]


def test_who_has_not_joined_is_refused(m: ProtocolMachine) -> None:
    v = publish(m)
    assert refused_reserve(m, "nobody") == ("UNJOINED", [])
    for call in (("commit", "nobody", v), ("get", "nobody", 1, "n", "")):
        assert refused(m, *call) == ("UNJOINED", [])
    assert m.run("abort", "nobody", v) == 0
    assert m.run("release", "nobody", v, 1) == 0
    assert m.run("sweep", "nobody", 5) == [0, 0, 0]
    assert "nobody" not in m.clients


def test_a_quota_bounds_the_files_and_is_reached_exactly(m: ProtocolMachine) -> None:
    m.quota = 4096
    for name in "abcd":
        reserve(m, name=name)
    assert refused_reserve(m, name="e") == ("QUOTA", ["4096", "4096"])
    assert [segment.used for segment in m.segments.values()] == [2, 2]


@pytest.mark.breaks_state
def test_slots_are_numbers_from_one_used_again_and_bounded(m: ProtocolMachine) -> None:
    v = publish(m, name="a")
    m.slots = SLOTS_MAX
    assert refused_reserve(m, name="b") == ("SLOTS", [])
    assert reserve(m, name="a")[1] == 1
    m.run("delete", "a", 1, v, 0, "", 0)
    assert m.slots_free == []  # another version of it is pending
    m.run("sweep", "w", 9)
    assert (m.slots_free, "a" in m.names) == ([1], False)
    assert reserve(m, "x", name="b")[1] == 1
    assert m.slots_free == []


def test_a_name_keeps_its_kind(m: ProtocolMachine) -> None:
    publish(m, kind="t")
    assert refused_reserve(m, kind="b") == ("KIND", ["t"])


def test_an_unnumbered_step_follows_the_published_one(m: ProtocolMachine) -> None:
    assert reserve(m)[4] == 0
    publish(m, step=7)
    assert reserve(m)[4] == 8
    assert reserve(m, step=9)[4] == 9
    assert m.names["n"].s == 7


def test_an_older_epoch_or_step_is_refused_when_it_asks(m: ProtocolMachine) -> None:
    publish(m, epoch=2, step=5)
    assert refused_reserve(m, epoch=1, step=9) == ("FENCED", ["2"])
    assert refused_reserve(m, epoch=2, step=4) == ("STALE", ["5"])
    assert reserve(m, epoch=2, step=5)[4] == 5
    assert reserve(m, epoch=3, step=1)[4] == 1


def test_a_fence_holds_for_its_label_and_all_below_and_never_falls(m: ProtocolMachine) -> None:
    assert m.run("fence", "a", 3) == 3
    assert m.run("fence", "a", 1) == 3
    assert m.run("fence", "a/b", 2) == 2
    for label in ("a", "a/b", "a/b/c"):
        assert refused_reserve(m, name=label, label=label, epoch=2) == ("FENCED", ["3"])
        assert reserve(m, name=label, label=label, epoch=3)[4] == 0
    assert reserve(m, name="z", label="ab", epoch=0)[4] == 0
    assert m.run("fence", "q", 0) == 0
    assert reserve(m, name="y", label="q", epoch=0)[4] == 0


def test_a_copy_of_what_another_machine_published_passes_the_fence_of_its_label(m: ProtocolMachine) -> None:
    m.run("fence", "a", 3)
    copy = reserve(m, label="a", epoch=2, direct=0, copied=1)[0]
    assert m.run("commit", "w", copy)[0] == "ready"
    assert refused_reserve(m, label="a", epoch=2) == ("FENCED", ["3"])
    publish(m, epoch=4)
    assert refused_reserve(m, label="a", epoch=3, direct=0, copied=1) == ("FENCED", ["4"]), (
        "the order of versions holds"
    )


def test_a_fence_raised_after_the_reservation_refuses_the_commit_and_gives_the_block_back(m: ProtocolMachine) -> None:
    v = reserve(m, label="a", epoch=1)[0]
    m.run("fence", "a", 2)
    assert refused(m, "commit", "w", v) == ("FENCED", ["2"])
    assert (m.versions, m.names, m.clients["w"].own) == ({}, {}, {})
    assert m.free == {1024: [("seg-1024-1", 0)]}
    assert refused(m, "commit", "w", v) == ("ABORTED", [])


def test_a_commit_tells_whether_it_is_the_first_and_what_is_kept(m: ProtocolMachine) -> None:
    a, b, c = (reserve(m, step=step, retain=2, epoch=1)[0] for step in (1, 2, 3))
    assert m.run("commit", "w", a) == ["ready", a, 1, 1, "", a, 0]
    assert m.run("commit", "w", a) == ["ready", a, 1, 0, "", a, 0]
    assert m.run("commit", "w", b) == ["ready", b, 1, 0, str(a), b, 0]
    assert m.names["n"].pend == 1
    assert m.run("commit", "w", c) == ["ready", c, 1, 0, str(b), c, 0]
    assert (m.names["n"].pend, m.names["n"].e, m.names["n"].s, m.names["n"].hist) == (0, 1, 3, [b])
    assert a not in m.versions and m.clients["w"].own == {}


def test_of_three_that_are_retained_the_oldest_goes(m: ProtocolMachine) -> None:
    a, b, c, d = (publish(m, step=step, retain=3) for step in (1, 2, 3, 4))
    assert (m.names["n"].hist, a in m.versions) == ([c, b], False)
    assert m.run("get", "r", 1, "n", "s2")[0][0] == b
    assert m.run("commit", "w", d)[4] == f"{c} {b}"


def test_the_later_of_two_writers_of_a_step_wins_and_the_other_learns_it(m: ProtocolMachine) -> None:
    a, b = reserve(m, "w", step=5)[0], reserve(m, "x", step=5)[0]
    m.run("commit", "x", b)
    assert refused(m, "commit", "w", a) == ("LOST", ["5"])
    c, d = reserve(m, "w", step=6)[0], reserve(m, "x", step=6)[0]
    m.run("commit", "w", c)
    assert m.run("commit", "x", d)[1] == d
    assert m.names["n"].v == d


def test_who_commits_after_a_later_step_is_stale_and_without_a_number_has_lost(m: ProtocolMachine) -> None:
    publish(m, step=1)
    named, auto = reserve(m, step=2)[0], reserve(m)[0]
    publish(m, "x", step=9)
    assert refused(m, "commit", "w", named) == ("STALE", ["9"])
    assert refused(m, "commit", "w", auto) == ("LOST", ["9"])
    assert m.names["n"].pend == 0


def test_a_newer_epoch_wins_with_a_lower_step_and_the_older_one_is_fenced(m: ProtocolMachine) -> None:
    old = reserve(m, epoch=1, step=9)[0]
    v = publish(m, "x", epoch=2, step=1)
    assert m.names["n"].v == v
    assert refused(m, "commit", "w", old) == ("FENCED", ["2"])


def test_what_an_owner_drops_goes_with_it_once_it_is_deleted(m: ProtocolMachine) -> None:
    v = publish(m, orphan="drop")
    kept = publish(m, name="k", orphan="keep")
    assert m.run("sweep", "w", 5) == [1, 0, 0, v, "n"]
    assert "w" in m.clients
    m.run("delete", "n", 1, v, 0, "", 0)
    assert m.clients["w"].drops == {}
    assert m.run("sweep", "w", 5) == [0, 0, 0]
    assert "w" not in m.clients and kept in m.versions


def test_a_version_that_was_replaced_is_dropped_with_nobody(m: ProtocolMachine) -> None:
    old = publish(m, orphan="drop")
    m.run("get", "r", 1, "n", "")
    publish(m, "x")
    assert m.clients["w"].drops == {old: "n"}
    assert m.run("sweep", "w", 5) == [0, 0, 0]
    assert "w" not in m.clients and old in m.versions
    m.run("release", "r", old, 1)
    assert old not in m.versions


def test_a_step_of_a_group_is_ready_when_its_last_part_is(m: ProtocolMachine) -> None:
    a = reserve(m, "w", step=1, part=0, world=2)[0]
    b = reserve(m, "x", step=1, part=1, world=2)[0]
    assert m.run("commit", "w", a) == ["part", 1, 1, 0, "", 0, 0]
    assert (m.versions[a].st, m.clients["w"].own, refused(m, "get", "r", 1, "n", "")) == ("q", {}, ("NOTFOUND", ["5"]))
    assert m.run("commit", "x", b) == ["ready", b, 1, 1, "", b, 0]
    assert m.run("commit", "w", a) == ["ready", b, 1, 0, "", b, 0]
    assert (m.names["n"].pend, m.parts["n"], m.versions[a].st, m.versions[b].parts) == (0, {}, "r", [a])
    row = [b, 1, 0, 1, b, b, "seg-1024-1", 1024, 1024, a, "seg-1024-1", 0, 1024]
    assert m.run("get", "r", 1, "n", "") == [row]
    m.run("release", "r", b, 1)
    m.run("delete", "n", 1, b, 0, "", 0)
    assert (m.versions, m.segments["seg-1024-1"].used) == ({}, 0)


def test_a_part_that_comes_again_takes_the_place_of_the_first(m: ProtocolMachine) -> None:
    first = publish(m, step=1, part=0, world=2)
    again = publish(m, step=1, part=0, world=2)
    assert (first in m.versions, m.parts["n"]) == (False, {(0, 1, 0): again})
    assert m.names["n"].pend == 1
    assert m.run("commit", "x", reserve(m, "x", step=1, part=1, world=2)[0])[0] == "ready"


def test_a_whole_step_ends_the_parts_of_earlier_ones_and_keeps_those_of_later_ones(m: ProtocolMachine) -> None:
    early = publish(m, step=1, part=0, world=2)
    late = publish(m, step=3, part=0, world=2)
    publish(m, "w", step=2, part=0, world=2)
    publish(m, "x", step=2, part=1, world=2)
    assert (early in m.versions, late in m.versions) == (False, True)
    assert (m.parts["n"], m.names["n"].pend, m.names["n"].s) == ({(0, 3, 0): late}, 1, 2)
    assert m.run("commit", "w", late) == ["part", 1, 1, 0, "", m.names["n"].v, 0]


def test_parts_of_an_older_epoch_are_fenced_by_a_part_of_a_newer_one(m: ProtocolMachine) -> None:
    old = reserve(m, epoch=1, step=1, part=0, world=2)[0]
    new = publish(m, "x", epoch=2, step=1, part=0, world=2)
    assert refused(m, "commit", "w", old) == ("FENCED", ["2"])
    publish(m, "x", epoch=2, step=1, part=1, world=2)
    assert new in m.versions


def test_a_whole_step_of_a_newer_epoch_ends_the_parts_of_the_older_one(m: ProtocolMachine) -> None:
    old = publish(m, epoch=1, step=7, part=0, world=2)
    publish(m, "w", epoch=2, step=1, part=0, world=2)
    publish(m, "x", epoch=2, step=1, part=1, world=2)
    assert (old in m.versions, m.parts["n"]) == (False, {})


def test_deleting_a_name_ends_its_parts(m: ProtocolMachine) -> None:
    part = publish(m, step=1, part=0, world=2)
    assert m.run("delete", "n", 1, 0, 0, "", 0)[0] == 0
    assert (part in m.versions, m.names, m.parts["n"]) == (False, {}, {})
    publish(m, epoch=0, step=1)


def test_a_reader_names_the_version_it_wants(m: ProtocolMachine) -> None:
    a = publish(m, step=3, retain=2)
    b = publish(m, step=5, retain=2)
    other = publish(m, name="o")
    own = reserve(m, "r", step=6)[0]
    for selector, v in (
        ("", b),
        (f"v{a}", a),
        ("s3", a),
        ("s5", b),
        ("m5", b),
        ("m4", b),
        (f"w{b}", b),
        (f"v{own}", own),
    ):
        assert m.run("get", "r", 1, "n", selector)[0][0] == v, selector
    assert refused(m, "get", "w", 1, "n", f"v{own}") == ("GONE", ["5", str(b), "5"])
    assert refused(m, "get", "r", 1, "n", f"v{other}") == ("GONE", ["5", str(b), "5"])
    assert refused(m, "get", "r", 1, "none", "v99") == ("GONE", ["5", "0", "0"])
    assert refused(m, "get", "r", 1, "n", "s4") == ("GONE", ["5", str(b), "5", "1"])
    assert refused(m, "get", "r", 1, "n", "s6") == ("BEHIND", ["5", str(b), "5", "1"])
    assert refused(m, "get", "r", 1, "n", "m6") == ("BEHIND", ["5", str(b), "5", "1"])
    assert refused(m, "get", "r", 1, "n", f"w{b + 1}") == ("BEHIND", ["5", str(b), "5", "1"])
    assert refused(m, "get", "r", 1, "n", "", "none", "") == ("NOTFOUND", ["7"])


def test_a_doomed_version_is_read_while_somebody_holds_it_and_not_after(m: ProtocolMachine) -> None:
    a = publish(m, step=1)
    m.run("get", "r", 1, "n", "")
    publish(m, step=2)
    assert m.run("get", "x", 1, "n", f"v{a}")[0][0] == a
    assert m.run("release", "r", a, 1, 99, 1) == 1
    assert m.run("release", "x", a, 2) == 0
    assert m.run("release", "x", a, 1) == 1
    assert refused(m, "get", "x", 1, "n", f"v{a}")[0] == "GONE"


def test_leases_are_counted_once_a_holder_and_end_with_their_newest_read(m: ProtocolMachine) -> None:
    a = publish(m)
    m.run("get", "r", 4, "n", "")
    m.run("get", "r", 2, "n", "")
    m.run("get", "x", 1, "n", "")
    assert (m.versions[a].refs, m.clients["r"].leases) == (2, {a: 4})
    assert m.run("release", "r", a, 2) == 0
    assert m.run("release", "r", a, 4) == 1
    assert m.versions[a].refs == 1


def test_a_label_is_checked_against_the_fences_on_it_and_above(m: ProtocolMachine) -> None:
    assert m.run("check", "a/b", 0) == 1
    m.run("fence", "a", 2)
    assert refused(m, "check", "a/b", 1) == ("FENCED", ["2"])
    assert m.run("check", "a/b", 2) == m.run("check", "b", 0) == 1


def test_a_name_without_a_version_is_not_there(m: ProtocolMachine) -> None:
    assert refused(m, "touch", "n") == ("NOTFOUND", [])
    reserve(m)
    assert refused(m, "touch", "n") == ("NOTFOUND", [])
    v = publish(m)
    assert m.run("touch", "n") == v
    assert m.run("gone", v, 99) == [99]


def test_a_delete_names_what_it_has_seen_and_spares_what_is_read(m: ProtocolMachine) -> None:
    v = publish(m, label="a", epoch=4, step=9)
    m.run("fence", "a", 3)
    assert refused(m, "delete", "n", 1, v, 0, "a", 2) == ("FENCED", ["3"])
    assert refused(m, "delete", "none", 1, v, 0, "", 0) == ("NOTFOUND", [])
    assert refused(m, "delete", "n", 2, v, 0, "", 0) == ("CHANGED", [str(v), "1"])
    assert refused(m, "delete", "n", 1, v + 1, 0, "", 0) == ("CHANGED", [str(v), "1"])
    m.run("get", "r", 1, "n", "")
    assert refused(m, "delete", "n", 1, v, 1, "", 0) == ("LEASED", [])
    pending = reserve(m, step=10, epoch=4, label="a")[0]
    assert m.run("delete", "n", 1, "", 0, "a", 3) == [v, 1]
    entry = m.names["n"]
    assert (entry.v, entry.e, entry.s, entry.hist, entry.part_epoch, entry.pend) == (0, 0, 0, [], -1, 1)
    assert refused(m, "delete", "n", 1, "", 0, "", 0) == ("NOTFOUND", [])
    assert m.run("commit", "w", pending)[3] == 1
    m.run("release", "r", v, 1)
    assert m.run("delete", "n", 1, pending, 1, "", 0)[0] == pending
    assert (m.names, m.versions, m.slots_free) == ({}, {}, [1])


def test_a_delete_of_an_idle_name_looks_at_every_retained_version(m: ProtocolMachine) -> None:
    a = publish(m, step=1, retain=2)
    m.run("get", "r", 1, "n", "")
    b = publish(m, step=2, retain=2)
    assert refused(m, "delete", "n", 1, b, 1, "", 0) == ("LEASED", [])
    m.run("release", "r", a, 1)
    assert m.run("delete", "n", 1, b, 1, "", 0)[0] == b
    assert m.versions == {}


def test_who_joins_again_holds_what_it_says_and_nothing_else(m: ProtocolMachine) -> None:
    a, b = publish(m, name="a"), publish(m, name="b")
    m.run("get", "r", 1, "a", "")
    assert m.run("join", "r", "", b, 5, 99, 6) == [99]
    assert (m.clients["r"].leases, m.versions[a].refs, m.versions[b].refs) == ({b: 5}, 0, 1)
    with pytest.raises(ValueError):
        m.run("join", "r", "", b)


def test_a_sweep_ends_leases_some_at_a_time_and_all_that_is_pending(m: ProtocolMachine) -> None:
    published = [publish(m, name=name) for name in "abc"]
    m.run("get", "x", 1, "a", "", "b", "", "c", "")
    pending = reserve(m, "x", name="d")[0]
    assert m.run("sweep", "x", 2) == [1, 2, 1]
    assert (pending in m.versions, [m.versions[v].refs for v in published]) == (False, [0, 0, 1])
    assert "x" in m.clients
    assert m.run("sweep", "x", 2) == [0, 1, 0]
    assert "x" not in m.clients and m.versions[published[2]].refs == 0


def test_a_holder_keeps_what_a_client_reads(m: ProtocolMachine) -> None:
    v = publish(m)
    m.run("get", "r", 3, "n", "")
    assert m.run("hold", "r", "h") == 1
    assert (m.clients["h"].leases, m.versions[v].refs) == ({v: 0}, 2)
    m.run("release", "r", v, 3)
    publish(m)
    assert v in m.versions
    assert m.run("sweep", "h", 9) == [0, 1, 0]
    assert v not in m.versions


def test_a_refusal_is_its_code_and_its_words() -> None:
    refusal = ScriptRefused("STALE", [5, "x"])
    assert (str(refusal), refusal.code, refusal.words) == ("STALE 5 x", "STALE", ["5", "x"])


def test_a_version_that_is_still_read_after_its_name_is_gone_has_no_slot(m: ProtocolMachine) -> None:
    v = publish(m, step=3)
    m.run("get", "r", 1, "n", "")
    m.run("delete", "n", 1, v, 0, "", 0)
    assert m.run("get", "x", 1, "n", f"v{v}") == [[v, 0, 0, 3, 0, v, "seg-1024-1", 0, 1024]]
