"""Code of a job as an archive: what is left out, its name, its limits, its cache, and how it is unpacked."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.runtime import code_pack
from rota.runtime.code_pack import CodeCache, entries_of, unpack
from rota.spec.errors import BadInput, StoreUnavailable

NAMES = ("a", "b", "a.py", "b.txt", "out", "build")
PATTERNS = ("*.py", "/a", "a/", "!a.py", "out", "/out/*", "!/out/b.txt", "**/b", "a/**", "a/**/b", "b*", "?", "[ab]")
PATTERNS += ("[!a]", "# a", "", "\\!a", "build/", "!build/", "*", "!*/", "a.*  ", "out/b.txt")


def filled(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def packed_files(root: Path) -> set[str]:
    return {one.path for one in entries_of(root) if (root / one.path).is_file()}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="git is the judge")
@given(
    top=st.lists(st.sampled_from(PATTERNS), max_size=5),
    inner=st.lists(st.sampled_from(PATTERNS), max_size=3),
    where=st.sampled_from(["a", "out", "build"]),
)
def test_what_is_packed_is_what_git_would_add(
    tmp_path_factory: pytest.TempPathFactory, top: list[str], inner: list[str], where: str
) -> None:
    root = tmp_path_factory.mktemp("r")
    files = [f"{one}/{two}" for one in ("a", "out", "build") for two in ("b.txt", "a.py", "build/b")]
    filled(root, dict.fromkeys([*files, "b", "a.py", "b.txt", "z/a", "z/out", "z/b.txt"], "x"))
    filled(root, {".gitignore": "\n".join(top), f"{where}/.gitignore": "\n".join(inner)})
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    listed = ["git", "ls-files", "--others", "--exclude-standard"]
    wanted = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split("\n")
    assert packed_files(root) == {one for one in wanted if one}
    below = subprocess.run(listed, cwd=root / where, check=True, capture_output=True, text=True).stdout.split("\n")
    if any(below):  # git says nothing of a folder that is itself ignored
        assert packed_files(root / where) == {one for one in below if one}


def test_the_same_files_have_the_same_name_and_arrive_as_they_were(tmp_path: Path) -> None:
    cache = CodeCache(tmp_path / "cache")
    one = filled(tmp_path / "one", {"train.py": "print(1)", "lib/deep.py": "x = 2", "data.bin": "\0" * 100_000})
    (one / "run.sh").write_text("true")
    (one / "run.sh").chmod(0o755)
    (one / "empty").mkdir()
    (one / "link.py").symlink_to("train.py")
    (one / "away").symlink_to("/nowhere/at/all")
    two = shutil.copytree(one, tmp_path / "two", symlinks=True)
    os.utime(two / "train.py", (1, 1))
    digest = cache.pack(one)
    assert cache.pack(two) == digest
    assert [path.name for path in cache.folder.iterdir()] == [f"{digest}.tar"]
    target = tmp_path / "there" / "code"
    unpack(cache.path(digest), target)
    assert {str(path.relative_to(target)) for path in target.rglob("*")} == {
        str(path.relative_to(one)) for path in one.rglob("*")
    }
    assert (target / "lib/deep.py").read_text() == "x = 2"
    assert os.access(target / "run.sh", os.X_OK)
    assert (target / "link.py").readlink() == Path("train.py")
    assert (target / "away").readlink() == Path("/nowhere/at/all")
    (one / "train.py").write_text("print(3)")
    assert cache.pack(one) != digest


def test_what_goes_while_it_is_packed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = filled(tmp_path / "one", {"train.py": "print(1)", "old.log": "gone"})
    (one / "link.py").symlink_to("train.py")
    listed = code_pack.entries_of(one)
    monkeypatch.setattr(code_pack, "entries_of", lambda workdir, without: listed)
    (one / "old.log").unlink()
    (one / "link.py").unlink()
    cache = CodeCache(tmp_path / "cache")
    unpack(cache.path(cache.pack(one)), tmp_path / "there")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["train.py"]


def test_too_much_is_refused_with_the_largest_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = filled(tmp_path / "w", {"data/a": "", "data/b": "", "model.pt": "", "train.py": "x"})
    for name, size in (("data/a", 200), ("data/b", 100), ("model.pt", 50)):
        os.truncate(root / name, size * 2**20)
    with pytest.raises(BadInput) as refused:
        entries_of(root)
    assert "350.0 MiB of files to send to other machines, at most 256.0 MiB" in str(refused.value)
    assert "largest: data 300.0 MiB, model.pt 50.0 MiB, train.py 0.0 MiB" in str(refused.value)
    assert str(root / ".gitignore") in refused.value.hint
    (root / ".gitignore").write_text("data/\n")
    assert packed_files(root) == {".gitignore", "model.pt", "train.py"}
    monkeypatch.setattr(code_pack, "PACK_FILES_MAX", 2)
    with pytest.raises(BadInput, match="more than 2 files and folders"):
        entries_of(root)
    with pytest.raises(BadInput, match="No such file"):
        entries_of(tmp_path / "absent")


def test_the_home_of_the_service_is_not_packed_with_the_folder_that_holds_it(tmp_path: Path) -> None:
    filled(tmp_path, {"a.py": "x", "home/rota.db": "secret", "b/home/c": "x"})
    found = {one.path for one in entries_of(tmp_path, tmp_path / "home")}
    assert found == {"a.py", "b", "b/home", "b/home/c"}


def test_the_home_of_the_service_itself_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, {"a.py": "x", "secret.key": "k"})
    with pytest.raises(BadInput, match=r"is \$ROTA_HOME, with the keys"):
        entries_of(tmp_path, tmp_path)


def test_an_archive_that_arrives_damaged_is_not_kept(tmp_path: Path) -> None:
    source, cache = CodeCache(tmp_path / "one"), CodeCache(tmp_path / "two")
    digest = source.pack(filled(tmp_path / "w", {"a.py": "x"}))
    data = source.path(digest).read_bytes()
    with pytest.raises(StoreUnavailable, match="damaged"):
        cache.put(digest, [data[:-1], b"x"])
    assert list(cache.folder.iterdir()) == []
    assert cache.put(digest, [data[:10], data[10:]]).read_bytes() == data
    with pytest.raises(ValueError, match="not the name"):
        cache.path("../x")


def test_the_cache_is_bounded_and_drops_what_was_used_longest_ago(tmp_path: Path) -> None:
    cache = CodeCache(tmp_path / "cache", bytes_max=25_000)
    digests = [cache.pack(filled(tmp_path / str(i), {"a.py": str(i)})) for i in range(4)]  # 10 KiB each
    for age, digest in enumerate(reversed(digests), start=1):
        os.utime(cache.path(digest), (age * 1000, age * 1000))
    cache.trim(keep=[digests[3]])
    assert [cache.find(one) is not None for one in digests] == [True, False, False, True]
    fresh = [cache.pack(filled(tmp_path / str(i), {"a.py": str(i)})) for i in range(5, 9)]
    cache.trim()
    assert all(cache.find(one) for one in fresh)


def test_an_archive_that_cannot_be_unpacked_leaves_nothing(tmp_path: Path) -> None:
    bad = tmp_path / "bad.tar"
    bad.write_bytes(b"x" * 20_000)
    with pytest.raises(tarfile.ReadError):
        unpack(bad, tmp_path / "t" / "code")
    assert list((tmp_path / "t").iterdir()) == []
