"""Where the service is: a flag, the environment, the record of the one that runs here, else the default address."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rota.service.config import Settings, load_settings
from rota.spec.errors import BadInput

RECORD = "service.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """How to reach a service. ``local`` is False when another address was asked for."""

    url: str
    token: str
    home: Path
    local: bool


def find_service(server: str = "", token: str = "") -> Address:
    """The address to use. Raises BadInput for settings that cannot be read."""
    settings = load_settings({"server": server, "token": token})
    local = not settings.server
    url = (_recorded_url(settings) if local else "") or settings.url
    return Address(url=url, token=settings.token or _token(settings), home=settings.root, local=local)


def _recorded_url(settings: Settings) -> str:
    """The address that the running service wrote down; empty when there is none."""
    try:
        record = json.loads((settings.root / "run" / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(record.get("url", "")) if isinstance(record, dict) else ""


def _token(settings: Settings) -> str:
    try:
        return (settings.root / "token").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except OSError as exc:
        raise BadInput(f"the token cannot be read: {exc}", hint="set ROTA_TOKEN, or mend the file") from exc
