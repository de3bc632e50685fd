"""Replay cases of policies: fair shares, reclaim, borrowing, life cycle, gangs, affinity, migration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from rota.cluster.core import quota
from rota.cluster.core.cycle import decide
from rota.cluster.core.events import JobArrived, JobHolds, apply
from rota.cluster.core.jobs import JobAsk, Shape, Slot
from rota.cluster.core.profile import Admit, Profile
from rota.cluster.core.quota import QueueDemand, ReclaimRules, reclaim
from rota.cluster.core.state import State
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import Queue
from rota.spec.resources import Device, Node
from tests.proof.cases.compare import Mismatch, Unsupported, expect_equal
from tests.proof.cases.drf import fill, tasks_after
from tests.proof.cases.reference import (
    AffinityNode,
    GraceBook,
    Life,
    LifeEvent,
    asset_fluid,
    ceei,
    choose_by_affinity,
    choose_migration,
    dominant,
    drf_fluid,
    live,
)

Raw = dict[str, Any]
TOLERANCE = Fraction(1, 10**6)


def policy_case(case: Raw, profile: Profile) -> None:
    """Replay one case. Raises Mismatch or Unsupported."""
    play = KINDS.get(case.get("kind", ""))
    if play is None:
        raise Unsupported(f"kind {case.get('kind')!r}")
    play(case, profile)


def number(value: Any) -> Fraction:
    """A number of a case file: an integer, a decimal, or a fraction such as ``"2/3"``, exactly."""
    return Fraction(str(value))


def amounts(raw: Mapping[str, Any]) -> dict[str, Fraction]:
    """Numbers by name."""
    return {name: number(value) for name, value in raw.items()}


def expect_numbers(
    what: str, expected: Mapping[str, Any], got: Mapping[str, Any], within: Fraction = TOLERANCE
) -> None:
    """Raise Mismatch unless every expected number is matched; names that are absent on either side count as 0."""
    for name in dict.fromkeys((*expected, *got)):
        wanted, found = number(expected.get(name, 0)), Fraction(got.get(name, 0))
        if abs(wanted - found) > within:
            raise Mismatch(f"{what} of {name}: expected {wanted}, got {_shown(found)}")


def _shown(value: Fraction) -> str:
    return str(value) if value.denominator < 1000 else f"{float(value):.6g}"


def _each(case: Raw, checks: Mapping[str, Callable[[Any], None]]) -> None:
    """Run the check of every expected key; keys with text for people are skipped."""
    for key, wanted in case["expect"].items():
        check = checks.get(key)
        if check is not None:
            check(wanted)
        elif not isinstance(wanted, str):
            raise Unsupported(f"expect.{key}")


def _equal(values: Mapping[str, Any]) -> dict[str, Callable[[Any], None]]:
    """Checks that expect these values, by key."""
    return {key: lambda wanted, key=key: expect_equal(key, wanted, values[key]) for key in values}


# -- dominant resource fairness --


def _drf(case: Raw, profile: Profile) -> None:
    given = case["given"]
    capacity = amounts(given["cluster"])
    demands = {user: amounts(demand) for user, demand in given["demands"].items()}
    weights = amounts(given["weights"]) if "weights" in given else None
    tie = re.search(r"first tie goes to (\w+)", str(given.get("progressive_filling", "")))
    steps = fill(capacity, demands, weights=weights, first=tie.group(1) if tie else None)
    tasks = tasks_after(steps, list(demands))
    final = steps[-1].shares if steps else {}

    def check_steps(wanted: list[Raw]) -> None:
        expect_equal("number of steps", len(wanted), len(steps))
        for number_, (want, step) in enumerate(zip(wanted, steps), 1):
            if "user" in want:
                expect_equal(f"user of step {number_}", want["user"], step.user)
            for key, value in want.items():
                if key.startswith("dom_"):
                    expect_numbers(f"step {number_} share", {key[4:]: value}, {key[4:]: step.shares[key[4:]]})
            if "used" in want:
                expect_numbers(f"step {number_} use", want["used"], step.used)

    def check_half(wanted: Raw) -> None:
        half = [n for n, step in enumerate(steps, 1) if set(step.shares.values()) == {Fraction(1, 2)}]
        got = tasks_after(steps[: half[0]], list(demands)) if half else {}
        expect_numbers("tasks at equal half shares", wanted, got)

    def check_allocation(wanted: Raw) -> None:
        for user, want in wanted.items():
            expect_numbers(f"allocation of {user}", want, {r: n * tasks[user] for r, n in demands[user].items()})

    _each(
        case,
        {
            "tasks": lambda wanted: expect_numbers("tasks", wanted, tasks),
            "tasks_at_exhaustion": lambda wanted: expect_numbers("tasks", wanted, tasks),
            "allocation": check_allocation,
            "dominant": lambda wanted: expect_equal(
                "dominant", wanted, {user: dominant(capacity, demands[user])[0] for user in wanted}
            ),
            "dominant_share": lambda wanted: expect_numbers("dominant share", wanted, final),
            "steps": check_steps,
            "tasks_when_shares_first_equal_half": check_half,
        },
    )


RULES: dict[str, Callable[[quota.Amounts, Mapping[str, quota.Amounts]], dict[str, Fraction]]] = {
    "drf": drf_fluid,
    "asset_fair": asset_fluid,
    "asset": asset_fluid,
    "ceei": ceei,
}


def _drf_property(case: Raw, profile: Profile) -> None:
    given = case["given"]
    capacity = amounts(given["cluster"])
    raw = given.get("demands_true") or given["demands"]
    truth = {user: amounts(demand) for user, demand in raw.items()}
    lied = {**truth, **{user: amounts(demand) for user, demand in (given.get("lie") or {}).items()}}
    for key, wanted in case["expect"].items():
        if isinstance(wanted, str) and not re.fullmatch(r"-?\d+(/\d+|\.\d+)?", wanted):
            continue
        _drf_property_key(key, wanted, capacity, truth, lied)


def _drf_property_key(
    key: str,
    wanted: Any,
    capacity: dict[str, Fraction],
    truth: dict[str, dict[str, Fraction]],
    lied: dict[str, dict[str, Fraction]],
) -> None:
    if match := re.fullmatch(r"(\w+?)_(tasks|after_lie)", key):
        rule = RULES.get(match.group(1))
        if rule is None:
            raise Unsupported(f"expect.{key}")
        expect_numbers(key, wanted, rule(capacity, lied if match.group(2) == "after_lie" else truth))
    elif match := re.fullmatch(r"(\w+?)_gain_under_(\w+)", key):
        user, rule = match.group(1), RULES.get(match.group(2))
        if rule is None or user not in truth:
            raise Unsupported(f"expect.{key}")
        before = rule(capacity, truth)[user]
        got = rule(capacity, lied)[user]
        after = min(got * lied[user][r] / need for r, need in truth[user].items() if need > 0)
        gain = after - before
        if isinstance(wanted, bool):
            expect_equal(key, wanted, gain > TOLERANCE)
        else:
            expect_numbers(key, {user: wanted}, {user: gain})
    elif match := re.fullmatch(r"(\w+?)_dominant_share_continuous", key):
        tasks = RULES[match.group(1)](capacity, truth)
        got = {user: dominant(capacity, truth[user])[1] * tasks[user] for user in truth}
        expect_numbers(key, wanted if isinstance(wanted, dict) else dict.fromkeys(truth, wanted), got)
    elif match := re.fullmatch(r"allocation_(\w+)", key):
        tasks = drf_fluid(capacity, truth)
        expect_numbers(key, wanted, {u: truth[u].get(match.group(1), Fraction(0)) * tasks[u] for u in truth})
    else:
        raise Unsupported(f"expect.{key}")


# -- queues --


def _capacity(case: Raw, profile: Profile) -> None:
    given = case["given"]
    off = set(given.get("non_preemptable") or ())
    parents = {q["name"]: q["parent"] for q in given["queues"]}
    queues = [
        QueueDemand(
            name=q["name"],
            parent=q["parent"],
            guaranteed=number(q["guaranteed"]),
            limit=number(q["max"]),
            used=number(q["used"]),
            pending=number(q.get("pending", 0)),
            reserved=number(q.get("reserved", 0)),
            preemptible=not off & {q["name"], _path(parents, q["name"])},
        )
        for q in given["queues"]
    ]
    rules = ReclaimRules(
        max_per_round=number(given.get("max_preemption_per_round", 1)),
        natural_termination=number(given.get("natural_termination_factor", 1)),
        dead_zone=number(given.get("max_ignored_over_capacity", 0)),
        observe_only=bool(given.get("observe_only", False)),
    )
    got = reclaim(queues, rules)
    within = number(given.get("rounding_tolerance", 1)) * number(given.get("container_size", 1))
    book = GraceBook(wait_s=float(given.get("wait_before_kill_ms", 0)) / 1000)
    for key, wanted in case["expect"].items():
        if key == "preempt":
            expect_numbers("preempt", wanted, got, within)
        elif match := re.fullmatch(r"at_(\d+)ms", key):
            _check_round(key, wanted, book.round(got, int(match.group(1)) / 1000), within)
        elif not isinstance(wanted, str):
            raise Unsupported(f"expect.{key}")


def _path(parents: Mapping[str, str | None], name: str) -> str:
    """Dotted path below the root: ``A.B``."""
    parent = parents[name]
    return name if parent is None or parents.get(parent) is None else f"{_path(parents, parent)}.{name}"


def _check_round(key: str, wanted: Raw, got: tuple[dict[str, Fraction], dict[str, Fraction]], within: Fraction) -> None:
    notify, kill = got
    for word, value in wanted.items():
        found = {"notify": notify, "notify_again": notify, "kill": kill}.get(word)
        if found is None:
            raise Unsupported(f"expect.{key}.{word}")
        if isinstance(value, dict):
            expect_numbers(f"{key} {word}", value, found, within)
        else:
            expect_numbers(f"{key} {word}", {"all": value}, {"all": sum(found.values(), Fraction(0))}, within)


def _borrowing(case: Raw, profile: Profile) -> None:
    given = case["given"]
    key = next(k for k in given if k.startswith("usage_"))
    mine = key.removeprefix("usage_")
    cohort: Raw = given["cohort"]
    none_lent = set(re.findall(r"(\w+)\s+lending_?[lL]imit\s*(?:=|of)?\s*0\b", str(case.get("notes", ""))))
    lendable: dict[str, Fraction] = {}
    for member in cohort.values():
        limits = member.get("lending_limit") or {}
        for r, nominal in amounts(member["nominal"]).items():
            lent = Fraction(0) if r in none_lent else min(nominal, number(limits.get(r, nominal)))
            lendable[r] = lendable.get(r, Fraction(0)) + lent
    used = amounts(given[key])
    for r, extra in amounts(given.get("extra_request") or {}).items():
        used[r] = used.get(r, Fraction(0)) + extra
    got = quota.borrowing_share(amounts(cohort[mine]["nominal"]), lendable, used, number(cohort[mine].get("weight", 1)))
    values = {"dominant_resource": got.resource, "share_permille": got.share_permille, "borrowing": got.borrowing}
    _each(case, _equal(values))


def _fair_share(case: Raw, profile: Profile) -> None:
    given = case["given"]

    def unlimited(value: Any) -> Fraction | None:
        return None if value is None or number(value) == -1 else number(value)

    claims = {
        name: quota.ShareRequest(
            deserved=Fraction(0) if q.get("deserved") is None else unlimited(q["deserved"]),
            request=number(q["request"]),
            most=unlimited(q.get("max_allowed")),
            weight=number(q.get("over_quota_weight") or 0),
            priority=int(q.get("priority") or 100),
        )
        for name, q in given["queues"].items()
    }
    got, left = quota.fair_shares(number(given["total_gpus"]), claims)
    exact = all(share.denominator == 1 for share in got.values())
    _each(
        case,
        {
            "fair_share": lambda wanted: _check_shares(wanted, got, exact),
            "remaining": lambda wanted: expect_numbers(
                "remaining", {"all": wanted}, {"all": left}, TOLERANCE if exact else Fraction(1)
            ),
        },
    )


def _check_shares(wanted: Mapping[str, Any], got: Mapping[str, Fraction], exact: bool) -> None:
    integral = all(number(value).denominator == 1 for value in wanted.values())
    within = Fraction(1) if integral and not exact else TOLERANCE
    expect_numbers("fair share", wanted, {name: got.get(name, Fraction(0)) for name in wanted}, within)


# -- jobs --

_STATES = {"SCHEDULED": "ADMITTED", "SUSPENDED": "PAUSED", "STOPPED": "CANCELLED", "PENDING": "QUEUED"}
_WORDS: dict[str, tuple[LifeEvent, ...]] = {
    "submit": (LifeEvent.ACCEPTED,),
    "accept": (LifeEvent.ACCEPTED,),
    "queue": (LifeEvent.ACCEPTED,),
    "admit": (LifeEvent.ADMITTED,),
    "schedule": (LifeEvent.ADMITTED,),
    "start": (LifeEvent.ACCEPTED, LifeEvent.ADMITTED, LifeEvent.STARTING, LifeEvent.RUNNING),
    "run": (LifeEvent.ACCEPTED, LifeEvent.ADMITTED, LifeEvent.STARTING, LifeEvent.RUNNING),
    "success": (LifeEvent.SUCCEEDED,),
    "succeed": (LifeEvent.SUCCEEDED,),
    "finish": (LifeEvent.SUCCEEDED,),
    "fail": (LifeEvent.FAILED,),
    "node_lost": (LifeEvent.PLATFORM_FAILED,),
    "platform_fail": (LifeEvent.PLATFORM_FAILED,),
    "preempt": (LifeEvent.PREEMPTED, LifeEvent.RELEASED),
    "suspend": (LifeEvent.PAUSED,),
    "pause": (LifeEvent.PAUSED,),
    "resume": (LifeEvent.RESUMED,),
    "stop": (LifeEvent.CANCELLED,),
    "cancel": (LifeEvent.CANCELLED,),
    "kill": (LifeEvent.CANCELLED,),
}


def _lifecycle(case: Raw, profile: Profile) -> None:
    given = case["given"]
    life = Life(retries_max=int(given.get("max_retries", 0)))
    states = [life.state]
    words = given.get("events")
    if words is None:
        words = [w for code in given["exit_sequence"] for w in ("start", _exit_word(code))]
    for word in words:
        for event in _events_of(str(word)):
            after = live(life, event)
            if after.state is not life.state:
                states.append(after.state)
            life = after
    names = [str(state) for state in states]
    counts = {key: getattr(life, key) for key in ("attempts", "retries_used", "preemptions")}
    _each(
        case,
        {
            "states": lambda wanted: _check_milestones([_state(one) for one in wanted], names),
            "final": lambda wanted: expect_equal("final", _state(wanted), names[-1]),
            **_equal(counts),
        },
    )


def _state(word: Any) -> str:
    return _STATES.get(str(word).upper(), str(word).upper())


def _exit_word(code: Any) -> str:
    if isinstance(code, int):
        return "success" if code == 0 else "fail"
    return str(code)


def _events_of(word: str) -> tuple[LifeEvent, ...]:
    """Events of a word in any usual form: start, started, failure, preempted, succeeded ..."""
    text = word.lower().replace("-", "_").replace(" ", "_")
    best = max((w for w in _WORDS if text.startswith(w)), key=len, default=None)
    if best is None:
        raise Unsupported(f"event {word!r}")
    return _WORDS[best]


def _check_milestones(wanted: list[str], got: list[str]) -> None:
    """The expected states occur in this order, the last of them at the end; states between them are not listed."""
    rest = iter(got)
    if not all(state in rest for state in wanted) or (wanted and wanted[-1] != got[-1]):
        raise Mismatch(f"states: expected {wanted}, got {got}")


def _gang(case: Raw, profile: Profile) -> None:
    given = case["given"]
    gpus = int(given["gpus"])
    node = Node(
        id=NodeId("n0"),
        host="n0",
        cpus=10.0 * max(gpus, 1),
        memory_bytes=0,
        devices=tuple(Device(index=i, type="gpu") for i in range(gpus)),
    )
    state = State([node], [Queue(path="default")])
    for order, (name, job) in enumerate(given["jobs"].items()):
        slots = (Slot(gpus=int(job.get("gpus_per_task", 1))),) * int(job["tasks"])
        ask = JobAsk(
            id=JobId(name), shape=Shape(slots=slots), queued_at=0.0 if given.get("arrive") == "together" else order
        )
        apply(state, JobArrived(ask=ask), 0.0)
    for decision in decide(state, profile, 0.0):
        if isinstance(decision, Admit):
            apply(state, JobHolds(job=decision.job, held=decision.held), 0.0)
    running = sorted(row.ask.id for row in state.jobs.values() if row.phase == "running")
    waiting = sorted(row.ask.id for row in state.jobs.values() if row.phase == "queued")
    held = sum(len(slot.devices) for job in waiting for slot in state.jobs[JobId(job)].held)
    lists = {"running_after_1_cycle": running, "waiting": waiting}
    sets = {key: lambda wanted, key=key: expect_equal(key, sorted(wanted), lists[key]) for key in lists}
    _each(case, sets | _equal({"gpus_held_by_waiting": held}))


def _placement(case: Raw, profile: Profile) -> None:
    given = case["given"]
    nodes = [
        AffinityNode(
            name=node["n"],
            free=int(node["free"]),
            affinity=node.get("affinity"),
            suspendable=bool(node.get("suspendable", False)),
            load=float(node.get("load", 0.0)),
        )
        for node in given["nodes"]
    ]
    name, mode = choose_by_affinity(nodes, int(given["job_gpus"]))
    shared = ("time-slice", "queue")
    _each(
        case,
        {
            "node": lambda wanted: expect_equal("node", wanted, name),
            "mode": lambda wanted: expect_equal("mode", wanted if wanted in shared else "exclusive", mode),
        },
    )


def _migration(case: Raw, profile: Profile) -> None:
    given = case["given"]
    raw = given["nodes_free"]
    free = {str(n): int(f) for n, f in (raw.items() if isinstance(raw, dict) else enumerate(raw))}
    on = given.get("job_on")
    gpus = int(given.get("job_gpus", 1))
    if isinstance(on, dict):
        (on, gpus) = next((str(n), int(g)) for n, g in on.items())
    move = choose_migration(free, int(given["gpus_per_node"]), None if on is None else str(on), gpus)
    after = dict(free)
    if move is not None:
        after[move[0]] += gpus
        after[move[1]] -= gpus
    for key, wanted in case["expect"].items():
        if key == "move":
            expect_equal("move", _move_of(wanted, list(free)), move)
        elif key == "free_after":
            pairs = wanted.items() if isinstance(wanted, dict) else enumerate(wanted)
            expect_equal("free after", {str(n): int(f) for n, f in pairs}, after)


def _move_of(wanted: Any, names: list[str]) -> tuple[str, str] | None:
    """A move in any usual form: ``{from, to}``, a pair, or text that names both nodes in order."""
    if wanted is None or wanted is False:
        return None
    if isinstance(wanted, dict):
        return str(wanted["from"]), str(wanted["to"])
    parts = [str(part) for part in wanted] if isinstance(wanted, list) else re.findall(r"\w+", str(wanted))
    found = [part for part in parts if part in names]
    if len(found) < 2:
        raise Unsupported(f"move {wanted!r}")
    return found[0], found[-1]


KINDS: dict[str, Callable[[Raw, Profile], None]] = {
    "drf": _drf,
    "drf-property": _drf_property,
    "capacity-preemption": _capacity,
    "borrowing-share": _borrowing,
    "fair-share-division": _fair_share,
    "lifecycle": _lifecycle,
    "gang": _gang,
    "placement": _placement,
    "migration": _migration,
}
