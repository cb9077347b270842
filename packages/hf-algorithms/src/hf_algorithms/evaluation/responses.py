"""Responses as texts: asked of a worker group, read from its batch, and scored by metric functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from hf_algorithms.data import decode_responses
from hf_algorithms.rewards import FunctionSpec, Samples, ScoringFunctions
from hf_algorithms.roles import least_rows
from hf_algorithms.url_secrets import hide_secrets
from hf_protocols import BackendError, ConfigError
from hf_protocols.validation import Checks, show

if TYPE_CHECKING:
    from hf_algorithms.data import PromptDataset, TurnFormat
    from hf_controller import Executor, WorkerGroup
    from hf_engine import SamplingParams, SupportsPromptCheck
    from hf_engine.model_directory import ModelDirectory

__all__ = [
    "Response",
    "ResponseScorer",
    "build_sampling_of",
    "check_prompts",
    "check_room",
    "draw_responses",
    "list_draws",
    "name_metrics",
]

_check = Checks(ConfigError)

_MOST_SAMPLES = 512
"""Of one call, where a prompt has fewer: what is complete after each call is written."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response to a prompt.

    Attributes:
        text: without special tokens and without the token that ended it.
        finish_reason: `stop`, or `length` where the limit of tokens cut it.
        token_ids: with the token that ended it.
        prompt_ids: of its prompt.
    """

    text: str
    finish_reason: str
    token_ids: Sequence[int]
    prompt_ids: Sequence[int]

    def to_dict(self) -> dict[str, Any]:
        """The response as files have it."""
        return {"text": self.text, "finish_reason": self.finish_reason, "tokens": len(self.token_ids)}


def build_sampling_of(
    *,
    samples: int,
    temperature: float | None,
    top_p: float,
    max_new_tokens: int,
    seed: int,
    stop_ids: tuple[int, ...],
    stop_strings: tuple[str, ...] = (),
) -> SamplingParams:
    """Returns how responses are drawn; a temperature of 0 takes the likeliest tokens.

    Args:
        samples: responses to each prompt.
        temperature: None: 0 for a single response, 1 for several.
        top_p: draws among the likeliest tokens that together have this probability.
        max_new_tokens: tokens of a response at most.
        seed: of the draws.
        stop_ids: tokens at which responses end.
        stop_strings: texts at which they end.

    Raises:
        ConfigError: for several responses at temperature 0, which would be equal, and for a value out of range.
    """
    from hf_engine import SamplingParams

    for name, count in (("samples", samples), ("max_new_tokens", max_new_tokens)):
        _check.count(name, count)
    _check.count("seed", seed, least=0)
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{name} = {show(value)}: is not a number")
    if temperature is None:
        temperature = 0.0 if samples == 1 else 1.0
    if not 0 <= temperature < float("inf") or 0 < temperature < 1e-6:  # logits divided by less may overflow
        raise ConfigError(f"temperature = {temperature}: must be 0 or at least 1e-06")
    greedy = temperature == 0
    if greedy and samples > 1:
        raise ConfigError(f"samples = {samples}: at temperature = 0 all would be equal. Set a temperature above 0")
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        # Nobody reads these log-probs, and some servers report no others of greedy responses.
        temperature=1.0 if greedy else temperature,
        greedy=greedy,
        top_p=top_p,
        n=samples,
        seed=seed,
        stop_token_ids=stop_ids,
        stop_strings=stop_strings,
    )


def check_room(data: PromptDataset, *, context: int, max_new_tokens: int, key: str = "max_new_tokens") -> None:
    """Refuses prompts that leave no room for a response in the model's context.

    Args:
        data: the prompts.
        context: tokens of a prompt and its response together.
        max_new_tokens: tokens of a response at most.
        key: the user's name of that number.

    Raises:
        ConfigError: naming the row of the longest prompt.
    """
    longest = data.max_prompt_tokens
    if longest + max_new_tokens <= context:
        return
    others = sum(length + max_new_tokens > context for length in data.prompt_lengths) - 1
    more = f", and so are {others} other prompts" if others else ""
    room = context - longest
    lower = f", or lower {key} to at most {room}" if room > 0 else ""
    raise ConfigError(
        f"{data.where(list(data.prompt_lengths).index(longest))}: its prompt of {longest} tokens and a response of up "
        f"to {max_new_tokens} ({key}) are above the model's context of {context} tokens{more}. Shorten the "
        f"prompt{lower}"
    )


def check_prompts(
    backend: type[SupportsPromptCheck], files: ModelDirectory, data: PromptDataset, *, max_new_tokens: int
) -> None:
    """Refuses prompts from which an engine does not generate.

    Args:
        backend: of the engine.
        files: of the model.
        data: the prompts.
        max_new_tokens: tokens of a response at most.

    Raises:
        ConfigError: naming the row.
    """
    try:
        backend.check_prompts(files, data.prompt_lengths, max_new_tokens=max_new_tokens)
    except BackendError as error:
        raise ConfigError(f"{data.source}: {error}") from None


def draw_responses(
    executor: Executor, group: WorkerGroup, data: PromptDataset, sampling: SamplingParams, turns: TurnFormat
) -> Iterator[tuple[list[int], list[list[Response]]]]:
    """Yields, a few hundred responses at a time, the numbers of rows and the responses to each.

    Args:
        executor: of the group.
        group: whose worker has `generate_sequences`.
        data: the prompts.
        sampling: how to draw.
        turns: of the model.
    """
    from hf_algorithms.jagged import list_rows

    start = 0
    for num_rows in list_draws(group, len(data), sampling):
        indices = list(range(start, min(start + num_rows, len(data))))
        start += num_rows
        prompts = data.prompts(indices)
        repeated = [row % len(indices) for row in range(num_rows)]
        batch = executor.put(prompts).rows(repeated)
        found = group.generate_sequences(batch, sampling).select(["response_ids", "finish_reason"])
        columns = found.rows(range(len(indices) * sampling.n)).result()
        prompt_ids = list_rows(prompts["prompt_ids"])
        ids = list_rows(columns["response_ids"])
        texts = decode_responses(turns.tokenizer, ids, stop_ids=frozenset(sampling.stop_token_ids))
        reasons = ["length" if reason else "stop" for reason in columns["finish_reason"].tolist()]
        responses = [
            Response(text=text, finish_reason=reason, token_ids=each, prompt_ids=prompt_ids[number // sampling.n])
            for number, (text, reason, each) in enumerate(zip(texts, reasons, ids, strict=True))
        ]
        yield indices, [responses[row * sampling.n : (row + 1) * sampling.n] for row in range(len(indices))]


def list_draws(group: WorkerGroup, num_rows: int, sampling: SamplingParams) -> list[int]:
    """Returns the rows of each call that `draw_responses` makes for a data set of `num_rows` rows.

    Every rank that generates needs a row: from some of the last ones it generates twice.
    """
    least = least_rows(group, "generate_sequences")
    size = max(least, _MOST_SAMPLES // sampling.n, 1)
    return [max(least, min(size, num_rows - start)) for start in range(0, num_rows, size)]


def name_metrics(functions: Sequence[str], *, key: str) -> dict[str, str]:
    """Returns the functions by the name of their metric: the last part of `module:function`.

    Args:
        functions: as the user wrote them.
        key: that names them, for messages.

    Raises:
        ConfigError: for no function, and for two of one name.
    """
    from hf_algorithms.config import FunctionConfig

    if not functions:
        raise ConfigError(f"{key} is missing. Name a function, such as exact_match")
    names: dict[str, str] = {}
    for function in functions:
        name = FunctionConfig.of(function).name
        if names.get(name) == function:
            raise ConfigError(f"{key} names {show(hide_secrets(function))} twice. Name it once")
        if name in names:
            shown, other = (show(hide_secrets(each)) for each in (function, names[name]))
            raise ConfigError(f"{key} = {shown}: {other} has the same name {show(name)}. Rename one")
        names[name] = function
    return names


class ResponseScorer:
    """Metric functions, called on the responses to rows of a data set.

    Args:
        metrics: functions by name.
        turns: of the model.
        search_path: folders where the functions' modules are looked for first.
        answer_name: of the answers in the data.
        num_processes: that call functions; by default as many as there are cores.
        allowed_hosts: that a function's URL may name in addition to this machine.
    """

    def __init__(
        self,
        metrics: Mapping[str, str],
        turns: TurnFormat,
        *,
        search_path: Sequence[str] = (),
        answer_name: str = "answer",
        num_processes: int | None = None,
        allowed_hosts: tuple[str, ...] = (),
    ) -> None:
        specs = [
            FunctionSpec(name=name, function=function, allowed_hosts=allowed_hosts)
            for name, function in metrics.items()
        ]
        self._functions = ScoringFunctions(specs, search_path=search_path, num_processes=num_processes, kind="metric")
        self._turns = turns
        self._answer_name = answer_name

    def score(
        self, data: PromptDataset, indices: Sequence[int], responses: Sequence[Sequence[Response]]
    ) -> dict[str, list[list[float]]]:
        """Returns by metric the score of every response of every row; NaN where a response has no score.

        A response whose call exceeded its deadline or ended its process counts 0, as in a run.

        Raises:
            RewardError: if a function raises, or returns something else than a score for each response.
        """
        rows = [data.row(index) for index in indices]
        flat = list(chain.from_iterable(responses))
        owners = [row for row, each in enumerate(responses) for _ in each]
        texts = decode_responses(self._turns.tokenizer, [each.prompt_ids for each in flat])
        samples = Samples(
            prompts=texts,
            responses=[each.text for each in flat],
            answers=[rows[owner].answer for owner in owners],
            prompt_ids=[each.prompt_ids for each in flat],
            response_ids=[each.token_ids for each in flat],
            truncated=[each.finish_reason == "length" for each in flat],
            messages=[self._turns.as_chat(rows[owner].prompt) for owner in owners],
            columns=[rows[owner].columns for owner in owners],
            groups=owners,
            answer_name=self._answer_name,
        )
        found: dict[str, list[list[float]]] = {}
        for spec, scored in zip(self._functions.specs, self._functions.score(samples), strict=True):
            scores = iter(
                [0.0 if failed else score for score, failed in zip(scored.scores, scored.failed, strict=True)]
            )
            found[spec.name] = [[next(scores) for _ in each] for each in responses]
        return found

    def close(self) -> None:
        """Ends the processes that call functions."""
        self._functions.close()
