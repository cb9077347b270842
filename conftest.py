"""Settings of Hypothesis for all tests: a slow machine is not a failure."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("hybridflow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hybridflow")
