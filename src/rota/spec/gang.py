"""What one gang asks for: bundles, closeness, apart; and the grant that answers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rota.spec.ids import GangId, InstanceId, NodeId
from rota.spec.resources import Res

CellLevel = Literal["device", "socket", "node", "rack"]
CELL_LEVELS: tuple[CellLevel, ...] = get_args(CellLevel)
"""From the narrowest cell to the widest."""
Share = Literal["lease", "fraction"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleAsk:
    """One slot: the instances that share it and what they need together (device-collocated ones share a slot)."""

    index: int
    members: tuple[InstanceId, ...]
    res: Res


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """No bundle of ``left`` lies in the same cell of ``level`` as one of ``right``; equal sets mean pairwise apart."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    level: CellLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """All of ``bundles`` must lie in one cell of ``level``."""

    bundles: tuple[int, ...]
    level: CellLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class GangRequest:
    """Everything that starts together or not at all. ``bundles[i].index == i``.

    ``tied`` groups of bundles must each be on one node, as a parallel plan needs it; ``close`` ones, each of which
    holds whole tied groups, should be.
    """

    gang: GangId
    bundles: tuple[BundleAsk, ...]
    apart: tuple[Apart, ...] = ()
    together: tuple[Together, ...] = ()
    tied: tuple[tuple[int, ...], ...] = ()
    close: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleGrant:
    """Where one bundle runs: the node, the engine host that carries it, and exact device indices on the node."""

    index: int
    node: NodeId
    host: str
    devices: tuple[int, ...]
    res: Res


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The answer to a GangRequest, one BundleGrant a bundle, in order."""

    gang: GangId
    bundles: tuple[BundleGrant, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All grants of one attempt of a job."""

    gangs: tuple[Grant, ...]

    def gang(self, gang: GangId) -> Grant:
        """The grant of one gang. Raises KeyError if it has none."""
        for grant in self.gangs:
            if grant.gang == gang:
                return grant
        raise KeyError(gang)

    @property
    def bundles(self) -> tuple[BundleGrant, ...]:
        """Every bundle of every gang."""
        return tuple(bundle for grant in self.gangs for bundle in grant.bundles)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Nodes in use, sorted, each once."""
        return tuple(sorted({bundle.node for bundle in self.bundles}))
