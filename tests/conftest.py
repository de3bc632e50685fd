"""Settings of all tests; its place puts the root of the repository on the path, so that ``tests.makers`` imports."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("check", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("check")
