"""The service process: start and stop, wiring, background tasks, supervision, backup."""
