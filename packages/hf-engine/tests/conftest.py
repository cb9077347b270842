from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_engine.testing import LocalRanks

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def ranks1() -> Iterator[LocalRanks]:
    with LocalRanks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def ranks2() -> Iterator[LocalRanks]:
    with LocalRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def ranks3() -> Iterator[LocalRanks]:
    with LocalRanks(3) as ranks:
        yield ranks
