"""Run a command as the user of a tenant, in folders and a process list of its own, or in the files of an image.

``python -I -S isolation.py JSON COMMAND...``: becomes the command. The JSON object has ``user`` (``name`` or
``uid:gid``), ``home`` (hidden, but for the folders in ``shown``), ``given`` (made the user's), ``programs`` (folders
that stay visible), ``tmp`` and ``shm`` (of the job: its ``/tmp`` and ``/dev/shm``). The variables of the command are
those whose names begin with ``PREFIX``. What is not said stays as it is: network, devices, all other folders. It
needs root and Linux. With ``image`` (a folder of ``image.py``) and ``given`` alone the command runs in the files of the
image, with these folders and the devices, processes, user and network of this machine; ``links`` are names of given
libraries with their paths, a folder of them ends its ``LD_LIBRARY_PATH``.
"""

import ctypes
import json
import os
import pwd
import stat
import sys

NEW_NS, NEW_IPC, NEW_USER = 0x00020000, 0x08000000, 0x10000000
NO_NEW_PRIVS = 38
BIND, REC, PRIVATE, NOSUID, NODEV = 0x1000, 0x4000, 1 << 18, 2, 4
PREFIX = "ROTA_TENANT_VARIABLE_"
"""Before the name of each variable of the command, which means nothing to the loader and to this interpreter."""
OF_TENANT = ("/tmp", "/dev/shm")
"""Folders of the job itself: what is in them may lead anywhere."""
CANNOT = 126
"""Exit status of a command that cannot be run, as of a shell."""
_OPENED = "/proc/self/fd/{}"


class CannotIsolate(Exception):
    """The command would not run as its tenant; the message says why."""


def account(user: str) -> tuple[int, int, str, str]:
    """User and group id, name and home folder of ``name`` or ``uid:gid``. Raises CannotIsolate, also for root."""
    uid, colon, gid = user.partition(":")
    try:
        if colon:
            found = int(uid), int(gid), f"uid-{uid}", "/tmp"
        else:
            entry = pwd.getpwnam(user)
            found = entry.pw_uid, entry.pw_gid, entry.pw_name, entry.pw_dir
    except (KeyError, ValueError):
        raise CannotIsolate(f"this machine has no user {user!r}; name one of it, or UID:GID") from None
    if found[0] <= 0 or found[1] <= 0:
        raise CannotIsolate(f"{user!r} is root, or of its group; tenants need a user and group of their own")
    return found


def refusal(user: str) -> str:
    """Why commands cannot run as that user here; empty when they can."""
    try:
        account(user)
    except CannotIsolate as error:
        return str(error)
    if os.geteuid() != 0:
        return f"the service runs as user {os.geteuid()}; only one that runs as root can start jobs as others"
    return ""


def call(name: str, *args: object) -> None:
    """A call of the C library. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount, as ``mount(2)``. Raises OSError."""
    call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def hidden(path: str) -> str:
    """The outermost folder on the way to ``path`` that others may not pass; ``path`` where they reach it."""
    above = "/"
    for part in path.strip("/").split("/"):
        above = os.path.join(above, part)  # noqa: PTH118 - pathlib takes longer to import than all else here
        if not os.stat(above).st_mode & 0o001:  # noqa: PTH116 - as above
            return above
    return path


def made(path: str) -> int:
    """Open a folder, made if need be. Below ``OF_TENANT`` no link is followed: the job may have put it there.

    Raises OSError, CannotIsolate.
    """
    own = next((one for one in OF_TENANT if path.startswith(f"{one}/")), "")
    if not own:
        os.makedirs(path, mode=0o755, exist_ok=True)  # noqa: PTH103 - pathlib takes longer to import than all else
        return os.open(path, os.O_PATH | os.O_DIRECTORY)
    here = os.open(own, os.O_PATH | os.O_DIRECTORY)
    for name in path.removeprefix(own).split("/"):
        if name:
            above = here
            try:
                try:  # noqa: SIM105 - contextlib takes longer to import than all else
                    os.mkdir(name, 0o755, dir_fd=above)
                except FileExistsError:
                    pass
                here = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            except NotADirectoryError:
                raise CannotIsolate(f"{path}: {name} is not a folder; the job must remove it") from None
            finally:
                os.close(above)
    return here


def mount_at(source: str, path: str, kind: str, flags: int, options: str = "") -> None:
    """Mount at a folder that is ``made``."""
    target = made(path)
    mount(source, _OPENED.format(target), kind, flags, options)
    os.close(target)


def separate(home: str, shown: list[str], tmp: str, shm: str, programs: list[str]) -> None:
    """Give this process folders and a process list of its own.

    ``home`` is empty but for what is ``shown``; so is each folder that others may not pass and that holds the
    interpreter. The workdir and the interpreter are shown where they would be hidden.
    """
    here = os.getcwd()  # noqa: PTH109 - see hidden
    programs = sorted({*programs, sys.base_prefix, str(__file__).rpartition("/rota/")[0]})
    masks = sorted({hidden(home), *(hidden(one) for one in programs if hidden(one) != one)})
    lost = (*masks, "/tmp")
    shown = [*shown, *(one for one in (*programs, here) if one.startswith(tuple(f"{path}/" for path in lost)))]
    os.umask(0o022)
    call("unshare", NEW_NS | NEW_IPC)
    mount("none", "/", "", REC | PRIVATE)
    opened = {path: os.open(path, os.O_PATH) for path in (*shown, tmp, shm)}
    mount(_OPENED.format(opened[tmp]), "/tmp", "", BIND)
    mount(_OPENED.format(opened[shm]), "/dev/shm", "", BIND)
    for mask in masks:  # it may be in the /tmp that was hidden
        mount_at("tmpfs", mask, "tmpfs", NOSUID | NODEV, "mode=0755,size=1m")
    for path in sorted(shown):
        mount_at(_OPENED.format(opened[path]), path, "", BIND)
    mount("proc", "/proc", "proc", NOSUID | NODEV, "hidepid=invisible")
    for opening in opened.values():
        os.close(opening)


OF_MACHINE = ("/dev", "/proc", "/sys", "/tmp", "/etc/hosts", "/etc/resolv.conf")
"""What a command in an image has of the machine, beside the folders of its job."""
LIBRARIES = "/.rota-libraries"
"""Folder in an image with links to the libraries of drivers."""
NO_NAMESPACE = {
    True: "the service needs the capability CAP_SYS_ADMIN",
    False: "this machine lets no user make namespaces: as root, sysctl -w"
    " kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), or kernel.unprivileged_userns_clone=1 (Debian)",
}
"""What to do where the kernel refuses an image to root, and to others."""


def own_namespaces(uid: int, gid: int) -> None:
    """Mounts of its own for this process; who is not root is the same user in a user namespace. Raises OSError."""
    call("unshare", NEW_NS | (NEW_USER if uid else 0))
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - see hidden
                file.write(text)
    mount("none", "/", "", REC | PRIVATE)


def place(path: str, *, folder: bool) -> int:
    """Open a folder or file, made if need be; a link is replaced where it leads nowhere, or is at the path of a file.

    Raises OSError, CannotIsolate for a file in the place of a folder.
    """
    above, _, name = path.rstrip("/").rpartition("/")
    if not name:
        return os.open("/", os.O_PATH)
    os.close(place(above, folder=True))
    if os.path.islink(path) and not (folder and os.path.isdir(path)):  # noqa: PTH112, PTH114 - see hidden
        os.unlink(path)  # noqa: PTH108 - see hidden
    if not os.path.exists(path):  # noqa: PTH110 - see hidden
        if folder:
            os.mkdir(path)  # noqa: PTH102 - see hidden
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644))
    if os.path.isdir(path) is not folder:  # noqa: PTH112 - see hidden
        kinds = ("a folder", "a file") if folder else ("a file", "a folder")
        raise CannotIsolate(f"{path} is {kinds[0]} of this machine and {kinds[1]} in the image: rename one")
    return os.open(path, os.O_PATH)


def enter(image: str, given: list[str], links: dict[str, str]) -> dict[str, str]:
    """Have the files of an image, with ``given`` of the machine at their paths; returns the variables of the image.

    What is written elsewhere is in memory and ends with the process: other commands have the image as it was unpacked.
    Who is not root does it in a user namespace, as the same user. Raises OSError, CannotIsolate.
    """
    import warnings  # noqa: F401, PLC0415 - execvpe looks for it, in the image it is not there

    here, uid = os.getcwd(), os.geteuid()  # noqa: PTH109 - see hidden
    with open(f"{image}/environment.json") as file:  # noqa: PTH123 - see hidden
        variables = json.load(file)
    try:
        own_namespaces(uid, os.getegid())
    except PermissionError as error:
        raise CannotIsolate(f"{error}; {NO_NAMESPACE[not uid]}") from None
    opened = [(path, os.open(path, os.O_PATH)) for path in (*OF_MACHINE, *given) if os.path.exists(path)]  # noqa: PTH110 - see hidden
    machine, lower = os.open("/", os.O_PATH), os.open(f"{image}/root", os.O_PATH)
    mount("tmpfs", "/mnt", "tmpfs", NOSUID | NODEV)
    for name in ("upper", "work", "root"):
        os.mkdir(f"/mnt/{name}")  # noqa: PTH102 - see hidden
    layers = f"lowerdir={_OPENED.format(lower)},upperdir=/mnt/upper,workdir=/mnt/work"
    mount("overlay", "/mnt/root", "overlay", 0, layers)
    os.chroot("/mnt/root")  # what links of the image lead to is in the image, as nothing is mounted there yet
    places = [place(path, folder=stat.S_ISDIR(os.fstat(file).st_mode)) for path, file in opened]
    for name, path in links.items():
        os.close(place(LIBRARIES, folder=True))
        os.symlink(path, f"{LIBRARIES}/{name}")  # noqa: PTH211 - see hidden
    os.fchdir(machine)
    os.chroot(".")
    for (_, file), at in zip(opened, places):
        mount(_OPENED.format(file), _OPENED.format(at), "", BIND | REC)
    os.chroot("/mnt/root")
    os.chdir(here)
    for file in (machine, lower, *places, *(file for _, file in opened)):
        os.close(file)
    return {"HOME": "/tmp" if uid else "/root", **variables}


def become(uid: int, gid: int) -> None:
    """Be that user from here on, without other groups; no program gives more rights, not ``sudo`` either."""
    call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def give(paths: list[str], uid: int, gid: int) -> None:
    """Make folders, and the output of this process, those of the user; what another one put in their place is not."""
    opened = [os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) for path in paths]
    for file in (1, 2, *opened):
        os.fchown(file, uid, gid)
    for file in opened:
        os.close(file)


def main() -> None:
    """Exec the command."""
    asked, command = json.loads(sys.argv[1]), sys.argv[2:]
    here = os.getcwd()  # noqa: PTH109 - see hidden
    given = {key.removeprefix(PREFIX): value for key, value in os.environ.items() if key.startswith(PREFIX)}
    try:
        if "image" in asked:
            if not (image := asked["image"]):
                raise CannotIsolate("it is not unpacked here yet; try again when the instance is READY")
            variables = enter(image, asked["given"], links := asked.get("links", {})) | given
            if links:
                found = (variables.get("LD_LIBRARY_PATH"), LIBRARIES)
                variables["LD_LIBRARY_PATH"] = ":".join(filter(None, found))
            os.environ["PATH"] = variables.setdefault("PATH", os.defpath)
            os.execvpe(command[0], command, variables)
        uid, gid, name, folder = account(asked["user"])
        give(asked["given"], uid, gid)
        separate(asked["home"], asked["shown"], asked["tmp"], asked["shm"], asked["programs"])
        become(uid, gid)
        os.umask(0o077)
        variables = given | {"USER": name, "LOGNAME": name, "HOME": folder, "TMPDIR": "/tmp"}
        try:
            os.chdir(here)
        except OSError as error:
            raise CannotIsolate(f"{here}: {error.strerror} for {name}; let it read the workdir of the job") from None
        os.execvpe(command[0], command, variables)
    except (CannotIsolate, OSError) as error:
        how = f"in the image {asked['name']}" if "image" in asked else f"as {asked['user']}"
        sys.stderr.write(f"rota: the command cannot run {how}: {error}\n")
        sys.exit(CANNOT)


if __name__ == "__main__":
    main()
