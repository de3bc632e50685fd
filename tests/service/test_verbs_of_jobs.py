"""The verbs that list, change and end jobs: several at once, their order, their columns, their form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standing import Standing
from test_cli import own_home, with_cli

from rota.spec.states import JobState

assert own_home  # the fixture of every test here, too


@pytest.mark.parametrize(
    ("verb", "state"), [("pause", {"PAUSED"}), ("resume", {"QUEUED"}), ("stop", {"STOPPING", "CANCELLED"})]
)
def test_several_jobs_are_changed_at_once_and_one_that_refuses_stops_no_other(
    verb: str, state: set[str], tmp_path: Path
) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        source = "name: {}\nroles: {{main: {{run: [x], replicas: 2, resources: {{gpus: 4}}}}}}\n"
        names = [(await service.submit(source.format(name)))["id"] for name in ("fills", "one", "two")][1:]
        await service.until("fills-1", JobState.ADMITTED)
        if verb == "resume":
            assert (await ask("pause", *names)).status == 0
        done = await ask(verb, names[0], "none", names[1], "--json")
        assert (done.status, done.document["kind"], done.document["action"]) == (2, "ActionList", verb)
        rows = done.document["items"]
        assert [(row["job"], row["done"]) for row in rows] == [(names[0], True), ("none", False), (names[1], True)]
        assert all(row["state"] in state for row in rows if row["done"])
        assert (rows[1]["code"], "no job" in rows[1]["text"]) == ("UNKNOWN_NAME", True)
        alone = await ask(verb, "none", "--json")
        assert (alone.status, alone.document["kind"]) == (2, "Error")
        assert "which job?" in (await ask(verb)).err

    with_cli(tmp_path / "service", test)
