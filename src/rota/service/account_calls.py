"""Users, tokens, secrets, webhooks and the audit in Python: one set of calls for both clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from rota.service import calls
from rota.service.calls import API_PATH, Ask

T = TypeVar("T")


class AccountCalls(Generic[T]):
    """``client.accounts``; each call gives what ``ask`` of its client gives, a document or the promise of one."""

    def __init__(self, ask: Callable[[Ask], T]) -> None:
        self._ask = ask

    def whoami(self) -> T:
        """``User``: the one behind the token, and what it may do where."""
        return self._ask(calls.get("/whoami"))

    def login_code(self) -> T:
        """``Login``: a code that opens the page once, and the address with it."""
        return self._ask(Ask(method="POST", path=f"{API_PATH}/login/code", safe=False))

    def users(self) -> T:
        """``UserList``; for admins."""
        return self._ask(calls.get("/users"))

    def put_user(self, name: str, grants: Iterable[tuple[str, str]]) -> T:
        """Let a user have these roles, pairs of queue (``""`` is the root) and role, and no others."""
        rows = [{"queue": queue, "role": role} for queue, role in grants]
        return self._ask(_change("PUT", "users", name, {"grants": rows}))

    def remove_user(self, name: str) -> T:
        """Take every role and token from a user."""
        return self._ask(_change("DELETE", "users", name))

    def tokens(self) -> T:
        """``TokenList``: the valid ones of oneself, for admins all."""
        return self._ask(calls.get("/tokens"))

    def make_token(self, **body: Any) -> T:
        """``Token``, the only answer that holds it. Fields: user, name, role, queue, ttl_s."""
        given = {name: value for name, value in body.items() if value not in (None, "")}
        return self._ask(Ask(method="POST", path=f"{API_PATH}/tokens", body=given, safe=False))

    def revoke_token(self, token_id: str) -> T:
        """Make a token worthless, by its id."""
        return self._ask(_change("DELETE", "tokens", token_id))

    def secrets(self) -> T:
        """``SecretList``: names alone."""
        return self._ask(calls.get("/secrets"))

    def set_secret(self, name: str, value: str) -> T:
        """Keep a value that own jobs may use as a variable of that name."""
        return self._ask(_change("PUT", "secrets", name, {"value": value}))

    def remove_secret(self, name: str) -> T:
        """Forget a value."""
        return self._ask(_change("DELETE", "secrets", name))

    def webhooks(self) -> T:
        """``WebhookList``; for admins."""
        return self._ask(calls.get("/webhooks"))

    def make_webhook(self, url: str, *, on: Iterable[str] = (), queue: str = "") -> T:
        """``Webhook``, the only answer with the secret its notices are signed with."""
        body = {"url": url, "on": list(on), "queue": queue}
        return self._ask(Ask(method="POST", path=f"{API_PATH}/webhooks", body=body, safe=False))

    def remove_webhook(self, webhook: str) -> T:
        """Tell it nothing any more."""
        return self._ask(_change("DELETE", "webhooks", webhook))

    def audit(self, *, user: str = "", limit: int = 100) -> T:
        """``AuditList``: who asked for which change, the newest first; for admins."""
        return self._ask(calls.get("/audit", user=user, limit=limit))


def _change(method: str, kind: str, name: str, body: dict[str, Any] | None = None) -> Ask:
    return Ask(method=method, path=f"{API_PATH}/{kind}/{quote(name, safe='')}", body=body)
