"""The runner of mutants: what it changes, what it leaves alone, and that it tells a strong test from a weak one."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.__main__ import MEANT, Mutant, equivalent, report, sampled, share
from tests.mutants.areas import AREAS, ROOT, Area
from tests.mutants.mutate import mutations
from tests.mutants.runner import ENDLESS, FOUND, SURVIVED, in_child, replace_code

SOURCE = b'''"""Text."""

LIMIT = 3


def left(n: int, *, strict: bool = True) -> int:
    """What is left."""
    rest = LIMIT - n
    if not strict and rest < 0:
        raise ValueError(f"{n} is over {LIMIT}")
    seen.append(rest)
    return divide(rest, n)
'''


def changes(source: bytes) -> set[str]:
    return {one.shown(source) for one in mutations(source)}


@pytest.mark.parametrize(
    "change",
    (
        "LIMIT = 3 -> LIMIT = 4",
        "rest = LIMIT - n -> rest = (LIMIT + (n))",
        "if not strict and rest < 0: -> if not strict and (rest <= 0):",
        "if not strict and rest < 0: -> if (strict) and rest < 0:",
        "if not strict and rest < 0: -> if ((not strict) or (rest < 0)):",
        "if not strict and rest < 0: -> if (rest < 0):",
        'raise ValueError(f"{n} is over {LIMIT}") -> pass',
        "seen.append(rest) -> pass",
        "seen.append(rest) -> return",
        "return divide(rest, n) -> return None",
        "return divide(rest, n) -> return divide(n, rest)",
    ),
)
def test_a_line_is_broken_in_each_of_these_ways(change: str) -> None:
    assert change in changes(SOURCE)


def test_every_change_is_a_program_and_differs_from_the_source() -> None:
    for one in mutations(SOURCE):
        assert ast.dump(ast.parse(one.applied(SOURCE))) != ast.dump(ast.parse(SOURCE)), one


def test_texts_for_people_types_and_first_bindings_stay() -> None:
    shown = " ".join(changes(SOURCE))
    assert "Text.XX" not in shown
    assert "over" not in shown.replace('raise ValueError(f"{n} is over {LIMIT}") -> pass', "")
    assert "rest = LIMIT - n -> pass" not in shown


def test_the_same_seed_breaks_the_same_lines_and_each_line_once() -> None:
    first, again = sampled(AREAS[-1], 40, 7), sampled(AREAS[-1], 40, 7)
    assert first == again
    assert len({(one.path, one.mutation.line) for one in first}) == 40
    assert first != sampled(AREAS[-1], 40, 8)


def test_a_function_that_others_imported_is_changed_in_place() -> None:
    from rota.service.accounts import is_below

    source = next(
        path for area in AREAS for path in area.files() if path.name == "accounts.py" and path.parent.name == "service"
    )
    mutant = next(
        Mutant(path=source, mutation=one)
        for one in mutations(source.read_bytes())
        if one.kind == "and/or" and "queue.startswith" in one.shown(source.read_bytes())
    )
    before = is_below("a/b", "a")
    assert (before, in_child(lambda: (replace_code(mutant), is_below("a/b", "a")))) == (True, (True, False))
    assert is_below("a/b", "a")


def test_a_survivor_is_printed_and_what_is_known_to_be_equivalent_is_not_counted(capsys) -> None:
    mutants = sampled(AREAS[-1], 4, 1)
    results = [(one, result, 1) for one, result in zip(mutants, (FOUND, SURVIVED, SURVIVED, ENDLESS), strict=True)]
    known = {f"{mutants[2].name} | {mutants[2].mutation.shown(mutants[2].path.read_bytes())}": "why"}
    counts = report(results, known, show_all=False)
    assert share(counts) == (2, 3) and share(counts)[0] < MEANT * 3
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 and printed[0].startswith(f"survived {mutants[1].name}:{mutants[1].mutation.line}: ")


def test_what_is_listed_as_equivalent_names_a_change_that_exists() -> None:
    sources = {name: (ROOT / name).read_bytes() for name in {row.partition(" | ")[0] for row in equivalent()}}
    exists = {f"{name} | {one.shown(source)}" for name, source in sources.items() for one in mutations(source)}
    assert set(equivalent()) - exists == set()


@pytest.mark.parametrize("area", AREAS, ids=lambda area: area.name)
def test_every_area_names_sources_and_tests_that_exist(area: Area) -> None:
    assert [pattern for pattern in area.sources if not [*(ROOT / "src" / "rota").glob(pattern)]] == []
    assert [path for path in area.tests if not (ROOT / path).exists()] == []
