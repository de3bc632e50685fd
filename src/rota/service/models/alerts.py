"""Alerts: what needs a person's attention, and who has seen it."""

from __future__ import annotations

from typing import Literal

from rota.service.models.base import Closed, Headed, Moment


class AlertRow(Closed):
    """One alert of a job, a node, a queue or the disk; ``hint`` is the command that shows more."""

    id: str
    code: str
    severity: Literal["critical", "warning", "info"]
    since: Moment | None
    text: str
    job: str | None
    node: str | None
    hint: str
    acknowledged_by: str
    acknowledged_at: Moment | None
    note: str


class AlertList(Headed):
    """The present alerts: those without an acknowledgement first, then by severity."""

    kind: Literal["AlertList"]
    items: list[AlertRow]
    next: None
