"""Secrets of users: write-only values for jobs, in encrypted files below ``$ROTA_HOME/secrets``."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rota.runtime.environ import PRIVATE_DIR, Home
from rota.runtime.process import write_private
from rota.spec.errors import BadInput, UnknownName
from rota.spec.ids import NAME_PATTERN, NAME_RULE

if TYPE_CHECKING:
    from cryptography.fernet import Fernet

SECRET_NAME = re.compile(r"^[A-Za-z][A-Za-z0-9_]{0,62}$")
"""Names of secrets; each becomes the name of a variable."""

VALUE_BYTES_MAX = 64 * 2**10
SECRETS_MAX = 200
"""Of one user."""
MASK_CHARS_MIN = 6
"""Shorter values are not masked in output: they would black out half of it."""
MASKED = "******"
VARIABLE = "ROTA_SECRETS"
"""The secrets that an instance opens: the owner, then the names."""


class Vault:
    """The secrets of one installation.

    A value is sealed (Fernet: AES-128-CBC with an HMAC) by ``secret.key``, so a back-up without that file reveals
    nothing. It protects copies, not the home itself: jobs run as its owner.
    """

    def __init__(self, home: Home) -> None:
        self._root, self._key = home.root / "secrets", home.root / "secret.key"

    def put(self, owner: str, name: str, value: str) -> None:
        """Keep a value in place of any before. Raises BadInput."""
        if not value:
            raise BadInput(f"secret {name}: the value is empty", hint=f"rota secret set {name} < FILE")
        if "\0" in value:
            raise BadInput(f"secret {name}: the value has a zero byte", hint="no variable can hold one: encode it")
        if (count := len(value.encode())) > VALUE_BYTES_MAX:
            raise BadInput(f"secret {name}: the value has {count} bytes, at most {VALUE_BYTES_MAX} are kept")
        path = self._path(owner, name)
        if not path.exists() and len(self.names(owner)) >= SECRETS_MAX:
            raise BadInput(f"{owner} has {SECRETS_MAX} secrets already", hint="remove one: rota secret rm NAME")
        path.parent.mkdir(mode=PRIVATE_DIR, parents=True, exist_ok=True)
        write_private(path, _fernet(self._make_key()).encrypt(value.encode()).decode())

    def remove(self, owner: str, name: str) -> None:
        """Forget a value. Raises UnknownName."""
        try:
            self._path(owner, name).unlink()
        except FileNotFoundError:
            raise UnknownName(f"{owner} has no secret {name!r}", hint="see: rota secret ls") from None

    def names(self, owner: str) -> list[str]:
        """The names of a user's secrets."""
        folder = self._path(owner, "x").parent
        return sorted(one.name for one in folder.iterdir() if SECRET_NAME.match(one.name)) if folder.is_dir() else []

    def check(self, owner: str, names: Iterable[str]) -> None:
        """Raises UnknownName for a name that is not there."""
        known = self.names(owner)
        for name in names:
            if name not in known:
                listed = f"{owner} has: {', '.join(known)}" if known else f"{owner} has none"
                raise UnknownName(f"no secret {name!r}", hint=f"set it: rota secret set {name}; {listed}")

    def open(self, owner: str, names: Iterable[str]) -> dict[str, str]:
        """Values by name. Raises UnknownName for one that is gone, BadInput when the key is another one."""
        from cryptography.fernet import InvalidToken  # noqa: PLC0415 - 40 ms that few processes need

        found: dict[str, str] = {}
        for name in names:
            self.check(owner, [name])
            try:
                found[name] = _fernet(self._key.read_bytes()).decrypt(self._path(owner, name).read_bytes()).decode()
            except (InvalidToken, FileNotFoundError):
                raise BadInput(f"secret {name!r} was sealed by another {self._key.name}", hint="set it again") from None
        return found

    def _path(self, owner: str, name: str) -> Path:
        if not NAME_PATTERN.match(owner):
            raise BadInput(f"user {owner!r} is not a name", hint=NAME_RULE)
        if not SECRET_NAME.match(name):
            raise BadInput(f"secret {name!r} cannot name a variable", hint="a letter, then letters, digits and '_'")
        return self._root / owner / name

    def _make_key(self) -> bytes:
        from cryptography.fernet import Fernet  # noqa: PLC0415 - see above

        if not self._key.exists():
            fresh = self._key.with_name(f".{self._key.name}.{os.getpid()}")
            write_private(fresh, Fernet.generate_key().decode())
            with contextlib.suppress(FileExistsError):  # another process was first: its key counts
                os.link(fresh, self._key)
            fresh.unlink()
        return self._key.read_bytes()


def open_from_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The secrets that ``ROTA_SECRETS`` of an environment names: owner, then names. Raises what ``open`` raises."""
    owner, *names = environ.get(VARIABLE, "").split() or [""]
    return Vault(Home.find(environ)).open(owner, names) if names else {}


def redact(text: str, *, cut: bool = False) -> str:
    """The text without the secrets of this process: for what it reports of itself; ``cut`` as in ``masked``."""
    names = os.environ.get(VARIABLE, "").split()[1:]
    return masked(text, [os.environ[name] for name in names if name in os.environ], cut=cut)


def redact_bytes(data: bytes) -> bytes:
    """As ``redact``, of bytes: a value that lies across two pieces of output is not found."""
    return redact(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def masked(text: str, values: Iterable[str], *, cut: bool = False) -> str:
    """The text with each value of ``MASK_CHARS_MIN`` characters or more blacked out.

    Of a text that was ``cut``, maybe inside a character, also what a value began with at its end.
    """
    long = [value for value in sorted(values, key=len, reverse=True) if len(value) >= MASK_CHARS_MIN]
    for value in long:
        text = text.replace(value, MASKED)
    if cut:
        text = text.rstrip("\ufffd")
        begun = max((n for value in long for n in range(1, len(value)) if text.endswith(value[:n])), default=0)
        text = text[:-begun] + MASKED if begun else text
    return text


def _fernet(key: bytes) -> Fernet:
    from cryptography.fernet import Fernet  # noqa: PLC0415 - see above

    return Fernet(key)
