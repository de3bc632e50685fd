"""Answers of the job-file reader to every job file of the project and to thousands of damaged copies of them.

``python -m tests.service.jobfile_corpus [FILE ...]`` records them again, with files (JSON lists of ``[text, sets]``) also
for other texts. A text is kept as a base and the replacements made in it.
"""

# ruff: noqa: E501  tables of scraps

from __future__ import annotations

import json
import lzma
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rota.service.jobfile.reader import read_job
from rota.spec import codec
from rota.spec.errors import JobFileError

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "tests" / "data" / "jobfile_answers.json.xz"
SEED = 20
DAMAGED = 10_000
BASE_CHARS_MAX = 4_000
_KEY = re.compile(r"[A-Za-z_$][\w.$-]*(?=['\"]?\s*:(?:\s|$))")
_VALUE = re.compile(r":[ \t]+([^\s,{}\[\]#][^,{}\[\]\n#]*)")
_BLOCK = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
_WRONG = (
    "5", "-1", "1.5", "1e3", "1_000", "08", "'2'", "true", "yes", "null", "~", "''", "x", "[1, 2]", "[]", "{}", "{a: 1}", "a|b",
    "9" * 30, "1e400", ".nan", "90", "90s", "512", "512MiB", "5x", "3/10m", "3", "*", "\"*\"", "a.b -> c", "->", "self", "!!str x",
    "> folded", "|", "'open", "\"\\x41\"", "\"a\\0b\"", "all", "loop", "[a, {role: b}]", "{min: 1}", "{min: 2, max: 1}", "node|job",
    "nod", "Process", "processs", "10 commits", "0 commits", "auto", "-", "a: b", "torchrun t.py", "x" * 70,
)  # fmt: skip

Edit = tuple[int, int, str]
Case = tuple[str, tuple[str, ...]]


def answer(text: str, sets: Sequence[str]) -> str:
    """The canonical form of the job that ``text`` describes, or every problem as ``line:col code path message``."""
    try:
        return codec.dumps(read_job(text, filename="f", sets=sets))
    except JobFileError as error:
        return "\n".join(f"{one.file}:{one.line}:{one.col} {one.code} {one}" for one in error.problems)


def bases() -> list[Case]:
    """The job files of the examples, the templates and the pages."""
    files = [*ROOT.glob("examples/*/*.yaml"), *ROOT.glob("src/rota/service/templates/*/*.yaml")]
    texts = [file.read_text() for file in sorted(files)]
    for page in sorted(ROOT.glob("docs/**/*.md")):
        texts += _BLOCK.findall(page.read_text())
    return [(text, ()) for text in texts]


def damaged(rng: random.Random, text: str) -> Iterator[Edit]:
    """One to three replacements in ``text``, each to be made in what the ones before it left."""
    for _ in range(1 + (rng.random() < 0.25) + (rng.random() < 0.1)):
        edit = rng.choice(_DAMAGES)(rng, text)
        if edit is not None:
            yield edit
            text = made(text, [edit])


def made(text: str, edits: Sequence[Edit]) -> str:
    """``text`` with the replacements."""
    for start, end, new in edits:
        text = text[:start] + new + text[end:]
    return text


def _spot(rng: random.Random, found: list[re.Match[str]], group: int = 0) -> tuple[int, int] | None:
    return rng.choice(found).span(group) if found else None


def _lines(rng: random.Random, text: str) -> tuple[int, int]:
    starts = [0, *(found.end() for found in re.finditer("\n", text))]
    start = rng.choice(starts)
    end = text.find("\n", start)
    return start, len(text) if end < 0 else end + 1


def _drop_line(rng: random.Random, text: str) -> Edit:
    start, end = _lines(rng, text)
    return start, end, ""


def _double_line(rng: random.Random, text: str) -> Edit:
    start, end = _lines(rng, text)
    return end, end, text[start:end]


def _move_line(rng: random.Random, text: str) -> Edit:
    start, end = _lines(rng, text)
    spot = _lines(rng, text)[0]
    return spot, spot, text[start:end]


def _indent(rng: random.Random, text: str) -> Edit:
    start, _ = _lines(rng, text)
    blank = len(text[start:]) - len(text[start:].lstrip(" "))
    return start, start + blank, " " * max(0, blank + rng.choice((-4, -2, -1, 1, 2, 4)))


def _tab(rng: random.Random, text: str) -> Edit:
    start, _ = _lines(rng, text)
    blank = len(text[start:]) - len(text[start:].lstrip(" "))
    return start, start + blank, "\t"


def _rename(rng: random.Random, text: str) -> Edit | None:
    spot = _spot(rng, list(_KEY.finditer(text)))
    if spot is None:
        return None
    word = text[slice(*spot)]
    at = rng.randrange(len(word))
    new = rng.choice(
        (word[:at] + word[at + 1 :], word + "s", word.upper(), word[:at] + "x" + word[at:], rng.choice(_KEYS))
    )
    return *spot, new


def _drop_key(rng: random.Random, text: str) -> Edit | None:
    spot = _spot(rng, list(re.finditer(r"[A-Za-z_]\w*: [^,{}\[\]\n]+,? ?", text)))
    return None if spot is None else (*spot, "")


def _double_key(rng: random.Random, text: str) -> Edit | None:
    spot = _spot(rng, list(re.finditer(r"[A-Za-z_]\w*: [^,{}\[\]\n]+", text)))
    return None if spot is None else (spot[1], spot[1], f", {text[slice(*spot)]}")


def _value(rng: random.Random, text: str) -> Edit | None:
    spot = _spot(rng, list(_VALUE.finditer(text)), 1)
    return None if spot is None else (*spot, rng.choice(_WRONG))


def _more_fields(rng: random.Random, text: str) -> Edit | None:
    spot = _spot(rng, list(re.finditer(r"\{", text)))
    return None if spot is None else (spot[1], spot[1], f"{rng.choice(_KEYS)}: {rng.choice(_WRONG)}, ")


def _top_field(rng: random.Random, text: str) -> Edit:
    return 0, 0, f"{rng.choice(_KEYS)}: {rng.choice(_WRONG)}\n"


def _cut(rng: random.Random, text: str) -> Edit:
    return rng.randrange(len(text) + 1), len(text), ""


def _character(rng: random.Random, text: str) -> Edit:
    at = rng.randrange(len(text) + 1)
    return at, min(len(text), at + rng.choice((0, 1))), rng.choice("{}[]:,-#&*!|>'\"%@`? \n\tx1\x07\ufeff\u2028")


def _anchor(rng: random.Random, text: str) -> Edit | None:
    spot = _spot(rng, list(re.finditer(r":[ \t]+", text)))
    return None if spot is None else (spot[1], spot[1], rng.choice(("&x ", "*x", "<<: *x", "&y ", "*y ", "*x, b: ")))


_DAMAGES: tuple[Callable[[random.Random, str], Edit | None], ...] = (
    _drop_line, _double_line, _move_line, _indent, _indent, _tab, _rename, _rename, _rename, _drop_key, _double_key,
    _value, _value, _value, _value, _more_fields, _more_fields, _top_field, _top_field, _cut, _character, _anchor, _anchor,
)  # fmt: skip
_KEYS = (
    "name", "queue", "priority", "roles", "edges", "streams", "weights", "gang", "retry", "time_limit", "grace", "checkpoint",
    "workdir", "data", "output", "env", "secrets", "image", "labels", "success_when", "seed", "workload", "run", "setup",
    "replicas", "mesh", "plan", "model", "resources", "fail", "collocate", "apart", "start_after", "restart", "limit", "then",
    "state", "degrade", "standby", "progress", "bad_data", "nan", "backoff", "check", "slow", "cpus", "gpus", "gpu_type",
    "memory", "min", "max", "role", "level", "share", "source", "key", "cap", "stale", "full", "from", "to", "kind", "micro",
    "inflight", "every", "via", "lag", "versions", "by", "seconds", "dir", "keep", "layers", "$schema", "jobName", "taskRoles",
    "<<",
)  # fmt: skip


def record(given: list[Case]) -> dict[str, Any]:
    """The document of ``STORE`` for these bases."""
    rng = random.Random(SEED)
    cases: list[tuple[int, list[Edit]]] = [(index, []) for index in range(len(given))]
    fit = [index for index, (text, _) in enumerate(given) if len(text) <= BASE_CHARS_MAX]
    size = [min(len(given[index][0]), 1_500) + 40 for index in fit]
    while len(cases) < len(given) + DAMAGED:
        (index,) = rng.choices(fit, size)
        edits = list(damaged(rng, given[index][0]))
        if edits:
            cases.append((index, edits))
    answers: dict[str, int] = {}
    rows = [
        (index, edits, answers.setdefault(answer(made(given[index][0], edits), given[index][1]), len(answers)))
        for index, edits in cases
    ]
    return {"bases": given, "answers": list(answers), "cases": rows}


def stored() -> list[tuple[Case, str]]:
    """Every text of ``STORE`` with its ``--set`` and the recorded answer."""
    document = json.loads(lzma.decompress(STORE.read_bytes()))
    found: list[tuple[Case, str]] = []
    for index, edits, number in document["cases"]:
        text, sets = document["bases"][index]
        found.append(((made(text, edits), tuple(sets)), document["answers"][number]))
    return found


def main() -> None:
    """Record the answers anew: of the bases in ``STORE``, of the tree and of the files named as arguments."""
    known: dict[Case, None] = dict.fromkeys(bases())
    if STORE.exists():
        known |= {(text, tuple(sets)): None for text, sets in json.loads(lzma.decompress(STORE.read_bytes()))["bases"]}
    for file in sys.argv[1:]:
        known |= {(text, tuple(sets)): None for text, sets in json.loads(Path(file).read_text())}
    document = record(list(known))
    STORE.write_bytes(lzma.compress(json.dumps(document).encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
