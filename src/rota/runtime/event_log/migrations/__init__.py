"""Alembic versions of the schema; packaged, and run by the service when it opens the store."""
