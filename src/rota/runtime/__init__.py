"""Access to the world for all packages: clock, processes, event log (SQL), Redis, Ray; with twins in memory."""
