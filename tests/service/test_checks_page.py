"""The page of expectations names tests and files that exist, thirty of them, with three open ones at most."""

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
    assert len(re.findall(r"\b\d+ (?:has|does)\b", text.partition("Open:")[2])) <= 3
