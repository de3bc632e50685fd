"""Policies as plug-ins of the scheduling cycle, and the table of profiles: each names one plug-in of each kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rota.cluster.core.profile import Profile
from rota.cluster.policies.basic import RandomFit, fifo, las, pool, pool_spread, private, random, srtf
from rota.cluster.policies.default import default
from rota.cluster.policies.fair_share import drf, kueue, yarn
from rota.cluster.policies.fgd import bestfit, fgd
from rota.cluster.policies.gandiva import gandiva, gandiva_pack
from rota.cluster.policies.hived import hived
from rota.cluster.policies.kai import kai
from rota.spec.errors import unknown

PROFILES: dict[str, Callable[[], Profile]] = {
    "default": default,
    "fifo": fifo,
    "hived": hived,
    "yarn": yarn,
    "kai": kai,
    "kueue": kueue,
    "drf": drf,
    "las": las,
    "srtf": srtf,
    "fgd": fgd,
    "bestfit": bestfit,
    "random": random,
    "gandiva": gandiva,
    "gandiva-pack": gandiva_pack,
    "private": private,
    "pool": pool,
    "pool-spread": pool_spread,
}


def get_profile(name: str, *, seed: int = 0) -> Profile:
    """The profile of that name; ``seed`` is for one that places at random. Raises UnknownName with the nearest one."""
    if name not in PROFILES:
        raise unknown(f"there is no scheduling profile {name!r}", name, PROFILES, "profiles")
    made = PROFILES[name]()
    return replace(made, placer=RandomFit(seed)) if isinstance(made.placer, RandomFit) else made
