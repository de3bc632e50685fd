"""The reader answers ten thousand damaged job files as recorded: the same job, or the same problems at their places."""

from __future__ import annotations

import os

import pytest
from tests.service.jobfile_corpus import answer, stored

PART = 1 if os.environ.get("ROTA_DEEP") else 5
"""Every fifth text without ROTA_DEEP=1: about two thousand."""

pytestmark = pytest.mark.slow


def test_the_reader_answers_as_recorded() -> None:
    """A wording that changed on purpose: look at each difference, then ``python -m tests.service.jobfile_corpus``."""
    cases = stored()
    assert len(cases) > 10_000
    differing = [
        f"{text!r} --set {sets}\n  recorded: {recorded}\n  now:      {now}"
        for (text, sets), recorded in cases[::PART]
        if (now := answer(text, sets)) != recorded
    ]
    assert not differing, f"{len(differing)} differ:\n" + "\n".join(differing[:10])
