"""Policies as plug-ins of the scheduling cycle, and the table of profiles: each names one plug-in of each kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rota.cluster.core.profile import Profile
from rota.cluster.policies import basic, capacity, default, fair_share, fgd, gandiva, hived, kai
from rota.spec.errors import unknown

PROFILES: dict[str, Callable[[], Profile]] = {
    "default": default.default,
    "fifo": basic.fifo,
    "hived": hived.hived,
    "yarn": capacity.yarn,
    "kai": kai.kai,
    "kueue": fair_share.kueue,
    "drf": fair_share.drf,
    "las": basic.las,
    "srtf": basic.srtf,
    "srsf": basic.srsf,
    "fgd": fgd.fgd,
    "bestfit": fgd.bestfit,
    "random": basic.random,
    "gandiva": gandiva.gandiva,
    "gandiva-pack": gandiva.gandiva_pack,
    "private": basic.private,
    "pool": basic.pool,
    "pool-spread": basic.pool_spread,
}


def get_profile(name: str, *, seed: int = 0) -> Profile:
    """The profile of that name; ``seed`` is for one that places at random. Raises UnknownName with the nearest one."""
    if name not in PROFILES:
        raise unknown(f"no scheduling profile has the name {name!r}", name, PROFILES, "profiles")
    made = PROFILES[name]()
    return replace(made, placer=basic.RandomFit(seed)) if isinstance(made.placer, basic.RandomFit) else made
