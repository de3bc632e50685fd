"""Settings of one installation: flag over environment over config.toml over default; checked at start."""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import platformdirs

from rota.spec.errors import BadInput
from rota.spec.ids import NAME_PATTERN
from rota.spec.resources import pretend_nodes

if TYPE_CHECKING:
    from rota.service.models.cluster import SettingRow

DEFAULT_PORT = 7700
POLL_MIN_S = 0.001


class OwnSettings(TypedDict):
    """The ``SettingList`` of this process, without its version."""

    kind: str
    items: list[SettingRow]
    next: None


@cache
def rota_version() -> str:
    """Version of the installed package, looked up once: that takes milliseconds."""
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
    listen: Annotated[str, "Address of this machine for others that join, and default of `host`. Empty: none."] = ""
    server: Annotated[str, "URL of a service elsewhere; wins over `host` and `port`."] = ""
    token: Annotated[str, "Token that clients show. Empty: the one that `rota up` wrote into `home`."] = ""
    db_url: Annotated[str, "Event log as an SQLAlchemy URL (PostgreSQL). Empty: SQLite in `home`."] = ""
    redis_url: Annotated[str, "Registry of shared tensors. Empty: an embedded one on a unix socket."] = ""
    ray_address: Annotated[str, "`HOST:PORT` of a Ray cluster to run jobs on. Empty: an embedded one."] = ""
    pretend: Annotated[str, "Nodes the scheduler sees in place of this machine, `RACKSxNODESxDEVICES` or `none`."] = ""
    profile: Annotated[str, "Scheduling profile, as `rota sim compare` names them."] = "default"
    spares: Annotated[int, "Nodes the scheduler keeps free for jobs that lose one."] = 0
    cool_down_s: Annotated[float, "Seconds before a job that had to make room for another is tried again."] = 0.0
    log_level: Annotated[str, "What the service logs: DEBUG, INFO, WARNING or ERROR."] = "INFO"
    webhook_hosts: Annotated[
        str, "Hosts inside that webhooks may go to, with commas between, in the file a list; others must be outside."
    ] = ""
    poll_s: Annotated[float, "Seconds between two looks of the service at the log and at the engine."] = 0.08
    stores: Annotated[str, "Named URLs, `NAME=URL` with spaces between: `data: NAME:/path`. In the file a table."] = ""
    device_families: Annotated[
        str, "Families of devices beside the built-in ones, `MODULE:CLASS` with spaces between. In the file a list."
    ] = ""
    logs_kept_days: Annotated[float, "Days that logs of a job are kept after its end. 0: for ever."] = 0.0
    origins: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def url(self) -> str:
        """Where the service of these settings answers; ``server`` wins over host and port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.server.rstrip("/") or f"http://{host}:{self.port}"

    @property
    def store_urls(self) -> dict[str, str]:
        """The URL of each named store."""
        return dict(one.split("=", 1) for one in self.stores.split())

    @property
    def root(self) -> Path:
        return Path(self.home)

    def wrong(self, name: str, problem: str, hint: str = "") -> BadInput:
        """The error for a value that its owner refuses: the setting, its value, where it came from, and the remedy."""
        return _Given({one: getattr(self, one) for one in _NAMES}, self.origins).wrong(name, problem, hint)

    def document(self) -> OwnSettings:
        """``SettingList``: every setting with its origin, without tokens and passwords."""
        items: list[SettingRow] = [
            {"name": name, "value": _without_password(name, getattr(self, name)), "origin": origin}
            for name, origin in sorted(self.origins.items())
        ]
        return {"kind": "SettingList", "items": items, "next": None}


def _without_password(name: str, value: str | float) -> str | float:
    if name == "token" and value:
        return "(set)"
    return masked_url(value) if isinstance(value, str) else value


def masked_url(url: str) -> str:
    """A URL, or a text with some, without passwords."""
    return re.sub(r"(//[^:/@\s]*:)[^@\s]*@", r"\1***@", url)


_NAMES = tuple(one.name for one in fields(Settings) if one.name != "origins")
_NUMBERS = {"port": int, "spares": int, "cool_down_s": float, "poll_s": float, "logs_kept_days": float}
_LISTS = {"webhook_hosts": ",", "device_families": " "}
"""Settings that may be a list in the file, and what is between the parts of one that is a text."""
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
FILE = "config.toml"
NO_PRETEND = "none"
"""Said where the last ``up`` had pretend nodes, which the next one takes again."""


def load_settings(flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process. Raises BadInput naming the setting, its value and where it came from."""
    env = os.environ if environ is None else environ
    given = {name: value for name, value in (flags or {}).items() if value not in (None, "")}
    home = str(Path(str(given.get("home") or _home_of(env))).expanduser().absolute())
    file = _read_file(Path(home) / FILE)
    values: dict[str, object] = {"home": home}
    origins: dict[str, str] = {}
    for name in _NAMES:
        variable = f"ROTA_{name.upper()}"
        if name in given:
            values[name], origins[name] = given[name], "flag"
        elif env.get(variable):
            values[name], origins[name] = env[variable], variable
        elif name in file:
            values[name], origins[name] = file[name], FILE
        else:
            origins[name] = "default"
    if given.get("home") and Path(home) == Path(_home_of(env)):  # a process of the service is given what it has anyway
        origins["home"] = "ROTA_HOME" if env.get("ROTA_HOME") else "default"
    if values.get("listen") and "host" not in values:
        values["host"], origins["host"] = values["listen"], "listen"
    if values.get("pretend") == NO_PRETEND:
        values["pretend"] = ""
    found = _Given({**values, "home": home}, origins)
    return _checked(Settings(**{name: found.typed(name) for name in values}, origins=origins), found)


def _home_of(env: Mapping[str, str]) -> str:
    return str(Path(env.get("ROTA_HOME") or platformdirs.user_state_path("rota")).expanduser().absolute())


@dataclass(frozen=True, slots=True)
class _Given:
    """The values as they were given, with their origins; what is wrong with one names all three and the remedy."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]

    def typed(self, name: str) -> Any:
        """The value as text or number. Raises BadInput for one that is neither."""
        value, kind = self.values[name], _NUMBERS.get(name, str)
        if kind is str:
            if not isinstance(value, str):
                what = ("a list of texts", '["...", "..."]') if name in _LISTS else ("a text", f'"{value}"')
                raise self.wrong(name, f"is not {what[0]}", f"write {name} = {what[1]}")
            return value
        try:
            number = kind(value)
        except (TypeError, ValueError, OverflowError):
            raise self.wrong(name, "is not a number") from None
        if isinstance(value, bool) or (isinstance(value, float) and number != value):
            raise self.wrong(name, "is not a whole number" if kind is int else "is not a number")
        return number

    def wrong(self, name: str, problem: str, hint: str = "") -> BadInput:
        """The error for a value."""
        origin, value = self.origins[name], self.values[name]
        shown = repr(value) if name in _NUMBERS and isinstance(value, str) else _without_password(name, value)
        remedies = {"flag": "give that flag another value", FILE: f"change or remove {name} there"}
        remedy = remedies.get(origin, f"set {origin} to another value")
        where = str(Path(self.values["home"]) / FILE) if origin == FILE else origin
        return BadInput(f"{name}={shown} (from {where}) {problem}", hint=hint or remedy)


def _read_file(path: Path) -> dict[str, object]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: {error}", hint="repair the file or remove it") from error
    for name in found:
        if name not in _NAMES:
            raise BadInput(f"{path}: unknown setting {name!r}", hint=f"settings: {', '.join(_NAMES)}")
    if isinstance(stores := found.get("stores"), dict):
        found["stores"] = " ".join(f"{name}={url}" for name, url in stores.items())
    for name, between in _LISTS.items():
        if isinstance(listed := found.get(name), list) and all(isinstance(one, str) for one in listed):
            found[name] = between.join(listed)
    return found


def _checked(settings: Settings, given: _Given) -> Settings:
    if not 0 <= settings.port <= 65535:
        raise given.wrong("port", "is not between 0 and 65535")
    if settings.server and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", settings.server):
        raise given.wrong("server", "is not an address", "write http://HOST:PORT")
    for name in ("spares", "cool_down_s", "poll_s", "logs_kept_days"):
        if not 0 <= getattr(settings, name) < inf:
            raise given.wrong(name, "is not a number from 0")
    if settings.poll_s < POLL_MIN_S:
        raise given.wrong("poll_s", f"is below {POLL_MIN_S:g}: the service would never rest")
    if settings.log_level.upper() not in _LEVELS:
        raise given.wrong("log_level", "is not a level of logging", f"write one of {', '.join(_LEVELS)}")
    if settings.ray_address and not re.fullmatch(r"[\w.-]+:\d+|\[[0-9a-fA-F:]+\]:\d+", settings.ray_address):
        raise given.wrong("ray_address", "is not HOST:PORT", "the address that 'ray start --head' prints")
    if settings.ray_address and not 0 < int(settings.ray_address.rpartition(":")[2]) <= 65535:
        raise given.wrong("ray_address", "has a port that is not between 1 and 65535")
    if settings.ray_address and settings.pretend:
        raise given.wrong("ray_address", f"has real machines; those of pretend={settings.pretend} are not")
    if settings.listen:
        try:
            ipaddress.ip_address(settings.listen)
        except ValueError:
            hint = "write an address of this machine, for example 10.0.0.5; see: ip address"
            raise given.wrong("listen", "is not an IP address", hint) from None
        for name in ("ray_address", "pretend"):
            if other := getattr(settings, name):
                raise given.wrong("listen", f"cannot be combined with {name}={other}: no machine can join that")
    for one in settings.stores.split():
        name, _, url = one.partition("=")
        if not NAME_PATTERN.match(name) or "://" not in url:
            hint = "[stores] in config.toml: datasets = 's3://bucket/prefix'; a store that is mounted: file:///path"
            raise given.wrong("stores", f"has {masked_url(one)!r}, which is not NAME=URL", hint)
    for one in settings.device_families.split():
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", one):
            raise given.wrong(
                "device_families",
                f"has {one!r}, which is not MODULE:CLASS",
                'in config.toml: device_families = ["package.module:Class"]',
            )
    if settings.pretend:
        try:
            pretend_nodes(settings.pretend, host="local")
        except ValueError as error:
            raise given.wrong("pretend", f"is not a cluster: {error}") from error
    return settings
