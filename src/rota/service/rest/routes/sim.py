"""Simulation routes: what other scheduling profiles would do with the present jobs; and the job templates."""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import Annotated, cast

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from rota.cluster.policies import PROFILES, get_profile
from rota.cluster.sim.forecast import outlook
from rota.service.models.base import Sent
from rota.service.models.cluster import Outlook, ProfileList, ProfileRow, TemplateList, TemplateRow
from rota.service.rest.deps import Asker, Parts
from rota.service.templates import about, template_files, template_names
from rota.service.views.jobs import API
from rota.spec.errors import LimitExceeded

JOBS_MAX = 3000

router = APIRouter(prefix="/api/v1", tags=["sim"])


class OutlookBody(BaseModel):
    """The profiles to simulate; the others are compared with the first."""

    model_config = ConfigDict(extra="forbid")

    profiles: Annotated[list[str], Field(min_length=1, max_length=4)]


@router.get("/sim/profiles")
async def profiles(caller: Asker) -> Sent[ProfileList]:
    """Every scheduling profile with the sentence of its policy."""
    items: list[ProfileRow] = [{"name": name, "text": _sentence(name)} for name in PROFILES]
    return {"api": API, "kind": "ProfileList", "items": items, "next": None}


def _sentence(name: str) -> str:
    make = PROFILES[name]
    return inspect.getdoc(make) or inspect.getdoc(sys.modules[make.__module__]) or ""


@router.post("/sim/outlook")
async def play(body: OutlookBody, app: Parts, caller: Asker) -> Sent[Outlook]:
    """When the present jobs would start and end under each profile, in virtual time on copies of the state."""
    for name in body.profiles:
        get_profile(name)
    state = app.loop.scheduler.state
    if len(state.jobs) > JOBS_MAX:
        raise LimitExceeded(
            f"{len(state.jobs)} jobs wait or run; the limit of a simulation is {JOBS_MAX}",
            hint="simulate a part of them from a trace: rota sim compare --trace FILE",
        )
    async with app.playing:
        forks = {name: state.copy() for name in dict.fromkeys(body.profiles)}
        found = await asyncio.to_thread(outlook, forks, app.clock.wall_s(), app.clock)
    return app.veiled(caller, cast("Outlook", {"api": API, "kind": "Outlook", **found}))


@router.get("/templates")
async def templates(caller: Asker) -> Sent[TemplateList]:
    """The jobs to begin with: what each shows, and its files."""
    items: list[TemplateRow] = [
        {"name": name, "text": about(name), "files": template_files(name)} for name in template_names()
    ]
    return {"api": API, "kind": "TemplateList", "items": items, "next": None}
