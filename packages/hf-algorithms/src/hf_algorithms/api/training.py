"""`train`, `sft`, `dpo` and `reward_model` as functions, for programs and notebooks; they run what the commands run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_algorithms.api.notebook import is_notebook
from hf_algorithms.held_functions import find_lost, hold_again, release
from hf_algorithms.passed_inputs import InputFolder, are_texts
from hf_algorithms.run_lock import training_alone
from hf_algorithms.value_names import naming_parameters, refuse_doubled, rewording
from hf_protocols.errors import ConfigError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.trackers import MetricsHook

__all__ = ["TrainingResult", "dpo", "reward_model", "sft", "train"]

_TEXT_COLUMNS = {"train": "prompt", "sft": "text"}
"""Column of a row that is a text alone, by command."""
_SCORERS = ("function", "functions")
"""Keys of `[reward]` that a passed reward replaces."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The files and numbers of a run that has ended.

    Attributes:
        summary: contents of `summary.json`.
        metrics: objects of `metrics.jsonl`, one for each iteration.
        run_dir: directory of the run.
        model_dir: directory of the trained model.

    It stands for its run where a path is wanted: `evaluate(result)`, `train(resume=result)`.
    """

    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    run_dir: Path
    model_dir: Path

    def __fspath__(self) -> str:
        return str(self.run_dir)


def train(
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dataset: Any = None,
    reward: Any = None,
    *,
    algorithm: str | Mapping[str, Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    set: Mapping[str, Any] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    resume: str | os.PathLike[str] | None = None,
    allow_changed: Sequence[str] = (),
    on_metrics: MetricsHook | None = None,
) -> TrainingResult:
    """Runs an algorithm of `hybridflow train`.

    Args:
        model: directory or hub name, or the keys of `[model]`.
        dataset: a path, a hub name, a list of mappings or of prompts, or a `datasets.Dataset`; or these by `train`,
            `validation` and `test`. Rows are written to `OUTPUT.inputs`.
        reward: a function, or its name as `module:function`, `file.py:function` or a URL; or a list of these. A
            function that cannot be pickled runs in this process, without a deadline.
        algorithm: name that `hybridflow algorithms` lists, `file.py:RECIPE`, or the keys of `[algorithm]`; left out:
            that of `config`, else `ppo`.
        config: a TOML file or its sections; the arguments above take precedence over it.
        set: values by `section.key`, such as `{"rollout.batch_size": 32}`; they are applied last. A key that another
            argument stands for, such as `run.output_dir`, is given once.
        output_dir: `run.output_dir`; by default a new folder in `runs`.
        overwrite: replaces an earlier run there.
        resume: directory of a run to go on with; then only `set`, `allow_changed` and `on_metrics` are given.
        allow_changed: keys of `set` that change the resumed run, and are allowed to.
        on_metrics: called with each iteration and its metrics.

    Raises:
        HybridFlowError: for every failure that a user can cause.
    """
    given = _Given(
        model=model,
        dataset=dataset,
        reward=reward,
        algorithm=algorithm,
        config=config,
        changes=set or {},
        resume=resume,
        allowed=allow_changed,
    )
    return _run("train", given, output_dir, overwrite=overwrite, on_metrics=on_metrics)


def sft(
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dataset: Any = None,
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    set: Mapping[str, Any] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    resume: str | os.PathLike[str] | None = None,
    allow_changed: Sequence[str] = (),
    on_metrics: MetricsHook | None = None,
) -> TrainingResult:
    """Fine-tunes a model on answers, as `hybridflow sft` does; arguments are those of `train`.

    Raises:
        HybridFlowError: for every failure that a user can cause.
    """
    given = _Given(model=model, dataset=dataset, config=config, changes=set or {}, resume=resume, allowed=allow_changed)
    return _run("sft", given, output_dir, overwrite=overwrite, on_metrics=on_metrics)


def dpo(
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dataset: Any = None,
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    set: Mapping[str, Any] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    resume: str | os.PathLike[str] | None = None,
    allow_changed: Sequence[str] = (),
    on_metrics: MetricsHook | None = None,
) -> TrainingResult:
    """Trains a policy on preference pairs, as `hybridflow dpo` does; arguments are those of `train`.

    Raises:
        HybridFlowError: for every failure that a user can cause.
    """
    given = _Given(model=model, dataset=dataset, config=config, changes=set or {}, resume=resume, allowed=allow_changed)
    return _run("dpo", given, output_dir, overwrite=overwrite, on_metrics=on_metrics)


def reward_model(
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dataset: Any = None,
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    set: Mapping[str, Any] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    resume: str | os.PathLike[str] | None = None,
    allow_changed: Sequence[str] = (),
    on_metrics: MetricsHook | None = None,
) -> TrainingResult:
    """Trains a model that scores, as `hybridflow reward-model` does; arguments are those of `train`.

    Raises:
        HybridFlowError: for every failure that a user can cause.
    """
    given = _Given(model=model, dataset=dataset, config=config, changes=set or {}, resume=resume, allowed=allow_changed)
    return _run("reward-model", given, output_dir, overwrite=overwrite, on_metrics=on_metrics)


@dataclass(frozen=True, kw_only=True)
class _Given:
    """Arguments that make a configuration."""

    model: Any
    dataset: Any
    config: Any
    changes: Mapping[str, Any]
    reward: Any = None
    algorithm: Any = None
    resume: str | os.PathLike[str] | None = None
    allowed: Sequence[str] = ()

    def __post_init__(self) -> None:
        _check("model", self.model, (str, os.PathLike, Mapping), "a path, a hub name or the keys of [model]")
        _check("algorithm", self.algorithm, (str, Mapping), "a name, file.py:RECIPE or the keys of [algorithm]")
        _check("set", self.changes, Mapping, "a mapping of section.key to values")
        _check("resume", self.resume, (str, os.PathLike), "the directory of a run")
        allowed: Any = self.allowed
        if isinstance(allowed, str) or not isinstance(allowed, Collection):
            raise ConfigError(f"allow_changed = {show(allowed)}: is not a list of keys. Pass ['section.key']")
        if allowed and self.resume is None:
            raise ConfigError(
                f"allow_changed = {show(allowed)}: belongs to resume, which is not given. Leave it out, or pass resume"
            )

    def refuse_doubled(self, **others: Any) -> None:
        """Refuses keys of `set` that an argument stands for; `others` are arguments that this object has not."""
        sets = self.dataset if isinstance(self.dataset, Mapping) else ("train",)
        keys = {
            "output_dir": ("run.output_dir",),
            "on_metrics": ("run.on_metrics",),
            "dataset": [f"data.{name}" for name in sets],
            "reward": [f"reward.{name}" for name in _SCORERS],
        }
        for name, value in {**others, "dataset": self.dataset, "reward": self.reward}.items():
            refuse_doubled(self.changes, name, value, keys[name])

    def refuse_missing(self, body: Mapping[str, Any]) -> None:
        """Refuses sections without rows or a model, by the arguments that pass them."""
        data, model = body.get("data", {}), body.get("model", {})
        where = "" if self.config is None else ", or set {} in config"
        if self.dataset is None and "train" not in data:
            raise ConfigError(f"dataset is missing. Pass rows or a path{where.format('data.train')}")
        if isinstance(self.model, Mapping) and not ("path" in model or "tokenizer" in model):
            raise ConfigError(
                f"model: has {'the keys ' + ', '.join(map(str, self.model)) if self.model else 'no keys'}. Give path, "
                "of a model directory, or tokenizer, for a fresh model"
            )
        if not ("path" in model or "tokenizer" in model):
            raise ConfigError(f"model is missing. Pass a directory or a hub name{where.format('model.path')}")

    def search_path(self) -> tuple[str, ...]:
        """Folders where a user's own modules are."""
        is_file = isinstance(self.config, str | os.PathLike)
        own = (str(Path(self.config).resolve().parent),) if is_file else ()
        return (os.getcwd(), *own)

    def sections(self, command: str) -> dict[str, Any]:
        """Sections without data and reward, of which some may be written to files."""
        from hf_algorithms.config import build_new, read_sections, set_key, with_plain_scalars

        named = {"algorithm": self.algorithm} if isinstance(self.algorithm, Mapping) else self._name_algorithm()
        sections = {} if self.model is None else {"model": self._model_keys()}
        if self.config is not None:
            body = read_sections(self.config)
        else:
            chosen = dict(named.get("algorithm", {})) if command == "train" else {"name": command.replace("-", "_")}
            name = {key: chosen[key] for key in ("name", "recipe") if key in chosen}
            body = build_new(name, None, None, self.search_path())
            body = {section: keys for section, keys in body.items() if section not in ("model", "data")}
        for section, keys in {**named, **sections}.items():
            body[section] = {**body.get(section, {}), **with_plain_scalars(keys)}
        for key, value in self.changes.items():
            set_key(body, str(key), value, label="set")
        return body

    def _name_algorithm(self) -> dict[str, Any]:
        if self.algorithm is None:
            return {}
        return {"algorithm": {"recipe" if ":" in self.algorithm else "name": self.algorithm}}

    def _model_keys(self) -> dict[str, Any]:
        return dict(self.model) if isinstance(self.model, Mapping) else {"path": os.fspath(self.model)}


def _check(name: str, value: object, kinds: Any, wanted: str) -> None:
    if value is not None and not isinstance(value, kinds):
        shown = " ".join(show(value).split())  # a model is shown in many lines
        raise ConfigError(f"{name} = {shown}: is not {wanted}")


@naming_parameters()
@training_alone()
def _run(
    command: str,
    given: _Given,
    output_dir: str | os.PathLike[str] | None,
    *,
    overwrite: bool,
    on_metrics: MetricsHook | None,
) -> TrainingResult:
    from hf_algorithms.config import parse_config
    from hf_algorithms.run.any_run import run_recipe
    from hf_algorithms.run_directory import RunDirectory

    _check("on_metrics", on_metrics, Callable, "a function of an iteration and its metrics")
    _check("overwrite", overwrite, bool, "True or False")
    if given.resume is not None:
        return _resume(command, given.resume, given, output_dir, overwrite=overwrite, on_metrics=on_metrics)
    _check("output_dir", output_dir, (str, os.PathLike), "a path")
    given.refuse_doubled(output_dir=output_dir, on_metrics=on_metrics)
    body = given.sections(command)
    given.refuse_missing(body)
    run = body.setdefault("run", {})
    if output_dir is not None:
        run["output_dir"] = os.fspath(output_dir)
    run.setdefault("output_dir", str(_choose_folder(command)))
    _check("run.output_dir", run["output_dir"], str, "a path")
    if "executor" not in run and is_notebook():
        run["executor"] = "in_process"
    directory = RunDirectory(Path(run["output_dir"]).expanduser(), overwrite=overwrite)
    inputs = InputFolder(directory.path.with_name(f"{directory.path.name}.inputs"))

    def name_arguments(text: str) -> str:
        return text if directory.has_begun else inputs.name_arguments(text)  # files of a run that began stay

    try:
        with rewording(name_arguments):
            if given.dataset is not None:
                body["data"] = {
                    **body.get("data", {}),
                    **inputs.name_data(given.dataset, text_column=_TEXT_COLUMNS.get(command)),
                }
            is_here = run.get("executor") == "in_process"
            inputs.name_values(body, is_in_process=is_here)
            if given.reward is not None:
                kept = {key: value for key, value in body.get("reward", {}).items() if key not in _SCORERS}
                body["reward"] = {**kept, **inputs.name_reward(given.reward, is_in_process=is_here)}
                if are_texts(given.dataset) and "function" in body["reward"]:
                    # Without answers the reward alone says how good a response is.
                    body["reward"].setdefault("metric", body["reward"]["function"])
            config = parse_config(body, search_path=given.search_path(), command=command)
            summary = run_recipe(config, directory, search_path=given.search_path(), on_metrics=on_metrics)
    finally:
        inputs.close(is_used=directory.has_begun)
    return _read_result(directory.path, summary)


def _resume(
    command: str,
    run: str | os.PathLike[str],
    given: _Given,
    output_dir: str | os.PathLike[str] | None,
    *,
    overwrite: bool,
    on_metrics: MetricsHook | None,
) -> TrainingResult:
    from hf_algorithms.checkpoints import open_resumption
    from hf_algorithms.run.any_run import run_recipe

    values = {name: getattr(given, name) for name in ("model", "dataset", "algorithm", "config")}
    values |= {"output_dir": output_dir, "overwrite": overwrite or None}
    held = _find_lost_reward(Path(run).expanduser(), given.reward)
    values["reward"] = given.reward if held is None else None
    if named := [name for name, value in values.items() if value is not None]:
        raise ConfigError(f"resume={show(os.fspath(run))}: takes what the run was started with. Leave out {named[0]}")
    with ExitStack() as stack:
        if held is not None:
            hold_again(held, given.reward)
            stack.callback(release, held)
        found = open_resumption(Path(run).expanduser(), given.changes, given.allowed, command=command)
        path = found.directory.path
        if found.is_finished:
            return _read_result(path)
        summary = run_recipe(
            found.config,
            found.directory,
            plan=found.plan,
            search_path=found.search_path,
            on_metrics=on_metrics,
            resume=found,
        )
    return _read_result(path, summary)


def _find_lost_reward(run: Path, reward: Any) -> str | None:
    """The reference of a reward that could not be pickled and that is passed again; None for another run or reward."""
    from hf_algorithms.checkpoints.origin import read_origin
    from hf_algorithms.run_directory import ORIGIN

    if not callable(reward) or not (run / ORIGIN).is_file():
        return None
    return find_lost(read_origin(run).sections).get("reward.function")


def _read_result(run: Path, summary: dict[str, Any] | None = None) -> TrainingResult:
    """Returns the result of a run that is over; without a summary, that of its file."""
    from hf_algorithms.checkpoints import CheckpointError

    try:
        if summary is None:
            summary = dict(json.loads((run / "summary.json").read_text(encoding="utf-8")))
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{run}: its summary.json or metrics.jsonl cannot be read ({error})") from None
    return TrainingResult(summary=summary, metrics=metrics, run_dir=run, model_dir=run / "model")


def _choose_folder(command: str) -> Path:
    """The first folder that no run has used, such as `runs/sft-2`."""
    number = 1
    while (path := Path("runs") / f"{command}-{number}").exists():
        number += 1
    return path
