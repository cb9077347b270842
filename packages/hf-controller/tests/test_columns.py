"""Columns of a call, from its registration and its arguments; the conformance suite has the calls themselves."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from hf_controller.data.columns import CallColumns, find_columns
from hf_controller.data.expressions import Leaf, Source
from hf_protocols import DP, FROM_ARGUMENT, BatchError, ProtocolError, method_spec, register


def spec(**columns: Any) -> Any:
    def method(self, batch, *rest):
        pass

    return method_spec(register(protocol=DP, **columns)(method))


@dataclass(frozen=True, slots=True)
class Claims:
    reads: Any = ("advantages", "values?")
    writes: Any = ("loss",)


class Derived:
    """Declares by properties, as an object whose columns follow from its settings does."""

    def __init__(self, with_values: bool) -> None:
        self._with_values = with_values

    @property
    def reads(self) -> tuple[str, ...]:
        return ("scores", "values") if self._with_values else ("scores",)


class Constant:
    reads = ("scores",)
    writes = ("advantages",)


class Pair(NamedTuple):
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class AnswersAnything(dict):
    """As configuration libraries make them."""

    def __getattr__(self, name):
        return self[name]


def test_reads_of_arguments_come_after_those_of_the_method():
    found = find_columns(spec(reads=("mask", "values"), writes=("x",)), (1, Claims(), "text", Derived(True)), "actor.m")
    assert found == CallColumns(
        reads=("mask", "values", "advantages", "values?", "scores"),
        writes=("x",),
        readers=(("Claims", ("advantages", "values?")), ("Derived", ("scores", "values"))),
    )


OTHERS = [None, 1, "reads", ["reads"], {"reads": ("x",)}, [Claims()], AnswersAnything(), lambda columns: columns]


@pytest.mark.parametrize("argument", OTHERS, ids=[type(each).__name__ for each in OTHERS])
def test_other_arguments_declare_nothing(argument):
    assert find_columns(spec(reads=("mask",), writes=("x",)), (argument,), "actor.m") is None


def test_a_method_reading_all_columns_needs_the_declared_ones():
    found = find_columns(spec(), (Derived(False),), "actor.m")
    assert (found.reads, found.writes) == (None, None)
    batch = Leaf(Source((), columns=("x",), maker="actor.generate"))
    with pytest.raises(BatchError, match=r"^Derived reads scores; the batch has x, made by actor\.generate\. Add the"):
        found.check(("x",), batch)
    found.check(("x", "scores"), batch)


def test_an_optional_column_may_be_missing():
    found = find_columns(spec(reads=()), (Claims(),), "actor.m")
    found.check(("advantages",), Leaf(Source(())))


@pytest.mark.parametrize("argument", [Constant(), Constant, Claims(writes=["advantages"]), Pair((), ("advantages",))])
def test_one_argument_says_what_the_method_writes(argument):
    found = find_columns(spec(reads=("mask",), writes=FROM_ARGUMENT), (None, argument), "advantage.m")
    assert found.writes == ("advantages",)
    assert found.writer in ("Constant", "Claims", "Pair")


def test_an_arguments_writes_matter_only_if_the_method_asks():
    assert find_columns(spec(writes=("x",)), (Claims(writes="no tuple"),), "actor.m").writes == ("x",)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((), "no argument"),
        ((Derived(True), {}), "no argument"),
        ((Claims(), Constant()), "Claims and Constant"),
    ],
)
def test_not_one_argument_that_writes_is_an_error(arguments, found):
    with pytest.raises(
        ProtocolError, match=rf"^advantage\.m returns the columns .* and {found} declares `writes`\. Give"
    ):
        find_columns(spec(writes=FROM_ARGUMENT), arguments, "advantage.m")


class Raises:
    def __init__(self, error: Exception) -> None:
        self._error = error

    @property
    def reads(self) -> tuple[str, ...]:
        raise self._error


class Method:
    def reads(self) -> tuple[str, ...]:
        return ("scores",)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            Claims(reads="scores"),
            r"Claims\.reads='scores' is one string. Use a list of column names, \['scores'\]",
        ),
        (Claims(reads=[1, 2]), r"Claims\.reads=\[1, 2\]. Use a list of column names"),
        (Claims(reads={"scores": 1}), r"Claims\.reads=\{'scores': 1\}. Use a tuple of column names"),
        (Claims(reads=iter(["scores"])), r"Claims\.reads=<list_iterator .*. Use a tuple of column names"),
        (Claims(reads=None), r"Claims\.reads=None. Use a tuple"),
        (Claims(writes=("a?",)), r"Claims\.writes=\('a\?',\): 'a\?' ends in \?"),
        (Claims(writes=("a", 2)), r"Claims\.writes=\('a', 2\). Use a list of column names"),
        (Claims(writes=()), r"Claims\.writes=\(\) names no column"),
        (Raises(AttributeError("no field")), r"Raises\.reads raised AttributeError: no field"),
        (Raises(KeyError("field")), r"Raises\.reads raised KeyError: 'field'"),
        (Derived, r"Derived\.reads=<property .*. Use a tuple"),
        (Method(), r"Method\.reads=<bound method .*. Use a tuple"),
    ],
)
def test_a_malformed_declaration_is_one_error(argument, message):
    given = (argument,) if hasattr(type(argument), "writes") else (argument, SimpleNamespace(writes=("x",)))
    with pytest.raises(ProtocolError, match=rf"^advantage\.m: {message}"):
        find_columns(spec(reads=("mask",), writes=FROM_ARGUMENT), given, "advantage.m")
