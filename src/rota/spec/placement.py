"""Which devices of which nodes each gang of a job gets."""

from __future__ import annotations

from dataclasses import dataclass

from rota.spec.gang import BundleGrant, Grant
from rota.spec.ids import GangId, NodeId


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
