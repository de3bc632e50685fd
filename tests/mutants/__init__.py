"""Mutations of the source, and which of them the unit tests find."""
