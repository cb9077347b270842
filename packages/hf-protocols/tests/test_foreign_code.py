"""Code of others raises anything: it becomes one of our errors, or is kept; what ends a program passes."""

from __future__ import annotations

import pytest

from hf_protocols import PlanError, ProtocolError
from hf_protocols.foreign_code import Caught, raised_as


@pytest.mark.parametrize("raised", [ValueError("no"), StopIteration(), KeyError("x"), StopAsyncIteration()])
def test_any_exception_becomes_the_described_one(raised):
    with pytest.raises(ProtocolError, match="said") as found, raised_as(lambda error: ProtocolError(f"said {error!r}")):
        raise raised
    assert found.value.__cause__ is raised


@pytest.mark.parametrize("raised", [PlanError("ours"), KeyboardInterrupt(), SystemExit(3)])
def test_own_errors_and_what_ends_a_program_pass(raised):
    with pytest.raises(type(raised)) as found, raised_as(lambda error: ProtocolError("another")):
        raise raised
    assert found.value is raised


def test_an_exception_is_kept_and_the_program_goes_on():
    with Caught() as none:
        pass
    with Caught() as kept:
        raise StopIteration
    assert (none.error, type(kept.error)) == (None, StopIteration)
    with pytest.raises(KeyboardInterrupt), Caught():
        raise KeyboardInterrupt
