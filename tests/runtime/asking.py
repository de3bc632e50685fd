"""Ask a gateway that runs already, without an event loop."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rota.runtime.random import SystemRandom
from rota.runtime.ray.client import LENGTH, GatewayFiles, encode


def ask_once(home: Path, op: str, args: Mapping[str, Any], *, timeout_s: float = 30.0) -> Any:
    """The result of one operation. Raises OSError when there is no gateway, KeyError for an error."""
    own = SystemRandom().new_id()  # the answer to a known one would be the first answer again
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(timeout_s)
        door.connect(GatewayFiles(home).address)
        door.sendall(encode({"request_id": own, "op": op, "args": args, "deadline_s": timeout_s}))
        with door.makefile("rb") as stream:
            message = dict[str, Any]()
            while message.get("request_id") != own:  # before it comes a greeting
                (length,) = LENGTH.unpack(stream.read(LENGTH.size))
                message = json.loads(stream.read(length))
    return message["result"]
