"""Code of a job as one archive: what a workdir sends to other machines, named by its content, and its bounded cache.

An archive is a tar without owners and times, so that the same files give the same name. What ``.gitignore`` files
exclude is left out, and so is ``.git``; a link is sent as a link.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
import stat
import tarfile
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

from rota.runtime import cache
from rota.runtime.clock import SystemClock
from rota.spec.errors import BadInput, StoreUnavailable

PACK_BYTES_MAX = 256 * 2**20
PACK_FILES_MAX = 50_000
CACHE_BYTES_MAX = 2**30
CACHE_FRESH_S = 600.0
"""An archive as young as this stays in the cache: a job that was packed is about to be written to the log."""
LARGEST_SHOWN = 5
IGNORE_FILE = ".gitignore"
_NEVER = frozenset({".git"})
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class IgnoreRule:
    """One line of a ``.gitignore``: ``pattern`` matches paths relative to ``base``, the folder of that file."""

    base: str
    pattern: re.Pattern[str]
    negated: bool
    folders_only: bool


def rules_of(text: str, base: str = "") -> tuple[IgnoreRule, ...]:
    """Rules of a ``.gitignore`` in order (gitignore(5)); ``base`` is its folder, relative to where paths begin."""
    found: list[IgnoreRule] = []
    for raw in text.splitlines():
        line = re.sub(r"(?<!\\) +$", "", raw)
        negated = line.startswith("!")
        line = line[1:] if negated else line
        folders_only, body = line.endswith("/"), line.rstrip("/")
        if not body or line.startswith("#"):
            continue
        anchored = "/" in body
        start = "" if anchored else "(?:.*/)?"
        with contextlib.suppress(re.error):  # a broken class of characters matches nothing, as in git
            pattern = re.compile(start + _translated(body.removeprefix("/")), re.DOTALL)
            found.append(IgnoreRule(base, pattern, negated, folders_only))
    return tuple(found)


def _translated(body: str) -> str:
    """A pattern of gitignore as a regular expression: ``*`` and ``?`` stop at slashes, ``**`` does not."""
    out, i = "", 0
    while i < len(body):
        rest = body[i:]
        if rest.startswith("**/") and (i == 0 or body[i - 1] == "/"):
            out, i = f"{out}(?:.*/)?", i + 3
        elif rest == "**" and i and body[i - 1] == "/":
            out, i = f"{out}.+", i + 2
        elif rest[0] == "*":
            stars = len(rest) - len(rest.lstrip("*"))
            out, i = f"{out}[^/]*", i + stars
        elif rest[0] == "?":
            out, i = f"{out}[^/]", i + 1
        elif rest[0] == "[" and (found := re.match(r"\[([!^]?)(\]?(?:\\.|[^\]\\])*)\]", rest)):
            inside = found.group(2).replace("[", r"\[")
            out, i = f"{out}(?!/)[{'^' if found.group(1) else ''}{inside}]", i + found.end()
        elif rest[0] == "\\" and len(rest) > 1:
            out, i = out + re.escape(rest[1]), i + 2
        else:
            out, i = out + re.escape(rest[0]), i + 1
    return out


def is_ignored(path: str, rules: Sequence[IgnoreRule], *, folder: bool) -> bool:
    """True when the last rule that matches a path excludes it; its folders must have been asked before."""
    for rule in reversed(rules):
        inner = path.removeprefix(f"{rule.base}/") if rule.base else path
        below = not rule.base or path.startswith(f"{rule.base}/")
        if below and (folder or not rule.folders_only) and rule.pattern.fullmatch(inner):
            return not rule.negated
    return False


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """A file, folder or link of a workdir; ``path`` is relative to it."""

    path: str
    status: os.stat_result


def entries_of(workdir: Path, without: Path | None = None) -> list[PackedEntry]:
    """What a workdir sends, sorted by path, but for the folder ``without``.

    Raises BadInput when it is not a folder, is ``without`` itself, or is over a limit.
    """
    if workdir == without:
        raise BadInput(
            f"workdir {workdir} is $ROTA_HOME, with the keys of the installation: it is not sent to other machines",
            hint="put the code into a folder of its own",
        )
    found: list[PackedEntry] = []
    above = _rules_above(workdir)
    prefix = os.path.relpath(workdir, above[0]) if above[0] != workdir else ""

    def walk(folder: Path, inside: str, rules: tuple[IgnoreRule, ...]) -> None:
        at = "/".join(part for part in (prefix, inside) if part)
        rules += _read_rules(folder, at)
        with os.scandir(folder) as listed:
            there = sorted(listed, key=lambda one: one.name)
        for one in there:
            path = f"{inside}/{one.name}" if inside else one.name
            is_folder = one.is_dir(follow_symlinks=False)
            if one.name in _NEVER or (is_folder and Path(one.path) == without):
                continue
            if is_ignored(f"{prefix}/{path}" if prefix else path, rules, folder=is_folder):
                continue
            try:
                status = one.stat(follow_symlinks=False)
            except FileNotFoundError:  # it went since it was listed
                continue
            if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode) or is_folder:
                found.append(PackedEntry(path, status))
                if len(found) > PACK_FILES_MAX:
                    raise _too_much(workdir, f"more than {PACK_FILES_MAX:,} files and folders", found, by_bytes=False)
            if is_folder:
                walk(Path(one.path), path, rules)

    try:
        walk(workdir, "", above[1])
    except OSError as error:
        raise BadInput(
            f"workdir {workdir}: {error.filename or workdir}: {error.strerror}",
            hint="its code is sent to other machines: name a folder that can be read with 'workdir'",
        ) from error
    size = sum(one.status.st_size for one in found if stat.S_ISREG(one.status.st_mode))
    if size > PACK_BYTES_MAX:
        raise _too_much(workdir, f"{_mib(size)} of files", found, by_bytes=True)
    return found


def _rules_above(workdir: Path) -> tuple[Path, tuple[IgnoreRule, ...]]:
    """The root of the repository that holds a workdir, and the rules of the folders from there down to above it."""
    root = next((one for one in (workdir, *workdir.parents) if (one / ".git").exists()), workdir)
    between = [one for one in reversed(workdir.parents) if one.is_relative_to(root)]
    bases = ["" if one == root else os.path.relpath(one, root) for one in between]
    return root, tuple(rule for one, base in zip(between, bases, strict=True) for rule in _read_rules(one, base))


def _read_rules(folder: Path, base: str) -> tuple[IgnoreRule, ...]:
    try:
        return rules_of((folder / IGNORE_FILE).read_text(encoding="utf-8", errors="replace"), base)
    except (FileNotFoundError, IsADirectoryError):
        return ()


def _too_much(workdir: Path, what: str, found: Iterable[PackedEntry], *, by_bytes: bool) -> BadInput:
    totals = Counter[str]()
    for one in found:
        if not stat.S_ISDIR(one.status.st_mode):
            totals[one.path.partition("/")[0]] += one.status.st_size if by_bytes else 1
    largest = totals.most_common(LARGEST_SHOWN)
    shown = ", ".join(f"{name} {_mib(count) if by_bytes else f'{count:,} files'}" for name, count in largest)
    return BadInput(
        f"workdir {workdir} has {what} to send to other machines, at most {_mib(PACK_BYTES_MAX)} in "
        f"{PACK_FILES_MAX:,} files; largest: {shown}",
        hint=f"list what the job does not need in {workdir / IGNORE_FILE}, or name a smaller folder with 'workdir'",
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


class _Hashed:
    """A file that is written and hashed at once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)


def _write_tar(workdir: Path, entries: Iterable[PackedEntry], out: _Hashed) -> None:
    stream = cast("IO[bytes]", out)  # of which "w|" needs ``write`` alone: it never goes back
    with tarfile.open(mode="w|", fileobj=stream, format=tarfile.PAX_FORMAT) as archive:
        for one in entries:
            info = tarfile.TarInfo(one.path)
            info.mode = stat.S_IMODE(one.status.st_mode)
            if stat.S_ISDIR(one.status.st_mode):
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            elif stat.S_ISLNK(one.status.st_mode):
                with contextlib.suppress(FileNotFoundError):  # it went since it was listed
                    info.type, info.linkname = tarfile.SYMTYPE, str((workdir / one.path).readlink())
                    archive.addfile(info)
            else:
                _add_file(archive, info, workdir / one.path)


def _add_file(archive: tarfile.TarFile, info: tarfile.TarInfo, path: Path) -> None:
    """The file as it is now, up to the size that it has now: logs grow while they are read."""
    try:
        with path.open("rb") as file:
            data = file.read(min(os.fstat(file.fileno()).st_size, PACK_BYTES_MAX))
    except FileNotFoundError:  # it went since it was listed
        return
    except PermissionError:
        hint = f"let it be read, or list it in {IGNORE_FILE}"
        raise BadInput(f"workdir: {path} may not be read, so it cannot be sent to other machines", hint=hint) from None
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


@dataclass(frozen=True, slots=True)
class CodeCache:
    """Archives by digest in one folder; those that were used longest ago go when there are over ``bytes_max``."""

    folder: Path
    bytes_max: int = CACHE_BYTES_MAX

    def path(self, digest: str) -> Path:
        """Where the archive of that digest is. Raises ValueError for what is not a digest."""
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is not the name of an archive")
        return self.folder / f"{digest}.tar"

    def find(self, digest: str) -> Path | None:
        """The archive if it is here; it counts as used now."""
        path = self.path(digest)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def pack(self, workdir: Path, without: Path | None = None) -> str:
        """Archive a workdir but for the folder ``without``; its digest. Raises BadInput for one that cannot be sent."""
        entries = entries_of(workdir, without)
        try:
            with self._writing() as (file, path):
                out = _Hashed(file)
                _write_tar(workdir, entries, out)
                digest = out.digest.hexdigest()
                self._keep(file, path, digest)
        except OSError as error:
            where = error.filename or self.folder
            raise StoreUnavailable(f"packing {workdir}: {where}: {error.strerror or error}") from error
        return digest

    def put(self, digest: str, parts: Iterable[bytes]) -> Path:
        """Keep an archive that comes in parts. Raises StoreUnavailable unless they give that digest."""
        with self._writing() as (file, path):
            out = _Hashed(file)
            for part in parts:
                out.write(part)
            if out.digest.hexdigest() != digest:
                raise StoreUnavailable(f"the archive {digest[:12]} arrived damaged", hint="it is fetched again")
            self._keep(file, path, digest)
        return self.path(digest)

    def _keep(self, file: BinaryIO, path: Path, digest: str) -> None:
        file.flush()
        os.fsync(file.fileno())  # after a power cut the name must not be that of an empty file
        path.replace(self.path(digest))

    def trim(self, keep: Collection[str] = ()) -> None:
        """Remove what is over the limit, but for the digests in ``keep`` and what is fresh."""
        things, fresh_s = list(cache.files(self.folder)), SystemClock().wall_s() - CACHE_FRESH_S
        kept = {path for used_s, _, path in things if used_s > fresh_s or path.stem in keep}
        cache.remove_oldest(things, self.bytes_max, lambda path: path not in kept and cache.removed(path))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[tuple[BinaryIO, Path]]:
        """A file that is renamed by the block, or removed."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=self.folder, prefix="new-")
        try:
            with os.fdopen(fd, "wb") as file:
                yield file, Path(name)
        finally:
            Path(name).unlink(missing_ok=True)


def unpack(archive: Path, target: Path) -> None:
    """Unpack an archive as the folder ``target``, whole or not at all; one that is there stays."""
    if target.is_dir():
        return
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        with tarfile.open(archive, mode="r:") as tar:
            tar.extractall(made, filter="tar")
        made.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
