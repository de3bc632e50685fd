"""Settings of all tests; its place puts the root of the repository on the path, so that ``tests.makers`` imports."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("check", max_examples=50, **quiet)
settings.register_profile("deep", max_examples=1_000, **quiet)
settings.load_profile("deep" if os.environ.get("ROTA_DEEP") == "1" else "check")
