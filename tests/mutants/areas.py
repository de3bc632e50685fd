"""Which sources are mutated, and which tests must find it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """Sources (patterns below ``src/rota``) and the folders or files of tests that are about them."""

    name: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]

    def files(self) -> list[Path]:
        """The source files, in order."""
        found = {path for pattern in self.sources for path in (ROOT / "src" / "rota").glob(pattern)}
        return sorted(path for path in found if path.name != "__init__.py")


AREAS = (
    Area(name="cluster", sources=("cluster/core/*.py", "cluster/virtual/*.py"), tests=("tests/cluster",)),
    Area(name="job", sources=("job/core/*.py",), tests=("tests/job",)),
    Area(
        name="fencing",
        sources=("runtime/event_log/interface.py",),
        tests=("tests/runtime/test_event_log.py",),
    ),
    Area(
        name="log",
        sources=("runtime/event_log/sql.py", "spec/codec.py"),
        tests=(
            "tests/runtime/test_event_log.py",
            "tests/spec",
            "tests/runtime/test_event_log_sql.py",
            "tests/logs",
            "tests/service/test_backup.py",
        ),
    ),
    Area(
        name="rights",
        sources=("service/rest/auth.py", "service/accounts.py", "service/rest/routes/accounts.py"),
        tests=tuple(f"tests/service/test_{name}.py" for name in ("accounts", "rights", "rest_deps", "webhooks")),
    ),
    Area(name="streams", sources=("tensors/ring.py",), tests=("tests/tensors/core/test_ring.py",)),
    Area(name="snapshots", sources=("service/control/snapshot.py",), tests=("tests/service/test_snapshot.py",)),
    Area(name="sweeps", sources=("service/sweeps.py",), tests=("tests/service/test_sweeps.py",)),
)
