"""Data and output of jobs by URL: data is fetched once a machine into a bounded cache, output is copied at the end.

``python -m rota.runtime.data_cache fetch HOME URL`` prints the folder; ``check HOME URL`` the size, when it would fit;
``writable HOME URL`` writes a file and removes it; ``upload HOME URL FOLDER ...`` prints an ``Uploaded`` as JSON. It is
a process of its own: libraries for object stores are large, and keep threads and connections. Progress and, with
status 1, what is wrong are lines on stderr.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict, TypeVar

from rota.runtime import cache, environ, execute, file_locks
from rota.runtime.clock import SystemClock, blocking_sleep
from rota.runtime.secrets import open_from_environ
from rota.runtime.undo import undone_if_raised
from rota.spec.errors import did_you_mean
from rota.spec.resources import format_size

LIMIT = "ROTA_DATA_CACHE"
"""Variable of a machine: most bytes of its cache of data, such as ``500GiB``; by default a fifth of its disk."""
FETCH_MAX_S = 6 * 3600.0
"""Longest time for one fetch, also by another process that is waited for."""
TRIES_S = (1.0, 4.0, 15.0)
"""Pauses before further tries of one file."""
FILES_MAX = 1_000_000
SAY_EVERY_S = 5.0
_MARKS = (
    "etag",
    "mtime",
    "lastmodified",
    "last_modified",
    "updated",
    "checksum",
    "md5hash",
    "sha256",
    "blob_id",
    "oid",
)
"""What stores say of the content of a file, in small letters."""
NOTES_MAX = 20
T = TypeVar("T")


class DataFailed(Exception):
    """What a URL names cannot be had or kept; the message says why, and what to do; ``output`` is what came before."""

    output = ""


class DataMissing(DataFailed):
    """A URL names nothing, or its store refuses: no use to try again at once."""


class Uploaded(TypedDict):
    """What was copied to a URL; ``left_out`` names links and sockets, ``NOTES_MAX`` at most."""

    files: int
    bytes: int
    left_out: list[str]


@dataclass(frozen=True, slots=True)
class _Remote:
    """A file of a URL: its path in the store, its name below the URL, its bytes, what says that it is another one."""

    path: str
    name: str
    bytes: int
    mark: str


def url_refused(url: str) -> tuple[str, str]:
    """What is wrong with a URL before anything is asked, and what to do; empty when nothing is."""
    try:
        from fsspec.registry import get_filesystem_class, known_implementations, registry  # noqa: PLC0415 - optional
    except ImportError:
        return f"{url} needs fsspec", "pip install fsspec, in the environment of the service"
    protocol = url.partition("://")[0]
    if protocol not in known_implementations and protocol not in registry:
        return f"no store has the scheme {protocol!r}", did_you_mean(protocol, known_implementations) or "s3, hf, https"
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        return f"{url} needs a library: {error}", f"pip install {package}, in the environment of the service"
    return "", ""


def output_refused(url: str) -> tuple[str, str]:
    """What is wrong with a URL of output before anything is asked, and what to do; empty when nothing is."""
    if url.startswith("memory:"):
        return f"{url} is gone when the process that wrote it ends", "s3, file, or another store that lasts"
    return url_refused(url)


async def apart(what: str, home: str, url: str, *folders: str, env: Mapping[str, str] | None = None) -> str:
    """What the module does (see there) in a process of its own, and what it prints. Raises DataFailed."""
    argv = (sys.executable, "-m", "rota.runtime.data_cache", what, home, url, *folders)
    done = await execute.execute_command(argv, timeout_s=FETCH_MAX_S, env=env)
    if done["exit_status"] == 0:
        return done["stdout"]
    failed = DataFailed((done["stderr"].strip().splitlines() or [f"it took more than {FETCH_MAX_S:.0f} s"])[-1])
    failed.output = done["stderr"]
    raise failed


def fetch(home: environ.Home, url: str, say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder on this machine with what a URL names, fetched unless it is there; its files as they are now.

    Use ``hold`` before the next ``fetch`` may remove it. Raises DataFailed.
    """
    kept = _cache_of(home)
    store, files = _listed(url)
    folder = kept / _key(url, files)
    with file_locks.locked(folder.with_suffix(".making"), wait_s=FETCH_MAX_S):
        if not folder.exists():
            total = sum(one.bytes for one in files)
            _make_room(kept, folder.name, url, total)
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            counted = folder.with_suffix(".bytes")
            with (
                undone_if_raised(counted.unlink, missing_ok=True),
                undone_if_raised(shutil.rmtree, partial, ignore_errors=True),
            ):
                _fetch_all(store, files, partial, total, say)
                partial.rename(folder)
    folder.touch()
    return folder


def check(home: environ.Home, url: str) -> int:
    """How many bytes a URL names. Raises DataFailed where nothing is there, or more than the cache may have."""
    wanted = sum(one.bytes for one in _listed(url)[1])
    if wanted > (limit := limit_of(_cache_of(home))):
        raise _too_large(url, wanted, limit, "")
    return wanted


def check_writable(url: str) -> None:
    """Write a small file below a URL and remove it. Raises DataFailed."""
    store, root = _opened(url)
    probe = f"{root.rstrip('/')}/.rota-check-{os.getpid()}"
    _tried(url, lambda: store.pipe_file(probe, b"rota"))
    with contextlib.suppress(Exception):  # some may write and not delete: the file stays, the output can be written
        store.rm_file(probe)


def upload(url: str, folders: Sequence[Path], say: Callable[[str], None] = lambda _: None) -> Uploaded:
    """Copy the files of folders below a URL, in place of those of the same name. Links are not followed.

    Raises DataFailed; what was copied before stays.
    """
    store, root = _opened(url)
    done = Uploaded(files=0, bytes=0, left_out=[])
    for folder in folders:
        for place in sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()):
            name = place.relative_to(folder).as_posix()
            if place.is_symlink() or not place.is_file():
                done["left_out"] = [*done["left_out"], name][:NOTES_MAX]
                continue
            done["bytes"] += _upload_file(store, place, f"{root.rstrip('/')}/{name}")
            done["files"] += 1
            say(f"output: {done['files']} files, {format_size(done['bytes'])}")
    return done


def _upload_file(store: Any, place: Path, target: str) -> int:
    """Copy one file; its size. Raises DataFailed when the store has another number of bytes afterwards."""

    def act() -> int:
        store.put_file(str(place), target)
        size, there = place.stat().st_size, store.info(target).get("size")
        if there is not None and there != size:
            raise DataFailed(f"{target} has {there} bytes after {size} were written")
        return size

    return _tried(target, act)


def _cache_of(home: environ.Home) -> Path:
    folder = home.root / "cache" / "data"
    folder.mkdir(mode=environ.PRIVATE_DIR, parents=True, exist_ok=True)
    return folder


def _too_large(what: str, wanted: int, limit: int, kept: str) -> DataFailed:
    text = f"{what} is {format_size(wanted)}; the cache may have {format_size(limit)}{kept}"
    return DataFailed(f"{text}: set {LIMIT} to more for the service, or mount it and name the path")


def hold(folder: Path) -> int:
    """Keep the folder of ``fetch`` for as long as the descriptor is open. Raises FileNotFoundError when it is gone."""
    use = cache.hold(folder.with_suffix(".use"))
    if folder.exists():
        return use
    os.close(use)
    raise FileNotFoundError(str(folder))


def limit_of(folder: Path) -> int:
    """Most bytes that the cache may have. Raises DataFailed for a variable that is not a size."""
    try:
        return cache.limit_of(LIMIT, folder)
    except ValueError as error:
        raise DataFailed(str(error)) from None


def _make_room(folder: Path, name: str, url: str, wanted: int) -> None:
    """Remove what was not used for the longest time and is not in use, until so much more fits; then take it."""
    with file_locks.locked(folder / "room.lock"):
        sizes = {path.stem: int(path.read_text() or 0) for path in folder.glob("*.bytes") if path.stem != name}
        limit = limit_of(folder)
        there = [(_used_s(folder / one), size, folder / one) for one, size in sizes.items()]
        total = cache.remove_oldest(there, limit - wanted, _removed)
        if total + wanted > limit:
            kept = f", of which jobs that run use {format_size(total)}" if total else ""
            raise _too_large(url, wanted, limit, kept)
        (folder / f"{name}.bytes").write_text(str(wanted))


def _used_s(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # being fetched, or left over by a fetch that was killed
        return 0.0


def _removed(folder: Path) -> bool:
    """Remove data that is neither in use nor being fetched; False where it is."""
    with cache.unused(folder.with_suffix(".making"), folder.with_suffix(".use")) as free:
        if free:
            cache.remove_folder(folder)
            shutil.rmtree(folder.with_suffix(".partial"), ignore_errors=True)
            folder.with_suffix(".bytes").unlink(missing_ok=True)
        return free


def _key(url: str, files: list[_Remote]) -> str:
    parts = [[one.name, one.bytes, one.mark] for one in files]
    return hashlib.sha256(json.dumps([url, parts]).encode()).hexdigest()[:24]


def _opened(url: str) -> tuple[Any, str]:
    wrong, remedy = url_refused(url)
    if wrong:
        raise DataFailed(f"{wrong}: {remedy}")
    from fsspec.core import url_to_fs  # noqa: PLC0415 - optional

    with _named(url):
        store, path = url_to_fs(url)
    if hasattr(store, "auto_mkdir"):  # a local folder is made as a prefix of a store is
        store.auto_mkdir = True
    return store, path


@contextlib.contextmanager
def _named(url: str) -> Iterator[None]:
    """Whatever a store raises, as DataFailed with the URL."""
    try:
        yield
    except DataFailed:
        raise
    except FileNotFoundError:
        raise DataMissing(f"{url} does not exist, or these credentials do not see it") from None
    except Exception as error:  # noqa: BLE001 - each store has exceptions of its own
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        final = isinstance(error, (PermissionError, NotADirectoryError, IsADirectoryError, NotImplementedError))
        raise (DataMissing if final else DataFailed)(f"{url}: {text}") from None


def _listed(url: str) -> tuple[Any, list[_Remote]]:
    """The store and every file of a URL, in order. Raises DataFailed."""
    store, root = _opened(url)
    with _named(url):
        found: dict[str, dict[str, Any]] = _tried(url, lambda: store.find(root, detail=True))
        if not found:
            store.info(root)
            raise DataFailed(f"{url} has no files")
        if len(found) > FILES_MAX:
            raise DataFailed(f"{url} has {len(found)} files; the most is {FILES_MAX}: pack them")
        return store, [_remote(store, root, path, info) for path, info in sorted(found.items())]


def _remote(store: Any, root: str, path: str, info: dict[str, Any]) -> _Remote:
    if info.get("size") is None:
        info = {**info, **store.info(path)}
    below = path.removeprefix(root.rstrip("/")).strip("/")
    name = below if path != root and below else PurePosixPath(path.rstrip("/")).name
    if not name or ".." in PurePosixPath(name).parts:
        raise DataFailed(f"{path} is not the name of a file below {root}")
    marks = {key.lower(): str(value) for key, value in info.items() if key.lower() in _MARKS}
    return _Remote(path=path, name=name, bytes=int(info.get("size") or 0), mark=json.dumps(marks, sort_keys=True))


def _fetch_all(store: Any, files: list[_Remote], target: Path, total: int, say: Callable[[str], None]) -> None:
    clock, done = SystemClock(), 0
    said_s = clock.monotonic_s()
    target.mkdir(mode=environ.PRIVATE_DIR)
    say(f"data: fetching {len(files)} files, {format_size(total)}")
    for one in files:
        place = target / one.name
        place.parent.mkdir(parents=True, exist_ok=True)
        _tried(one.path, lambda one=one, place=place: store.get_file(one.path, str(place)))
        if one.bytes and place.stat().st_size != one.bytes:
            raise DataFailed(f"{one.path} was {one.bytes} bytes and is {place.stat().st_size}: it changes; try again")
        place.chmod(0o444)  # the next job has the same files
        done += one.bytes
        if clock.monotonic_s() - said_s > SAY_EVERY_S:
            said_s = clock.monotonic_s()
            say(f"data: {format_size(done)} of {format_size(total)}")
    say("data: fetched")


def _tried(what: str, act: Callable[[], T]) -> T:
    """Do it, again after a pause when it fails. Raises DataFailed."""
    for pause_s in TRIES_S:
        try:
            with _named(what):
                return act()
        except DataMissing:
            raise
        except DataFailed as error:
            _say(f"data: {error}; trying again")
            blocking_sleep(pause_s)
    with _named(what):
        return act()


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> int:
    """What the arguments name, with the secrets of the job as variables."""
    try:
        os.environ.update(open_from_environ(os.environ))
        match arguments:
            case ["fetch", home, url]:
                found = fetch(environ.Home.of(home), url, _say)
                sys.stdout.write(str(found))
            case ["check", home, url]:
                sys.stdout.write(str(check(environ.Home.of(home), url)))
            case ["writable", _, url]:
                check_writable(url)
            case ["upload", _, url, *folders]:
                sys.stdout.write(json.dumps(upload(url, [Path(one) for one in folders])))
            case _:
                raise DataFailed(__doc__ or "")
    except DataFailed as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
