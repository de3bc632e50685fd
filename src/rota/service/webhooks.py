"""Webhooks on job and node events: signed, at least once, in order, from a cursor in the log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rota.runtime.clock import Clock, backoff, iso
from rota.runtime.environ import Home
from rota.runtime.process import write_private
from rota.runtime.random import RandomSource, secret_token
from rota.runtime.secrets import Vault
from rota.service.control.loop import ServiceLoop
from rota.service.views.job_history import JobHistory
from rota.spec import events as e
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput, NotAllowed, RotaError, UnknownName
from rota.spec.events import Record, WebhookSet
from rota.spec.resources import Health
from rota.spec.states import JobState

if TYPE_CHECKING:
    import httpx

KINDS = ("started", "healed", "preempted", "failed", "finished", "drained", "lost", "replaced")
"""Notices that a webhook can be sent; ``drained`` and ``lost`` are of nodes, ``replaced`` of a part of the service."""
WEBHOOKS_MAX = 50
OWNER = "webhooks"
"""Under which the vault keeps the signing keys; no user may have this name."""
WHOLE = "_url"
"""Behind the id of a webhook: where the vault keeps its whole address, which the event log and answers show without
its password."""
_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All that IANA gives out as global; outside of it lie site-local addresses and translators of every local kind."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
PAGE = 500
POLL_S = 1.0
ANSWER_S = 10.0
RETRY_S = (1.0, 3600.0)
GIVE_UP_S = 86_400.0
"""A notice that is not accepted within this time is dropped, so that the next ones can be sent."""

_log = logging.getLogger("rota.service")


def notice_of(record: Record, history: JobHistory | None = None) -> str:
    """Which of ``KINDS`` a record is, in the history of its job; empty for none."""
    match record.event:
        case e.JobAdmitted(attempt=1):
            return "started"
        case e.Committed() | e.TimerFired() if history is not None and history.healed_with(record):
            return "healed"
        case e.PreemptAsked() if history is not None and history.gives_all_back(record.at, record.event):
            return "preempted"
        case e.JobEnded(state=state):
            return "failed" if state is JobState.FAILED else "finished"
        case e.NodeMarked(health=Health.DRAINED | Health.CORDONED):
            return "drained"
        case e.NodeLost(removed=False):
            return "lost"
        case e.PartReplaced():
            return "replaced"
        case _:
            return ""


def without_password(url: str) -> str:
    """The address as it may be shown: ``https://user:***@host/path``."""
    return re.sub(r"(//[^/?#]*?:)[^/?#]*@", r"\1***@", url)


def signature(secret: str, at: int, body: bytes) -> str:
    """``t=<unix seconds>,v1=<hex HMAC-SHA256 of "t.body">``: the header ``Rota-Signature``."""
    return f"t={at},v1={hmac.new(secret.encode(), f'{at}.'.encode() + body, hashlib.sha256).hexdigest()}"


def addresses_of(url: str, allowed: frozenset[str]) -> tuple[str, ...]:
    """The IP addresses behind a URL, each outside or of one of the ``allowed`` hosts: what may be connected to.

    Raises BadInput for no http address and for a name without address, NotAllowed when any address is inside.
    """
    import httpx  # noqa: PLC0415 - only where there are webhooks: it would slow down every start

    try:
        parts = urlsplit(url)
        port = parts.port or 80
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL) as error:
        raise BadInput(f"{without_password(url)!r} is not an http address: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput(f"{without_password(url)!r} is not an http address")
    try:
        answers = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise BadInput(f"{parts.hostname} has no address: {error}") from error
    found = tuple(dict.fromkeys(str(info[4][0]) for info in answers))
    inside = [] if parts.hostname in allowed else [one for one in found if not _is_outside(one)]
    if inside:
        hint = f"allow it: webhook_hosts = '{parts.hostname}' in config.toml"
        where = "" if parts.hostname == inside[0] else f" {inside[0]},"
        raise NotAllowed(f"{parts.hostname} is{where} an address inside", hint=hint)
    return found


def _is_outside(address: str) -> bool:
    """Also of an IPv4 address that an IPv6 one carries (mapped, 6to4, NAT64 of RFC 6052)."""
    one = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(one, ipaddress.IPv6Address):
        carried = one.ipv4_mapped or one.sixtofour
        if carried is None and one in _NAT64:
            carried = ipaddress.IPv4Address(int(one) & 0xFFFFFFFF)
        if carried is None and one not in _UNICAST:
            return False
        one = carried or one
    return one.is_global and not one.is_multicast


async def post(
    http: httpx.AsyncClient, url: str, address: str, *, body: bytes, headers: Mapping[str, str]
) -> httpx.Response:
    """Post to a URL at this address of its host and no other; the certificate must still be that of the name.

    Looking the name up once more would let whoever owns it give an outside address to the check and an inside one to
    the connection.
    """
    import httpx  # noqa: PLC0415 - only where there are webhooks: it would slow down every start

    named = httpx.URL(url)
    return await http.post(
        named.copy_with(host=address),
        content=body,
        headers={**headers, "Host": named.netloc.decode()},
        extensions={"sni_hostname": named.host},
    )


class Notifier:
    """One task a webhook; each reads the log for itself and keeps its place in ``run/webhooks/<id>``."""

    def __init__(
        self,
        loop: ServiceLoop,
        *,
        home: Home,
        vault: Vault,
        clock: Clock,
        random_source: RandomSource,
        url: str,
        allowed: str,
    ) -> None:
        self.targets = loop.installation.webhooks
        self.allowed = frozenset(one.strip() for one in allowed.split(",") if one.strip())
        self._loop, self._vault, self._clock, self._random, self._url = loop, vault, clock, random_source, url
        self._folder = home.webhooks
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._places: dict[str, int] = {}
        """The last record that each webhook is done with, also while the disk takes no note of it."""

    def make(self, url: str, on: list[str], queue: str, by: str) -> tuple[WebhookSet, str]:
        """A new webhook, not appended yet, and the secret its notices are signed with. Raises BadInput, NotAllowed."""
        unknown = sorted(set(on) - set(KINDS))
        if unknown:
            raise BadInput(f"no notice {unknown[0]!r}", hint=f"notices: {', '.join(KINDS)}")
        if len(self.targets) >= WEBHOOKS_MAX:
            raise BadInput(f"there are {WEBHOOKS_MAX} webhooks", hint="remove one: rota webhook rm ID")
        addresses_of(url, self.allowed)
        shown = without_password(url)
        made = WebhookSet(id=f"w{self._random.new_id(40).lower()}", url=shown, on=tuple(on), queue=queue, by=by)
        secret = secret_token()
        self._vault.put(OWNER, made.id, secret)
        if made.url != url:
            self._vault.put(OWNER, made.id + WHOLE, url)
        return made, secret

    def forget(self, one: str) -> None:
        """Drop what the vault keeps of a webhook."""
        for name in (one, one + WHOLE):
            with suppress(UnknownName):
                self._vault.remove(OWNER, name)

    async def run(self) -> None:
        """Until cancelled: keep a task for each webhook, and none for one that was removed."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        try:
            while True:
                for one in self._tasks.keys() - self.targets.keys():
                    await self._end(one)
                    self._places.pop(one, None)
                    (self._folder / one).unlink(missing_ok=True)
                for one in self.targets.keys() - self._tasks.keys():
                    self._tasks[one] = asyncio.create_task(self._keep(one), name=f"webhook/{one}")
                await self._clock.sleep(POLL_S)
        finally:
            for one in tuple(self._tasks):
                await self._end(one)

    async def _end(self, one: str) -> None:
        task = self._tasks.pop(one)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _keep(self, one: str) -> None:
        """Serve it; what fails unforeseen is begun again where it was, after a pause."""
        pauses = backoff(*RETRY_S)
        while True:
            began_s, pause_s = self._clock.monotonic_s(), next(pauses)
            try:
                await self._serve(one)
            except Exception as error:  # noqa: BLE001 - the edge of its task; one webhook must not end the others
                if self._clock.monotonic_s() - began_s > pause_s:
                    pauses = backoff(*RETRY_S)
                    pause_s = next(pauses)
                _log.error("webhook %s failed, and waits %.0f s", one, pause_s, exc_info=error)
            await self._clock.sleep(pause_s)

    async def _serve(self, one: str) -> None:
        import httpx  # noqa: PLC0415 - only where there are webhooks: it would slow down every start

        target, since = self.targets[one]
        kept = [one, one + WHOLE] if one + WHOLE in self._vault.names(OWNER) else [one]
        values = self._vault.open(OWNER, kept)
        secret, target = values[one], replace(target, url=values.get(one + WHOLE, target.url))
        cursor = written = self._places[one] if one in self._places else self._place(one, since)
        async with httpx.AsyncClient(timeout=ANSWER_S, follow_redirects=False, trust_env=False) as http:
            while True:
                try:
                    records = await asyncio.to_thread(self._loop.log.read, after=cursor, limit=PAGE)
                except RotaError as error:
                    _log.warning("webhook %s: %s", one, error)
                    records = ()
                if records:
                    await self._loop.wait_for(records[-1].number)  # the histories are to know what is reported of them
                for record in records:
                    if (body := self._body(target, record)) is not None:
                        await self._deliver(http, target, record.number, body, secret)
                    cursor = self._places[one] = record.number
                if cursor != written:
                    try:
                        write_private(self._folder / one, str(cursor))
                        written = cursor
                    except OSError as error:  # tried again at the next look
                        _log.log(logging.ERROR if records else logging.DEBUG, "webhook %s: its place: %s", one, error)
                if not records:
                    await self._clock.sleep(POLL_S)

    def _place(self, one: str, since: int) -> int:
        try:
            return int((self._folder / one).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return since

    def _body(self, target: WebhookSet, record: Record) -> bytes | None:
        history = self._loop.installation.jobs.get(record.job) if record.job is not None else None
        kind = notice_of(record, history)
        if not kind or (target.on and kind not in target.on):
            return None
        if target.queue and (history is None or f"{history.queue}/".find(f"{target.queue}/") != 0):
            return None
        event = record.event
        document: JsonObject = {"api": "rota/v1", "kind": "Notice", "event": kind, "number": record.number}
        document |= {"at": iso(record.at), "job": record.job, "node": getattr(event, "node", None)}
        document |= {"reason": getattr(event, "reason", None), "text": getattr(event, "text", "")}
        if history is not None:
            document |= {"name": history.spec.name, "user": history.submitted.user, "queue": history.queue}
            document |= {"state": history.state.value, "url": f"{self._url}/jobs/{history.id}"}
        return json.dumps(document, ensure_ascii=False, default=str).encode()

    async def _deliver(self, http: httpx.AsyncClient, to: WebhookSet, number: int, body: bytes, secret: str) -> None:
        """Until it is taken (2xx), at most ``GIVE_UP_S``; the same ``Rota-Event-Id`` each time."""
        import httpx  # noqa: PLC0415 - only where there are webhooks: it would slow down every start

        until_s = self._clock.monotonic_s() + GIVE_UP_S
        for attempt, pause_s in enumerate(backoff(*RETRY_S)):
            headers = {"Content-Type": "application/json", "Rota-Event-Id": str(number)}
            headers["Rota-Signature"] = signature(secret, int(self._clock.wall_s()), body)
            try:
                found = await asyncio.to_thread(addresses_of, to.url, self.allowed)  # elsewhere by now, perhaps
                answer = await post(http, to.url, found[attempt % len(found)], body=body, headers=headers)
                cause = "" if answer.is_success else f"it answered {answer.status_code}"
            except (httpx.HTTPError, httpx.InvalidURL, RotaError, ValueError, OSError) as error:
                cause = str(error) or type(error).__name__
            if not cause:
                return
            if self._clock.monotonic_s() > until_s:
                _log.error("webhook %s: notice %s is given up: %s", to.id, number, cause)
                return
            _log.warning("webhook %s: notice %s waits %.0f s: %s", to.id, number, pause_s, cause)
            await self._clock.sleep(pause_s)
