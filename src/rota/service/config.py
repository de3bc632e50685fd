"""Settings of one installation: flag over environment over config.toml over default; checked at start."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import platformdirs

from rota.spec.errors import BadInput
from rota.spec.resources import pretend_nodes

DEFAULT_PORT = 7700
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def rota_version() -> str:
    """Version of the installed package."""
    try:
        return version_of("rota")
    except PackageNotFoundError:
        return "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting of the service; ``origins`` says where each value came from (flag, environment, file, default)."""

    home: Annotated[str, "Folder of everything this installation keeps. Default: the user's state folder for `rota`."]
    host: Annotated[str, "Address that the service listens on."] = "127.0.0.1"
    port: Annotated[int, "Port that the service listens on; 0 takes a free one."] = DEFAULT_PORT
    server: Annotated[str, "URL of a service elsewhere; wins over `host` and `port`."] = ""
    token: Annotated[str, "Token that clients show. Empty: the one that `rota up` wrote into `home`."] = ""
    db_url: Annotated[str, "Event log as an SQLAlchemy URL (PostgreSQL). Empty: SQLite in `home`."] = ""
    redis_url: Annotated[str, "Registry of shared tensors. Empty: an embedded one on a unix socket."] = ""
    ray_address: Annotated[str, "`HOST:PORT` of a Ray cluster to run jobs on. Empty: an embedded one."] = ""
    pretend: Annotated[str, "Nodes the scheduler sees in place of this machine, `RACKSxNODESxDEVICES`."] = ""
    profile: Annotated[str, "Scheduling profile, as `rota sim compare` names them."] = "default"
    spares: Annotated[int, "Nodes the scheduler keeps free for jobs that lose one."] = 0
    cool_down_s: Annotated[float, "Seconds before a job that had to make room for another is tried again."] = 0.0
    log_level: Annotated[str, "What the service logs: DEBUG, INFO, WARNING or ERROR."] = "INFO"
    webhook_hosts: Annotated[
        str, "Hosts inside that webhooks may go to, with commas between; others must be outside."
    ] = ""
    poll_s: Annotated[float, "Seconds between two looks of the service at the log and at the engine."] = 0.08
    logs_kept_days: Annotated[float, "Days that logs of a job are kept after its end. 0: for ever."] = 0.0
    origins: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def url(self) -> str:
        """Where the service of these settings answers; ``server`` wins over host and port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.server.rstrip("/") or f"http://{host}:{self.port}"

    @property
    def root(self) -> Path:
        return Path(self.home)

    def document(self) -> dict[str, Any]:
        """``SettingList``: every setting with its origin, without tokens and passwords."""
        items = [
            {"name": name, "value": _without_password(name, getattr(self, name)), "origin": origin}
            for name, origin in sorted(self.origins.items())
        ]
        return {"kind": "SettingList", "items": items, "next": None}


def _without_password(name: str, value: Any) -> Any:
    if name == "token" and value:
        return "(set)"
    return re.sub(r"(//[^:/@]*:)[^@]*@", r"\1***@", value) if name.endswith("_url") else value


_NAMES = tuple(one.name for one in fields(Settings) if one.name != "origins")
_NUMBERS = {"port": int, "spares": int, "cool_down_s": float, "poll_s": float, "logs_kept_days": float}


def load_settings(flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process. Raises BadInput naming the setting, its value and where it came from."""
    env = os.environ if environ is None else environ  # noqa: TID251 - settings are read here
    given = {name: value for name, value in (flags or {}).items() if value not in (None, "")}
    home = str(given.get("home") or env.get("ROTA_HOME") or platformdirs.user_state_path("rota"))
    home = str(Path(home).expanduser().absolute())
    file = _read_file(Path(home) / "config.toml")
    values: dict[str, Any] = {"home": home}
    origins: dict[str, str] = {}
    for name in _NAMES:
        variable = f"ROTA_{name.upper()}"
        if name in given:
            values[name], origins[name] = given[name], "flag"
        elif env.get(variable):
            values[name], origins[name] = env[variable], variable
        elif name in file:
            values[name], origins[name] = file[name], "config.toml"
        else:
            origins[name] = "default"
    values["home"] = home
    for name, kind in _NUMBERS.items():
        if name in values:
            values[name] = _number(name, values[name], kind, origins[name])
    return _checked(Settings(**values, origins=origins))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: {error}", hint="mend the file or remove it") from error
    for name in found:
        if name not in _NAMES:
            raise BadInput(f"{path}: unknown setting {name!r}", hint=f"settings: {', '.join(_NAMES)}")
    return found


def _number(name: str, value: Any, kind: type, origin: str) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise BadInput(f"{name}={value!r} (from {origin}) is not a number") from None


def _checked(settings: Settings) -> Settings:
    if not 0 <= settings.port <= 65535:
        raise BadInput(f"port={settings.port} (from {settings.origins['port']}) is not between 0 and 65535")
    if settings.server and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", settings.server):
        given = f"server={settings.server} (from {settings.origins['server']})"
        raise BadInput(f"{given} is no address", hint="write http://HOST:PORT")
    for name in ("spares", "cool_down_s", "logs_kept_days"):
        if not getattr(settings, name) >= 0:
            raise BadInput(f"{name}={getattr(settings, name)} (from {settings.origins[name]}) is below 0")
    given = f"ray_address={settings.ray_address} (from {settings.origins['ray_address']})"
    if settings.ray_address and not re.fullmatch(r"[\w.-]+:\d+|\[[0-9a-fA-F:]+\]:\d+", settings.ray_address):
        raise BadInput(f"{given} is not HOST:PORT", hint="the address that 'ray start --head' prints")
    if settings.ray_address and not 0 < int(settings.ray_address.rpartition(":")[2]) <= 65535:
        raise BadInput(f"{given}: its port is not between 1 and 65535")
    if settings.ray_address and settings.pretend:
        raise BadInput(f"{given}: its machines are real, those of pretend={settings.pretend} are not")
    if settings.pretend:
        try:
            pretend_nodes(settings.pretend, host="local")
        except ValueError as error:
            raise BadInput(f"pretend: {error}") from error
    return settings
