"""A profile names one plug-in of each kind."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from rota.cluster.core.plugins import Profile
from rota.cluster.policies.fifo import fifo
from rota.cluster.policies.pools import pool, pool_spread, private
from rota.spec.errors import UnknownName

PROFILES: dict[str, Callable[[], Profile]] = {
    "fifo": fifo,
    "private": private,
    "pool": pool,
    "pool-spread": pool_spread,
}


def get_profile(name: str) -> Profile:
    """The profile of that name. Raises UnknownName with the nearest ones."""
    if name not in PROFILES:
        near = difflib.get_close_matches(name, PROFILES, n=3, cutoff=0.4)
        raise UnknownName(
            f"there is no scheduling profile {name!r}",
            hint=f"did you mean {' or '.join(near)}?" if near else f"profiles: {', '.join(PROFILES)}",
        )
    return PROFILES[name]()
