"""rota demo: the main job on a pretend cluster, killed three times and healed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rota.service.cli.output import Table
from rota.service.cli.verbs.flags import DEFAULT_FLAGS, Flags
from rota.spec.resources import counted

HOMES = Table(
    columns={"HOME": "home", "ENDED": lambda one: ", ".join(one["ended"]), "LEFT": "still_running"},
    empty="no demo left anything",
)


def demo(
    *,
    out: Annotated[Path, Parameter(help="Folder of the report.")] = Path("rota-demo-report"),
    keep: Annotated[bool, Parameter(help="Leave the service running at the end.")] = False,
    clean: Annotated[bool, Parameter(help="Only remove what earlier demos left: services, folders.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Train a small model, kill a rollout, an actor rank and the master, and show how the job heals.

    It uses a service of its own, ends within 8 minutes on two cores and leaves nothing running. Exits with 0 only when
    every kill healed, each commit is in the log once, and the reward rose.

    Examples
    --------
    rota demo --out report

    rota demo --clean
    """
    from rota.service.demo import clean as remove
    from rota.service.demo import document, play

    if clean:
        return flags.show(remove, HOMES, lambda found: any(one["still_running"] for one in found["items"]))
    terminal = flags.terminal()
    outcome = play(out, terminal.note if terminal.json else terminal.line, keep=keep)
    for problem in outcome.problems:
        terminal.note(f"problem: {problem}")
    verdict = "all kills healed" if not outcome.problems else counted(len(outcome.problems), "problem")
    terminal.show(document(outcome), lambda term: term.line(f"{verdict}; the whole demo took {outcome.seconds} s"))
    return 0 if not outcome.problems else 1
