"""Code of a job on a machine: made once, shared by all of its processes, removed when none uses it.

Ray reads its environment when it is imported: the tests import it, not this file.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rota.runtime.code_pack import CodeCache
from rota.runtime.environ import HOME, Home
from rota.runtime.job_files import INSTALLATION, JobFiles
from rota.runtime.secrets import VARIABLE, Vault
from rota.spec.errors import BadInput, UnknownName

JOB = "train-1"
HOLD = """
import sys
from rota.runtime.ray.localize import localized
from rota.runtime.ray.host import Boot
home, workdir = sys.argv[1:]
boot = Boot(name="x", namespace="rota/i", target="", args={"place": {"job": "train-1"}}, env={"ROTA_HOME": home},
            workdir=workdir, installation="i")
print(localized(boot)[0].workdir, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """The home of a service whose job was packed at its submit."""
    from rota.runtime.ray.agent import packed

    home = Home.of(tmp_path / "home").make()
    (home.root / INSTALLATION).write_text("i")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("1")
    packed(home, JOB, str(tmp_path / "code"))
    return home


@pytest.mark.slow
def test_processes_of_one_machine_share_the_code_and_it_goes_when_none_holds_it(home: Home, tmp_path: Path) -> None:
    from rota.runtime.ray.localize import remove_unused

    (tmp_path / "code" / "a.py").write_text("changed after the submit")
    code, argv = home.job(JOB).code, [sys.executable, "-c", HOLD, str(home.root), str(tmp_path / "code")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holders = [subprocess.Popen(argv, **pipes) for _ in range(2)]
    try:
        said = [one.stdout.readline().strip() for one in holders if one.stdout]
        assert said == [str(code)] * 2, "the second does not wait for the end of the first"
        assert (code / "a.py").read_text() == "1"
        os.utime(home.job(JOB).code_lock, (1, 1))
        remove_unused(home)
        assert code.is_dir(), "it is in use"
    finally:
        for one in holders:
            one.communicate()
    remove_unused(home)
    assert not code.exists()


def test_code_in_use_a_moment_ago_stays_and_a_job_without_a_pack_starts_in_its_folder(
    home: Home, tmp_path: Path
) -> None:
    from rota.runtime.ray.host import Boot
    from rota.runtime.ray.localize import localized, remove_unused

    place = {"job": JOB}
    boot = Boot(name="x", namespace="rota/i", target="", args={"place": place}, env={HOME: str(home.root)})
    assert localized(boot)[0].workdir == "", "without a workdir nothing is unpacked"
    other = Boot(
        name="x",
        namespace="rota/i",
        target="",
        args={"place": {"job": "other-1"}},
        env={HOME: str(home.root)},
        workdir=str(tmp_path / "code"),
        installation="i",
    )
    assert localized(other)[0].workdir == str(tmp_path / "code")
    home.job(JOB).code.mkdir()
    home.job(JOB).code_lock.touch()
    remove_unused(home)
    assert home.job(JOB).code.is_dir()


def test_code_whose_removal_was_cut_is_not_used_and_goes_later(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    from rota.runtime.ray.localize import remove_unused

    dirs = home.job(JOB)
    dirs.code.mkdir()
    (dirs.code / "a.py").touch()
    (dirs.root / ".code-killed").mkdir()
    dirs.code_lock.touch()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # the process ended here
        remove_unused(home, unused_s=-1.0)
    assert not dirs.code.exists(), "the next process must not take a part of it for the whole"
    remove_unused(home, unused_s=-1.0)
    assert not list(dirs.root.glob(".code-*"))


def test_an_archive_that_went_from_the_cache_is_packed_again(home: Home, tmp_path: Path) -> None:
    from rota.runtime.ray.agent import packed

    digest, size = packed(home, JOB, "/nowhere")
    assert size == CodeCache(home.code_archives).path(digest).stat().st_size
    CodeCache(home.code_archives).path(digest).unlink()
    assert packed(home, JOB, str(tmp_path / "code"))[0] == digest


def test_an_agent_reads_below_the_folders_of_a_job_alone_and_its_refusals_are_values(home: Home) -> None:
    from rota.runtime.ray.agent import Agent
    from rota.runtime.ray.host import Boot
    from rota.runtime.ray.localize import localized

    agent, dirs = Agent(str(home.root), "i"), home.job(JOB)
    (dirs.logs / "main-0.log").write_bytes(b"0123456789")
    (dirs.output / "link").symlink_to(home.root)
    (home.root / "rota.db").write_text("everything")
    (dirs.output / "deep").mkdir()
    os.mkfifo(dirs.output / "deep" / "pipe")
    assert agent.read(JOB, "logs", "main-0.log", 3, 4) == b"3456"
    assert agent.read(JOB, "logs", "main-0.log", 10, 4) == b""
    listed = agent.listed(JOB, "output", "", "")
    assert isinstance(listed, dict)
    assert [(row["path"], row["kind"]) for row in listed["items"]] == [
        ("deep", "folder"),
        ("deep/pipe", "other"),
        ("link", "other"),
    ]
    for path in ("../../../rota.db", "link/rota.db", "/etc/passwd", "deep/pipe"):
        assert type(agent.read(JOB, "output", path, 0, 1)) is BadInput, path
    assert isinstance(agent.read(JOB, "output", "nothing", 0, 1), UnknownName)
    Vault(home).put("ann", "TOP", "hushhush")
    assert agent.secrets("ann TOP") == {"TOP": "hushhush"}
    assert isinstance(agent.secrets("ann NONE"), UnknownName)
    boot = Boot(
        name="x", namespace="rota/i", target="", args={"place": {"job": JOB}}, env={HOME: str(home.root), VARIABLE: ""}
    )
    assert localized(boot)[1] == {}


def test_an_output_folder_around_or_below_the_home_is_not_shown(home: Home, tmp_path: Path) -> None:
    """With ``output: /`` a user read the token of the admin."""
    files, own, link = JobFiles(home), tmp_path / "results", tmp_path / "link"
    home.token.write_text("of the admin")
    link.symlink_to(home.root)
    for area in ("/", str(home.root), str(home.root.parent), str(home.job("another").output), str(link)):
        for ask in (lambda area=area: files.listed(JOB, area), lambda area=area: files.read(JOB, area, "token", 0, 9)):
            with pytest.raises(BadInput, match="files of the installation"):
                ask()
    own.mkdir()
    (own / "model.bin").write_bytes(b"weights")
    assert files.read(JOB, str(own), "model.bin", 0, 9) == b"weights"


def test_names_that_json_cannot_carry_are_listed_and_too_long_ones_are_not_there(home: Home) -> None:
    files, output = JobFiles(home), home.job(JOB).output
    (output / os.fsdecode(b"caf\xe9.txt")).touch()
    (output / "plain.txt").touch()
    listed = files.listed(JOB, "output")
    json.dumps(listed, ensure_ascii=False).encode()
    found = [(row["path"], row["kind"]) for row in listed["items"]]
    assert found == [("caf\\xe9.txt", "other"), ("plain.txt", "file")]
    with pytest.raises(UnknownName, match="no file"):
        files.read(JOB, "output", "x" * 300, 0, 1)


def test_a_request_is_answered_while_another_one_gives_the_agent_up(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rota.runtime.ray.agent import Agents

    agents = Agents("rota/i", home)

    class Remote:
        async def remote(self, *args: object) -> object:
            return args

    def find(host: str) -> Any:
        agents._known[host] = known = ("n1", SimpleNamespace(listed=Remote()))
        agents._known.pop(host)  # the other request, which got no answer in time
        return known

    monkeypatch.setattr(agents, "_find", find)
    assert asyncio.run(agents.ask("n1", "m1", "listed", 1)) == (1,)


def test_the_first_request_of_a_machine_has_the_time_in_which_its_agent_starts(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a process of the engine takes longer to start than any request of one that runs."""
    from ray.exceptions import RayError

    from rota.runtime.ray import agent
    from rota.spec.errors import EngineUnavailable

    monkeypatch.setattr(agent, "READ_S", 0.2)
    monkeypatch.setattr(agent, "FIRST_READ_S", 20.0)
    agents, answers = agent.Agents("rota/i", home), list[object]()

    class Remote:
        async def remote(self) -> object:
            await asyncio.sleep(0.5)
            answer = answers.pop()
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr(agents, "_find", lambda _: ("n1", SimpleNamespace(listed=Remote())))

    def asked(*given: object) -> object:
        answers[:] = given
        return asyncio.run(agents.ask("n1", "m1", "listed"))

    assert asked("slow at first") == "slow at first"
    with pytest.raises(EngineUnavailable, match=r"within 0\.2 s"):
        asked("and then too slow")
    monkeypatch.setattr(agent, "READ_S", 20.0)
    with pytest.raises(EngineUnavailable, match="does not reach it"):
        asked(RayError("its machine was started again"))
    monkeypatch.setattr(agent, "READ_S", 0.2)
    monkeypatch.setattr(agent, "FIRST_READ_S", 0.3)
    with pytest.raises(EngineUnavailable, match=r"within 0\.3 s"):
        asked("it does not start")
    with pytest.raises(EngineUnavailable, match=r"within 0\.2 s"):  # it had its time: others wait no longer
        asked("nor now")
    with pytest.raises(EngineUnavailable, match="not a machine"):
        monkeypatch.setattr(agents, "_find", lambda _: agent.Agents._find(agents, "gone"))
        monkeypatch.setattr("ray.nodes", list)
        asked("it is gone")
    monkeypatch.setattr(agents, "_find", lambda _: ("n1", SimpleNamespace(listed=Remote())))
    monkeypatch.setattr(agent, "FIRST_READ_S", 20.0)
    assert asked("started again") == "started again"


def test_a_long_listing_comes_in_pages(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.runtime.job_files.LISTED_MAX", 3)
    for n in range(7):
        (home.job(JOB).output / f"{n}").touch()
    seen, after = list[str](), ""
    while True:
        page = JobFiles(home).listed(JOB, "output", "", after)
        seen += [row["path"] for row in page["items"]]
        if page["next"] is None:
            break
        after = page["next"]
    assert seen == list("0123456")
