"""Tests: unit tests mirror the package; ``real``, ``world``, ``machines``, ``proof``, ``logs``, ``mutants`` span it."""
