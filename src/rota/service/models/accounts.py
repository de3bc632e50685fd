"""Users, tokens, secrets, webhooks, the audit and logins."""

from __future__ import annotations

from typing import Literal, NotRequired

from rota.service.models.base import Closed, Headed, Moment


class GrantedRole(Closed):
    """A role on a queue and all below it; ``""`` is the root."""

    queue: str
    role: str


class UserRow(Closed):
    """A user and what it may do."""

    name: str
    grants: list[GrantedRole]


class UserDocument(Headed):
    """One user. ``by`` is how the caller proved who it is; ``jobs`` cannot start again without their secrets.

    ``live`` are the jobs of a removed user that have not ended.
    """

    kind: Literal["User"]
    by: NotRequired[str]
    name: str
    grants: list[GrantedRole]
    jobs: NotRequired[list[str]]
    live: NotRequired[list[str]]


class UserList(Headed):
    """Every user."""

    kind: Literal["UserList"]
    items: list[UserRow]
    next: None


class TokenRow(Closed):
    """A token, never its value; ``role`` is the highest of ``grants``, what it lets its holder do now."""

    id: str
    user: str
    name: str
    role: str
    grants: list[GrantedRole]
    queue: str
    made_at: Moment
    made_by: str
    expires_at: Moment | None
    revoked: bool


class TokenDocument(TokenRow):
    """One token; ``token``, its value, is in the answer that makes it and in no other."""

    api: Literal["rota/v1"]
    kind: Literal["Token"]
    token: NotRequired[str]
    url: NotRequired[str]


class TokenList(Headed):
    """The valid tokens."""

    kind: Literal["TokenList"]
    items: list[TokenRow]
    next: None


class SecretRow(Closed):
    """The name of a secret; no answer has its value."""

    name: str


class SecretDocument(Headed):
    """A secret that was stored or removed."""

    kind: Literal["Secret"]
    name: str
    removed: bool


class SecretList(Headed):
    """The names of one's secrets."""

    kind: Literal["SecretList"]
    items: list[SecretRow]
    next: None


class WebhookRow(Closed):
    """A webhook: which notices go to which address, without its password."""

    id: str
    url: str
    on: list[str]
    queue: str
    by: str


class WebhookDocument(WebhookRow):
    """One webhook; ``secret``, which signs its notices, is in the answer that makes it and in no other."""

    api: Literal["rota/v1"]
    kind: Literal["Webhook"]
    secret: NotRequired[str]


class WebhookList(Headed):
    """Every webhook."""

    kind: Literal["WebhookList"]
    items: list[WebhookRow]
    next: None


class AuditLine(Closed):
    """A request that was to change something; ``status`` is null while it is under way."""

    at: Moment
    user: str
    token: str
    by: str
    address: str
    method: str
    path: str
    request_id: str
    status: int | None
    dry_run: NotRequired[bool]
    instance: NotRequired[str]
    command: NotRequired[str]
    change: NotRequired[str]
    left_out: NotRequired[int]


class AuditList(Headed):
    """Requests, the newest first; ``next`` is the cursor of the older ones."""

    kind: Literal["AuditList"]
    items: list[AuditLine]
    next: str | None


class LoginDocument(Closed):
    """A code that opens the page once, and the address with it."""

    kind: Literal["Login"]
    code: str
    url: str


class Liveness(Closed):
    """The process answers; ``records`` are in the log that it has read."""

    ok: bool
    records: NotRequired[int]
