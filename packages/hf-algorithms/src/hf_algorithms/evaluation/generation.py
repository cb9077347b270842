"""Responses of any model to the rows of a file, with any rollout backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from hf_algorithms.atomic_files import find_part, refuse_unwritable, writing_lines
from hf_algorithms.data import PromptDataset, PromptRows, TurnFormat, load_tokenizer, open_rows, read_template
from hf_algorithms.evaluation.responses import build_sampling_of, check_prompts, check_room, draw_responses
from hf_algorithms.json_text import format_json
from hf_algorithms.models.initial_model import check_vocabulary, without_progress
from hf_algorithms.models.model_source import ModelSource, find_model_source, holding_whole_model
from hf_algorithms.passed_inputs import temporary_inputs
from hf_algorithms.preflight.placement import check_backend_options
from hf_algorithms.value_names import naming_arguments, refuse_doubled
from hf_protocols import BackendError, ConfigError
from hf_protocols.paths import read_path
from hf_protocols.validation import Checks, show

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_controller import Executor, WorkerGroup
    from hf_engine import SamplingParams
    from hf_engine.model_directory import ModelDirectory
    from hf_protocols import ModelShape

__all__ = [
    "DEFAULT_NEW_TOKENS",
    "GenerationResult",
    "Model",
    "Policy",
    "choose_drawing",
    "generate",
    "read_policy",
    "read_prompts",
]

_check = Checks(ConfigError)

DEFAULT_NEW_TOKENS = 256
"""Tokens of a response at most, where the model's context has room for them."""
_SERVER = "server"
"""Its servers hold the weights that they were started with: a run's are not there."""
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_FILE = "responses.jsonl"
_KEYS = {
    **{name: f"rollout.{name}" for name in ("temperature", "top_p", "max_new_tokens", "backend")},
    **{name: f"data.{name}" for name in ("prompt_field", "answer_field", "chat_template", "system_prompt")},
    "seed": "run.seed",
}
"""Arguments, and the keys of a configuration that they stand for."""
_USUAL: Mapping[str, Any] = {"temperature": None, "top_p": 1.0, "seed": 0}

Model = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """The file that `generate` wrote.

    Attributes:
        output: the file.
        rows: prompts.
        responses: to all of them.
        tokens: of all responses.
        truncated: responses that the limit of tokens cut.
        model_dir: directory, or hub name, of the model.
        run_dir: directory of its run; None for a model alone.
    """

    output: Path
    rows: int
    responses: int
    tokens: int
    truncated: int
    model_dir: Path
    run_dir: Path | None

    @property
    def summary(self) -> dict[str, Any]:
        """The numbers by name, and the file as `output`."""
        names = ("rows", "responses", "tokens", "truncated")
        return {"output": str(self.output)} | {name: getattr(self, name) for name in names}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One mapping, of the responses: their number, mean tokens, and the share that the limit cut."""
        shares = {"tokens": self.tokens / self.responses, "truncated": self.truncated / self.responses}
        return [{"responses": self.responses} | {f"response/{name}": value for name, value in shares.items()}]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model that was read, and the way to start an engine with it.

    Attributes:
        turns: how its prompts are written.
        stop_ids: tokens at which responses end.
        files: of the model, or of an adapter's base.
        shape: sizes of the model; its context is `max_positions`.
        config: of the run that it is from; None for a model alone.
        source: the model; adapters are merged when the engine starts.
        backend: name of the rollout backend.
        options: of its `build`.
    """

    turns: TurnFormat
    stop_ids: tuple[int, ...]
    files: ModelDirectory
    shape: ModelShape
    config: Config | None
    source: ModelSource
    backend: str
    options: Mapping[str, Any]

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts at which responses end: the run's."""
        return () if self.config is None else self.config.rollout.stop

    def choose_sampling(
        self, drawing: Mapping[str, Any], *data: PromptDataset, samples: int, max_new_tokens: int | None
    ) -> SamplingParams:
        """Returns how responses to some prompts are drawn.

        Args:
            drawing: of `choose_drawing`.
            data: the prompts.
            samples: responses to each.
            max_new_tokens: limit of a response; None: the run's or 256, or what the prompts leave of it.

        Raises:
            ConfigError: for values that cannot be, and prompts that leave no room.
        """
        if max_new_tokens is None:
            usual = DEFAULT_NEW_TOKENS if self.config is None else self.config.rollout.max_new_tokens
            left = self.shape.max_positions - max(each.max_prompt_tokens for each in data)
            max_new_tokens = max(1, min(usual, left))
        how = {"samples": samples, "max_new_tokens": max_new_tokens, **drawing}
        sampling = build_sampling_of(**how, stop_ids=self.stop_ids, stop_strings=self.stop_strings)
        self._check_room(sampling, *data)
        return sampling

    def _check_room(self, sampling: SamplingParams, *data: PromptDataset) -> None:
        """Refuses prompts that leave no room for a response in the model's context, or in the engine's cache.

        Refuses prompts as well from which the engine does not generate.

        Raises:
            ConfigError: naming the row, or the option of the engine.
        """
        from hf_engine import SupportsPromptCheck, SupportsRowCheck, load_rollout_backend

        backend = load_rollout_backend(self.backend)
        for each in data:
            check_room(each, context=self.shape.max_positions, max_new_tokens=sampling.max_new_tokens)
            if issubclass(backend, SupportsPromptCheck):
                check_prompts(backend, self.files, each, max_new_tokens=sampling.max_new_tokens)
            if not issubclass(backend, SupportsRowCheck):
                continue
            tokens = each.max_prompt_tokens + sampling.max_new_tokens
            try:
                backend.check_row(self.options, self.shape, tokens=tokens, samples=sampling.n)
            except BackendError as error:
                raise ConfigError(f"backend_options.{error}") from None

    @contextmanager
    def started(self, *, seed: int) -> Iterator[tuple[Executor, WorkerGroup]]:
        """Yields an executor and a group of one rank that generates."""
        import torch

        from hf_algorithms.workers.generator import GeneratorWorker
        from hf_controller import InProcessExecutor, ResourcePool, WorkerSpec
        from hf_protocols import GenerationSpec, ParallelSpec, Topology

        with ExitStack() as stack:
            with without_progress():
                path = stack.enter_context(holding_whole_model(self.source))
            executor = stack.enter_context(InProcessExecutor())
            spec = WorkerSpec(
                worker=GeneratorWorker,
                topology=Topology(ParallelSpec(), GenerationSpec()),
                kwargs={"model": path, "rollout": self.backend, "rollout_options": dict(self.options)},
                seed=seed,
            )
            pool = ResourcePool([1], device="cuda" if torch.cuda.is_available() else "cpu", name="generation")
            with without_progress():
                group = executor.build_groups(pool, {"generator": spec})["generator"]
            yield executor, group


def read_policy(
    model: Model | None,
    *,
    config: object = None,
    changes: Mapping[str, Any] = NO_OPTIONS,
    backend: str | None = None,
    backend_options: Mapping[str, Any] = NO_OPTIONS,
    chat_template: str | None = None,
    system_prompt: str | None = None,
) -> Policy:
    """Returns a model that was checked by its files; its weights are not loaded before `Policy.started`.

    Args:
        model: directory in Hugging Face format, hub name, adapter directory, or directory of a run, whose
            configuration then has the defaults.
        config: in place of that configuration; see `find_model_source`.
        changes: of the configuration, by `section.key`.
        backend: name of a `hf_engine.rollout_backends` entry point; None: the run's, else `transformers`.
        backend_options: more of what its `build` takes.
        chat_template: file or text; None: the tokenizer's.
        system_prompt: first message of chats without one.

    Raises:
        ConfigError: for a model or a backend that cannot be used.
    """
    source = find_model_source(model, config=config, changes=changes)
    settings = source.load_config()
    if chat_template is None and settings is not None and (config is not None or "data.chat_template" in changes):
        chat_template = settings.data.chat_template  # a run's own is in its tokenizer
    if backend is None:
        backend, own = _choose_backend(settings)
        backend_options = {**own, **backend_options}
    try:
        check_backend_options(backend, backend_options, key="backend", options_key="backend_options")
    except BackendError as error:  # its kind is of what goes wrong in an engine; nothing has started
        raise ConfigError(str(error)) from error
    return _read_policy(
        source,
        settings,
        backend=backend,
        options=backend_options,
        template=chat_template,
        system_prompt=system_prompt,
    )


def _choose_backend(config: Config | None) -> tuple[str, Mapping[str, Any]]:
    if config is None or config.rollout.backend == _SERVER:
        return "transformers", NO_OPTIONS
    return config.rollout.backend, config.rollout.options


def _read_policy(
    source: ModelSource,
    config: Config | None,
    *,
    backend: str,
    options: Mapping[str, Any],
    template: str | None,
    system_prompt: str | None,
) -> Policy:
    import torch

    from hf_engine import SupportsModelCheck, derive_shape, load_rollout_backend
    from hf_engine.model_directory import (
        check_end_tokens,
        check_model_directory,
        is_adapter,
        is_hub_name,
        read_adapter,
        read_end_of_sequence_ids,
        read_model_directory,
    )

    adapter = read_adapter(source.path, label=source.label) if is_adapter(source.path) else None
    path = source.path if adapter is None else adapter.base
    files = read_model_directory(path, label=source.label, needs_weights=not is_hub_name(path))
    check_model_directory(files, head="lm")
    check_end_tokens(files)
    engine = load_rollout_backend(backend)
    if issubclass(engine, SupportsModelCheck):
        try:
            engine.check_model(files, on_cpu=not torch.cuda.is_available(), options=options)
        except BackendError as error:
            raise ConfigError(f"backend = {show(backend)}: {error}") from error
    tokenizer = load_tokenizer(str(path if adapter is None else adapter.tokenizer), label=source.label)
    check_vocabulary(tokenizer, files, label=source.label)
    data = None if config is None else config.data
    turns = TurnFormat(
        tokenizer,
        template=None if template is None else read_template(template),
        options=None if data is None else data.template_options,
        system_prompt=system_prompt if system_prompt is not None or data is None else data.system_prompt,
        label=source.label,
    )
    return Policy(
        turns=turns,
        stop_ids=turns.list_stop_ids(read_end_of_sequence_ids(files)),
        files=files,
        shape=derive_shape(files),
        config=config,
        source=source,
        backend=backend,
        options=options,
    )


def read_prompts(
    policy: Policy,
    path: str,
    *,
    prompt_field: str | None = None,
    answer_field: str | None = None,
    most_rows: int | None = None,
) -> tuple[PromptRows, PromptDataset]:
    """Returns the rows of a file and their prompts as the model's tokens.

    Args:
        policy: the model.
        path: a path, a pattern or a hub name.
        prompt_field: field of the prompt; None: the run's, else found by its name.
        answer_field: of the answer, in the same way.
        most_rows: uses that many from the first; None: all.

    Raises:
        DataError: for a file that cannot be read, and a prompt without tokens.
    """
    data = None if policy.config is None else policy.config.data
    if data is not None and prompt_field is None and answer_field is None:
        prompt_field, answer_field = data.prompt_field, data.answer_field
    rows = open_rows([(read_path("data", path), None)], prompt_field=prompt_field, answer_field=answer_field)
    if most_rows is not None:
        _check.count("rows", most_rows)
        rows = rows.first(most_rows)
    return rows, PromptDataset(rows, policy.turns.tokenizer, turns=policy.turns, source=f"data = {show(path)}")


def choose_drawing(changes: Mapping[str, Any] | None, **given: Any) -> dict[str, Any]:
    """Returns how responses are drawn: arguments, else the values that `set` has for them, else what is usual.

    Args:
        changes: what was passed as `set`.
        given: arguments that stand for keys of a configuration; None: not given.

    Raises:
        ConfigError: for a value that is given by both.
    """
    changes = changes if isinstance(changes, Mapping) else {}
    for name, value in given.items():
        refuse_doubled(changes, name, value, [_KEYS[name]])
    found = {name: changes.get(_KEYS[name]) if given[name] is None else given[name] for name in _USUAL}
    return {name: _USUAL[name] if value is None else value for name, value in found.items()}


def generate(
    model: Model | None = None,
    *,
    data: Any,
    output: str | Path | None = None,
    output_dir: str | Path | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    set: Mapping[str, Any] | None = None,
    backend: str | None = None,
    backend_options: Mapping[str, Any] = NO_OPTIONS,
    samples: int = 1,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    prompt_field: str | None = None,
    answer_field: str | None = None,
    chat_template: str | None = None,
    system_prompt: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> GenerationResult:
    """Writes responses to every row of a file as JSONL.

    Each line has the row's own columns, `prompt`, `answer` where there is one, and `responses`: a list of objects with
    `text`, `finish_reason` (`stop` or `length`) and `tokens`. Lines are added to `OUTPUT.part`, which takes its name
    when all are there: an interruption leaves what was complete.

    Args:
        model: directory of a model, an adapter or a run, hub name, or a result; left out: the run of `config`.
        data: a path, in any format that training reads; or the rows of one set: a list of mappings or of prompts, or
            a `datasets.Dataset`.
        output: a file that does not exist.
        output_dir: a folder, in which the file is `responses.jsonl`; given in place of `output`.
        config: a TOML file or its sections, in place of the configuration of a run.
        set: values by `section.key`, which come last.
        backend: name of a rollout backend; by default the run's, else `transformers`.
        backend_options: more of what the backend's `build` takes.
        samples: responses to each prompt.
        max_new_tokens: tokens of a response at most; by default the run's, else 256, or what prompts leave of a
            smaller context.
        temperature: 0 takes the likeliest tokens. By default 0 for one response and 1 for several.
        top_p: draws among the likeliest tokens that together have this probability; by default 1, all of them.
        seed: of the draws, by default 0; the same seed draws the same responses, however many rows a file has.
        prompt_field: field of the prompt; by default the run's, else found by its name.
        answer_field: field of the answer, in the same way.
        chat_template: file or text of a chat template; by default the tokenizer's.
        system_prompt: first message of chats without one; by default the run's.
        on_progress: called with the rows that are done and all rows.

    Raises:
        ConfigError, DataError: before anything is generated, for what cannot be used.
    """
    file = _check_output(_name_output(output, output_dir))
    how = {"backend": backend, "chat_template": chat_template, "system_prompt": system_prompt}
    fields = {"prompt_field": prompt_field, "answer_field": answer_field}
    kept = {**how, **fields, "max_new_tokens": max_new_tokens}
    drawing = choose_drawing(set, temperature=temperature, top_p=top_p, seed=seed, **kept)
    with naming_arguments(), temporary_inputs() as inputs:
        policy = read_policy(model, config=config, changes=set or {}, backend_options=backend_options, **how)
        path = inputs.name_rows(data, "data", label="data", text_column="prompt")
        rows, prompts = read_prompts(policy, path, prompt_field=prompt_field, answer_field=answer_field)
        sampling = policy.choose_sampling(drawing, prompts, samples=samples, max_new_tokens=max_new_tokens)
        num_tokens = num_cut = done = 0
        with policy.started(seed=sampling.seed) as (executor, group), writing_lines(file) as write:
            for indices, responses in draw_responses(executor, group, prompts, sampling, policy.turns):
                write(_format_row(rows, index, drawn) for index, drawn in zip(indices, responses, strict=True))
                num_tokens += sum(len(each.token_ids) for drawn in responses for each in drawn)
                num_cut += sum(each.finish_reason == "length" for drawn in responses for each in drawn)
                done += len(indices)
                if on_progress is not None:
                    on_progress(done, len(prompts))
    return GenerationResult(
        output=file,
        rows=done,
        responses=done * samples,
        tokens=num_tokens,
        truncated=num_cut,
        model_dir=Path(policy.source.path),
        run_dir=policy.source.run,
    )


def _name_output(output: object, output_dir: object) -> object:
    """The file that is written."""
    if (output is None) == (output_dir is None):
        given = "neither is" if output is None else "both are"
        raise ConfigError(f"output, output_dir: {given} given. Pass a file, or a folder for {_FILE}")
    if output_dir is None:
        return output
    _check.kind("output_dir", output_dir, str | os.PathLike, "a path")
    return os.path.join(cast("str", output_dir), _FILE)


def _format_row(rows: PromptRows, index: int, responses: Any) -> str:
    row = rows[index]
    columns = dict(rows.record(index)) | {"prompt": row.prompt}
    if row.answer is not None:
        columns.setdefault("answer", row.answer)
    columns["responses"] = [each.to_dict() for each in responses]
    return format_json(columns, default=str)


def _check_output(output: Any) -> Path:
    """A file that is not there, nor what an interrupted command left of it."""
    _check.kind("output", output, str | os.PathLike, "a path")
    file = Path(read_path("output", str(output)))
    if file.exists():
        raise ConfigError(f"output = {show(str(output))}: exists. Name another file, or remove it")
    if (part := find_part(file)).exists():
        raise ConfigError(
            f"output = {show(str(output))}: {part} is there, with the rows of a command that was interrupted. Move it "
            "away, or remove it"
        )
    refuse_unwritable(file.parent, f"output = {show(str(output))}")
    return file
