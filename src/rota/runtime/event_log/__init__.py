"""The event log: its interface, and the SQL store behind it."""
