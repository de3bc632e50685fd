"""Words that no text of the project uses; ``python tests/banned_words.py [PATH ...]`` prints where they still are.

Looked at are the string literals, docstrings and comments of ``src/rota`` and of what writes ``docs``, the texts of
``web/src``, the pages at the root, those of ``docs`` that people write, the templates, and the names of files. What is
left in each file is recorded in ``words_left.txt`` and only becomes less: ``--record`` writes that file again.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT = Path(__file__).with_name("words_left.txt")
NAME = "name"
"""Instead of a count: the name of the file itself is an old one."""
BANNED = re.compile(
    r"""
      \bso\ (?:many|long)\b
    | \bwhat\ shall\b
    | \bstands\b
    | \b(?:tells?|told|telling|story|stories)\b
    | \b(?:goes|go|going|went|gone)\ on\b (?!\ (?:on|the|a|it)\b)
    | (?<!there\ )\bis\ no\ (?!longer\b|more\b|less\b|later\b|earlier\b)
    | \bmend(?:s|ed|ing)?\b
    | \b(?:nobody|somebody)\b
    | \b(?:come|comes|came|coming)\ (?:any\ )?further\b
    | \bdoors?\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
GENERATED = frozenset({"docs/README.md"}) | {
    f"docs/reference/{name}.md"
    for name in (
        *("tree", "reasons", "states", "events", "errors", "exit-codes"),
        *("cli", "settings", "metrics", "rest", "job-file"),
    )
}
"""Written by docs/generate.py from texts of the code."""
OLD_NAMES = (
    *("doors", "door", "beside", "kept", "lanes", "meetings", "chance", "turns", "life"),
    *("losing", "recovering", "settling", "intent", "winding", "moving", "sizing"),
    *("facts", "claims", "sound", "binding", "variants", "intra", "vcells", "policies/anywhere", "policies/pools"),
    *("questions", "wire", "olderform", "sets", "jobtext", "starters", "planeview", "verbs/reasons", "verbs/words"),
    *("train/keep", "train/ties", "train/parts", "train/room", "plan/published", "plan/exchange"),
)
"""Names of files, without ``.py``, that a word of the field has replaced."""
WEB_TEXT = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|`[^`]*`|>[^<>{}=;]*<|//[^\n]*|/\*.*?\*/", re.DOTALL)
"""Literals, text between tags, and comments."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One of the words at a line of a file."""

    file: str
    line: int
    word: str
    text: str


def places() -> list[Place]:
    """Every place that is left, by file and line."""
    found: list[Place] = []
    for path in (*sorted((ROOT / "src" / "rota").rglob("*.py")), *sorted((ROOT / "docs").glob("*.py"))):
        found += _in_python(path)
    for path in sorted((ROOT / "web" / "src").rglob("*.ts*")):
        found += _in_web(path)
    front = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")]
    templates = sorted((ROOT / "src" / "rota" / "service" / "templates").rglob("*"))
    front += [path for path in templates if path.suffix in (".yaml", ".txt", ".ipynb")]
    for path in (*filter(Path.exists, front), *sorted((ROOT / "docs").rglob("*.md"))):
        if path.relative_to(ROOT).as_posix() not in GENERATED:
            found += _in_text(path, path.read_text(encoding="utf-8"), 1)
    return sorted(found)


def old_names() -> list[str]:
    """The files of the package that have one of the old names."""
    files = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "src" / "rota").rglob("*.py"))]
    return [file for file in files if file.removesuffix(".py").endswith(tuple(f"/{name}" for name in OLD_NAMES))]


def left() -> list[str]:
    """A line for each file with a number of places, or with an old name, ordered by file."""
    counts = Counter(place.file for place in places())
    rows = [(file, str(count)) for file, count in counts.items()] + [(file, NAME) for file in old_names()]
    return [f"{count} {file}" for file, count in sorted(rows)]


def recorded() -> list[str]:
    """The same as it was last recorded."""
    return LEFT.read_text(encoding="utf-8").splitlines()


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax of a file, read once for all tests."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _in_python(path: Path) -> Iterator[Place]:
    """In comments, and in literals of more than one word: a single one is a name, such as that of a field."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\s", node.value.strip()):
            yield from _in_text(path, node.value, node.lineno)
    lines = path.read_text(encoding="utf-8").splitlines()
    if not any(BANNED.search(line, line.index("#")) for line in lines if "#" in line):
        return  # to take a file apart costs more than all the rest
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield from _in_text(path, token.string, token.start[0])


def _in_web(path: Path) -> Iterator[Place]:
    text = path.read_text(encoding="utf-8")
    for found in WEB_TEXT.finditer(text):
        if re.search(r"\s", found.group().strip("\"'`<> \n")):
            yield from _in_text(path, found.group(), text.count("\n", 0, found.start()) + 1)


def _in_text(path: Path, text: str, first: int) -> Iterator[Place]:
    """Names in code marks are left alone."""
    plain = re.sub(r"`[^`\n ]*`", lambda code: "`" + "x" * (len(code.group()) - 2) + "`", text)
    for found in BANNED.finditer(plain):
        line = text.count("\n", 0, found.start())
        shown = text.splitlines()[line].strip()
        yield Place(path.relative_to(ROOT).as_posix(), first + line, found.group(), shown)


def main() -> int:
    """Print what is left, or record how much; 1 when a place is left."""
    parser = argparse.ArgumentParser(prog="python tests/banned_words.py", description=__doc__)
    parser.add_argument("paths", nargs="*", help="only files below these, for example src/rota/job")
    parser.add_argument("--record", action="store_true", help=f"write {LEFT.name}")
    args = parser.parse_args()
    if args.record:
        LEFT.write_text("".join(f"{row}\n" for row in left()), encoding="utf-8")
        return 0
    found = [one for one in places() if one.file.startswith(tuple(args.paths) or "")]
    for file in old_names():
        if file.startswith(tuple(args.paths) or ""):
            print(f"{file}: its name is an old one")
    for one in found:
        print(f"{one.file}:{one.line}: {one.word}: {one.text[:140]}")
    print(f"{len(found)} places in {len({one.file for one in found})} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
