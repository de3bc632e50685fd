"""The stored snapshots: one file a route, one file a command."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.service.snapshots.cli import commands
from tests.service.snapshots.installation import installed
from tests.service.snapshots.rest import answers, file_of

FOLDER = Path(__file__).parent
LINES_SHOWN_MAX = 40
"""Lines of one difference that are shown."""


async def of_rest(home: Path) -> dict[str, str]:
    """The text of the file of every route."""
    async with installed(home) as it:
        return {
            file_of(route): text_of({"route": route, "answers": rows}) for route, rows in (await answers(it)).items()
        }


async def of_cli(home: Path) -> dict[str, str]:
    """The text of the file of every verb."""
    async with installed(home) as it:
        return {
            verb: text_of({"verb": verb, "commands": rows})
            for verb, rows in (await commands(it, home.with_name("work"))).items()
        }


def text_of(document: Mapping[str, Any]) -> str:
    """A document as it is stored."""
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def stored(kind: str) -> dict[str, str]:
    """The stored files of ``rest`` or ``cli`` by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted((FOLDER / kind).glob("*.json"))}


def write(kind: str, found: Mapping[str, str]) -> None:
    """Replace the stored files."""
    folder = FOLDER / kind
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.json"):
        if path.stem not in found:
            path.unlink()
    for name, text in found.items():
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def compare(kind: str, found: Mapping[str, str]) -> list[str]:
    """What differs from the stored files, a text a file."""
    known = stored(kind)
    return [
        difference(f"{kind}/{name}.json", known.get(name, ""), found.get(name, ""))
        for name in sorted({*known, *found})
        if known.get(name) != found.get(name)
    ]


def difference(name: str, before: str, after: str) -> str:
    """The lines that differ, the first of them."""
    lines = [*difflib.unified_diff(before.splitlines(), after.splitlines(), name, f"{name} now", lineterm="", n=2)]
    more = [f"... {len(lines) - LINES_SHOWN_MAX} more lines"] if len(lines) > LINES_SHOWN_MAX else []
    return "\n".join(lines[:LINES_SHOWN_MAX] + more)


KINDS = {"rest": of_rest, "cli": of_cli}
