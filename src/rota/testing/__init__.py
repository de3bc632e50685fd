"""Implementations of the interfaces of ``runtime`` for tests: a launcher in one process, under a virtual clock."""
