"""One Ray cluster, and one set of groups, for the whole session: starting them takes many seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forked_workers import forked_workers
from hf_controller import RayExecutor, ResourcePool
from hf_controller.signals import SignalGuard
from hf_controller.testing import StageWorker


@pytest.fixture(scope="session")
def ray_executor() -> Iterator[RayExecutor]:
    with (
        forked_workers(["hf_controller.testing"]),
        RayExecutor(
            num_cpus=16,
            object_store_bytes=200 * 2**20,
            start_timeout_s=180.0,
            call_timeout_s=60.0,
            collective_timeout_s=15.0,
        ) as executor,
    ):
        yield executor


@pytest.fixture(scope="session")
def ray_stage(ray_executor: RayExecutor) -> Iterator[StageWorker]:
    with StageWorker(ray_executor) as stage:
        yield stage


@pytest.fixture
def pool(ray_executor: RayExecutor) -> Iterator[ResourcePool]:
    pool = ResourcePool([2], device="cpu", name="fragile")
    yield pool
    ray_executor.release(pool)


@pytest.fixture
def other_guards_hear_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps a test's signals from executors of other tests, whose next call would end the program."""
    monkeypatch.setattr(SignalGuard, "_installed", [])
