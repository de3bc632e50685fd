"""What every route needs, and the check that comes before it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from rota.runtime.clock import Clock
from rota.runtime.environ import Home
from rota.service.auth import COOKIE, Asked, Auth, Caller
from rota.service.config import Settings
from rota.service.engine import Engine
from rota.service.intake import Intake
from rota.service.loop import ServiceLoop
from rota.service.metrics import Metrics
from rota.spec.errors import LimitExceeded

STREAMS_MAX = 64

Document = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Doors:
    """The parts behind the routes."""

    settings: Settings
    home: Home
    clock: Clock
    loop: ServiceLoop
    intake: Intake
    auth: Auth
    engine: Engine
    metrics: Metrics
    version: str
    pid: int
    started_at: float
    ready: bool = False
    streams: int = 0
    playing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the jobs of now are played under other policies: one such play at a time."""

    def open_stream(self) -> None:
        """Count a long answer. Raises LimitExceeded."""
        if self.streams >= STREAMS_MAX:
            raise LimitExceeded(f"{STREAMS_MAX} streams are open", hint="close a page or a follower")
        self.streams += 1

    def close_stream(self) -> None:
        """A long answer is over."""
        self.streams -= 1


def doors_of(request: Request) -> Doors:
    """The parts of the application that this request came to."""
    return request.app.state.doors


def asked_of(request: Request) -> Asked:
    """What of a request matters for its permission."""
    return Asked(
        method=request.method,
        headers={name.lower(): value for name, value in request.headers.items()},
        cookie=request.cookies.get(COOKIE, ""),
        address=request.client.host if request.client else "",
    )


def caller_of(request: Request) -> Caller:
    """Who asks. Raises NoToken or NotAllowed."""
    return doors_of(request).auth.check(asked_of(request))


Parts = Annotated[Doors, Depends(doors_of)]
Asker = Annotated[Caller, Depends(caller_of)]
