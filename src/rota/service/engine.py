"""What the service asks of the engine, and what it does while there is none."""

from __future__ import annotations

from typing import Any, Protocol

from rota.spec.errors import EngineUnavailable
from rota.spec.ids import JobId


class Engine(Protocol):
    """The engine behind the gateway. Methods are idempotent and raise EngineUnavailable when it cannot be reached."""

    @property
    def generation(self) -> int:
        """Rises each time the engine was lost or its gateway started anew: masters must be asked for again."""
        ...

    async def ensure_master(self, job: JobId) -> None:
        """Start the master of a job unless it lives; starts the engine with the first one."""
        ...

    async def sweep(self, job: JobId) -> None:
        """End the master and everything else of a job that is over."""
        ...

    async def jobs(self) -> tuple[JobId, ...]:
        """Jobs of which anything lives in the engine; none while the engine was not started."""
        ...

    async def status(self) -> dict[str, Any]:
        """Parts with their health: ``engine``, ``gateway``, ``registry``; never starts anything."""
        ...

    async def close(self, *, stop_engine: bool) -> None:
        """Let go; with ``stop_engine`` end the engine and everything in it."""
        ...


class NoEngine:
    """Where Ray is not installed: jobs are accepted, planned and explained, and wait for an engine."""

    def __init__(self, why: str) -> None:
        self._why = why

    @property
    def generation(self) -> int:
        return 0

    async def ensure_master(self, job: JobId) -> None:
        raise EngineUnavailable(f"{job} cannot start: {self._why}", hint="pip install 'rota[engine]'")

    async def sweep(self, job: JobId) -> None:
        """Nothing runs."""

    async def jobs(self) -> tuple[JobId, ...]:
        return ()

    async def status(self) -> dict[str, Any]:
        return {"engine": {"state": "off", "text": self._why}, "gateway": {"state": "off"}}

    async def close(self, *, stop_engine: bool) -> None:
        """Nothing to let go of."""
