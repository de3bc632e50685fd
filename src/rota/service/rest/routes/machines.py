"""Routes of machines that join: what one needs to join the engine, who is there, and who leaves."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from rota.runtime.node import host_name, machine_identity
from rota.service.machine_checks import own_versions, version_conflicts
from rota.service.models.base import REFUSAL, Sent, document
from rota.service.models.cluster import EngineAccessRow, MachineDocument
from rota.service.rest.deps import HEARTBEAT_PATH, AppState, Asker, Parts
from rota.service.rest.machine_names import JoinedMachine
from rota.service.views.cluster import node_list
from rota.spec.errors import Conflict

router = APIRouter(prefix="/api/v1", tags=["cluster"], responses=REFUSAL)
Word = Annotated[str, Field(max_length=200)]
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?$")]


class MachineBody(BaseModel):
    """A machine that wants to join. ``identity`` differs between machines of one name; ``versions`` are by package."""

    model_config = ConfigDict(extra="forbid")

    host: HostName
    identity: Annotated[str, Field(min_length=1, max_length=64)]
    address: Word
    versions: Annotated[dict[Word, Word], Field(max_length=20)]


@router.post("/machines", status_code=201)
async def join(body: MachineBody, app: Parts, caller: Asker) -> Sent[MachineDocument]:
    """Let a machine join: the answer has the access to the engine, which is started unless it runs.

    Needs the role machine or admin. Joining again under the same name and identity is harmless.
    """
    caller.need_machines()
    _check_listening(app)
    if wrong := version_conflicts(body.versions, own_versions()):
        texts = "; ".join(f"{one.name} is {one.there or 'missing'} there and {one.here} here" for one in wrong)
        raise Conflict(
            f"{body.host} cannot join: {texts}", hint=f"install there: {', '.join(one.wanted for one in wrong)}"
        )
    _check_not_here(body)
    app.machines.check(body.host, body.identity, caller)
    found = await app.engine.access()
    app.machines.check(body.host, body.identity, caller)  # another one may have joined while the engine started
    facts = body.model_dump(include={"host", "identity", "address", "versions"})
    app.machines.take(JoinedMachine(token=caller.token, **facts))
    return _machine(app, body.host, access=document(EngineAccessRow, found))


def _check_listening(app: AppState) -> None:
    if app.settings.ray_address:
        where = app.settings.ray_address
        hint = f"there: ray start --address={where}"
        raise Conflict(f"this installation uses the Ray cluster at {where}, which others run", hint=hint)
    if not app.settings.listen:
        hint = "on the machine of the service: rota down, then rota up --listen ADDRESS"
        raise Conflict("this installation takes no other machines: its engine listens on 127.0.0.1 alone", hint=hint)


def _check_not_here(body: MachineBody) -> None:
    if body.host == host_name():
        text = f"the name {body.host} is taken by the machine of the service"
        if body.identity == machine_identity():
            raise Conflict(f"{body.host} is the machine of the service: it takes part already", hint="see: rota nodes")
        raise Conflict(text, hint="give this one another: rota join --name NAME")


@router.get("/machines/{host}")
async def machine(host: str, app: Parts, caller: Asker) -> Sent[MachineDocument]:
    """A machine that joined: its state as a node, and the engine that runs."""
    caller.need_machines()
    app.machines.get(host)
    return _machine(app, host)


@router.post(HEARTBEAT_PATH.removeprefix("/api/v1"))
async def heartbeat(host: str, app: Parts, caller: Asker) -> Sent[MachineDocument]:
    """The agent of a machine that joined says that it is there: its name stays its own. Not in the audit.

    From another token than the one with which it joined it answers the same, and changes nothing.
    """
    caller.need_machines()
    app.machines.seen(host, caller)
    return _machine(app, host)


@router.delete("/machines/{host}")
async def leave(host: str, app: Parts, caller: Asker) -> Sent[MachineDocument]:
    """A machine leaves; harmless when it is not known. What runs there ends when its agent ends it.

    Needs the token with which it joined, or one of an admin.
    """
    caller.need_machines()
    app.machines.give_back(host, caller)
    return _machine(app, host)


def _machine(app: AppState, host: str, **more: object) -> MachineDocument:
    found = (one["state"] for one in node_list(app.loop.installation)["items"] if one["id"] == host)
    state = next((one for one in found if one not in ("lost", "removed")), "joining")
    return document(MachineDocument, host=host, state=state, engine=app.engine.running, **more)
