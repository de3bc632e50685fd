"""Sizes, types, docstrings, broad excepts and test ratio of any Python tree: ``code_shape.py PATH...``, a row a tree.

Lines are physical lines. Tests, generated code and functions of two lines or fewer (stubs) are left out; a test is what
lies in a folder ``test`` or ``tests`` or is named ``test_*.py``, ``*_test.py`` or ``conftest.py``.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from run import Row, hand_in

OURS = Path(__file__).resolve().parent.parent / "src" / "rota"
STUB_LINES_MAX = 2
LONG_LINES_MIN = 71
BROAD = {"Exception", "BaseException"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Shape:
    """What is counted; ``row`` gives the columns."""

    files: list[int] = field(default_factory=list[int])
    functions: list[int] = field(default_factory=list[int])
    typed: list[bool] = field(default_factory=list[bool])
    told: list[bool] = field(default_factory=list[bool])
    modules_told: list[bool] = field(default_factory=list[bool])
    broad: int = 0
    test_lines: int = 0

    def row(self, name: str) -> dict[str, object]:
        """The columns: quantiles are median, 90 % and largest; shares are per cent."""
        lines = sum(self.files)
        return {
            "tree": name,
            "files": len(self.files),
            "lines": lines,
            "file": quantiles(self.files),
            "function": quantiles(self.functions),
            "long_pct": share([n >= LONG_LINES_MIN for n in self.functions]),
            "typed_pct": share(self.typed),
            "docstrings_pct": share(self.told),
            "module_docstrings_pct": share(self.modules_told),
            "broad_excepts_per_1000": round(1000 * self.broad / max(lines, 1), 2),
            "test_lines_a_line": round(self.test_lines / max(lines, 1), 2),
        }


def quantiles(values: Sequence[int]) -> list[int]:
    """Median, 90 % and largest of the values; zeros without any."""
    ordered = sorted(values) or [0]
    return [ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.9))], ordered[-1]]


def share(values: Sequence[bool]) -> float:
    """How many are true, in per cent."""
    return round(100 * sum(values) / max(len(values), 1), 1)


def is_test(path: Path) -> bool:
    """By folder or by name."""
    named = path.name.startswith("test_") or path.name.endswith("_test.py") or path.name == "conftest.py"
    return named or bool({"test", "tests", "testing"} & set(path.parts))


def is_typed(function: Function) -> bool:
    """Every argument but ``self`` and ``cls``, and the result, have a type."""
    args = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    plain = all(one.annotation is not None for one in args if one.arg not in ("self", "cls"))
    return plain and (function.returns is not None or function.name == "__init__")


def public(node: ast.AST) -> Iterator[Function | ast.ClassDef]:
    """Public classes and functions, also those in public classes."""
    for one in ast.iter_child_nodes(node):
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not one.name.startswith("_"):
            yield one
            if isinstance(one, ast.ClassDef):
                yield from public(one)


def measure(tree: Path, tests: Path | None) -> Shape:
    """Read every Python file below ``tree``; those below ``tests``, or among the tree's own, count as tests."""
    shape = Shape()
    for path in sorted(tree.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if is_test(path.relative_to(tree)):
            shape.test_lines += text.count("\n")
        else:
            count(shape, ast.parse(text), text.count("\n"))
    if tests is not None:
        shape.test_lines += sum(path.read_text(encoding="utf-8").count("\n") for path in tests.rglob("*.py"))
    return shape


def count(shape: Shape, module: ast.Module, lines: int) -> None:
    """Add one file."""
    shape.files.append(lines)
    shape.modules_told.append(ast.get_docstring(module) is not None)
    shape.told += [ast.get_docstring(one) is not None for one in public(module) if length(one) > STUB_LINES_MAX]
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and length(node) > STUB_LINES_MAX:
            shape.functions.append(length(node))
            shape.typed.append(is_typed(node))
        elif isinstance(node, ast.ExceptHandler):
            shape.broad += node.type is None or (isinstance(node.type, ast.Name) and node.type.id in BROAD)


def length(node: Function | ast.ClassDef) -> int:
    """Lines from the name to the end."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def main(paths: Sequence[str]) -> None:
    """Print a row for each tree, and first for Rota when none is given."""
    for path in [Path(one) for one in paths] or [OURS]:
        tests = OURS.parent.parent / "tests" if path.resolve() == OURS else None
        shape = measure(path, tests)
        print(json.dumps(shape.row(path.name)))
        if tests is not None:
            hand_in(
                [
                    Row("lines of a function, median", quantiles(shape.functions)[0], "", 10),
                    Row("lines of the longest function", max(shape.functions), "", 80),
                    Row("lines of the longest file", max(shape.files), "", 700),
                ]
            )


if __name__ == "__main__":
    main(sys.argv[1:])
