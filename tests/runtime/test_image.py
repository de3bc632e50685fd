"""Images: unpacked once, entered as the same user, with the exit and the signals of the command itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.images import small_image, small_root

from rota.runtime import cache, file_locks, image, isolation
from rota.runtime.environ import Home
from rota.runtime.image import ImageFailed, unpack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(folder: Path, given: Path, script: str, **more: object) -> subprocess.CompletedProcess[str]:
    asked = json.dumps({"image": str(folder), "name": "small", "given": [str(given)], **more})
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
    assert (folder / "root/usr/lib/app/dev/index.js").exists() and not (folder / "root/dev/own").exists()
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


@pytest.fixture
def apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of programs, of which the only tool of images is ``APPTAINER``."""
    for name, text in (("apptainer", APPTAINER), ("podman", "#!/bin/false\n"), ("docker", "#!/bin/false\n")):
        program(tmp_path / "bin" / name, text)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path / "bin"


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def made(folder: Path) -> Path:
    """An unpacked image of a ``small_root``."""
    small_root(folder / "root")
    (folder / "environment.json").write_text('{"PATH": "/bin"}')
    return folder


def started(home: Home, name: str, **options: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "rota.runtime.image", str(home.root), name]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, **options)


def test_apptainer_builds_a_folder_for_each_name_and_for_each_content_of_a_file(
    tmp_path: Path, apptainer: Path
) -> None:
    home, said = Home.of(tmp_path / "home").make(), list[str]()
    folder = unpack(home, "ubuntu:24.04", said.append)
    assert (folder / "root/bin").is_dir() and "image: building docker://ubuntu:24.04" in said
    with pytest.raises(ImageFailed, match="no such image"):
        unpack(home, "nowhere", said.append)
    (file := tmp_path / "env.sif").write_text("1")
    first = unpack(home, str(file), said.append)
    assert unpack(home, str(file), said.append) == first and said.count(f"image: building {file}") == 1
    file.write_text("12")
    assert unpack(home, str(file), said.append) != first and said.count(f"image: building {file}") == 2
    with pytest.raises(ImageFailed, match="no such file"):
        unpack(home, f"{file}x", said.append)


def test_libraries_of_a_driver_are_found_by_the_names_that_programs_ask_for(
    tmp_path: Path, apptainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (library := tmp_path / "lib/libcuda.so.550.54.15").parent.mkdir()
    library.write_text("driver\n")
    (tmp_path / "lib/libcuda.so.1").symlink_to(library.name)
    (tmp_path / "lib/libcuda.so.9").symlink_to("libcuda.so.9.1")
    program(apptainer / "nvidia-container-cli", f"#!/bin/sh\necho /dev/nvidia0; echo /usr/bin/env; echo {library}\n")
    files = image.driver_files()
    assert files == ["/usr/bin/env", str(library)]
    links = image.library_links(files)
    assert links == {one: str(library) for one in (library.name, "libcuda.so.1")}
    (given := tmp_path / "given").mkdir()
    ran = run(made(tmp_path / "image"), given, "cat ${LD_LIBRARY_PATH##*:}/libcuda.so.1", links=links)
    assert ran.stdout == "driver\n", ran.stderr


@pytest.mark.parametrize("folder", ["", None])
def test_a_command_beside_an_image_that_is_not_unpacked_says_so(tmp_path: Path, folder: str | None) -> None:
    ran = run(tmp_path, tmp_path, "true", image=folder)
    assert ran.returncode == 126
    assert ran.stderr.startswith("rota: the command cannot run in the image small: it is not unpacked here yet; try")


def test_links_of_an_image_lead_to_nothing_outside_of_it(tmp_path: Path) -> None:
    (given := tmp_path / "given").mkdir()
    root, victims = made(tmp_path / "image") / "root", (tmp_path / "victim", tmp_path / "outside")
    (root / "etc").mkdir()
    for name, target in (("etc/resolv.conf", victims[0]), ("tmp", victims[1]), ("etc/hosts", Path("../run/nothing"))):
        (root / name).symlink_to(target)
    ran = run(root.parent, given, "cat /etc/resolv.conf /etc/hosts; echo x > made")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == Path("/etc/resolv.conf").read_text() + Path("/etc/hosts").read_text()
    assert (given / "made").exists() and not any(one.exists() for one in victims)


def test_a_file_in_the_place_of_a_folder_and_a_kernel_that_refuses_namespaces_are_errors_with_a_next_step(
    tmp_path: Path,
) -> None:
    (given := tmp_path / "given").mkdir()
    root = made(tmp_path / "image") / "root"
    (root / "tmp").touch()
    ran = run(root.parent, given, "true")
    assert (ran.returncode, "/tmp is a folder of this machine and a file in the image" in ran.stderr) == (126, True)
    if os.geteuid() != 0:
        pytest.skip("needs root, to take a right away")
    bare = ["setpriv", "--bounding-set=-sys_admin", *map(str, ran.args)]
    ran = subprocess.run(bare, cwd=given, capture_output=True, text=True, check=False)
    assert (ran.returncode, "unshare: Operation not permitted; the service needs" in ran.stderr) == (126, True)
    assert "kernel.apparmor_restrict_unprivileged_userns=0" in isolation.NO_NAMESPACE[False]


def test_who_cannot_write_the_folders_of_a_failed_unpacking_can_unpack_again(
    apptainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = 'mkdir -p "$4/bin"; touch "$4/bin/x"; chmod 555 "$4/bin"; [ -e $0.again ]'
    program(apptainer / "apptainer", APPTAINER.replace('mkdir -p "$4/bin"', fails))
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o777)
        home = Home.of(Path(made) / "home")
        shutil.copytree(apptainer, bare := Path(made) / "bin")
        monkeypatch.setenv("PATH", f"{bare}:/usr/bin:/bin")
        assert as_nobody(lambda: unpack(home, "x:1", print)) == 1
        assert not [one for one in home.root.glob("cache/images/*") if ".new" in one.name], "nothing of it is left"
        (bare / "apptainer.again").touch()
        assert as_nobody(lambda: unpack(home, "x:1", print)) == 0
        assert [*home.root.glob("cache/images/*/root/bin/x")]


def as_nobody(call: Callable[[], object]) -> int:
    """The exit status of a child that makes the call, without the rights of root; 1 when it raises ImageFailed."""
    if (pid := os.fork()) == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            call()
            os._exit(0)
        except ImageFailed:
            os._exit(1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_an_image_that_is_there_waits_for_no_pull_and_one_that_is_pulled_for_too_long_is_stopped(
    tmp_path: Path, apptainer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home.of(tmp_path / "home").make()
    there = unpack(home, "x:1", print)
    monkeypatch.setattr(image, "PULL_MAX_S", 0.5)
    with contextlib.ExitStack() as others:
        for lock in there.parent.glob("*.pulling"):
            others.enter_context(file_locks.locked(lock))
        assert unpack(home, "x:1", print) == there
        shutil.rmtree(there)
        monkeypatch.setattr(sys, "argv", ["image", str(home.root), "x:1"])
        capsys.readouterr()
        assert image.main() == 1
        assert "Traceback" not in (error := capsys.readouterr().err) and ".pulling" in error
    program(apptainer / "apptainer", APPTAINER.replace("echo", "sleep 60 #"))
    with pytest.raises(ImageFailed, match=r"stopped after 0.5 s"):
        unpack(home, "y:1", print)


def test_the_cache_keeps_to_its_limit_and_removes_what_is_not_in_use(tmp_path: Path, apptainer: Path) -> None:
    program(apptainer / "apptainer", APPTAINER + 'head -c 1048576 /dev/zero > "$4/big"\n')
    home, env = Home.of(tmp_path / "home").make(), {**os.environ, image.LIMIT: "1.5MiB"}
    one, two = (Path(started(home, name, env=env).stdout) for name in ("one", "two"))
    assert (one.exists(), two.exists()) == (False, True)
    use = cache.hold(two.with_suffix(".lock"))
    refused = started(home, "three", env=env)
    assert refused.returncode == 1, refused.stdout
    assert re.search(r"images in use have 1\.\d+MiB: set ROTA_IMAGE_CACHE", refused.stderr), refused.stderr
    assert started(home, "two", env=env).stdout == str(two)
    os.close(use)


def test_what_a_kill_leaves_of_an_unpacking_is_removed_with_the_next(tmp_path: Path) -> None:
    home = Home.of(tmp_path / "home").make()
    kills = """#!/bin/sh
[ "$1" = export ] && kill -9 $PPID
exec {} "$@"
"""
    with small_image(tmp_path) as name:
        tool = image.find_tool()

        def names() -> list[str]:
            listed = [tool, "ps", "-a", "--filter", "name=^rota-", "--format", "{{.Names}}"]
            return subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()

        before = names()
        program(tmp_path / "bin" / tool, kills.format(shutil.which(tool)))
        env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        assert started(home, name, env=env).returncode == -signal.SIGKILL
        assert len(names()) == len(before) + 1 and [*home.root.glob("cache/images/*.new")]
        assert started(home, name).returncode == 0
        assert names() == before and not [*home.root.glob("cache/images/*.new")]
