"""What of a document differs from run to run, replaced by its name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from tests.service.snapshots.installation import URL

from rota.service.config import rota_version

SECRET = {"token", "secret", "code"}
"""Names of fields that hold a fresh secret where their value is not one of a short list."""
TOKEN = re.compile(r"rota_[0-9a-z]+_[A-Za-z0-9_-]{20,}")
LOOPBACK = re.compile(r"http://127\.0\.0\.1:\d{4,5}")
COOKIE = re.compile(r"(rota_session=)[^;]+")
FRESH = re.compile(r"[A-Za-z0-9_-]{20,}")
"""What the system's own source of chance makes."""
DRAWN = re.compile(r"(?<=/tokens/)[0-9a-z]{8}$|(?<=/webhooks/)w[0-9a-z]{8}$|(?<=^id {6})w?[0-9a-z]{8}$")
"""Identifiers of tokens and webhooks: how many were drawn before them depends on what the service did meanwhile."""


def normal(value: Any, home: Path, name: str = "") -> Any:
    """The same value, without what another run of the same scenario would say otherwise."""
    if isinstance(value, dict):
        if value.get("kind") == "TokenMade":
            value = value | {"digest": "<digest>"}
        if value.get("kind") in ("Token", "Webhook") and value.get("id"):
            value = value | {"id": "<id>"}
        return {key: normal(one, home, key) for key, one in value.items()}
    if isinstance(value, list):
        return [normal(one, home, name) for one in value]
    if isinstance(value, str):
        return _text(value, home, name)
    if name == "pid" and value == os.getpid():
        return "<pid of the service>"
    return value


def _text(value: str, home: Path, name: str) -> str:
    if name in SECRET and FRESH.fullmatch(value):
        return f"<{name}>"
    if name == "terminal" and not value.endswith(".t"):
        return "<terminal>"
    if name == "request_id" and value:
        return "<request id>"
    shown = TOKEN.sub("<token>", value.replace(str(home), "<home>"))
    shown = LOOPBACK.sub(URL, COOKIE.sub(r"\1<session>", shown))
    shown = DRAWN.sub("<id>", shown)
    shown = re.sub(r"code=[A-Za-z0-9_-]{20,}", "code=<code>", shown)
    return shown.replace(rota_version(), "<version>") if name == "version" else shown
