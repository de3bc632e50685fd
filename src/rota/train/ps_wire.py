"""Messages between workers and parameter servers: a JSON head and raw arrays over TCP."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from rota.spec.errors import BadInput

_SIZES: Final = struct.Struct("<IQ")
HEAD_BYTES_MAX: Final = 1 << 20
BODY_BYTES_MAX: Final = 1 << 33
Arrays = Mapping[str, np.ndarray[Any, Any]]


def send(link: socket.socket, head: Mapping[str, Any], arrays: Arrays) -> int:
    """Write one message; its bytes."""
    packed = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    shapes = [(name, array.dtype.str, array.shape) for name, array in packed.items()]
    text = json.dumps({**head, "arrays": shapes}).encode()
    body = sum(array.nbytes for array in packed.values())
    link.sendall(_SIZES.pack(len(text), body) + text)
    for array in packed.values():
        if array.nbytes:
            link.sendall(array.reshape(-1).view(np.uint8).data)
    return _SIZES.size + len(text) + body


def receive(
    link: socket.socket, *, body_max: int = BODY_BYTES_MAX
) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Read one message with at most ``body_max`` bytes of arrays.

    Raises ConnectionError at its end, BadInput for a message that cannot be one.
    """
    head_bytes, body_bytes = _SIZES.unpack(_exactly(link, _SIZES.size))
    if head_bytes > HEAD_BYTES_MAX or body_bytes > body_max:
        raise BadInput(f"message of {head_bytes} + {body_bytes} bytes: the limit is {HEAD_BYTES_MAX} + {body_max}")
    head = json.loads(bytes(_exactly(link, head_bytes)))
    body = _exactly(link, body_bytes)
    arrays, at = dict[str, Any](), 0
    for name, dtype, shape in head.pop("arrays"):
        kind = np.dtype(dtype)
        size = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        if kind.hasobject or at + size > body_bytes:
            raise BadInput(f"array {name!r} of {dtype} {shape} is not in the message")
        arrays[name] = np.frombuffer(body, kind, size // kind.itemsize, at).reshape(shape)
        at += size
    return head, arrays


def _exactly(link: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    view, at = memoryview(found), 0
    while at < size:
        got = link.recv_into(view[at:])
        if not got:
            raise ConnectionError("the other side closed the connection")
        at += got
    return found
