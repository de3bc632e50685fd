"""Keep the nodes of the installation those of an engine that somebody else runs: asked for again and again."""

from __future__ import annotations

import logging

from rota.service.process.assembly import node_changes
from rota.service.rest.deps import AppState
from rota.spec.errors import EngineUnavailable, StoreUnavailable

LOOK_S = 2.0
"""Between two looks: so long after 'ray start' a machine gets work at the latest."""

_log = logging.getLogger("rota.service")


def not_known(app: AppState, why: str = "it has not answered yet") -> str:
    """What jobs wait for until the engine has said which machines it has."""
    return f"the machines of the engine at {app.settings.ray_address} are not known: {why}"


async def keep_nodes(app: AppState) -> None:
    """Until cancelled. Nothing is decided before the first answer; while one is awaited later, the known nodes stay."""
    while True:
        try:
            found, alive = await app.engine.nodes()
            if changes := node_changes(app, found, alive):
                await app.loop.append(changes)
            app.loop.decide_from_now()
        except (EngineUnavailable, StoreUnavailable) as error:
            text = not_known(app, str(error))
            _log.warning("%s", text)
            if app.loop.unknown:
                app.loop.unknown = text
        await app.clock.sleep(LOOK_S)
