"""What says whether an instance is healthy: heartbeats, stacks, preflight checks."""
