"""Replay recorded cases: state, request, expected."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rota.cluster.policies import get_profile
from rota.spec.errors import BadInput
from tests.proof.cases.compare import Mismatch, Unsupported
from tests.proof.cases.hived import hived_case
from tests.proof.cases.kai import kai_case
from tests.proof.cases.policies import policy_case

Case = tuple[str, Callable[[], None]]
"""Identifier, and a replay that raises Mismatch where the outcome differs."""


class CaseError(BadInput):
    """A case file that cannot be read or is of no known form."""

    code = "CASES_INVALID"


def run_cases(path: Path, profile: str = "auto") -> dict[str, Any]:
    """Replay every case of a file and return the document of ``rota sim cases --json``.

    The form is recognised by the keys of the file. A case whose words are not known fails with ``unsupported: ...``.
    Raises CaseError for a file that cannot be read or has another form.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CaseError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise CaseError(f"{path}: cannot be read as JSON: {error}") from error
    results = [_outcome(case_id, replay) for case_id, replay in _cases(path, raw, profile)]
    passed = sum(result["ok"] for result in results)
    return {"passed": passed, "failed": len(results) - passed, "cases": results}


def _cases(path: Path, raw: Any, profile: str) -> Iterator[Case]:
    if not isinstance(raw, dict) or not isinstance(raw.get("cases"), list):
        raise CaseError(f"{path}: no list of cases", hint="the file must be an object with the key 'cases'")
    if "physical_cluster" in raw:
        if profile not in ("auto", "hived"):
            raise CaseError(f"{path}: cases of virtual clusters need the profile hived, not {profile}")
        return ((case.get("id", "?"), lambda case=case: hived_case(raw, case)) for case in raw["cases"])
    if all("action" in case for case in raw["cases"]):
        shared = get_profile("kai" if profile == "auto" else profile)
        return ((case.get("id", "?"), lambda case=case: kai_case(case, shared)) for case in raw["cases"])
    if all("kind" in case for case in raw["cases"]):
        chosen = get_profile("fifo" if profile == "auto" else profile)
        return ((case.get("id", "?"), lambda case=case: policy_case(case, chosen)) for case in raw["cases"])
    raise CaseError(f"{path}: cases of an unknown form")


def _outcome(case_id: str, replay: Callable[[], None]) -> dict[str, Any]:
    try:
        replay()
    except Mismatch as mismatch:
        return {"id": case_id, "ok": False, "why": str(mismatch)}
    except Unsupported as unsupported:
        return {"id": case_id, "ok": False, "why": f"unsupported: {unsupported}"}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, BadInput) as error:
        return {"id": case_id, "ok": False, "why": f"unsupported: {type(error).__name__}: {error}"}
    return {"id": case_id, "ok": True, "why": None}
