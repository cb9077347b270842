from __future__ import annotations

from collections.abc import Iterator

import pytest

from hf_controller import InProcessExecutor
from hf_controller.testing import StageWorker, conformance_checks


def _named(*, collectives: bool) -> list[object]:
    return [pytest.param(check, id=check.__name__) for check in conformance_checks(collectives=collectives)]


@pytest.fixture(scope="module")
def in_process_stage() -> Iterator[StageWorker]:
    with InProcessExecutor() as executor, StageWorker(executor) as stage:
        yield stage


@pytest.mark.parametrize("check", _named(collectives=False))
def test_in_process(check, in_process_stage):
    check(in_process_stage)


@pytest.mark.parametrize("check", _named(collectives=True))
def test_ray(check, ray_stage):
    check(ray_stage)
