"""Routes of users, tokens, secrets and webhooks, and of who asked for what."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from rota.service.accounts import LOCAL, Caller, Token, UserRole, is_below
from rota.service.models.accounts import (
    AuditList,
    GrantedRole,
    SecretDocument,
    SecretList,
    TokenDocument,
    TokenList,
    TokenRow,
    UserDocument,
    UserList,
    UserRow,
    WebhookDocument,
    WebhookList,
    WebhookRow,
)
from rota.service.models.base import REFUSAL, Sent, document
from rota.service.rest.auth import audit_cursor
from rota.service.rest.deps import AppState, Asker, Parts
from rota.service.webhooks import OWNER, without_password
from rota.spec.errors import BadInput, NotAllowed, UnknownName, unknown
from rota.spec.events import SecretChanged, TokenRevoked, UserChanged, WebhookRemoved, WebhookSet
from rota.spec.ids import NAME_PATTERN, NAME_RULE

TTL_MAX_S = 10 * 365 * 86400.0
GRANTS_MAX = 100
TOKENS_MAX = 1000
"""Valid tokens of one user."""
AUDIT_MAX = 1000

router = APIRouter(prefix="/api/v1", tags=["accounts"], responses=REFUSAL)

Name = Annotated[str, Field(max_length=63)]


class GrantBody(BaseModel):
    """A role on a queue and all below it; ``""`` is the root."""

    model_config = ConfigDict(extra="forbid")

    queue: Annotated[str, Field(max_length=500)] = ""
    role: str


class UserBody(BaseModel):
    """Everything a user may do."""

    model_config = ConfigDict(extra="forbid")

    grants: Annotated[list[GrantBody], Field(min_length=1, max_length=GRANTS_MAX)]


class TokenBody(BaseModel):
    """A token of oneself, or by an admin one of any user; ``role`` and ``queue`` make it worth less than its user."""

    model_config = ConfigDict(extra="forbid")

    user: Name = ""
    name: Annotated[str, Field(max_length=200)] = ""
    role: str = UserRole.ADMIN.word
    queue: Annotated[str, Field(max_length=500)] = ""
    ttl_s: Annotated[float | None, Field(gt=0, le=TTL_MAX_S)] = None


class SecretBody(BaseModel):
    """The value to keep."""

    model_config = ConfigDict(extra="forbid")

    value: str


class WebhookBody(BaseModel):
    """Where to, which notices (none: all), and of which queue's jobs (none: of all, and of nodes)."""

    model_config = ConfigDict(extra="forbid")

    url: Annotated[str, Field(max_length=2000)]
    on: list[str] = []
    queue: Annotated[str, Field(max_length=500)] = ""


@router.get("/whoami")
async def whoami(app: Parts, caller: Asker) -> Sent[UserDocument]:
    """The user behind the token or session, and what it may do where."""
    return document(UserDocument, _user(caller.user, dict(caller.grants)), by=caller.by)


@router.get("/users")
async def users(app: Parts, caller: Asker) -> Sent[UserList]:
    """Every user with roles; for admins."""
    caller.need(UserRole.ADMIN)
    found = {LOCAL: {"": UserRole.ADMIN}} | app.auth.accounts.users
    return document(UserList, items=[_user(*one) for one in sorted(found.items())])


@router.put("/users/{name}")
async def put_user(name: Name, body: UserBody, app: Parts, caller: Asker) -> Sent[UserDocument]:
    """Set the roles of a user, also for tokens made before; a new name makes a new user."""
    caller.need(UserRole.ADMIN)
    if not NAME_PATTERN.match(name):
        raise BadInput(f"user {name!r} is not a name", hint=NAME_RULE)
    if name in (LOCAL, OWNER):
        raise BadInput(f"user {name!r} is a name of Rota's own", hint="choose another name")
    grants = {one.queue: UserRole.of(one.role) for one in body.grants}
    for queue, role in grants.items():
        _check_queue(app, queue)
        if role is UserRole.ADMIN and queue:
            raise BadInput(
                f"role admin on queue {queue!r}: an admin is one of the whole installation",
                hint=f"give queue-admin on {queue}, or admin without a queue",
            )
    if name not in app.auth.accounts.users:
        await _forget_secrets(app, name)  # what another of that name left
    event = UserChanged(name=name, grants=tuple((path, role.word) for path, role in grants.items()), by=caller.user)
    await app.loop.append([event])
    return document(UserDocument, _user(name, grants))


@router.delete("/users/{name}")
async def remove_user(name: Name, app: Parts, caller: Asker) -> Sent[UserDocument]:
    """Take every role, every token and every secret from a user; the jobs stay, and belong to that name.

    ``live`` of the answer: jobs that have not ended, which continue under that name; ``jobs``: those of them that use
    secrets and cannot start again.
    """
    caller.need(UserRole.ADMIN)
    if name == LOCAL:
        owner = "it is who owns the home of the service, with all rights and no token to take"
        raise BadInput(f"user {LOCAL!r} cannot be removed: {owner}", hint="see: rota user ls")
    if name not in app.auth.accounts.users:
        raise UnknownName(f"no user {name!r}", hint="see: rota user ls")
    await _forget_secrets(app, name)  # first: the next of that name must not find them, whatever happens in between
    mine = [one.made.id for one in _valid(app) if one.made.user == name]
    revoked = [TokenRevoked(id=one, by=caller.user) for one in mine]
    await app.loop.append([*revoked, UserChanged(name=name, grants=(), by=caller.user)])
    live = [one for one in app.loop.installation.live.values() if one.submitted.user == name]
    jobs = [one.id for one in live if one.spec.secrets]
    return document(UserDocument, _user(name, {}), jobs=jobs, live=[one.id for one in live])


@router.get("/tokens")
async def tokens(app: Parts, caller: Asker) -> Sent[TokenList]:
    """The valid tokens of oneself, for an admin those of everybody; never a token itself."""
    items = [_token(app, one) for one in _valid(app) if caller.has(UserRole.ADMIN) or one.made.user == caller.user]
    return document(TokenList, items=items)


@router.post("/tokens", status_code=201)
async def make_token(body: TokenBody, app: Parts, caller: Asker) -> Sent[TokenDocument]:
    """A new token; this answer is the only one that holds it."""
    user = body.user or caller.user
    if user != LOCAL and user not in app.auth.accounts.users:
        raise UnknownName(f"no user {user!r}", hint=f"make it first: rota user create {user} --role user --queue PATH")
    if sum(one.made.user == user for one in _valid(app)) >= TOKENS_MAX:
        raise BadInput(f"{user} has {TOKENS_MAX} tokens", hint="revoke some: rota token rm ID")
    _check_queue(app, body.queue)
    made, whole = app.auth.make_token(
        caller, user=user, name=body.name, role=UserRole.of(body.role), queue=body.queue, ttl_s=body.ttl_s
    )
    await app.loop.append([made])
    shown = _token(app, app.auth.accounts.tokens[made.id])
    return document(TokenDocument, shown, token=whole, url=app.settings.url)


@router.delete("/tokens/{token}")
async def revoke_token(token: Annotated[str, Field(max_length=63)], app: Parts, caller: Asker) -> Sent[TokenDocument]:
    """Revoke a token and the sessions that were opened with it, effective at once."""
    known = next((one for one in _valid(app) if one.made.id == token), None)
    if known is None or not (caller.has(UserRole.ADMIN) or known.made.user == caller.user):
        raise UnknownName(f"no token {token!r}", hint="see: rota token ls")
    if not app.auth.may_revoke(caller, known.made):
        raise NotAllowed(f"token {token} may do more than the one you ask with", hint="use that one, or ask an admin")
    await app.loop.append([TokenRevoked(id=token, by=caller.user)])
    return document(TokenDocument, _token(app, app.auth.accounts.tokens[token]))


@router.get("/secrets")
async def secrets(app: Parts, caller: Asker) -> Sent[SecretList]:
    """The names of one's secrets; no answer ever holds a value."""
    names = await asyncio.to_thread(app.vault.names, _owner(caller))
    return document(SecretList, items=[{"name": name} for name in names])


@router.put("/secrets/{name}")
async def put_secret(name: Name, body: SecretBody, app: Parts, caller: Asker) -> Sent[SecretDocument]:
    """Keep a value that one's jobs may use as a variable of that name; it cannot be read back."""
    await asyncio.to_thread(app.vault.put, _owner(caller), name, body.value)
    await app.loop.append([SecretChanged(owner=caller.user, name=name, by=caller.user)])
    return document(SecretDocument, name=name, removed=False)


@router.delete("/secrets/{name}")
async def remove_secret(name: Name, app: Parts, caller: Asker) -> Sent[SecretDocument]:
    """Forget a value; instances that have it keep it until they end."""
    await asyncio.to_thread(app.vault.remove, _owner(caller), name)
    await app.loop.append([SecretChanged(owner=caller.user, name=name, removed=True, by=caller.user)])
    return document(SecretDocument, name=name, removed=True)


@router.get("/webhooks")
async def webhooks(app: Parts, caller: Asker) -> Sent[WebhookList]:
    """Every webhook; for admins."""
    caller.need(UserRole.ADMIN)
    items = [_webhook(made) for made, _ in app.notifier.targets.values()]
    return document(WebhookList, items=items)


@router.post("/webhooks", status_code=201)
async def make_webhook(body: WebhookBody, app: Parts, caller: Asker) -> Sent[WebhookDocument]:
    """Send notices to an address from now on; this answer alone holds the secret that notices are signed with."""
    caller.need(UserRole.ADMIN)
    _check_queue(app, body.queue)
    made, secret = await asyncio.to_thread(app.notifier.make, body.url, body.on, body.queue, caller.user)
    await app.loop.append([made])
    return document(WebhookDocument, _webhook(made), secret=secret)


@router.delete("/webhooks/{webhook}")
async def remove_webhook(webhook: Name, app: Parts, caller: Asker) -> Sent[WebhookDocument]:
    """Remove a webhook."""
    caller.need(UserRole.ADMIN)
    if webhook not in app.notifier.targets:
        raise UnknownName(f"no webhook {webhook!r}", hint="see: rota webhook ls")
    made, _ = app.notifier.targets[webhook]
    await app.loop.append([WebhookRemoved(id=webhook, by=caller.user)])
    await asyncio.to_thread(app.notifier.forget, webhook)
    return document(WebhookDocument, _webhook(made))


@router.get("/audit")
async def audit(
    app: Parts,
    caller: Asker,
    user: str = "",
    text: Annotated[str, Query(max_length=200)] = "",
    limit: Annotated[int, Query(ge=1, le=AUDIT_MAX)] = 100,
    cursor: Annotated[str, Query(max_length=200)] = "",
) -> Sent[AuditList]:
    """Requests that change something, the newest first, refused ones too; for admins.

    ``text``: a part of the path, the user or the address. ``next`` is the cursor of the older ones.
    """
    caller.need(UserRole.ADMIN)
    found = await asyncio.to_thread(app.audit.newest, limit + 1, user=user, text=text, before=cursor)
    items = found[:limit]
    return document(AuditList, items=items, next=audit_cursor(items[-1]) if len(found) > limit else None)


def _check_queue(app: AppState, queue: str) -> None:
    """Raises UnknownName for a path that is neither a queue nor above one; ``""`` is the root."""
    paths = sorted(one.path for one in app.loop.installation.queues)
    if not any(is_below(path, queue) for path in paths):
        raise unknown(f"no queue {queue!r}", queue, paths, "queues")


def _owner(caller: Caller) -> str:
    """Whose secrets these are. Raises NotAllowed for a token that may only look."""
    if not any(role >= UserRole.USER for _, role in caller.grants):
        raise NotAllowed("secrets are for those who may submit jobs", hint="a token of the role user")
    return caller.user


async def _forget_secrets(app: AppState, owner: str) -> None:
    for secret in await asyncio.to_thread(app.vault.names, owner):
        with suppress(UnknownName):  # another request was faster
            await asyncio.to_thread(app.vault.remove, owner, secret)


def _valid(app: AppState) -> list[Token]:
    now = app.clock.wall_s()
    return [one for one in app.auth.accounts.tokens.values() if one.valid(now)]


def _user(name: str, grants: dict[str, UserRole]) -> UserRow:
    return {"name": name, "grants": _granted(grants.items())}


def _granted(grants: Iterable[tuple[str, UserRole]]) -> list[GrantedRole]:
    return [{"queue": queue, "role": role.word} for queue, role in sorted(grants)]


def _webhook(made: WebhookSet) -> WebhookRow:
    return document(WebhookRow, made, url=without_password(made.url))


def _token(app: AppState, one: Token) -> TokenRow:
    """A token with what it gives by now, and the highest role of that: never more than its user has."""
    grants = app.auth.accounts.caller(one.made, by="token").grants
    return document(
        TokenRow,
        one.made,
        role=max(role for _, role in grants).word if grants else "none",
        grants=_granted(grants),
        made_at=one.at,
        made_by=one.made.by,
        revoked=one.revoked_at is not None,
    )
