"""Data by URL: a real web server and a real folder, the cache of a machine, and what is refused."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rota.runtime import data_cache
from rota.runtime.data_cache import DataFailed, check, check_writable, fetch, hold, upload, url_refused
from rota.runtime.environ import Home

pytest.importorskip("fsspec")
from fsspec.implementations.local import LocalFileSystem


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr(data_cache, "TRIES_S", (0.01, 0.01))
    return Home.of(str(tmp_path / "home"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "a.txt").write_text("alpha")
    (folder / "b.bin").write_bytes(b"x" * 1000)
    return folder


class Web:
    """A web server over a folder; ``paths`` are those that were asked for with GET, ``failing`` how often it fails."""

    def __init__(self, folder: Path) -> None:
        self.paths: list[str] = []
        self.failing = 0
        web = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                web.paths.append(self.path)
                if web.failing and not self.path.endswith("/"):
                    web.failing -= 1
                    self.send_error(503)
                    return
                super().do_GET()

            def log_message(self, format: str, *args: object) -> None:
                pass

        handler = functools.partial(Handler, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def web(source: Path) -> Iterator[Web]:
    made = Web(source)
    yield made
    made.server.shutdown()
    made.server.server_close()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_fetched_once_and_again_when_its_content_changed(home: Home, source: Path) -> None:
    url, said = f"file://{source}", list[str]()
    first = fetch(home, url, said.append)
    assert files_of(first) == {"train/a.txt": b"alpha", "b.bin": b"x" * 1000}
    assert said[0].startswith("data: fetching 2 files") and said[-1] == "data: fetched"
    assert (first / "b.bin").stat().st_mode & 0o222 == 0, "the next job has the same files"
    assert fetch(home, url, said.append) == first and said.count("data: fetched") == 1
    (source / "b.bin").write_bytes(b"y" * 1000)
    os.utime(source / "b.bin", (1, 1))
    second = fetch(home, url)
    assert second != first and files_of(second)["b.bin"] == b"y" * 1000


def test_a_web_server_gives_one_file_or_a_listing_and_a_failure_of_it_is_tried_again(home: Home, web: Web) -> None:
    one = fetch(home, f"{web.url}b.bin")
    assert files_of(one) == {"b.bin": b"x" * 1000}
    web.failing = 1
    found = fetch(home, web.url)
    assert files_of(found) == {"train/a.txt": b"alpha", "b.bin": b"x" * 1000}
    asked = web.paths.count("/b.bin")
    assert fetch(home, web.url) == found and web.paths.count("/b.bin") == asked, "nothing is fetched twice"
    web.failing = 10**6
    with pytest.raises(DataFailed, match="503"):
        fetch(home, f"{web.url}train/a.txt")
    assert not list((home.root / "cache" / "data").glob("*.partial"))


def test_what_is_not_there_or_needs_a_library_is_named_with_the_remedy(home: Home, web: Web, source: Path) -> None:
    for url in (f"file://{source}/none", f"{web.url}none.bin"):
        with pytest.raises(DataFailed, match="does not exist, or these credentials do not see it"):
            check(home, url)
    (source / "empty").mkdir()
    with pytest.raises(DataFailed, match="has no files"):
        fetch(home, f"file://{source}/empty")
    assert url_refused("file:///x") == ("", "")
    assert url_refused("htps://host") == ("no store has the scheme 'htps'", "did you mean 'https'?")
    wrong, remedy = url_refused("dropbox://x")
    assert wrong.startswith("dropbox://x needs a library") and remedy.startswith("pip install ")


def test_the_cache_keeps_to_its_limit_and_removes_what_nobody_used_for_longest(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(data_cache.LIMIT, "2500B")
    urls = []
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_bytes(name.encode() * 1000)
        urls.append(f"file://{tmp_path / name}")
    first, second = fetch(home, urls[0]), fetch(home, urls[1])
    os.utime(second, (1, 1))
    third = fetch(home, urls[2])
    assert (first.exists(), second.exists(), third.exists()) == (True, False, True)
    with pytest.raises(FileNotFoundError):
        hold(second)
    kept = [hold(first), hold(third)]
    with pytest.raises(
        DataFailed, match=r"b is 1000B; the cache may have 2.441KiB, of which jobs that run use 1.953KiB: set"
    ):
        fetch(home, urls[1])
    os.close(kept[0])
    assert fetch(home, urls[1]).exists() and not first.exists() and third.exists()
    os.close(kept[1])
    monkeypatch.setenv(data_cache.LIMIT, "10B")
    with pytest.raises(DataFailed, match="the cache may have 10B"):
        check(home, urls[0])
    monkeypatch.setenv(data_cache.LIMIT, "lots")
    with pytest.raises(DataFailed, match="ROTA_DATA_CACHE=lots"):
        check(home, urls[0])


def test_data_whose_removal_was_killed_is_never_taken_for_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "set"
    (folder / "rest").mkdir(parents=True)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data_cache.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        data_cache._removed(folder)
    assert not folder.exists()


@pytest.mark.slow
def test_two_processes_fetch_once_and_one_that_was_killed_leaves_nothing_that_counts(
    home: Home, source: Path, web: Web
) -> None:
    command = [sys.executable, "-m", "rota.runtime.data_cache", "fetch", str(home.root), web.url]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [(one.communicate(timeout=120), one.returncode) for one in both]
    assert answers[0][0][0] == answers[1][0][0] and [status for _, status in answers] == [0, 0], answers
    assert web.paths.count("/b.bin") == 1
    folder = Path(answers[0][0][0])
    left = folder.with_name("0" * 24)
    left.with_suffix(".partial").mkdir()
    left.with_suffix(".bytes").write_text("999999999999999")
    (source / "b.bin").write_bytes(b"z")
    assert files_of(fetch(home, f"file://{source}"))["b.bin"] == b"z"
    assert not left.with_suffix(".partial").exists() and not left.with_suffix(".bytes").exists()
    wrong = subprocess.run([*command[:-1], f"file://{source}/none"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (1, "") and "does not exist" in wrong.stderr.splitlines()[-1]


def test_an_upload_replaces_files_of_the_same_name_and_one_that_fails_is_tried_again(
    home: Home, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, failing, said = tmp_path / "store", [OSError("busy"), OSError("busy")], list[str]()
    there.mkdir()
    (there / "b.bin").write_text("older")
    put = LocalFileSystem.put_file

    def flaky(self: LocalFileSystem, *args: str, **kwargs: object) -> None:
        if failing:
            raise failing.pop()
        put(self, *args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "put_file", flaky)
    found = upload(f"file://{there}", [source], said.append)
    assert found == {"files": 2, "bytes": 1005, "left_out": []} and not failing
    assert files_of(there) == files_of(source)
    failing.extend(OSError("busy") for _ in range(3))
    with pytest.raises(DataFailed, match=r"b\.bin: OSError: busy"):
        upload(f"file://{there}", [source])


def test_a_file_that_is_shorter_in_the_store_is_not_taken_as_uploaded(
    home: Home, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalFileSystem, "put_file", lambda self, one, other: Path(other).write_bytes(b"x"))
    with pytest.raises(DataFailed, match="has 1 bytes after 1000 were written"):
        (tmp_path / "store" / "train").mkdir(parents=True)
        upload(f"file://{tmp_path}/store", [source])


def test_a_store_that_only_reads_is_not_writable(home: Home, web: Web, tmp_path: Path) -> None:
    with pytest.raises(DataFailed):
        check_writable(web.url)
    check_writable(f"file://{tmp_path}/made/below")
    assert [*(tmp_path / "made" / "below").iterdir()] == []
