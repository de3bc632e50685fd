"""Images: unpacked once, entered as the same user, with the exit and the signals of the command itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime.images import small_image

from rota.runtime import image, isolation
from rota.runtime.environ import Home
from rota.runtime.image import ImageFailed, unpack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(folder: Path, given: Path, script: str) -> subprocess.CompletedProcess[str]:
    asked = json.dumps({"image": str(folder), "name": "small", "given": [str(given)]})
    env = {"PATH": os.defpath, f"{isolation.PREFIX}OWN": "1", "OTHER": "2"}
    words = [sys.executable, "-I", "-S", isolation.__file__, asked, "/bin/sh", "-c", script]
    return subprocess.run(words, env=env, cwd=given, capture_output=True, text=True, timeout=60, check=False)


def test_an_image_is_unpacked_once_and_a_command_in_it_ends_as_without_it(tmp_path: Path) -> None:
    given, said, home = tmp_path / "given", list[str](), Home.of(tmp_path / "home").make()
    given.mkdir()
    with small_image(tmp_path) as name:
        folder = unpack(home, name, said.append)
        assert unpack(home, name, said.append) == folder
    assert said == [f"image: unpacking {name}", "image: unpacked"]
    ran = run(
        folder, given, "cat /marker; echo $OWN$OTHER $FLAVOUR $PATH; pwd; id -u; echo y > /y; echo x > made; exit 3"
    )
    assert (ran.returncode, ran.stderr) == (3, "")
    assert ran.stdout.splitlines() == ["of the image", "1 plain /bin", str(given), str(os.geteuid())]
    assert (given / "made").read_text() == "x\n", "a folder that was given is the one of this machine"
    assert not (folder / "root/y").exists() and not Path("/y").exists(), "all else is in memory"
    assert run(folder, given, "cat /y").returncode == 1, "and ends with the command"
    assert run(folder, given, "kill -TERM $$").returncode == -signal.SIGTERM
    assert run(folder, given, f"exec {sys.executable}").returncode != 0, "programs are those of the image"
    bare = subprocess.run([*ran.args[:-3], "cat", "/marker"], capture_output=True, text=True, cwd=given, check=True)
    assert bare.stdout == "of the image\n"
    lost = subprocess.run([*ran.args[:-3], "/bin/nothing"], capture_output=True, text=True, cwd=given, check=False)
    assert (lost.returncode, "cannot run in the image small" in lost.stderr) == (126, True)


def test_an_image_that_cannot_be_had_says_why_with_the_last_lines_of_the_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home.of(tmp_path / "home").make()
    told = pytest.raises(ImageFailed, match=r"(?s)pull ended with status .*its last lines:.*rota-nothing")
    with small_image(tmp_path), told:  # skips where there is no tool
        unpack(home, "localhost/rota-nothing:1", print)
    monkeypatch.setattr(image, "TOOLS", ("podman-that-is-missing",))
    with pytest.raises(ImageFailed, match="install one"):
        unpack(home, "small", print)


APPTAINER = """#!/bin/sh
[ "$1" = version ] && exit 0
[ "$1 $2 $3" = "build --force --sandbox" ] || exit 9
echo "building $5"
[ "$5" = docker://nowhere ] && { echo "FATAL: no such image"; exit 255; }
mkdir -p "$4/bin"
"""


def test_apptainer_builds_a_folder_and_the_driver_of_nvidia_is_listed_by_its_own_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {
        "apptainer": APPTAINER,
        "nvidia-container-cli": "#!/bin/sh\necho /dev/nvidia0; echo /usr/lib/libcuda.so.1\n",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(image, "TOOLS", ("apptainer",))
    home, said = Home.of(tmp_path / "home").make(), list[str]()
    folder = unpack(home, "ubuntu:24.04", said.append)
    assert (folder / "root/bin").is_dir() and "image: building docker://ubuntu:24.04" in said
    with pytest.raises(ImageFailed, match="no such image"):
        unpack(home, "nowhere", said.append)
    assert image.driver_files() == ["/usr/lib/libcuda.so.1"]
