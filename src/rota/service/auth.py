"""Who may ask: bearer tokens, the cookie of the page, and the checks of Host and Origin."""

from __future__ import annotations

import hashlib
import hmac
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from rota.runtime.chance import SystemChance, secret_token
from rota.runtime.clock import Clock
from rota.runtime.process import write_private
from rota.spec.errors import BadInput, LimitExceeded, NotAllowed, NoToken

COOKIE = "rota_session"
CSRF_HEADER = "rota-csrf"
CODE_TTL_S = 600.0
CODES_MAX = 32
SESSION_TTL_S = 7 * 86400.0
FAILURES_MAX = 10
FAILURES_WINDOW_S = 60.0
FAILING_MAX = 1000
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks: the user's name, and how they proved it (``token`` or ``cookie``)."""

    user: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What of a request matters for its permission; header names in lower case."""

    method: str
    headers: Mapping[str, str]
    cookie: str = ""
    address: str = ""


def ensure_token(path: Path) -> str:
    """The admin token of the installation, made at the first start; its file can be read by its owner alone."""
    if path.exists():
        path.chmod(0o600)
        return path.read_text(encoding="utf-8").strip()
    token = f"rota_{SystemChance().fresh(40).lower()}_{secret_token()}"
    write_private(path, token + "\n")
    return token


@dataclass(slots=True)
class Auth:
    """Checks requests against the admin token. Only its SHA-256 is kept; sessions of the page are signed with that.

    A session survives a restart of the service, and ends when the token is changed.
    """

    clock: Clock
    digest: bytes
    hosts: frozenset[str]
    _codes: dict[str, float] = field(default_factory=dict)
    _failures: dict[str, deque[float]] = field(default_factory=dict)

    @staticmethod
    def of(token: str, *, clock: Clock, hosts: frozenset[str]) -> Auth:
        """``hosts`` are the names under which the service may be asked, without port."""
        return Auth(clock=clock, digest=hashlib.sha256(token.encode()).digest(), hosts=hosts)

    def check(self, asked: Asked) -> Caller:
        """Who asks. Raises NoToken, NotAllowed (Host, Origin, CSRF) or LimitExceeded (too many wrong tokens)."""
        self.check_host(asked)
        self._check_origin(asked)
        kind, _, token = asked.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and token:
            key = f"{asked.address} {token[:16]}"
            self._check_rate(key)
            if hmac.compare_digest(hashlib.sha256(token.strip().encode()).digest(), self.digest):
                return Caller(user="local", by="token")
            self._count_failure(key)
            raise NoToken("the token is not known", hint="it is in the file 'token' of $ROTA_HOME")
        if asked.cookie:
            return self._check_session(asked)
        raise NoToken("no token", hint="send 'Authorization: Bearer TOKEN', or open the address that 'rota up' prints")

    def check_host(self, asked: Asked) -> None:
        """Refuse names that are not ours: a page elsewhere may have pointed its own name at this address."""
        host = _host_of(asked.headers.get("host", ""))
        if host not in self.hosts:
            raise NotAllowed(f"host {host!r} is not one of this service", hint="set 'host' to the name you use")

    def _check_origin(self, asked: Asked) -> None:
        origin = asked.headers.get("origin", "")
        if origin and urlsplit(origin).netloc != asked.headers.get("host", ""):
            raise NotAllowed(f"origin {origin!r} may not ask this service")

    def _check_session(self, asked: Asked) -> Caller:
        expires, _, signature = asked.cookie.partition(".")
        if not expires.isdecimal() or not hmac.compare_digest(signature.encode(), self._sign(expires).encode()):
            raise NoToken("the session is not known", hint="open the address that 'rota status' prints")
        if int(expires) < self.clock.wall_s():
            raise NoToken("the session has ended", hint="open the address that 'rota status' prints")
        if asked.method not in SAFE_METHODS and not asked.headers.get(CSRF_HEADER):
            raise NotAllowed(f"a change from a page needs the header {CSRF_HEADER}")
        return Caller(user="local", by="cookie")

    def new_code(self) -> str:
        """A code that opens one session, once, within ``CODE_TTL_S``."""
        now = self.clock.monotonic_s()
        self._codes = {code: until for code, until in self._codes.items() if until > now}
        if len(self._codes) >= CODES_MAX:
            raise LimitExceeded(f"{CODES_MAX} codes are open", hint=f"use one, or wait {CODE_TTL_S:.0f} s")
        code = secret_token(128)
        self._codes[code] = now + CODE_TTL_S
        return code

    def open_session(self, code: str) -> str:
        """The value of the cookie for a code. Raises BadInput for an unknown, used or old one."""
        until = self._codes.pop(code, 0.0)
        if until < self.clock.monotonic_s():
            raise BadInput("this code was used or is too old", hint="'rota status' prints a new one")
        expires = str(int(self.clock.wall_s() + SESSION_TTL_S))
        return f"{expires}.{self._sign(expires)}"

    def _sign(self, text: str) -> str:
        return hmac.new(self.digest, f"session.{text}".encode(), hashlib.sha256).hexdigest()

    def _check_rate(self, key: str) -> None:
        recent = self._failures.get(key)
        now = self.clock.monotonic_s()
        while recent and recent[0] < now - FAILURES_WINDOW_S:
            recent.popleft()
        if recent and len(recent) >= FAILURES_MAX:
            raise LimitExceeded("too many wrong tokens", hint=f"wait {FAILURES_WINDOW_S:.0f} s")

    def _count_failure(self, key: str) -> None:
        if len(self._failures) >= FAILING_MAX:
            self._failures.pop(next(iter(self._failures)))
        self._failures.setdefault(key, deque(maxlen=FAILURES_MAX)).append(self.clock.monotonic_s())


def _host_of(value: str) -> str:
    """The name in a Host header without its port: ``[::1]:7700`` is ``::1``."""
    if value.startswith("["):
        return value[1:].partition("]")[0].lower()
    return value.partition(":")[0].lower()
