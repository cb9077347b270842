from __future__ import annotations

import copy
import pickle
from collections.abc import AsyncIterator, Iterator

import pytest

from hf_protocols import (
    DP,
    FROM_ARGUMENT,
    RANK_ZERO,
    THREE_D,
    MethodSpec,
    ProtocolError,
    method_spec,
    register,
    registered_methods,
)


class Base:
    @register(protocol=RANK_ZERO, returns="object")
    def describe(self) -> str:
        """Say who it is."""
        return "base"

    def local(self) -> None:
        """Not callable through a group."""


class MarkedWorker(Base):
    limit = 3

    @register(protocol=THREE_D, rows="times", reads=["prompt_ids", "answer?"], writes=("response_ids",))
    def generate(self, batch: list[int]) -> list[int]:
        return batch * 2

    @register(protocol=DP, returns="metrics")
    def update(self, batch: list[int]) -> dict[str, tuple[float, float]]:
        return {"loss": (float(sum(batch)), float(len(batch)))}


def test_a_registered_method_is_still_the_method() -> None:
    assert MarkedWorker().generate([1]) == [1, 1]
    assert Base.describe.__doc__ == "Say who it is."


def test_the_registration_is_found_on_the_method() -> None:
    expected = MethodSpec(
        protocol=THREE_D, rows="times", returns="batch", reads=("prompt_ids", "answer?"), writes=("response_ids",)
    )
    assert method_spec(MarkedWorker.generate) == expected
    assert method_spec(MarkedWorker().generate) == expected
    assert method_spec(MarkedWorker.local) is None
    assert method_spec(print) is None


def test_defaults_keep_rows_and_columns() -> None:
    @register(protocol=DP)
    def call(batch: object) -> object:
        return batch

    assert method_spec(call) == MethodSpec(protocol=DP, rows="same", returns="batch", reads=None, writes=None)
    read = method_spec(register(protocol=DP, reads=(name for name in ("a", "b?")))(call))
    assert read is not None
    assert read.reads == ("a", "b?")


def test_registered_methods_include_inherited_ones() -> None:
    assert list(registered_methods(Base)) == ["describe"]
    found = registered_methods(MarkedWorker)
    assert {name: spec.returns for name, spec in found.items()} == {
        "describe": "object",
        "generate": "batch",
        "update": "metrics",
    }


def test_an_overriding_method_registers_itself() -> None:
    class Other(MarkedWorker):
        @register(protocol=RANK_ZERO, returns="metrics")
        def update(self, batch: list[int]) -> dict[str, tuple[float, float]]:
            return {}

    assert registered_methods(Other)["update"].protocol is RANK_ZERO
    assert registered_methods(MarkedWorker)["update"].protocol is DP


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"protocol": "DP_PROTO"}, "protocol='DP_PROTO' is not a TransferProtocol"),
        ({"protocol": DP, "rows": "twice"}, "rows='twice' is not one of 'same', 'times', 'unknown'"),
        ({"protocol": DP, "returns": "list"}, "returns='list' is not one of 'batch', 'metrics', 'object'"),
        ({"protocol": DP, "reads": "values"}, r"reads='values' is one string. Use a list .*\['values'\]"),
        ({"protocol": DP, "writes": "values"}, "writes='values' is one string"),
        ({"protocol": DP, "reads": 3}, "^reads=3. Use a list of column names$"),
        ({"protocol": DP, "reads": ["values", 3]}, r"^reads=\['values', 3\]. Use a list of column names$"),
        ({"protocol": DP, "writes": ["values?"]}, r"^writes=\['values\?'\]: 'values\?' ends in \?"),
    ],
)
def test_a_wrong_registration_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        register(**given)


def test_a_method_says_what_kind_of_work_it_is() -> None:
    @register(protocol=DP, kind="training", returns="metrics")
    def update(batch: object) -> object:
        return batch

    spec = method_spec(update)
    assert spec is not None
    assert spec.kind == "training"
    with pytest.raises(
        ProtocolError, match=r"kind='forward' is not one of 'generation', 'inference', 'training', 'function'"
    ):
        register(protocol=DP, kind="forward")


def test_only_a_method_is_registered() -> None:
    for value in (property(lambda self: 1), staticmethod(lambda batch: 1), classmethod(lambda kind: 1), 5, int):
        with pytest.raises(ProtocolError, match="@register marks a method, got"):
            register(protocol=RANK_ZERO)(value)


def test_a_method_that_returns_no_result_is_refused() -> None:
    mark = register(protocol=RANK_ZERO, returns="object")

    async def later(self: object) -> int:
        return 1

    async def several_later(self: object) -> AsyncIterator[int]:
        yield 1

    def several(self: object) -> Iterator[int]:
        yield 1

    for method, message in (
        (later, r"^@register marks later, which is async. Use `def`, with asyncio.run"),
        (several_later, r"^@register marks several_later, which is async. Use `def`"),
        (several, r"^@register marks several, which yields its results. Return all of them at once$"),
    ):
        with pytest.raises(ProtocolError, match=message):
            mark(method)


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_method_without_the_worker_is_refused(kind: type) -> None:
    def score(batch: object) -> object:
        return batch

    worker = type("Scorer", (Base,), {"score": kind(register(protocol=DP)(score))})
    message = rf"^Scorer\.score is a {kind.__name__}. Register a method, `def score\(self, ...\)`$"
    with pytest.raises(ProtocolError, match=message):
        registered_methods(worker)


def test_what_a_method_writes_may_come_from_an_argument() -> None:
    @register(protocol=RANK_ZERO, writes=FROM_ARGUMENT)
    def compute(self: object, batch: object, estimator: object) -> object:
        return batch

    spec = method_spec(compute)
    assert spec is not None
    assert spec.writes is FROM_ARGUMENT
    assert pickle.loads(pickle.dumps(FROM_ARGUMENT)) is copy.deepcopy(FROM_ARGUMENT) is FROM_ARGUMENT
    assert repr(FROM_ARGUMENT) == "FROM_ARGUMENT"


@pytest.mark.parametrize("returns", ["metrics", "object"])
def test_only_a_batch_has_columns_from_an_argument(returns: str) -> None:
    with pytest.raises(ProtocolError, match=f"^writes=FROM_ARGUMENT: returns='{returns}' has no columns"):
        register(protocol=DP, returns=returns, writes=FROM_ARGUMENT)  # type: ignore[arg-type]


def test_columns_from_an_argument_need_one() -> None:
    mark = register(protocol=DP, writes=FROM_ARGUMENT)
    with pytest.raises(ProtocolError, match=r"^writes=FROM_ARGUMENT:\smake takes no argument that could declare"):

        @mark
        def make(self: object) -> object:
            return self

    @mark
    def make_any(*given: object) -> object:
        return given

    with pytest.raises(ProtocolError, match=r"reads=FROM_ARGUMENT. Use a list of column names"):
        register(protocol=DP, reads=FROM_ARGUMENT)  # type: ignore[arg-type]
