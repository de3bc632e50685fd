"""Where the service is: a flag, the environment, the record of the one that runs here, else the default address."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from rota.service.config import Settings, load_settings
from rota.spec.errors import BadInput, StoreCorrupt

RECORD = "service.json"
RECORD_REMEDY = "rota down ends what runs there and removes the record; then rota up"
LOGIN = "login.json"
"""Below ``$ROTA_HOME``: the address and token of ``rota login``, 0600. Flags and variables win over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """How to reach a service.

    ``local`` is False when another address was asked for. ``guessed``: no service of this home runs and no token was
    given, so whoever answers at the default address is somebody else's.
    """

    url: str
    token: str
    home: Path
    local: bool
    guessed: bool = False


def find_service(server: str = "", token: str = "") -> Address:
    """The address to use. Raises BadInput for settings that cannot be read."""
    settings = load_settings({"server": server, "token": token})
    if not settings.server and (kept := _read_login(settings)):
        given = settings.token if settings.origins["token"] != "default" else kept["token"]
        return Address(url=kept["url"], token=given, home=settings.root, local=False)
    local = not settings.server
    recorded = _recorded_url(settings) if local else ""
    return Address(
        url=recorded or settings.url,
        token=settings.token or _token(settings),
        home=settings.root,
        local=local,
        guessed=local and not recorded and not settings.token,
    )


def keep_login(url: str, token: str) -> Path:
    """Use this service until ``forget_login``; the file that says so."""
    path = load_settings().root / LOGIN
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{LOGIN}")
    partial.unlink(missing_ok=True)
    partial.touch(mode=0o600)
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"url": url.rstrip("/"), "token": token}))
        file.flush()
        os.fsync(file.fileno())
    return partial.replace(path)


def forget_login() -> str:
    """Drop the login; the address it was for, empty when there was none."""
    settings = load_settings()
    url = _read_login(settings).get("url", "")
    (settings.root / LOGIN).unlink(missing_ok=True)
    return url


def _read_login(settings: Settings) -> dict[str, str]:
    try:
        found = json.loads((settings.root / LOGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = isinstance(found, dict) and {"url", "token"} <= found.keys()
    return {"url": str(found["url"]), "token": str(found["token"])} if whole else {}


def _recorded_url(settings: Settings) -> str:
    """The address that the running service wrote down; empty when there is none."""
    path = settings.root / "run" / RECORD
    try:
        record = json.loads(path.read_bytes())
    except OSError:
        return ""
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("url"), str):
        raise StoreCorrupt(f"{path} is not the record of a service", hint=RECORD_REMEDY)
    return record["url"]


def _token(settings: Settings) -> str:
    try:
        return (settings.root / "token").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except OSError as exc:
        raise BadInput(f"the token cannot be read: {exc}", hint="set ROTA_TOKEN, or mend the file") from exc
