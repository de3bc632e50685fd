"""The whole system in one process: virtual clock, in-memory log, scripted instances, seeded faults."""
