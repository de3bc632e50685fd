"""Every command of ours that a page shows is one that the command line takes, with these flags and arguments."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from cyclopts import App, CycloptsError

from rota.service.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("[!r]*/*.md"), *(ROOT / "examples").rglob("*.md")]
SHELL = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`rota ([^`\n]+)`")
COMMANDS_MIN = 100


def commands(text: str) -> list[tuple[str, bool]]:
    """What follows ``rota`` in shell blocks, and (True) in the running text, where arguments may be left out."""
    blocks = "\n".join(SHELL.findall(text)).replace("\\\n", " ")
    parts = [part.strip() for line in blocks.splitlines() for part in re.split(r";|&&?|\|", line.partition("  #")[0])]
    typed = [re.sub(r"^(\w+=\S+ )+", "", part) for part in parts]
    found = [(one[5:], False) for one in typed if one.startswith("rota ")] + [(one, True) for one in SPAN.findall(text)]
    return [(re.sub(r" [<>] ?\S+|[][]| &$", "", words), loose) for words, loose in found]


@cache
def app_of(verb: str) -> App:
    return app.make_app(verb)


def refusal(command: str, *, loose: bool = False) -> str:
    """What the command line has against these words; empty for nothing."""
    words = app.ordered(shlex.split(command))
    try:
        app_of(app._chosen(words)).parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        why = " ".join(str(error).split())
        return "" if loose and "requires an argument" in why else why
    return ""


@pytest.mark.slow
def test_every_command_that_a_page_shows_is_one_that_there_is() -> None:
    found = {(path.relative_to(ROOT), *one) for path in PAGES for one in commands(path.read_text(encoding="utf-8"))}
    wrong = [f"{path}: rota {one}: {why}" for path, one, loose in sorted(found) if (why := refusal(one, loose=loose))]
    assert len(found) > COMMANDS_MIN and not wrong, "\n".join(wrong)
    assert "Unknown option" in refusal("run job.yaml --no-such-flag")
