"""The first schema: the event log and its fences."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create ``events`` and ``fences``."""
    op.create_table(
        "events",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=False),
        sa.Column("job", sa.Text, nullable=True),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("scope", sa.Text, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("crc", sa.BigInteger, nullable=False),
    )
    op.create_index(
        "events_by_job_seq",
        "events",
        ["job", "seq"],
        unique=True,
        sqlite_where=sa.text("job IS NOT NULL"),
        postgresql_where=sa.text("job IS NOT NULL"),
    )
    op.create_index("events_by_job_number", "events", ["job", "number"])
    op.create_table(
        "fences",
        sa.Column("scope", sa.Text, primary_key=True),
        sa.Column("epoch", sa.Integer, nullable=False),
    )
