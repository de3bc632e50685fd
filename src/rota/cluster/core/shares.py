"""Dominant share and weighted fair division, exact: every amount is a Fraction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

Amounts = Mapping[str, Fraction]
"""Amount by resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FillStep:
    """One task given: to whom, and the shares and use after it."""

    user: str
    shares: dict[str, Fraction]
    used: dict[str, Fraction]


def dominant(capacity: Amounts, amounts: Amounts) -> tuple[str | None, Fraction]:
    """The resource of which an amount is the largest part of the capacity, and that part.

    Resources without capacity or demand do not count; of equal ones the first by name. (DRF, NSDI'11, section 4.)
    """
    parts = [(amounts[r] / capacity[r], r) for r in sorted(amounts) if capacity.get(r, 0) > 0 and amounts[r] > 0]
    if not parts:
        return None, Fraction(0)
    best = max(part for part, _ in parts)
    return next(r for part, r in parts if part == best), best


def fill(
    capacity: Amounts,
    demands: Mapping[str, Amounts],
    *,
    weights: Mapping[str, Fraction] | None = None,
    first: str | None = None,
) -> list[FillStep]:
    """Progressive filling: one task at a time to the user of the lowest weighted dominant share.

    Who does not fit any more is skipped; others go on. Ties go to ``first``, then by name. (DRF, algorithm 1.)
    """
    tasks = dict.fromkeys(sorted(demands), 0)
    used = {r: Fraction(0) for r in capacity}
    steps: list[FillStep] = []
    while True:
        able = [user for user in tasks if any(demands[user].values()) and _fits(capacity, used, demands[user])]
        if not able:
            return steps
        shares = {user: _share(capacity, demands[user], tasks[user], weights, user) for user in tasks}
        chosen = min(able, key=lambda user: (shares[user], user != first, user))
        tasks[chosen] += 1
        for r, need in demands[chosen].items():
            used[r] = used.get(r, Fraction(0)) + need
        steps.append(
            FillStep(
                user=chosen,
                shares={user: _share(capacity, demands[user], tasks[user], None, user) for user in tasks},
                used=dict(used),
            )
        )


def _fits(capacity: Amounts, used: Amounts, demand: Amounts) -> bool:
    zero = Fraction(0)
    return all(used.get(r, zero) + need <= capacity.get(r, zero) for r, need in demand.items())


def _share(
    capacity: Amounts, demand: Amounts, tasks: int, weights: Mapping[str, Fraction] | None, user: str
) -> Fraction:
    return dominant(capacity, demand)[1] * tasks / (weights.get(user, Fraction(1)) if weights else 1)


def tasks_after(steps: Sequence[FillStep], users: Sequence[str]) -> dict[str, int]:
    """How many tasks each user has after these steps."""
    return {user: sum(step.user == user for step in steps) for user in users}


# -- divisible tasks --


def water_fill(
    capacity: Amounts, demands: Mapping[str, Amounts], cost: Callable[[Amounts], Fraction]
) -> dict[str, Fraction]:
    """Tasks of each user when all rise together, ``cost`` of one task at equal speed, until a resource is used up.

    Users that need that resource stop; the others go on. With the dominant share as cost this is DRF, with the sum of
    shares it is asset fairness (DRF, section 4.2).
    """
    tasks = {user: Fraction(0) for user in demands}
    rising = {user for user in demands if cost(demands[user]) > 0}
    left = dict(capacity)
    while rising:
        speed = {user: 1 / cost(demands[user]) for user in rising}
        rates = {r: sum((speed[u] * demands[u].get(r, Fraction(0)) for u in rising), Fraction(0)) for r in left}
        time = min(left[r] / rate for r, rate in rates.items() if rate > 0)
        for user in rising:
            tasks[user] += speed[user] * time
        left = {r: amount - rates[r] * time for r, amount in left.items()}
        empty = {r for r, amount in left.items() if amount <= 0}
        rising = {u for u in rising if not any(demands[u].get(r, Fraction(0)) > 0 for r in empty)}
    return tasks


def drf_fluid(capacity: Amounts, demands: Mapping[str, Amounts]) -> dict[str, Fraction]:
    """Tasks of each user under DRF when tasks are divisible."""
    return water_fill(capacity, demands, lambda demand: dominant(capacity, demand)[1])


def asset_fluid(capacity: Amounts, demands: Mapping[str, Amounts]) -> dict[str, Fraction]:
    """Tasks of each user under asset fairness: equal sums of the parts of all resources."""
    return water_fill(
        capacity,
        demands,
        lambda demand: sum((need / capacity[r] for r, need in demand.items() if capacity.get(r, 0) > 0), Fraction(0)),
    )


def ceei(capacity: Amounts, demands: Mapping[str, Amounts]) -> dict[str, Fraction]:
    """Tasks of each user in the competitive equilibrium from equal incomes: the largest product of tasks.

    Exact for two users, where one or two resources bind; otherwise by multiplicative price steps to about 1e-9.
    """
    users = sorted(demands)
    exact = _ceei_two(capacity, demands, users) if len(users) == 2 else None
    return exact if exact is not None else _ceei_by_prices(capacity, demands, users)


def _ceei_two(capacity: Amounts, demands: Mapping[str, Amounts], users: Sequence[str]) -> dict[str, Fraction] | None:
    a, b = (demands[user] for user in users)
    zero = Fraction(0)
    points = [
        (capacity[r] / (2 * a[r]), capacity[r] / (2 * b[r]))
        for r in capacity
        if a.get(r, zero) > 0 and b.get(r, zero) > 0
    ]
    for r, s in combinations(capacity, 2):
        ar, br, as_, bs = a.get(r, zero), b.get(r, zero), a.get(s, zero), b.get(s, zero)
        if (det := ar * bs - as_ * br) != 0:
            points.append(((capacity[r] * bs - capacity[s] * br) / det, (ar * capacity[s] - as_ * capacity[r]) / det))
    able = [
        (x, y)
        for x, y in points
        if x >= 0 and y >= 0 and all(a.get(r, zero) * x + b.get(r, zero) * y <= capacity[r] for r in capacity)
    ]
    if not able:
        return None
    best = max(able, key=lambda point: point[0] * point[1])
    return dict(zip(users, best))


def _ceei_by_prices(capacity: Amounts, demands: Mapping[str, Amounts], users: Sequence[str]) -> dict[str, Fraction]:
    prices = {r: 1.0 / float(capacity[r]) for r in capacity if capacity[r] > 0}
    tasks: dict[str, float] = {}
    for _ in range(20_000):
        tasks = {u: 1.0 / sum(prices[r] * float(demands[u].get(r, 0)) for r in prices) for u in users}
        used = {r: sum(tasks[u] * float(demands[u].get(r, 0)) for u in users) for r in prices}
        worst = max(used[r] / float(capacity[r]) for r in prices)
        if worst <= 1 + 1e-12 and all(
            prices[r] * float(capacity[r]) < 1e-12 or used[r] / float(capacity[r]) > 1 - 1e-10 for r in prices
        ):
            break
        prices = {r: max(p * math.sqrt(used[r] / float(capacity[r])), 1e-300) for r, p in prices.items()}
    return {user: Fraction(amount).limit_denominator(10**9) for user, amount in tasks.items()}


# -- borrowing (Kueue) --


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowing:
    """How much a queue borrows: thousandths of what the cohort can lend of its dominant resource, over its weight."""

    resource: str | None
    share_permille: int
    borrowing: bool


def borrowing_share(nominal: Amounts, lendable: Amounts, used: Amounts, weight: Fraction = Fraction(1)) -> Borrowing:
    """``max_r max(0, used - nominal) * 1000 / lendable_r / weight``, rounded up: borrowing never looks like none.

    Resources of which nothing can be lent do not count; ties go to the first name. Source: Kueue, fair sharing.
    """
    zero = Fraction(0)
    over = {r: used[r] - nominal.get(r, zero) for r in sorted(used) if used[r] > nominal.get(r, zero)}
    parts = {r: amount * 1000 / lendable[r] for r, amount in over.items() if lendable.get(r, 0) > 0}
    if not parts:
        return Borrowing(resource=None, share_permille=0, borrowing=bool(over))
    resource = max(parts, key=lambda r: parts[r])
    share = math.ceil(parts[resource] / weight) if weight > 0 else 2**63 - 1
    return Borrowing(resource=resource, share_permille=share, borrowing=True)


# -- fair share by guarantee, priority, weight (KAI) --


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a queue deserves, asks, may have at most (None: no limit), and how it competes for what is left over."""

    deserved: Fraction | None
    request: Fraction
    most: Fraction | None = None
    weight: Fraction = Fraction(0)
    priority: int = 100


def fair_shares(
    total: Fraction, claims: Mapping[str, Claim], unit: Fraction | None = None
) -> tuple[dict[str, Fraction], Fraction]:
    """Fair share of each queue, and what nobody gets.

    First what is deserved, as far as it is asked; the rest by tiers of priority, inside one by weight, until everyone
    has what it asks or may have. Weight 0 gets nothing of the rest. ``deserved`` None = unlimited. With a ``unit`` the
    rest is handed out in whole units: rounded down, then one each by the largest remainder, equal ones in the order
    given. Source: KAI scheduler, resource division of the proportion plug-in.
    """
    ceiling = {name: min(c.request, c.request if c.most is None else c.most) for name, c in claims.items()}
    shares = {
        name: min(ceiling[name], ceiling[name] if c.deserved is None else c.deserved) for name, c in claims.items()
    }
    left = max(Fraction(0), total - sum(shares.values(), Fraction(0)))
    for tier in sorted({claim.priority for claim in claims.values()}, reverse=True):
        weights = {n: c.weight for n, c in claims.items() if c.priority == tier and c.weight > 0}
        left = _by_weight(left, weights, ceiling, shares, unit)
    return shares, left


def _by_weight(
    left: Fraction,
    weights: Mapping[str, Fraction],
    ceiling: Mapping[str, Fraction],
    shares: dict[str, Fraction],
    unit: Fraction | None,
) -> Fraction:
    """Who wants no more than its part gets what it wants; when all want more, the parts are final."""
    while left > 0:
        hungry = [name for name in weights if shares[name] < ceiling[name]]
        if not hungry:
            break
        whole = sum((weights[name] for name in hungry), Fraction(0))
        part = {name: left * weights[name] / whole for name in hungry}
        modest = [name for name in hungry if ceiling[name] - shares[name] <= part[name]]
        given = {name: ceiling[name] - shares[name] for name in modest} or _rounded(part, unit)
        for name, amount in given.items():
            shares[name] += amount
            left -= amount
        if not modest:
            return _remainders(left, part, ceiling, shares, unit) if unit else left
    return left


def _rounded(part: Mapping[str, Fraction], unit: Fraction | None) -> dict[str, Fraction]:
    return {name: amount // unit * unit if unit else amount for name, amount in part.items()}


def _remainders(
    left: Fraction,
    part: Mapping[str, Fraction],
    ceiling: Mapping[str, Fraction],
    shares: dict[str, Fraction],
    unit: Fraction,
) -> Fraction:
    for name in sorted(part, key=lambda name: -(part[name] % unit)):
        given = min(unit, left, ceiling[name] - shares[name])
        shares[name] += given
        left -= given
    return left
