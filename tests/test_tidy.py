"""What linters cannot see: docstring sentences, sizes, dead files, names, docs in step with the code."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import banned_words as words

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src" / "rota").rglob("*.py"))
LINES_MAX = 700
FUNCTION_LINES_MAX = 60
TEST_LINES_MAX = 800
FOLDERS = ("src", "tests", "benchmarks", "examples", "docs")
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_source_file_begins_with_one_sentence_keeps_its_size_and_is_documented() -> None:
    wrong = [f"{_name(path)}{text}" for path in SOURCES for text in _untidy(path)]
    assert not wrong, "\n".join(wrong)


def _untidy(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if not text.strip():
        if path.name != "__init__.py":
            yield " is empty"
        return
    tree = words.tree_of(path)
    docstring = ast.get_docstring(tree)
    if not docstring:
        yield ": begin with a sentence that says what the file is for"
        return
    first = docstring.split("\n\n")[0].replace("\n", " ")
    if not first.endswith((".", "?", ":")):
        yield f": first docstring paragraph is no sentence: {first!r}"
    if text.count("\n") > LINES_MAX:
        yield f" has {text.count(chr(10))} lines; split it by idea"
    if "noqa: TID251" in text:
        yield ": clock, chance and environment come from runtime, or in the user's process from service/user_process.py"
    for node in _statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f": {node.name} has {lines} lines, more than {FUNCTION_LINES_MAX}"
    yield from (f": {one}" for one in _undocumented(tree))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement below a node; expressions, which are most of a tree and hold no function, are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from _statements(child)


def _undocumented(tree: ast.Module) -> list[str]:
    """Public functions and classes without a docstring, public functions without a return type."""
    missing: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                missing.append(f"{node.name} has no docstring")
            if not isinstance(node, ast.ClassDef) and node.returns is None:
                missing.append(f"{node.name} has no return type")
    return missing


def test_no_file_has_a_name_that_says_nothing() -> None:
    bad = [_name(path) for path in SOURCES if BANNED_NAMES & set(path.stem.split("_"))]
    assert not bad


def test_no_two_modules_declare_the_same_constant() -> None:
    """One imports it from the other. A wait (``_S``) is each module's own, and so is the form of its messages."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in SOURCES:
        for node in words.tree_of(path).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and re.fullmatch(r"_?[A-Z][A-Z0-9_]+(?<!_S)", target.id) and node.value:
                value = ast.unparse(node.value)
                if not re.match(r"struct\.Struct|\w+$(?<!\d)", value):
                    found.setdefault((target.id, value), []).append(_name(path))
    twice = [f"{name} = {value}: {', '.join(there)}" for (name, value), there in found.items() if len(there) > 1]
    assert not twice, "\n".join(twice)


def _dots(word: str) -> list[int]:
    return [found.start() for found in re.finditer(r"\.", word)]


def test_no_source_file_is_dead() -> None:
    """Every module is imported by another one, is an entry point, or is named as an import path."""
    words: dict[str, set[str]] = {}
    for path in (ROOT / "pyproject.toml", *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))):
        found = set(re.findall(r"[\w.]+", path.read_text(encoding="utf-8")))
        words[str(path)] = found | {word[:end] for word in found for end in _dots(word)}
    dead: list[str] = []
    for path in SOURCES:
        if path.name in ("__init__.py", "__main__.py") or "migrations" in path.parts:
            continue  # entry points, and what Alembic loads by folder
        dotted = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        package, _, stem = dotted.rpartition(".")
        used = any(dotted in found or {package, stem} <= found for name, found in words.items() if name != str(path))
        if not used:
            dead.append(_name(path))
    assert not dead


def test_test_files_stay_readable() -> None:
    long = [
        f"{_name(path)} ({lines} lines)"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (lines := path.read_text(encoding="utf-8").count("\n")) > TEST_LINES_MAX
    ]
    assert not long


def test_no_two_test_files_outside_packages_share_a_name() -> None:
    """Pytest imports them by that name alone, and refuses the second one when both are collected."""
    found = Counter(
        path.name for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()
    )
    assert [name for name, times in found.items() if times > 1] == []


def test_a_decision_has_a_number_of_its_own_and_says_what_it_costs() -> None:
    records = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    numbers = Counter(path.name[:4] for path in records)
    assert not [number for number, count in numbers.items() if count > 1]
    for path in records:
        text = path.read_text(encoding="utf-8").lower()
        missing = [section for section in ("alternative", "non-goal", "drawback") if section not in text]
        assert not missing, f"{_name(path)}: says nothing of {', '.join(missing)}s"


def test_importing_rota_and_asking_for_help_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'ray', 'fastapi', 'sqlalchemy'}"
    code = f"import sys, rota, rota.service.cli.app; print(sorted({heavy} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"


def test_readme_is_short_and_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 100
    assert "make demo" in text
    assert "make test" in text


def test_an_entry_of_the_changelog_has_at_most_two_lines() -> None:
    entries = re.findall(r"^- .*\n(?:  .*\n)*", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(entries) > 100 and not [one for one in entries if one.count("\n") > 2]


def test_no_machine_path_is_written_down() -> None:
    pattern = re.compile(r"(?<![\w$])/(?:work|root|home/\w+|farm|opt/wheels)/")
    hits: list[str] = []
    for folder in ("src", "examples", "benchmarks", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".md", ".yaml", ".toml", ".json", ".lua", ".html"} and path.is_file():
                for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                    if pattern.search(line):
                        hits.append(f"{_name(path)}:{number}")
    assert not hits


def test_a_setup_shows_large_downloads_alone_and_fails_when_the_installation_does(tmp_path: Path) -> None:
    said = [
        "Collecting a",
        "  Downloading a-1.whl (192.3 MB)",
        "  Downloading b-1.whl (9.9 MB)",
        "Requirement already: c",
    ]
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    make, sed = shutil.which("make"), shutil.which("sed")
    assert make and sed
    (tmp_path / "bin" / "sed").symlink_to(sed)  # alone on the path, which has no uv then
    for status, shown in ((0, ["  Downloading a-1.whl (192.3 MB)"]), (3, [])):
        python.write_text(
            "#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in said[: 4 - status]) + f"exit {status}\n"
        )
        python.chmod(0o755)
        (tmp_path / "mk").write_text("include Makefile\ninstalled: ; @$(call INSTALL,a)\n")
        command = [make, "-s", "-f", str(tmp_path / "mk"), "installed", f"VENV={tmp_path}"]
        done = subprocess.run(
            command, cwd=ROOT, env={"PATH": str(tmp_path / "bin")}, capture_output=True, text=True, check=False
        )
        assert (done.stdout.splitlines(), done.returncode != 0) == (shown, status != 0), done.stderr


def test_the_list_of_words_and_names_that_are_to_go_is_that_of_the_tree() -> None:
    """Nothing is added to it, and what is gone is taken from it."""
    found, recorded = set(words.left()), set(words.recorded())
    assert found == recorded, (
        f"see python tests/banned_words.py; reword what was added: {sorted(found - recorded)}; "
        f"then python tests/banned_words.py --record, for what is no longer true: {sorted(recorded - found)}"
    )


def test_a_word_is_found_in_texts_and_not_in_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "ROOT", tmp_path)
    for name, text in {
        "src/rota/job/door.py": '"""It tells\n\nthe story."""\nstory = ["story", f"there is no {1}, nobody is left"]\n',
        "web/src/a.tsx": 'const story = "so many jobs"; // it goes on\n<b>What shall run?</b>\n',
        "docs/a.md": "This is no page; `story` is a name, there is no other. It is no longer there.\n",
        "docs/reference/cli.md": "It tells what stands here.\n",
        "README.md": "Mend it.\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [(place.file, place.line, place.word) for place in words.places()] == [
        ("README.md", 1, "Mend"),
        ("docs/a.md", 1, "is no "),
        ("src/rota/job/door.py", 1, "tells"),
        ("src/rota/job/door.py", 3, "story"),
        ("src/rota/job/door.py", 4, "nobody"),
        ("web/src/a.tsx", 1, "goes on"),
        ("web/src/a.tsx", 1, "so many"),
        ("web/src/a.tsx", 2, "What shall"),
    ]
    assert words.left()[2:4] == ["3 src/rota/job/door.py", "name src/rota/job/door.py"]


_MEANT = re.compile(r"NAME|<engine>|/NAME")
_CODE_NAME = re.compile(
    r"(?<![\w/])(?:(?:src|tests|docs|examples)/[\w/.-]+|_[a-z]\w+|[A-Z]{2,}[A-Z_]+|[A-Z][a-z]+[A-Z]\w+)"
)


@pytest.mark.parametrize("page", sorted((ROOT / "docs/how-to").glob("add-a*.md")), ids=lambda page: page.stem)
def test_a_checklist_names_files_and_names_that_exist(page: Path) -> None:
    """A page said ``_carry_out`` for months after the match had moved to ``_effect``."""
    code = "\n".join(path.read_text() for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py"))
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    spans = [span for span in re.findall(r"`([^`]+)`", prose) if not _MEANT.search(span)]
    named = {one for span in spans for one in _CODE_NAME.findall(span)}
    gone = {one for one in named if not ((ROOT / one).exists() if "/" in one else re.search(rf"\b{one}\b", code))}
    assert not gone, f"{page.name} names what does not exist: {sorted(gone)}"
