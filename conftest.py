"""Settings for all tests: a slow machine is not a failure, and what was imported is not looked at again."""

from __future__ import annotations

import gc

from hypothesis import HealthCheck, settings

settings.register_profile("hybridflow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hybridflow")


def pytest_collection_finish() -> None:
    """Freezes what was imported: a model that is closed collects garbage, and would look at all of it every time."""
    gc.freeze()
