"""Environments of roles: one for each list of packages, built once, on top of the interpreter; a failure says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime.wheels import make_wheel, settings

from rota.runtime import packages
from rota.runtime.environ import Home
from rota.runtime.packages import PackagesFailed, key_of

WAIT_S = 300.0


def test_another_requirement_file_or_setting_of_pip_is_another_environment() -> None:
    same = key_of(["a"], {}, {"PIP_NO_INDEX": "1", "LANG": "C"})
    assert same == key_of(["a"], {}, {"PIP_NO_INDEX": "1", "LANG": "de"})
    others = [
        key_of(["a", "b"], {}, {"PIP_NO_INDEX": "1"}),
        key_of(["b", "a"], {}, {"PIP_NO_INDEX": "1"}),
        key_of(["a"], {"a": b"1"}, {"PIP_NO_INDEX": "1"}),
        key_of(["a"], {"a": b"2"}, {"PIP_NO_INDEX": "1"}),
        key_of(["a"], {}, {}),
    ]
    assert len({same, *others}) == 6


def built(home: Home, names: list[str], workdir: Path, wheels: Path) -> tuple[Path, list[str]]:
    said: list[str] = []
    return packages.build(home, names, str(workdir), settings(wheels), said.append), said


@pytest.mark.slow
def test_an_environment_is_built_once_and_has_what_the_interpreter_has(tmp_path: Path) -> None:
    home, wheels = Home.of(tmp_path / "home").make(), tmp_path / "wheels"
    make_wheel(wheels, "rota_leaf")
    make_wheel(wheels, "rota_twig", "2.5", needs="rota-leaf")
    (tmp_path / "more.txt").write_text("rota-leaf==1.0\n")
    folder, said = built(home, ["rota-twig", "more.txt"], tmp_path, wheels)
    assert any("Successfully installed" in line for line in said), said
    text = "import rota_twig, rota_leaf, rota, psutil; print(rota_twig.VERSION, rota_leaf.VERSION, rota.__file__)"
    run = [str(packages.python_of(folder)), "-c", text]
    shown = subprocess.run(run, capture_output=True, text=True, check=True, timeout=WAIT_S, cwd=tmp_path).stdout.split()
    import rota

    assert shown == ["2.5", "1.0", rota.__file__]
    assert built(home, ["rota-twig", "more.txt"], tmp_path, wheels) == (folder, [])
    (tmp_path / "more.txt").write_text("rota-leaf\n")
    assert packages.environment_of(home, ["rota-twig", "more.txt"], str(tmp_path), settings(wheels)) != folder


@pytest.mark.slow
def test_a_build_that_was_killed_is_begun_anew(tmp_path: Path) -> None:
    home, wheels = Home.of(tmp_path / "home").make(), tmp_path / "wheels"
    make_wheel(wheels, "rota_leaf")
    folder = packages.environment_of(home, ["rota-leaf"], "", settings(wheels))
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text("half of it")
    assert built(home, ["rota-leaf"], tmp_path, wheels)[0] == folder
    run = [str(packages.python_of(folder)), "-c", "import rota_leaf"]
    subprocess.run(run, check=True, timeout=WAIT_S)


@pytest.mark.slow
def test_a_package_that_is_missing_fails_with_the_last_lines_of_pip_and_leaves_nothing(tmp_path: Path) -> None:
    home, wheels = Home.of(tmp_path / "home").make(), tmp_path / "wheels"
    wheels.mkdir()
    asked = {"packages": ["rota-missing==9"], "settings": settings(wheels)}
    command = [sys.executable, "-m", "rota.runtime.packages", str(home.root), str(tmp_path), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=dict(os.environ), check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert "pip ended with status 1; its last lines:" in done.stderr
    assert "No matching distribution found for rota-missing==9" in done.stderr
    assert [path for path in (home.root / "cache" / "packages").iterdir() if path.is_dir()] == []
    with pytest.raises(PackagesFailed, match=r"missing\.txt cannot be read: No such file"):
        built(home, ["missing.txt"], tmp_path, wheels)
