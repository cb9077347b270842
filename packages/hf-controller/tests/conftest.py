"""One Ray cluster for the whole session: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hf_controller import RayExecutor


@pytest.fixture(scope="session")
def ray_executor() -> Iterator[RayExecutor]:
    with RayExecutor(
        num_cpus=16,
        object_store_bytes=200 * 2**20,
        start_timeout_s=90.0,
        call_timeout_s=60.0,
        collective_timeout_s=15.0,
    ) as executor:
        yield executor
