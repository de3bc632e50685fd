"""What Alembic runs: the versions, on the connection that ``rota.runtime.event_log.sql`` opened."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
context.run_migrations()
