"""A profile names one plug-in of each kind."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from rota.cluster.core.plugins import Profile
from rota.cluster.policies.capacity import yarn
from rota.cluster.policies.default import default
from rota.cluster.policies.drf import drf
from rota.cluster.policies.fairshare import kueue
from rota.cluster.policies.fgd import fgd
from rota.cluster.policies.fifo import fifo
from rota.cluster.policies.gandiva import gandiva, gandiva_pack
from rota.cluster.policies.hived import hived
from rota.cluster.policies.kai import kai
from rota.cluster.policies.las import las
from rota.cluster.policies.pools import pool, pool_spread, private
from rota.cluster.policies.srtf import srtf
from rota.spec.errors import UnknownName

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
    "gandiva": gandiva,
    "gandiva-pack": gandiva_pack,
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
