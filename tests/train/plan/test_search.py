"""The search against brute force on small instances, and the laws a best plan must keep."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace

import pytest

from rota.spec.errors import BadInput
from rota.train.plan.cost import step_time
from rota.train.plan.hardware import A100_80G_DGX, HostSpec
from rota.train.plan.memory import host_bytes, memory
from rota.train.plan.model import ModelShape, Offload, ParallelPlan, Recompute
from rota.train.plan.search import found_to_json, lower_bound_s, search
from rota.train.plan.space import CostTable, SearchRequest, Setting, cuts, divisors, plan_of, settings
from rota.train.plan.traffic import traffic

SEVEN_B = ModelShape(
    layers=32, hidden=4096, heads=32, seq=2048, vocab=32000, ffn=11008, gated=True, tied=False, name="7B"
)
SEEDS = tuple(range(1000)) if os.environ.get("ROTA_DEEP") else (1, 2, 4, 18, 19, 32, 49, 54)
"""Without ROTA_DEEP: small ones, among them some where state goes to the host, or may and does not."""


def seven_b(**changes: object) -> SearchRequest:
    question = SearchRequest(model=SEVEN_B, hardware=A100_80G_DGX, gpus=8, memory_gib=36, batch=16)
    return replace(question, **changes)  # type: ignore[arg-type]


def small_question(seed: int) -> SearchRequest:
    """A random instance of a few layers on a few devices, with memory that may or may not bind."""
    rng = random.Random(seed)
    model = ModelShape(
        layers=rng.choice([1, 2, 3, 4]),
        hidden=rng.choice([512, 1024]),
        heads=rng.choice([2, 8]),
        seq=rng.choice([256, 2048, 16384]),
        vocab=rng.choice([1000, 32000]),
        attention=rng.choice(["plain", "flash"]),
    )
    return SearchRequest(
        model=model,
        hardware=A100_80G_DGX,
        gpus=rng.choice([1, 2, 4]),
        memory_gib=2 + rng.choice([0.05, 0.2, 0.5, 1.0, 4.0]),
        batch=rng.choice([2, 4]),
        allow=rng.choice([(), ("offload",), ("cp",)]),
    )


def plans_of(question: SearchRequest, setting: Setting) -> list[ParallelPlan]:
    """Every cut of the family with every recompute of every layer; the order inside a chunk does not count."""
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    return [
        plan_of(question.dtype, setting, cut, [tuple((kind, 1) for kind in chunk) for chunk in chosen])
        for cut in cuts(question.model.layers, setting.pp * setting.interleave)
        for chosen in itertools.product(*(itertools.combinations_with_replacement(kinds, size) for size in cut))
    ]


def brute_force_s(question: SearchRequest) -> float | None:
    """The least time of all plans that fit, with offload allowed when nothing fits without."""
    found = best_of_all_s(question)
    return found or best_of_all_s(replace(question, allow=(*question.allow, "offload")))


def best_of_all_s(question: SearchRequest) -> float | None:
    """Settings, cuts, recompute and offload, whatever the space takes for legal: the rules decide."""
    fits = [
        step_time(plan, question.model, question.hardware).total_s
        for setting in settings(question)
        if not setting.offloads
        for bare in plans_of(question, setting)
        for plan in with_offloads(question, bare)
        if max(stage.total for stage in memory(plan, question.model)) <= question.budget_bytes
    ]
    return min(fits, default=None)


def with_offloads(question: SearchRequest, plan: ParallelPlan) -> list[ParallelPlan]:
    """The plan with its state here or there, where the rules let it and the host has room."""
    kinds: tuple[Offload, ...] = ("none", "optimizer_cpu", "all_cpu", "all_nvme")
    made = [
        replace(
            plan,
            layers=tuple(replace(layer, offload=kind) for layer in plan.layers),
            embed=replace(plan.embed, offload=kind),
            head=replace(plan.head, offload=kind),
        )
        for kind in (kinds if "offload" in question.allow else kinds[:1])
    ]
    room = question.hardware.host.memory_gib * 2**30
    return [one for one in made if one.check(question.model) == () and host_bytes(one, question.model) <= room]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_search_finds_what_brute_force_finds(seed: int) -> None:
    question = small_question(seed)
    found, best_s = search(question, top=1), brute_force_s(question)
    if best_s is None:
        assert found.best == ()
        return
    assert found.best[0].step.total_s == pytest.approx(best_s, rel=1e-12)
    assert found.certificate.gap_pct == 0.0
    assert found.certificate.lower_bound_s == pytest.approx(best_s, rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_no_plan_of_a_setting_is_faster_than_its_bound(seed: int) -> None:
    question = small_question(seed)
    table = CostTable(question)
    for setting in settings(question):
        bound_s = lower_bound_s(question, setting, table)
        for cut in cuts(question.model.layers, setting.pp * setting.interleave):
            plan = plan_of(question.dtype, setting, cut, [(("none", size),) for size in cut])
            assert step_time(plan, question.model, question.hardware).total_s >= bound_s * (1 - 1e-12)


def test_the_plan_found_keeps_every_rule_and_the_memory_limit() -> None:
    found = search(seven_b())
    assert len(found.best) == 5
    for one in found.best:
        assert one.plan.check(SEVEN_B) == ()
        assert one.plan.global_batch == 16
        assert one.memory_bytes <= (36 - 2) * 2**30
    times = [one.step.total_s for one in found.best]
    assert times == sorted(times)


def test_a_pipeline_with_fewer_micro_batches_than_stages_has_a_schedule_that_can_run() -> None:
    few = seven_b(pins={"pp": 8}, batch=4, memory_gib=80)
    best = search(few, top=1).best[0].plan
    assert (best.schedule, best.check(SEVEN_B)) == ("gpipe", ())


@pytest.mark.slow
def test_more_memory_a_faster_link_or_fewer_pins_never_give_a_slower_plan() -> None:
    base = search(seven_b(), top=1).best[0].step.total_s
    links = tuple(replace(level, gb_s=2 * level.gb_s) for level in A100_80G_DGX.levels)
    assert search(seven_b(memory_gib=80), top=1).best[0].step.total_s <= base
    assert search(seven_b(hardware=replace(A100_80G_DGX, levels=links)), top=1).best[0].step.total_s <= base
    assert search(seven_b(pins={"tp": 8}), top=1).best[0].step.total_s >= base


def test_a_long_sequence_is_split_over_context_ranks_when_that_is_faster_and_a_short_one_is_not() -> None:
    """One sequence of 64 Ki tokens on eight devices: without context ranks only tensor ranks could share it."""
    long = seven_b(model=replace(SEVEN_B, seq=65536, layers=4), batch=1, memory_gib=80)
    best = search(long, top=1).best[0]
    assert best.plan.mesh.cp > 1
    assert best.plan.check(long.model) == ()
    without = search(replace(long, pins={"cp": 1}), top=1).best[0]
    assert best.step.total_s < without.step.total_s
    assert all(one.cp == 1 for one in settings(seven_b()))
    assert {one.cp for one in settings(seven_b(pins={"cp": 2}))} == {2}


def test_state_goes_to_the_host_when_nothing_else_fits_or_when_it_is_allowed() -> None:
    """7B on two devices of 40 GiB: 18 bytes a parameter are 113 GiB, more than the 76 that both have."""
    tight = seven_b(gpus=2, memory_gib=40, batch=2)
    best = search(tight, top=1).best[0]
    assert best.plan.layers[0].offload == "all_cpu"
    assert best.step.breakdown_s["offload"] > 0
    assert best.memory_bytes <= 38 * 2**30 < host_bytes(best.plan, SEVEN_B)
    no_host = replace(A100_80G_DGX, host=HostSpec())
    assert search(replace(tight, hardware=no_host)).best == ()
    small = replace(A100_80G_DGX, host=replace(A100_80G_DGX.host, memory_gib=20))
    assert search(replace(tight, hardware=small)).best == (), "the host is full, too"
    allowed = search(seven_b(allow=("offload",)), top=1)
    assert allowed.best[0].plan.layers[0].offload == "none", "it fits without and is faster so"
    assert allowed.certificate.enumerated > search(seven_b(), top=1).certificate.enumerated


def test_a_pin_is_kept() -> None:
    for one in search(seven_b(pins={"pp": 2, "zero": 1})).best:
        assert one.plan.mesh.pp == 2
        assert one.plan.layers[0].zero == 1


@pytest.mark.slow
def test_when_memory_binds_recompute_is_paid_for_it() -> None:
    plain = replace(SEVEN_B, attention="plain")
    document = found_to_json(search(seven_b(model=plain, memory_gib=20)), seven_b(model=plain, memory_gib=20))
    assert document["binds"] == "memory"
    assert document["predicted"]["memory_gib"] <= 18
    assert sum(document["predicted"]["breakdown_s"].values()) == pytest.approx(document["predicted"]["iteration_s"])


def test_the_bytes_of_collectives_are_told_where_they_are_counted() -> None:
    flat, piped = seven_b(pins={"pp": 1}), seven_b(pins={"pp": 2})
    told = found_to_json(search(flat, top=1), flat)["predicted"]["bytes_by_collective"]
    sent = traffic(search(flat, top=1).best[0].plan, flat.model)
    assert sum(told.values()) == sum(one.size_bytes for one in sent) > 0
    assert told.keys() == {one.operation for one in sent}
    assert found_to_json(search(piped, top=1), piped)["predicted"]["bytes_by_collective"] is None


def test_a_model_that_fits_nowhere_gives_no_plan_and_says_why() -> None:
    document = found_to_json(search(seven_b(gpus=1, memory_gib=10)), seven_b(gpus=1, memory_gib=10))
    assert document["plan"] is None
    assert document["reason"] == "out_of_memory"


def test_a_search_that_is_stopped_says_that_it_is_not_complete() -> None:
    bounds = sum(1 for _ in settings(seven_b()))
    early, late = itertools.count(), itertools.count()
    none = search(seven_b(), stop=lambda: next(early) >= 3).certificate
    assert (none.complete, none.enumerated, none.scored, none.gap_pct) == (False, 3, 0, 0.0)
    found = search(seven_b(), stop=lambda: next(late) >= bounds + 40)
    assert not found.certificate.complete and 0 < found.certificate.scored < 40
    assert found.certificate.lower_bound_s <= found.best[0].step.total_s if found.best else True


def test_a_search_of_many_cuts_is_stopped_between_two_of_them() -> None:
    question = seven_b(model=replace(SEVEN_B, layers=2000), pins={"pp": 2, "tp": 4, "micro_batch": 1}, memory_gib=1e6)
    bounds, calls = sum(1 for _ in settings(question)), itertools.count()
    found = search(question, stop=lambda: next(calls) >= bounds + 5)
    assert next(calls) == bounds + 6 and not found.certificate.complete and found.certificate.scored == 0


def test_sizes_share_a_table_and_look_only_for_what_beats_the_size_before() -> None:
    eight = seven_b(model=replace(SEVEN_B, layers=8))
    sixteen, table = replace(eight, gpus=16), CostTable(eight)
    first = search(eight, table=table)
    best_s = first.best[0].step.total_s
    assert first == search(eight)
    assert search(sixteen, table=table).best == search(sixteen).best
    faster = search(sixteen, top=1, table=table, under_s=best_s)
    assert faster.best[0].step.total_s < best_s and faster.certificate.gap_pct == 0.0
    none = search(eight, table=table, under_s=best_s)
    assert none.best == () and none.certificate.complete


def test_divisors_are_all_of_them_in_order() -> None:
    assert all(divisors(n) == [one for one in range(1, n + 1) if n % one == 0] for n in range(1, 200))


@pytest.mark.slow
def test_the_same_question_gives_the_same_answer() -> None:
    assert search(seven_b()) == search(seven_b())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, "gpus: 0"),
        ({"memory_gib": 1.0}, "leaves nothing"),
        ({"pins": {"tq": 2}}, "pin tq"),
        ({"model": replace(SEVEN_B, heads=33)}, "heads 33"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        search(seven_b(**changes))
