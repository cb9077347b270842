"""Recipes that learn from rows as they are, and what such rows must offer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import Field, field_validator

from hf_algorithms.recipes._config import AlgorithmConfig
from hf_algorithms.recipes._recipe import Recipe, StepError, are_numbers
from hf_algorithms.users_code import describe_raised
from hf_protocols.foreign_code import raised_as
from hf_protocols.validation import show

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_algorithms.data import FileRows, RowOrder
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture

__all__ = ["UNREAD_OF_PAIRS", "SupervisedConfig", "SupervisedDataset", "SupervisedRecipe"]

UNREAD_OF_PAIRS = ("answer_field", "block_tokens", "max_prompt_tokens", "pretraining", "too_long")
"""Keys of `[data]` that mean nothing for preference pairs."""


class SupervisedConfig(AlgorithmConfig):
    """Keys of `[algorithm]` that every supervised recipe has."""

    epochs: Literal[1] = 1
    """Passes over the rows of one iteration; `run.iterations` says how long training is."""
    mini_batches: Literal[1] = 1
    """Updates of one iteration."""
    batch_size: Annotated[int, Field(ge=1, le=1 << 20)] = 64
    """Rows of one iteration, over all ranks."""

    @field_validator("epochs", "mini_batches", mode="before")
    @classmethod
    def _check_updates(cls, value: Any) -> Any:
        if type(value) is not int or value != 1:
            raise ValueError("must be 1, as an iteration is one update. For longer training raise run.iterations")
        return value


class SupervisedDataset(Protocol):
    """Rows of a supervised recipe as token ids.

    Attributes:
        source: key and value that name the file, for messages.
        num_cut: rows that were too long and lost a part.
    """

    source: str
    num_cut: int

    @property
    def order(self) -> RowOrder:
        """In which order rows are drawn."""

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""

    @property
    def max_response_tokens(self) -> int:
        """Tokens of the longest response."""

    @property
    def longest(self) -> tuple[int, str]:
        """Tokens that the largest row needs in a forward pass, and its place in the file."""

    def __len__(self) -> int:
        """Number of rows."""

    def batch(self, indices: Iterable[int]) -> TensorDict:
        """Returns the chosen rows."""

    def describe_rows(self) -> list[str]:
        """Returns lines for the user: how many rows there are, and what happened to long ones."""

    def preview(self) -> dict[str, list[int]]:
        """Returns the token ids of the first row's parts, by name, for a report."""


@dataclass(frozen=True, kw_only=True)
class SupervisedRecipe(Recipe):
    """A recipe that learns from rows as they are: its step generates nothing. Its configuration has `batch_size`.

    Attributes:
        columns: of the batch that its step is given.
        open_rows: returns the rows of a data set; called as `open_rows(sources, config, prompt_field=, answer_field=)`
            with the paths and weights of its sources, or None in place of a weight, with `[algorithm]`, and with keys
            of `[data]`.
        build_dataset: returns rows as token ids; called as `build_dataset(rows, tokenizer, max_tokens=, source=,
            turns=, budget_tokens=, block_tokens=, too_long=)`: with the tokens of the model's context, the key and
            value that name the file, the format of turns, the tokens of a forward pass, and keys of `[data]`.
        evaluate: returns numbers by name; called as `evaluate(roles, batch, num_rows, config)` with `[algorithm]`.
        metric: name of the number that says how good the model is.
        lower_is_better: True for a metric that falls as the model improves.
        sequences_per_row: that a row costs in a forward pass.
        defaults: values of keys that a file leaves out, by `section.key`, in place of the general ones.
        unused: sections of the configuration that mean nothing for it, and keys of others as `section.key`.
        unread_data: keys of `[data]` that mean nothing for it; a run with one is refused.
        generator: worker of the trained role in a run that generates for `[[evaluation]]`; None: the model generates
            nothing.
    """

    columns: tuple[str, ...]
    open_rows: Callable[..., FileRows[Any]]
    build_dataset: Callable[..., SupervisedDataset]
    evaluate: Callable[[Roles, BatchFuture, int, Any], Mapping[str, float]]
    metric: str
    lower_is_better: bool = False
    sequences_per_row: int = 1
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    unused: tuple[str, ...] = ("warm_start", "rollout", "reward", "cost", "evaluation")
    unread_data: tuple[str, ...] = ()
    generator: str | None = None

    def fill(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the sections of a file with the recipe's own `defaults` where the file says nothing."""
        found = dict(body)
        for key, value in self.defaults.items():
            section, _, name = key.partition(".")
            given = found.get(section, {})
            if isinstance(given, Mapping):
                found[section] = {name: value, **given}
        return found

    def run_evaluate(self, roles: Roles, batch: BatchFuture, num_rows: int, config: Any) -> Mapping[str, float]:
        """Runs `evaluate`, which may be a user's code, and checks what it returns.

        Raises:
            StepError: if it raises, with the place in its code, or returns something else than numbers by name with
                `metric` among them.
            HybridFlowError: what calls to the roles raise.
        """
        label = f"evaluate of recipe {show(self.name)}"
        with raised_as(lambda error: StepError(f"{label} raised {describe_raised(error)}")):
            found: Any = self.evaluate(roles, batch, num_rows, config)
        if not are_numbers(found):
            raise StepError(f"{label} returned {show(found)}. Return a mapping of names to numbers")
        if self.metric not in found:
            raise StepError(
                f"{label} returned {', '.join(found) or 'no numbers'}, and its metric is {show(self.metric)}. Return a "
                "number of this name, or set metric to another"
            )
        return dict(found)

    def with_generator(self) -> SupervisedRecipe:
        """Returns the recipe with a trained role that generates."""
        assert self.generator is not None, "[[evaluation]] is refused otherwise"
        trained, *others = self.roles
        return replace(self, roles=(replace(trained, worker=self.generator), *others))


GENERATOR = "hf_algorithms.workers:ActorWorker"
"""Worker of a policy that generates."""
UNUSED_BY_POLICIES = (
    "warm_start",
    "reward",
    "cost",
    *(
        f"rollout.{key}"
        for key in ("batch_size", "samples_per_prompt", "temperature", "top_p", "top_k", "min_new_tokens")
    ),
)
"""Sections and keys without a meaning for a supervised policy: `[[evaluation]]` has draws of its own."""
