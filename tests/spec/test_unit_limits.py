"""Unit tests open no sockets: the ban of ``tests/conftest.py`` holds."""

from __future__ import annotations

import socket

import pytest


def test_a_unit_test_cannot_open_a_connection():
    with socket.socket() as one, pytest.raises(AssertionError, match="opens a connection"):
        one.connect(("127.0.0.1", 9))
