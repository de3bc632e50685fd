"""What a plane tells of its namespace: names, places, counts, findings; the documents of ``rota tensors``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rota.tensors import doctor, reports
from rota.tensors.core.names import check_count
from rota.tensors.handle import Location
from rota.tensors.registry import Row
from rota.tensors.session import Session


class Inspection:
    """The questions and the housekeeping of a plane."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._space = session.space

    def locate(self, name: str) -> list[Location]:
        """Where the bytes of a name's current version lie, part by part: memory, file or device. It leases nothing: the
        bytes may be another's a moment later. Raises NotFound, VersionGone."""
        return self._space.retry(lambda: reports.locate(self._space, name))

    def info(self, name: str) -> Row:
        """What the registry knows of a name. Raises NotFound."""
        row = self._space.retry(lambda: self._space.find_row(name))
        if row is None:
            raise self._space.not_found(name)
        return row

    def stats(self) -> dict[str, Any]:
        """Bytes, leases and counts of the namespace and of this process."""
        return self._space.retry(lambda: reports.stats(self._space))

    def fsck(self, *, repair: bool = False) -> dict[str, Any]:
        """Check invariants I1 to I7: the document of ``rota tensors fsck``."""
        return reports.fsck(self._session, repair=repair)

    def gc(self, *, dry_run: bool = False) -> dict[str, Any]:
        """Sweep the dead and give all free memory back: the document of ``rota tensors gc``."""
        return reports.gc(self._session, dry_run=dry_run)

    def recover(self, *, dry_run: bool = False) -> dict[str, Any]:
        """Rebuild the registry from headers and client files: the document of ``rota tensors recover``."""
        done = asdict(self._session.recover(dry_run=dry_run))
        return done | {"seconds": round(done["seconds"], 4)}

    def list_document(self, prefix: str = "") -> dict[str, Any]:
        """The document of ``rota tensors ls``."""
        return self._space.retry(lambda: reports.tensor_list(self._space, prefix))

    def stat_document(self, name: str) -> dict[str, Any]:
        """The document of ``rota tensors stat``: a name, its versions, who holds them. Raises NotFound."""
        row = self.info(name)
        return self._space.retry(lambda: reports.tensor(self._space, row))

    def top(self, n_max: int = 20) -> dict[str, Any]:
        """The document of ``rota tensors top``: names by the bytes that all their versions take."""
        return self._space.retry(lambda: reports.top(self._space, n_max))

    def doctor(self) -> dict[str, Any]:
        """The document of ``rota tensors doctor``: findings with level and remedy."""
        return self._space.retry(lambda: doctor.document(self._session))

    def limit(self, bytes_max: int) -> None:
        """Set how many bytes the files of the namespace may take; 0 lifts the limit. Raises BadInput."""
        check_count("bytes_max", bytes_max, 0)
        self._space.retry(lambda: self._space.registry.configure(quota=bytes_max or 1 << 62))
