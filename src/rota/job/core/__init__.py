"""The decisions about one job: pure functions over values; no side effects."""
