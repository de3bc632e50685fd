"""Contexts of jobs kept beside their records, so that a new master replays only what came after."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create ``contexts``."""
    op.create_table(
        "contexts",
        sa.Column("job", sa.Text, primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("crc", sa.BigInteger, nullable=False),
    )
