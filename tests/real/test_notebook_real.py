"""The notebook of ``rota init notebook``, its cells run in order in one process as a kernel runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.real.test_cli_real import Installation, installation

assert installation  # the fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KERNEL = """
import ast, json, sys
for cell in json.load(open("notebook.ipynb"))["cells"]:
    if cell["cell_type"] == "code":
        *lines, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(lines, []), "cell", "exec"), globals())
        if not isinstance(last, ast.Expr):
            exec(compile(ast.Module([last], []), "cell", "exec"), globals())
        elif (value := eval(compile(ast.Expression(last.value), "cell", "eval"), globals())) is not None:
            print("DRAWN", value._repr_html_()[:60])
"""


def test_every_cell_of_the_notebook_runs_and_draws_what_it_ends_with(installation: Installation) -> None:
    up = installation.rota("up", "--json")
    assert up.returncode == 0, up.stderr
    made = installation.rota("init", "notebook")
    assert made.returncode == 0 and "notebook.ipynb" in made.stdout
    folder = Path(installation.folder) / "notebook"
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env=installation.env, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in ("DRAWN <b>NodeList", "DRAWN <b>line-1</b>", "loop/0 done", "40 commits, loss ", "line-2 SUCCEEDED"):
        assert shown in done.stdout, (shown, done.stdout)
    found = json.loads((folder / "line.json").read_text())
    assert abs(found["slope"] - 3) < 0.5 and abs(found["offset"] - 1) < 0.5, found
