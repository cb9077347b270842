"""One reward written in every convention gives equal scores; the page of the conventions shows these functions."""

from __future__ import annotations

import asyncio
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_algorithms.rewards import CONVENTIONS, FunctionSpec, Samples, ScoringFunctions, bind_function
from hf_protocols import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "reward-conventions.md"


def hybridflow(prompts: list[str], responses: list[str], answers: list[str], bonus: list[float]) -> list[float]:
    return [float(response == answer) + more for response, answer, more in zip(responses, answers, bonus, strict=True)]


def trl(completions: list[Any], solution: list[str], **columns: Any) -> list[float]:
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [float(text == truth) + more for text, truth, more in zip(texts, solution, columns["bonus"], strict=True)]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    return {"score": float(solution_str == ground_truth) + extra_info["bonus"], "length": len(solution_str)}


def verl_batch(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[dict[str, Any]]
) -> list[dict[str, float]]:
    rewards = [
        float(text == truth) + info["bonus"]
        for text, truth, info in zip(solution_strs, ground_truths, extra_infos, strict=True)
    ]
    return [{"score": each, "length": len(text)} for each, text in zip(rewards, solution_strs, strict=True)]


def openrlhf(queries: list[str], prompts: list[str], labels: list[str], bonus: list[float]) -> dict[str, Any]:
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    rewards = [float(text == label) + more for text, label, more in zip(responses, labels, bonus, strict=True)]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"length": [len(text) for text in responses]}}


async def verifiers(prompt: Any, completion: Any, answer: str, state: dict[str, Any], info: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return float(text == answer) + info["bonus"]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (hybridflow, trl, verl, verl_batch, openrlhf, verifiers)
}
CHAT = [{"role": "user", "content": "1+1"}]


@pytest.fixture(scope="module")
def functions() -> Iterator[ScoringFunctions]:
    scoring = ScoringFunctions(
        [FunctionSpec(name=name, function=each) for name, each in FUNCTIONS.items()], num_processes=1
    )
    yield scoring
    scoring.close()


@pytest.mark.parametrize("messages", [(), (CHAT, CHAT, CHAT)], ids=["texts", "chats"])
def test_one_reward_scores_alike_in_every_convention(functions: ScoringFunctions, messages: Any) -> None:
    bonus = [0.0, 0.25, 0.5]
    columns = [{"bonus": each, "extra_info": {"bonus": each}, "info": {"bonus": each}} for each in bonus]
    batch = Samples(
        prompts=["1+1="] * 3, responses=["2", "3", "2"], answers=["2"] * 3, messages=messages, columns=columns
    )
    found = dict(zip(FUNCTIONS, functions.score(batch), strict=True))
    assert {name: each.scores for name, each in found.items()} == {name: [1.0, 0.25, 1.5] for name in FUNCTIONS}
    assert found["verl"].metrics == found["verl_batch"].metrics == {"length": [1.0] * 3}
    assert found["openrlhf"].metrics == {"scores": [1.0, 0.25, 1.5], "length": [1.0] * 3}


def arguments(function: Callable[..., Any], batch: Samples, style: Any = "auto") -> tuple[tuple[Any, ...], Any]:
    binding = bind_function("f", function, style)
    (found,) = batch.build_arguments(binding, [list(range(len(batch)))])
    return found


def test_a_function_gets_what_it_names() -> None:
    batch = Samples(
        prompts=["p", "q"],
        responses=["r", "s"],
        answers=["a", None],
        prompt_ids=[[1], [2]],
        response_ids=[[3], [4, 5]],
        truncated=[False, True],
        messages=[None, CHAT],
        columns=[{"reward_model": {"ground_truth": [1, 2]}, "size": 1, "data_source": "gsm"}, {}],
        answer_name="final",
    )
    assert arguments(lambda responses, truncated, response_ids: 0, batch)[1] == {
        "responses": ["r", "s"],
        "truncated": [False, True],
        "response_ids": [[3], [4, 5]],
    }
    assert arguments(lambda *texts: 0, batch)[0] == (["p", "q"], ["r", "s"], ["a", None])
    assert arguments(lambda one, two, three: 0, batch)[0] == (["p", "q"], ["r", "s"], ["a", None])
    named = arguments(lambda completions, prompts, completion_ids, label, size, other=7, **columns: 0, batch)[1]
    assert named["completions"] == ["r", [{"role": "assistant", "content": "s"}]]
    assert named["prompts"] == ["p", CHAT]
    assert (named["completion_ids"], named["label"], named["final"]) == ([[3], [4, 5]], ["a", None], ["a", None])
    assert named["size"] == [1, None] and "other" not in named
    one = Samples(prompts=["p"], responses=["r"], answers=["a"], columns=batch.columns[:1])
    named = arguments(lambda solution_str, data_source, ground_truth, extra_info=None: 0, one)[1]
    assert named == {"solution_str": "r", "data_source": "gsm", "ground_truth": [1, 2], "extra_info": {}}
    assert arguments(lambda source, text, truth, more: 0, one, "verl")[0] == ("gsm", "r", [1, 2], {})


BATCHED = Samples(
    prompts=["p", "p"],
    responses=["r", "s"],
    answers=["a", "a"],
    columns=[{"data_source": "gsm", "reward_model": {"ground_truth": [1]}, "extra_info": {"n": 1}}, {}],
    groups=[0, 0],
)


@pytest.mark.parametrize("style", ["auto", "verl", "verl_batch"])
def test_verl_forms_are_shown_by_their_parameters(style: Any) -> None:
    named = arguments(lambda data_sources, solution_strs, ground_truths, extra_infos=None: 0, BATCHED, style)[1]
    assert named == {
        "data_sources": ["gsm", None],
        "solution_strs": ["r", "s"],
        "ground_truths": [[1], "a"],
        "extra_infos": [{"n": 1}, {}],
    }
    one = bind_function("f", lambda data_source, solution_str, ground_truth, extra_info=None: 0, style)
    assert (one.style, BATCHED.split_calls(one)) == ("verl", [[0], [1]])
    several = bind_function("f", lambda data_sources, solution_strs, ground_truths, **kwargs: 0, style)
    assert (several.style, BATCHED.split_calls(several)) == ("verl_batch", [[0, 1]])


@pytest.mark.parametrize(
    ("function", "named", "written"),
    [
        (lambda data_sources, texts, ground_truths: 0, "data_sources, ground_truths", "data_sources, solution_strs"),
        (lambda data_sources, ground_truths, **kwargs: 0, "data_sources, ground_truths", "data_sources, solution_strs"),
        (lambda prompt, response, answer: 0, "prompt, response, answer", "prompts, responses, answers"),
        (lambda query, text, label: 0, "query", "queries, prompts, labels"),
        (lambda texts, outputs, truths, extra_infos=None: 0, "extra_infos", "data_sources, solution_strs"),
        (lambda solution, text, question: 0, "solution", ""),
    ],
)
def test_names_near_a_convention_are_not_filled_by_position(function: Any, named: str, written: str) -> None:
    with pytest.raises(ConfigError, match=rf"^f has the parameters? {named}, .*\. Write it as def f\({written}"):
        bind_function("f", function)


def test_positional_names_at_their_own_place_are_filled() -> None:
    def only_by_position(prompts: Any, responses: Any, answers: Any, /) -> None: ...

    assert arguments(only_by_position, BATCHED)[0] == (["p", "p"], ["r", "s"], ["a", "a"])
    assert arguments(lambda questions, texts, solution: 0, BATCHED)[0][2] == ["a", "a"]


def test_keywords_have_all_columns_next_to_positions() -> None:
    """A column of the name of a parameter that is filled by position is not passed twice."""
    batch = Samples(prompts=["p"], responses=["r"], answers=["a"], columns=[{"size": 1, "one": 2}])
    found = arguments(lambda one, two, three, **columns: 0, batch)
    assert found[0] == (["p"], ["r"], ["a"])
    offered = {"messages": [None], "prompt_ids": [[]], "response_ids": [[]], "truncated": [False], "answer": ["a"]}
    assert found[1] == offered | {"size": [1]}
    found = arguments(lambda source, text, truth, more, size=0, **columns: 0, batch, "verl")
    assert found[0] == (None, "r", "a", {})
    assert found[1] == {"response_ids": [], "truncated": False, "answer": "a", "size": 1, "one": 2}
    found = arguments(lambda first, second, **columns: 0, batch, "trl")
    assert found[0] == (["p"], ["r"]) and found[1].keys() >= {"size", "log_metric", "log_extra", "trainer_state"}


def write_page() -> str:
    """Returns the page: what each convention offers, and the functions of this file."""
    rows = []
    for name, each in CONVENTIONS.items():
        called = "one response" if each.per_sample else "all responses to a prompt"
        offered = ", ".join(f"`{parameter}`" for parameter in (*each.positional, *each.offers))
        rows.append(f"| `{name}` | `{each.named_by}` | {called} | {offered} |")
    examples = [
        f"### {name}\n\n```python\n{textwrap.dedent(inspect.getsource(each)).strip()}\n```"
        for name, each in FUNCTIONS.items()
    ]
    table = "| style | is shown by | is called with | parameters, in order, then further ones |\n|---|---|---|---|\n"
    return HEAD + table + "\n".join(rows) + REST + "\n\n".join(examples) + "\n"


HEAD = """# Reward conventions

After this page you can use a reward function that was written for another trainer as it is. This page is made by
`packages/hf-algorithms/tests/test_reward_conventions.py`, whose functions it shows.

A function's convention is read off the names of its parameters; `style` of `[[reward.functions]]` names one instead.

"""
REST = """

- A parameter gets the value of its name: one that the convention offers, else the column of the data. All others need a
  default. `**columns` gets everything that is offered, and every column, except what other parameters got.
- `answer`, `solution`, `ground_truth`, `label`, `target`, `reference` and their plurals are the answers where the data
  has no such column.
- Parameters with none of the names are filled by position, in the table's order. A name of another convention, or a
  plural or singular of a name, is an error there: its value would be another one.
- verl calls a function in one of two forms: for one response, or for a batch, as its `BatchRewardManager` does. Both
  `style = "verl"` and `"verl_batch"` accept both, and the parameters show the form. verl's batch is all responses of a
  step; here a call has the responses to one prompt.
- `truncated` is True for a response that was cut by its length: its text does not show a missing end.
- For chats `prompts`, `completions`, `prompt` and `completion` are lists of messages in TRL's and verifiers'
  conventions. Texts are decoded without special tokens. `queries` are prompt and response in one text.
- A text of a chat is rendered by the actor's template. What has a template of its own reads `messages`.
- `trainer_state` has `global_step`, `max_steps` (updates of the policy), `epoch`, `iteration` (iterations that are
  done), `is_local_process_zero` and `is_world_process_zero`. Any other attribute is an error.
- `ground_truth` and `ground_truths` of verl are `reward_model.ground_truth` as the data has it, where it has that
  column.

## Results

| result | meaning |
|---|---|
| a number, true or false | score |
| None, NaN | the function does not apply to the response |
| a mapping with `score` | its other numbers are curves, `reward/NAME/KEY`; other values are columns, see below |
| a list, tuple, array or tensor | one of the above for each response |
| a mapping with `rewards` (or `scores`) and `extra_logs` | lists of scores, and of curves or columns |

The keys `mean`, `unscorable` and `failed` are the run's own: a function's numbers of these names begin with `logged_`.

TRL's functions may also call `log_metric(name, value)` and `log_extra(column, values)`:

- `log_metric`: the mean over all values that the calls of an iteration logged is the curve `reward/FUNCTION/NAME`. The
  calls of evaluations, of ReMax's greedy responses, and calls that failed count nothing.
- `log_extra`: one value for each response of the call, in one or several pieces. `samples/ITERATION.jsonl` has the
  columns in `extra`, for the first rows of validation and test; `report.html` shows those of the test rows. Where two
  functions name one column, the second is `FUNCTION/COLUMN`. A function without a parameter of this name is not called
  for samples.
- Texts and other values that `reward.metric` returns next to its scores, such as verl's `pred`, are such columns too.
- What is not kept is said when the run starts. A server gets none of the three.

A function may be `async`: calls for several prompts then wait at the same time.

## Weights, and responses without a score

The score of a response is the weighted sum over the functions that apply to it, as in TRL. A response has no score if
no function with a weight other than 0 applies to it, or if a call exceeded its deadline or ended its process. A
response without a score has no part in its group, and its advantage is 0.

## One reward in every convention

The six give equal scores, which the test checks on texts and on chats.

"""


def test_page_shows_the_conventions_as_they_are() -> None:
    """With `REWRITE` in the environment it is written."""
    import os

    if "REWRITE" in os.environ:
        PAGE.write_text(write_page())
    assert PAGE.read_text() == write_page(), "run this test with REWRITE=1"
