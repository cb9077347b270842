"""Scores of any model on named sets of rows, by metric functions."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_algorithms.atomic_files import refuse_unwritable, write_text, writing_lines
from hf_algorithms.evaluation.generation import (
    NO_OPTIONS,
    Model,
    Policy,
    choose_drawing,
    read_policy,
    read_prompts,
)
from hf_algorithms.evaluation.responses import ResponseScorer, name_metrics
from hf_algorithms.evaluation.sets import SetResult, evaluate_set
from hf_algorithms.json_text import format_json
from hf_algorithms.passed_inputs import NAME, check_name, temporary_inputs
from hf_algorithms.preflight.reward_functions import check_metric
from hf_algorithms.value_names import naming_arguments
from hf_protocols import ConfigError
from hf_protocols.paths import read_path
from hf_protocols.validation import Checks, show

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_algorithms.data import PromptDataset
    from hf_engine import SamplingParams

__all__ = ["EvaluationResult", "evaluate"]

_RESULT = "evaluation.json"
_check = Checks(ConfigError)

Keep = Callable[[list[dict[str, Any]]], None]
Progress = Callable[[str, int, int], None]
Data = str | Path | Sequence[Any] | Mapping[str, Any]
Metric = str | Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The numbers that `evaluate` found.

    Attributes:
        model: as the user named it.
        sets: by name.
        model_dir: directory, or hub name, of the model.
        run_dir: directory of its run; None for a model alone.
        output: folder of the samples; None if they were not kept.
    """

    model: str
    sets: Mapping[str, SetResult]
    model_dir: Path
    run_dir: Path | None
    output: Path | None = None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A mapping for each set: its name as `set`, and numbers by `eval/SET/METRIC`, with `/avg@K` and `/pass@K`."""
        return [{"set": name, **each.to_metrics()} for name, each in self.sets.items()]

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of `evaluation.json`: the model, the numbers of all sets by name, and every set's."""
        numbers = {name: value for each in self.sets.values() for name, value in each.to_metrics().items()}
        sets = {name: each.to_dict() for name, each in self.sets.items()}
        return {"model": self.model, "metrics": numbers, "sets": sets}


def evaluate(
    model: Model | None = None,
    *,
    data: Data | None = None,
    metrics: Metric | Sequence[Metric] | Mapping[str, Metric] = (),
    config: str | Path | Mapping[str, Any] | None = None,
    set: Mapping[str, Any] | None = None,
    output_dir: str | Path | None = None,
    samples: int = 1,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    backend: str | None = None,
    backend_options: Mapping[str, Any] = NO_OPTIONS,
    rows: int | None = None,
    prompt_field: str | None = None,
    answer_field: str | None = None,
    chat_template: str | None = None,
    system_prompt: str | None = None,
    search_path: Sequence[str] = (),
    on_progress: Progress | None = None,
) -> EvaluationResult:
    """Generates from every row of every set and averages what metric functions score.

    A row counts if each of its responses has a score; others are counted as unscorable. With several samples a response
    is correct if its score is at least 1, and pass@k is the unbiased estimate of the chance that one of k is correct.

    Args:
        model: directory of a model, an adapter or a run, hub name, or a result; left out: the run of `config`.
        data: sets by name, each a path or rows: a list of mappings or of prompts, or a `datasets.Dataset`. Or rows
            alone, the set `data`; or paths, each with `NAME=` before it or named after its file. For a run, names of
            its own sets as well; left out, the run's test rows.
        metrics: functions like those of a reward: callables, shipped names, `module:function`, `file.py:function`, or
            URLs; one, several in a list, or by metric. For a run, its `reward.metric` by default. A function that
            cannot be pickled runs in this process, without a deadline.
        config: a TOML file or its sections, in place of the configuration of a run.
        set: values by `section.key`, which come last.
        output_dir: a folder, empty or absent, for `SET.jsonl` with every response and `evaluation.json`.
        samples: responses to each row.
        max_new_tokens: tokens of a response at most; by default the run's, else 256, or what prompts leave of a
            smaller context.
        temperature: 0 takes the likeliest tokens. By default 0 for one response and 1 for several.
        top_p: draws among the likeliest tokens that together have this probability; by default 1, all of them.
        seed: of the draws, by default 0.
        backend: name of a rollout backend; by default the run's, else `transformers`.
        backend_options: more of what the backend's `build` takes.
        rows: of each set, from the first; None: all.
        prompt_field: field of the prompt; by default the run's, else found by its name.
        answer_field: field of the answer, in the same way.
        chat_template: file or text of a chat template; by default the tokenizer's.
        system_prompt: first message of chats without one; by default the run's.
        search_path: folders where modules of metrics are looked for first; then those of the run.
        on_progress: called with the name of a set, its rows that are done and all of them.

    Raises:
        ConfigError, DataError: before anything is generated, for what cannot be used.
        RewardError: if a metric function fails, or scores no row of a set.
    """
    folder = None if output_dir is None else _check_folder(output_dir)
    how = {"backend": backend, "chat_template": chat_template, "system_prompt": system_prompt}
    fields = {"prompt_field": prompt_field, "answer_field": answer_field}
    kept = {**how, **fields, "max_new_tokens": max_new_tokens}
    drawing = choose_drawing(set, temperature=temperature, top_p=top_p, seed=seed, **kept)
    with naming_arguments(), ExitStack() as stack, temporary_inputs() as inputs:
        policy = read_policy(model, config=config, changes=set or {}, backend_options=backend_options, **how)
        functions = _name_functions(inputs.name_metrics(metrics), policy.config)
        paths = _name_sets(inputs.name_sets(data), policy.config)
        sets = {name: read_prompts(policy, path, most_rows=rows, **fields)[1] for name, path in paths.items()}
        sampling = policy.choose_sampling(drawing, *sets.values(), samples=samples, max_new_tokens=max_new_tokens)
        built = _build_scorer(policy, functions, sets, answer_field, search_path, stays=inputs.holds_functions)
        scorer = stack.enter_context(closing(built))
        found = _score_sets(policy, sets, sampling, scorer, partial(_keeping, folder, on_progress))
    source = policy.source
    result = EvaluationResult(
        model=source.name, sets=found, model_dir=Path(source.path), run_dir=source.run, output=folder
    )
    if folder is not None:
        write_text(folder / _RESULT, json.dumps(result.summary, indent=2) + "\n")
    return result


def _score_sets(
    policy: Policy,
    sets: Mapping[str, PromptDataset],
    sampling: SamplingParams,
    scorer: ResponseScorer,
    keeping: Callable[[str, int], AbstractContextManager[Keep]],
) -> dict[str, SetResult]:
    """Starts the engine and evaluates one set after the other."""
    found = {}
    with policy.started(seed=sampling.seed) as (executor, group):
        for name, prompts in sets.items():
            with keeping(name, len(prompts)) as keep:
                found[name] = evaluate_set(
                    name,
                    prompts,
                    executor=executor,
                    group=group,
                    turns=policy.turns,
                    sampling=sampling,
                    scorer=scorer,
                    keep=keep,
                )
    return found


def _build_scorer(
    policy: Policy,
    functions: Mapping[str, str],
    sets: Mapping[str, PromptDataset],
    answer_field: str | None,
    search_path: Sequence[str],
    *,
    stays: bool,
) -> ResponseScorer:
    """Checks the functions with the rows that they will score; some may have to stay in this process."""
    config, search_path = policy.config, (*search_path, *policy.source.search_path)
    name = answer_field or (config.data.answer_field if config is not None else None) or "answer"
    hosts = () if config is None else config.reward.allowed_hosts
    for function in functions.values():
        for prompts in sets.values():
            check_metric(
                "metrics",
                function,
                prompts.rows,
                source=prompts.source,
                answer_name=name,
                allowed_hosts=hosts,
                search_path=search_path,
            )
    return ResponseScorer(
        functions,
        policy.turns,
        search_path=search_path,
        answer_name=name,
        num_processes=0 if stays else None,
        allowed_hosts=hosts,
    )


def _name_functions(given: Mapping[str, str] | Sequence[str], config: Config | None) -> Mapping[str, str]:
    """The functions by the names of their metrics; without any, the run's own."""
    if isinstance(given, Mapping) and given:
        return {check_name(name, "metrics"): function for name, function in given.items()}
    return name_metrics(list(given) or _find_metric(config), key="metrics")


def _find_metric(config: Config | None) -> list[str]:
    if config is None or config.reward.evaluates_model:
        return []
    return [config.reward.metric]


def _name_sets(data: Data | None, config: Config | None) -> dict[str, str]:
    """Returns the paths by the names of the sets."""
    own = {} if config is None else _list_own_sets(config)
    if isinstance(data, Mapping):
        given = [(check_name(name, f"data = {show(dict(data))}"), os.fspath(path)) for name, path in data.items()]
    else:
        paths = [data] if isinstance(data, str | Path) else list(data or ())
        given = [_split_name(os.fspath(each), own) for each in paths]
    if not given and "test" in own:
        given = [("test", own["test"])]
    if not given:
        raise ConfigError("data is missing. Name a file, or NAME=FILE")
    sets: dict[str, str] = {}
    for name, path in given:
        if name in sets:
            raise ConfigError(
                f"data = {show(path)}: {show(sets[name])} is named {show(name)} as well. Name it NAME=FILE"
            )
        sets[name] = path
    return sets


def _list_own_sets(config: Config) -> dict[str, str]:
    """The sets of a run by name, those that are one path."""
    found = {}
    for name in ("train", "validation", "test"):
        sources = config.data.sources_of(name)
        if len(sources) == 1:
            found[name] = sources[0][0]
    return found | {each.name: each.data for each in config.evaluation}


def _split_name(text: str, own: Mapping[str, str]) -> tuple[str, str]:
    """The name and the path of `NAME=FILE`, of a file alone, or of a run's own set."""
    name, equals, path = text.partition("=")
    if equals and NAME.fullmatch(name) and path:
        return name, path
    if text in own and not Path(text).exists():
        return text, own[text]
    stem = Path(text).name.partition(".")[0]
    return "_".join(re.findall(r"[\w.-]+", stem)) or "data", text


def _check_folder(output_dir: str | Path) -> Path:
    _check.kind("output_dir", output_dir, str | os.PathLike, "a path")
    folder, label = Path(read_path("output_dir", os.fspath(output_dir))), f"output_dir = {show(os.fspath(output_dir))}"
    refuse_unwritable(folder, label)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{label}: is not empty. Choose another folder")
    return folder


@contextmanager
def _keeping(folder: Path | None, on_progress: Progress | None, name: str, num_rows: int) -> Iterator[Keep]:
    """Yields what takes the samples of some rows: it writes them, if there is a folder, and counts them."""
    done: set[int] = set()
    with ExitStack() as stack:
        write = stack.enter_context(writing_lines(folder / f"{name}.jsonl")) if folder is not None else None

        def keep(samples: list[dict[str, Any]]) -> None:
            if write is not None:
                write(format_json(each, default=str) for each in samples)
            done.update(each["row"] for each in samples)
            if on_progress is not None:
                on_progress(name, len(done), num_rows)

        yield keep
