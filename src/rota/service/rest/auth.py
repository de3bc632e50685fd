"""Authentication and audit: tokens, sessions of the UI, checks of Host and Origin; who asked for which change."""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from rota.runtime.clock import Clock, iso
from rota.runtime.environ import PRIVATE_FILE
from rota.runtime.process import write_private
from rota.runtime.random import RandomSource, secret_token
from rota.service.accounts import LOCAL, AccountBook, Caller, UserRole, is_below
from rota.service.models.accounts import AuditLine
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput, LimitExceeded, NotAllowed, NoToken, StoreCorrupt, StoreUnavailable
from rota.spec.events import TokenMade

COOKIE = "rota_session"
CSRF_HEADER = "rota-csrf"
CODE_TTL_S = 600.0
CODES_OF_USER_MAX = 32
"""Open codes of one user; a new one replaces the oldest."""
SESSION_TTL_S = 7 * 86400.0
FAILURES_MAX = 10
"""Wrong tokens of one address in a window; further ones of it are answered with 429, right ones as ever."""
FAILURES_WINDOW_S = 60.0
FAILING_MAX = 1000
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_TOKEN = re.compile(r"rota_[a-z0-9]+_[A-Za-z0-9_-]{32,}|(?!rota_)[!-~]{16,}")
"""What the token file may hold: a whole token as it is made, or one of the owner's own of 16 characters and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthRequest:
    """What of a request matters for its permission; header names in lower case."""

    method: str
    headers: Mapping[str, str]
    cookie: str = ""
    address: str = ""


def ensure_token(path: Path, random_source: RandomSource) -> str:
    """The admin token of the installation, made at the first start; its file can be read by its owner alone.

    Raises StoreCorrupt for a file that holds no whole token: whoever guesses the rest of it would be an admin.
    """
    if path.exists():
        path.chmod(0o600)
        found = path.read_bytes().decode(errors="replace").strip()
        if not _TOKEN.fullmatch(found):
            raise StoreCorrupt(
                f"{path} holds no whole token ({len(found)} characters; expected rota_ID_SECRET)",
                hint="copy it from a back-up, or delete the file and start again for a new one (sessions then end)",
            )
        return found
    _, token = fresh_token(random_source)
    write_private(path, token + "\n")
    return token


def fresh_token(random_source: RandomSource) -> tuple[str, str]:
    """The id of a new token, and the whole of it: ``rota_<id>_<secret>``."""
    found = random_source.new_id(40).lower()
    return found, f"rota_{found}_{secret_token()}"


def digest_of(token: str) -> str:
    """What is kept of a token: its SHA-256. A token is 256 bits of chance, so it needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoginCode:
    until_s: float
    user: str
    token_id: str


@dataclass(slots=True)
class Auth:
    """Checks requests against the token of the installation and those of its users.

    Sessions of the page are signed with the digest of the former; each belongs to the token whose holder asked for
    it, survives a restart of the service, and ends with that token.
    """

    clock: Clock
    random_source: RandomSource
    own: TokenMade
    hosts: frozenset[str]
    accounts: AccountBook = field(default_factory=AccountBook)
    _codes: dict[str, _LoginCode] = field(default_factory=dict[str, _LoginCode])
    """The oldest first."""
    _failures: dict[str, deque[float]] = field(default_factory=dict[str, "deque[float]"])

    @staticmethod
    def of(
        token: str,
        *,
        clock: Clock,
        random_source: RandomSource,
        hosts: frozenset[str],
        accounts: AccountBook | None = None,
    ) -> Auth:
        """``token`` is that of the installation; ``hosts`` are the names under which it is asked, without port."""
        own = TokenMade(id=_id_of(token), user=LOCAL, digest=digest_of(token))
        return Auth(clock=clock, random_source=random_source, own=own, hosts=hosts, accounts=accounts or AccountBook())

    def check(self, asked: AuthRequest) -> Caller:
        """Who asks. Raises NoToken, NotAllowed (Host, Origin, CSRF) or LimitExceeded (too many wrong tokens)."""
        self.check_host(asked)
        self.check_origin(asked)
        kind, _, token = asked.headers.get("authorization", "").partition(" ")
        token = token.strip()
        if kind.lower() == "bearer" and token:
            made = self._find(_id_of(token))
            if made is not None and hmac.compare_digest(digest_of(token), made.digest):
                return self.accounts.caller(made, by="token")
            self._count_failure(asked.address)
            raise NoToken("invalid or expired token", hint="rota token, or ask an admin for a new one")
        if asked.cookie:
            return self._check_session(asked)
        raise NoToken("no token", hint="send 'Authorization: Bearer TOKEN', or open the address that 'rota ui' prints")

    def _find(self, token_id: str) -> TokenMade | None:
        """A token that is valid now, by its id."""
        if token_id == self.own.id:
            return self.own
        known = self.accounts.tokens.get(token_id)
        return known.made if known is not None and known.valid(self.clock.wall_s()) else None

    def renewed(self, caller: Caller) -> Caller:
        """The same caller with its present rights. Raises NoToken when its token was revoked or has expired."""
        if (made := self._find(caller.token)) is None:
            raise NoToken("the token was revoked, or it has expired", hint="ask an admin for a new one")
        return self.accounts.caller(made, by=caller.by)

    def may_revoke(self, caller: Caller, made: TokenMade) -> bool:
        """An admin any token; others their own ones, but none with more rights than the token that they ask with."""
        if caller.has(UserRole.ADMIN):
            return True
        mine = self._find(caller.token)
        return (
            mine is not None
            and made.user == caller.user
            and UserRole.of(made.role) <= UserRole.of(mine.role)
            and is_below(made.queue, mine.queue)
        )

    def check_host(self, asked: AuthRequest) -> None:
        """Refuse names that are not ours: a page elsewhere may have pointed its own name at this address."""
        host = host_of(asked.headers.get("host", ""))
        if host not in self.hosts:
            raise NotAllowed(f"host {host!r} is not one of this service", hint="set 'host' to the name you use")

    def check_origin(self, asked: AuthRequest) -> None:
        """Raises NotAllowed for what a page of another site makes a browser send."""
        origin = asked.headers.get("origin", "")
        if origin and urlsplit(origin).netloc != asked.headers.get("host", ""):
            raise NotAllowed(f"origin {origin!r} is another site than this service", hint="use the page of 'rota ui'")

    def _check_session(self, asked: AuthRequest) -> Caller:
        signed, _, signature = asked.cookie.rpartition(".")
        expires, _, token_id = signed.partition(".")
        if not expires.isdecimal() or not hmac.compare_digest(signature.encode(), self.sign(signed).encode()):
            raise NoToken("the session is not known", hint="open the page anew: rota ui")
        made = self._find(token_id)
        if int(expires) < self.clock.wall_s() or made is None:
            raise NoToken("the session has ended", hint="open the page anew: rota ui")
        if asked.method not in SAFE_METHODS and not asked.headers.get(CSRF_HEADER):
            raise NotAllowed(f"a change from a page needs the header {CSRF_HEADER}", hint=f"send {CSRF_HEADER}: 1")
        return self.accounts.caller(made, by="cookie")

    def new_code(self, caller: Caller) -> str:
        """A code that opens one session of the caller, once, within ``CODE_TTL_S``."""
        now = self.clock.monotonic_s()
        self._codes = {code: kept for code, kept in self._codes.items() if kept.until_s > now}
        mine = [code for code, kept in self._codes.items() if kept.user == caller.user]
        if len(mine) >= CODES_OF_USER_MAX:
            del self._codes[mine[0]]
        code = secret_token(128)
        self._codes[code] = _LoginCode(until_s=now + CODE_TTL_S, user=caller.user, token_id=caller.token)
        return code

    def open_session(self, code: str) -> str:
        """The value of the cookie for a code. Raises BadInput for an unknown, used or old one."""
        found = self._codes.pop(code, None)
        if found is None or found.until_s < self.clock.monotonic_s():
            raise BadInput("this code was used or is too old", hint="'rota ui' opens a new one")
        return self.session_of(found.token_id)

    def session_of(self, token_id: str) -> str:
        """The value of the cookie for a session under that token."""
        signed = f"{int(self.clock.wall_s() + SESSION_TTL_S)}.{token_id}"
        return f"{signed}.{self.sign(signed)}"

    def make_token(
        self, caller: Caller, *, user: str, name: str, role: UserRole, queue: str, ttl_s: float | None
    ) -> tuple[TokenMade, str]:
        """A new token and its event, which is not appended yet. Raises NotAllowed for one of another, or for more."""
        if user != caller.user:
            caller.need(UserRole.ADMIN)
        expires = None if ttl_s is None else self.clock.wall_s() + ttl_s
        parent = self.accounts.tokens.get(caller.token) if user == caller.user else None
        if parent is not None:  # no token makes one that may do or last more than itself
            most = parent.made
            role, queue = min(role, UserRole.of(most.role)), queue or most.queue
            if not is_below(queue, most.queue):
                raise NotAllowed(f"queue {queue!r} is not below {most.queue!r}, all that your token is for")
            if most.expires_at is not None:
                expires = min(expires or most.expires_at, most.expires_at)
        found, whole = fresh_token(self.random_source)
        made = TokenMade(
            id=found,
            user=user,
            digest=digest_of(whole),
            name=name,
            role=role.word,
            queue=queue,
            expires_at=expires,
            by=caller.user,
        )
        return made, whole

    def sign(self, text: str, kind: str = "session") -> str:
        """HMAC-SHA256 of the text and its ``kind`` under the token of the installation, in hexadecimal digits."""
        return hmac.new(self.own.digest.encode(), f"{kind}.{text}".encode(), hashlib.sha256).hexdigest()

    def _count_failure(self, address: str) -> None:
        """Note a wrong token of an address. Raises LimitExceeded from the eleventh within the window on."""
        now = self.clock.monotonic_s()
        recent = self._failures.pop(address, None) or deque[float](maxlen=FAILURES_MAX)
        if len(self._failures) >= FAILING_MAX:
            self._failures.pop(next(iter(self._failures)))
        self._failures[address] = recent
        if len(recent) == FAILURES_MAX and recent[0] >= now - FAILURES_WINDOW_S:
            left_s = math.ceil(recent[0] + FAILURES_WINDOW_S - now)
            message = f"too many wrong tokens from {address}"
            raise LimitExceeded(message, hint=f"wait {left_s} s", retry_after_s=left_s)
        recent.append(now)


def _id_of(token: str) -> str:
    """The middle of ``rota_<id>_<secret>``; the secret may hold underscores. Empty for another form."""
    head, _, rest = token.strip().partition("_")
    return rest.partition("_")[0] if head == "rota" and "_" in rest else ""


def host_of(value: str) -> str:
    """The name in a Host header without its port: ``[::1]:7700`` is ``::1``."""
    if value.startswith("["):
        return value[1:].partition("]")[0].lower()
    return value.partition(":")[0].lower()


def bracketed(host: str) -> str:
    """A host as an address has it before ``:PORT``: ``[::1]``."""
    return f"[{host}]" if ":" in host else host


FILE_BYTES_MAX = 32 * 2**20
"""At this size a file becomes ``audit.jsonl.1`` in place of the one before."""
ANONYMOUS_MAX, ANONYMOUS_WINDOW_S = 60, 60.0
"""Lines about requests without a valid token in one window; the rest are counted: a flood pushes out no others."""


class Audit:
    """The file of requests that change something, refused ones too.

    ``begin`` writes who asks for what before it is done, and nothing is done that could not be written; ``end`` adds
    the status before the answer leaves. So a full disk refuses a command and never hides one that was acknowledged. Not
    in the event log: what was done is there already (``by``), and what was refused did not happen. Requests without a
    valid token have a file of their own: they push out their own lines alone. For one thread.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._anonymous_path = path, path.with_name(f"strangers-{path.name}")
        self._clock = clock
        self._window_s, self._anonymous, self._left_out = float("-inf"), 0, 0
        self._last_ms = 0

    def _at(self) -> str:
        """Now, or a millisecond after the line before: pages go by time, so each line has its own."""
        self._last_ms = max(int(self._clock.wall_s() * 1000), self._last_ms + 1)
        return iso((self._last_ms + 0.5) / 1000)

    def begin(self, line: Mapping[str, object]) -> None:
        """Write who asks for what; ``request_id`` names it. Raises StoreUnavailable when that is impossible."""
        try:
            self._write({"at": self._at(), **line, "status": None})
        except OSError as error:
            raise self._refused(error) from error

    def add(self, request_id: str, **more: str | bool) -> None:
        """Say more of a request before it is done. Raises StoreUnavailable when that is impossible."""
        try:
            self._write({"request_id": request_id, **more})
        except OSError as error:
            raise self._refused(error) from error

    def end(self, request_id: str, status: int) -> None:
        """Write what came of it. Raises OSError; that it was begun is already written."""
        self._write({"request_id": request_id, "status": status})

    def anonymous(self, line: Mapping[str, object]) -> None:
        """Write a refusal of a request without a valid token; of a flood only the number. Raises OSError."""
        now = self._clock.monotonic_s()
        if now - self._window_s >= ANONYMOUS_WINDOW_S:
            self._window_s, self._anonymous = now, 0
        self._anonymous += 1
        if self._anonymous > ANONYMOUS_MAX:
            self._left_out += 1
            return
        left_out = {"left_out": self._left_out} if self._left_out else {}
        self._write({"at": self._at(), **line, **left_out}, self._anonymous_path)
        self._left_out = 0

    def _refused(self, error: OSError) -> StoreUnavailable:
        text = f"nothing was done: the audit {self._path} cannot be written: {error.strerror}"
        return StoreUnavailable(text, hint="free space on that disk, then ask again")

    def _write(self, line: JsonObject, path: Path | None = None) -> None:
        """Add one line. Blocks for as long as one small write takes."""
        path = path or self._path
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE)
        try:
            raw = json.dumps(line, ensure_ascii=False).encode() + b"\n"
            size = os.fstat(file).st_size
            if os.write(file, raw) < len(raw):
                os.ftruncate(file, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            full = size + len(raw) > FILE_BYTES_MAX
        finally:
            os.close(file)
        if full:
            path.replace(_older(path))

    def newest(self, count: int, *, user: str = "", text: str = "", before: str = "") -> list[AuditLine]:
        """The last requests, the newest first; of one user if named. A line that a crash cut short is left out.

        ``text``: only those with it in the path, user or address. ``before``: only those older than ``audit_cursor``.

        ``status`` is None of one that is under way or whose service died before it answered.
        """
        found: deque[JsonObject] = deque(maxlen=count)
        open_ones: dict[str, JsonObject] = {}
        for line in _lines(self._path):
            if "at" not in line:
                open_ones.get(line.get("request_id", ""), {}).update(line)
                if "status" in line:
                    open_ones.pop(line.get("request_id", ""), None)
            elif (not user or line.get("user") == user) and _wanted(line, text, before):
                found.append(line)
                if line.get("status") is None:
                    open_ones[line.get("request_id", "")] = line
        others = () if user else (one for one in _lines(self._anonymous_path) if _wanted(one, text, before))
        strangers = deque(others, maxlen=count)
        newest = list(merge(found, strangers, key=lambda line: line["at"]))[: -count - 1 : -1]
        return cast("list[AuditLine]", newest)


def audit_cursor(line: Mapping[str, object]) -> str:
    """The place of a line among all: its time, and its request where several have one time."""
    return f"{line['at']},{line.get('request_id', '')}"


def _wanted(line: Mapping[str, object], text: str, before: str) -> bool:
    where = f"{line.get('method')} {line.get('path')} {line.get('user')} {line.get('address')}".lower()
    return text.lower() in where and (not before or audit_cursor(line) < before)


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _lines(path: Path) -> Iterator[JsonObject]:
    for one in (_older(path), path):
        if one.exists():
            with one.open(encoding="utf-8") as file:
                for text in file:
                    try:
                        yield json.loads(text)
                    except ValueError:
                        continue
