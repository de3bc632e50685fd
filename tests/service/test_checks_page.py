"""The page of expectations names tests and files that exist, thirty of them; the review has its sum and its files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "checks.md"


def test_every_proof_on_the_page_of_expectations_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| .+ \| (.+) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 31))
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^\s*def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for number, proofs in rows:
        named = set(re.findall(r"`(test_\w+)`", proofs))
        files = re.findall(r"(?:tests|benchmarks)/\S+\.py", proofs)
        assert (named or files) and named <= defined, (number, named - defined)
        assert all((ROOT / name).exists() for name in files), number
    every = set(re.findall(r"`(test_\w+)`", text))
    assert every <= defined, every - defined


def test_the_review_adds_up_and_the_answers_to_its_questions_are_files() -> None:
    text = (PAGE.parent / "review.md").read_text(encoding="utf-8")
    points, questions = text.split("## Twenty questions")
    scores = re.findall(r"^\| \**(\d+)\** \| [^|]+ \| ([012]) \|", points, re.MULTILINE)
    assert [int(number) for number, _ in scores] == list(range(1, 41))
    assert f"Sum of this table: **{sum(int(score) for _, score in scores)}**" in points
    files = re.findall(r"^\| .+ \| `(.+)` \|$", questions, re.MULTILINE)
    assert len(files) == 20 and all((ROOT / "src" / "rota" / name).is_file() for name in files)
