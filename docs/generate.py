"""Write what the code already knows into README.md and docs/reference."""

from __future__ import annotations

import ast
import builtins
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import interfaces
from typescript import types_of

from rota.cluster.core.jobs import PHASE_CHANGES
from rota.job.core import machine, transitions
from rota.spec import errors, events, reasons, states

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "rota"
TYPES = ROOT / "web" / "src" / "api" / "types.ts"
PACKAGES = ("spec", "runtime", "testing", "tensors", "cluster", "job", "train", "adapters", "service")


def sentence(path: Path) -> str:
    """The first paragraph of a file's docstring on one line."""
    docstring = path.read_text(encoding="utf-8").partition('"""')[2].partition('"""')[0]
    return docstring.strip().split("\n\n")[0].replace("\n", " ")


def tree_of_packages() -> str:
    """A line a package, for README.md."""
    rows = [f"| `rota/{package}` | {sentence(SOURCE / package / '__init__.py')} |" for package in PACKAGES]
    return "\n".join(["| package | what it is |", "|---|---|", *rows])


def tree_of_files() -> str:
    """A line a file, for docs/reference/tree.md."""
    lines = ["# The tree", "", "One line a file: the first sentence of the file itself.", ""]
    for package in PACKAGES:
        lines += [
            f"## rota/{package}",
            "",
            sentence(SOURCE / package / "__init__.py"),
            "",
            "| file | what it is |",
            "|---|---|",
        ]
        for path in sorted((SOURCE / package).rglob("*.py")):
            name = path.relative_to(SOURCE / package)
            if name.name != "__init__.py":
                lines.append(f"| `{name}` | {sentence(path)} |")
            elif name.parent.name and sentence(path):
                lines.append(f"| `{name.parent}/` | {sentence(path)} |")
        lines.append("")
    return "\n".join(lines)


def page_of_reasons() -> str:
    """Every reason with its family, fault and final state."""
    lines = [
        "# Reasons",
        "",
        "A reason explains a decision or an end. The list is closed; names never change.",
        "",
        "| reason | family | fault | ends a job as | meaning |",
        "|---|---|---|---|---|",
    ]
    for reason in reasons.Reason:
        info = reasons.INFO[reason]
        lines.append(f"| `{reason}` | {info.family} | {info.fault} | {info.ends_in or ''} | {info.text} |")
    return "\n".join([*lines, ""])


KINDS_OF_STATE = (
    states.JobState,
    states.InstanceState,
    states.GangState,
    states.AskState,
    states.ReplicaState,
    states.Level,
)


def page_of_states() -> str:
    """The life cycles with what each state asserts."""
    lines = ["# States", "", *(states.__doc__ or "").strip().splitlines(), ""]
    tree = ast.parse((SOURCE / "spec" / "states.py").read_text(encoding="utf-8"))
    for cls in KINDS_OF_STATE:
        lines += [f"## {cls.__name__}", "", (cls.__doc__ or "").strip(), "", "| state | meaning |", "|---|---|"]
        texts = _member_texts(tree, cls.__name__)
        lines += [f"| `{member}` | {texts[member.name]} |" for member in cls]
        lines.append("")
    return "\n".join(lines)


def _member_texts(tree: ast.Module, cls: str) -> dict[str, str]:
    found: dict[str, str] = {}
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
    for before, after in itertools.pairwise(body):
        if isinstance(before, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            target = before.targets[0]
            if isinstance(target, ast.Name):
                found[target.id] = str(after.value.value)
    return found


def page_of_events() -> str:
    """Every event of the log with its fields."""
    lines = ["# Events", "", "Facts of the log, in the past tense. New fields have defaults, so old logs replay.", ""]
    lines += ["| event | of | fields | meaning |", "|---|---|---|---|"]
    for name, cls in events.KINDS.items():
        of = "cluster" if issubclass(cls, events.ClusterEvent) else "job"
        fields = ", ".join(f"`{field}`" for field in cls.__dataclass_fields__)
        lines.append(f"| `{name}` | {of} | {fields} | {(cls.__doc__ or '').split(chr(10) + chr(10))[0].strip()} |")
    return "\n".join([*lines, ""])


def page_of_errors() -> str:
    """The exception tree as drawn in the code, then the exceptions of each package below it."""
    drawn = (errors.__doc__ or "").partition("::\n")[2].rstrip()
    lines = ["# Errors", "", "Name, exit status of the command line, HTTP status, code.", "", f"```{drawn}\n```"]
    lines += [
        "",
        "Exceptions of single packages. One without a code is not in the tree: it is handled inside Rota.",
        "",
    ]
    below = exceptions()
    head = ["| name | base | exit | HTTP | code | meaning |", "|---|---|---|---|---|---|"]
    for package in PACKAGES:
        rows = [one.row(below) for one in below.values() if one.package == package and one.name[0] != "_"]
        lines += [f"## {package}", "", *head, *rows, ""] if rows else []
    return "\n".join(lines)


@dataclass(frozen=True)
class Raised:
    """An exception class as its file declares it; ``own`` are ``code``, ``http`` and ``exit`` where it sets them."""

    name: str
    bases: list[str]
    package: str
    meaning: str
    own: dict[str, object]

    def row(self, below: Mapping[str, Raised]) -> str:
        """Its row in the table of its package."""
        cells = [str(self.find(name, below) or "") for name in ("exit", "http", "code")]
        cells[2] = cells[2] and f"`{cells[2]}`"
        return (
            f"| `{self.name}` | {', '.join(f'`{one}`' for one in self.bases)} | {' | '.join(cells)} | {self.meaning} |"
        )

    def find(self, name: str, below: Mapping[str, Raised]) -> object:
        """An attribute, its own or that of the nearest base which sets it; None for one outside the tree."""
        bases = [below.get(one) or vars(errors).get(one) for one in self.bases]
        of_bases = (one.find(name, below) if isinstance(one, Raised) else getattr(one, name, None) for one in bases)
        return self.own.get(name) or next(filter(None, of_bases), None)


@cache
def exceptions() -> dict[str, Raised]:
    """Each exception outside ``spec/errors.py``, by name."""
    known = {
        name
        for name, value in (*vars(builtins).items(), *vars(errors).items())
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    classes = [
        Raised(
            node.name,
            [ast.unparse(one).rpartition(".")[2] for one in node.bases],
            path.relative_to(SOURCE).parts[0],
            " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split()),
            _own(node),
        )
        for path in sorted(SOURCE.rglob("*.py"))
        if path != SOURCE / "spec" / "errors.py"
        for node in _classes(path.read_text(encoding="utf-8"))
    ]
    size = 0
    while size != len(known):  # until no class below one of those is new
        size = len(known)
        known |= {one.name for one in classes if known.intersection(one.bases)}
    return {one.name: one for one in sorted(classes, key=lambda one: one.name) if known.intersection(one.bases)}


def _own(node: ast.ClassDef) -> dict[str, object]:
    found: dict[str, object] = {}
    for one in node.body:
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]).strip("()").split(", ")[0] == "code":
            values = ast.literal_eval(one.value)
            found = dict(
                zip(("code", "http", "exit"), values if isinstance(values, tuple) else (values,), strict=False)
            )
    return found


def _classes(text: str) -> list[ast.ClassDef]:
    """Every class of a file that has a base; most files have none, and to parse them takes most of the time."""
    tree = ast.walk(ast.parse(text)) if re.search(r"^ *class \w+\(", text, re.MULTILINE) else ()
    return [node for node in tree if isinstance(node, ast.ClassDef)]


SECTIONS = {
    "tutorials": "Begin here: first-job, then why-it-waits and first-failure, in either order.",
    "how-to": "One task a page.",
    "explanation": "How it works, and why.",
    "reference": "Looked up, most of it written by the code.",
    "decisions": "Where the way was chosen, and what was turned down.",
}


def page_of_pages() -> str:
    """Every page of the documentation by its heading."""
    lines = ["# Documentation", ""]
    for section, what in SECTIONS.items():
        lines += [f"## {section.capitalize()}", "", what, ""]
        for path in sorted((ROOT / "docs" / section).glob("*.md")):
            heading = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            lines.append(f"- [{heading}]({section}/{path.name})")
        lines.append("")
    return "\n".join(lines)


PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/tree.md": tree_of_files,
    "docs/reference/reasons.md": page_of_reasons,
    "docs/reference/states.md": page_of_states,
    "docs/reference/events.md": page_of_events,
    "docs/reference/errors.md": page_of_errors,
    **interfaces.PAGES,
    "docs/README.md": page_of_pages,
}


def table_of_transitions(rows: Sequence[transitions.Transition[transitions.S]]) -> str:
    """Every transition with the states that it leaves and enters."""
    lines = ["| when | from | to |", "|---|---|---|"]
    for row in rows:
        leaves, enters = (", ".join(f"`{one}`" for one in ones) for ones in (row.leaves, row.enters))
        lines.append(f"| {row.when} | {leaves} | {enters} |")
    return "\n".join(lines)


GROUPS = {
    "waiting": machine.WAITING,
    "up": machine.UP,
    "live": machine.LIVE,
    "waiting or live": (*machine.WAITING, *machine.LIVE),
    "any": machine.ENDING,
}
"""The names that the page of the machine gives to groups of states."""


def table_of_events() -> str:
    """Every event that changes a job, with the states in which it does; apart, those in which all is given back."""
    lines = ["| event | changes a job that is | or gives everything back as |", "|---|---|---|"]
    for event in sorted({row.event.__name__ for row in machine.ROWS}):
        cells: list[str] = []
        for ending in (False, True):
            rows = [row for row in machine.ROWS if row.event.__name__ == event and row.ending is ending]
            found = {state for row in rows for state in row.states}
            named = [name for name, group in GROUPS.items() if set(group) == found]
            cells.append(*named or [", ".join(f"`{state}`" for state in states.JobState if state in found)])
        lines.append(f"| `{event}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_phases() -> str:
    """Every change of phase of a row of the scheduler, with the event that makes it."""
    lines = ["| when | from | to | event of the scheduler |", "|---|---|---|---|"]
    for row in PHASE_CHANGES:
        leaves = ", ".join(f"`{one}`" for one in row.leaves)
        lines.append(f"| {row.when} | {leaves} | `{row.enters}` | `{row.event}` |")
    return "\n".join(lines)


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"tree": tree_of_packages},
    "docs/explanation/job-states.md": {
        "job": lambda: table_of_transitions(transitions.JOB_TRANSITIONS),
        "instance": lambda: table_of_transitions((*transitions.INSTANCE_TRANSITIONS, *transitions.AT_ONCE)),
        "gang": lambda: table_of_transitions(transitions.GANG_TRANSITIONS),
        "events": table_of_events,
        "ask": lambda: table_of_transitions(transitions.ASK_TRANSITIONS),
        "phase": table_of_phases,
    },
}
"""Pages of which only what is between two marks is written by the code."""


def page_with_parts(name: str) -> str:
    """A page of ``PARTS`` with what belongs between its marks."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for mark, part in PARTS[name].items():
        begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{part()}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    """Write the pages that are out of step."""
    wanted = {ROOT / name: page() for name, page in PAGES.items()}
    wanted |= {ROOT / name: page_with_parts(name) for name in PARTS}
    wanted[TYPES] = types_of(TYPES.parent.parent)
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
