"""A model directory in Hugging Face format, copied out of a run or made of an adapter."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_algorithms.atomic_files import describe_refusal, refuse_unwritable, write_text
from hf_algorithms.models.model_source import ModelSource, find_model_source, holding_model
from hf_engine import merge_adapter
from hf_engine.model_directory import is_adapter
from hf_protocols import ConfigError
from hf_protocols.paths import read_path
from hf_protocols.validation import Checks, show

__all__ = ["ExportResult", "export", "state_padding"]

_STEPS = "steps"
_check = Checks(ConfigError)


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """The directory that `export` wrote; it stands for it where a path is wanted.

    Attributes:
        model_dir: the directory.
        run_dir: directory of the run that the model is from; None for a model alone.
        summary: the model as it was given, the iteration of a run, and whether an adapter was merged.
        metrics: objects of the run's `metrics.jsonl`, those of the model's iterations; none for a model alone.
    """

    model_dir: Path
    run_dir: Path | None
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]

    def __fspath__(self) -> str:
        return str(self.model_dir)


def export(
    model: str | os.PathLike[str] | None = None,
    *,
    output_dir: str | os.PathLike[str],
    iteration: int | None = None,
    merge: bool = False,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    set: Mapping[str, Any] | None = None,
) -> ExportResult:
    """Copies the model of a run, or a model directory, to a new directory that `from_pretrained` loads.

    Args:
        model: directory of a run or its result, directory in Hugging Face format, adapter directory, or hub name; left
            out, the run that `config` describes.
        output_dir: a directory that is absent or empty.
        iteration: of a run: the model that it had after this iteration; None: the last one that it committed.
        merge: adds an adapter to the weights of its base. A model without an adapter stays as it is.
        config: a TOML file or its sections: of its run, if `model` is left out.
        set: values by `section.key`, such as another `run.output_dir`; they come last.

    Raises:
        ConfigError: for a model that is absent or damaged, an adapter without its base, and an iteration of which the
            run holds no model.
    """
    _check.kind("output_dir", output_dir, str | os.PathLike, "a path")
    _check.kind("merge", merge, bool, "True or False")
    folder, label = Path(read_path("output_dir", os.fspath(output_dir))), f"output_dir = {show(os.fspath(output_dir))}"
    refuse_unwritable(folder.parent, label)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{label}: is not an empty directory. Choose another one")
    source = find_model_source(model, config=config, changes=set or {})
    given = source.path if iteration is None else _find_iteration(source, iteration)
    fresh = folder.absolute().with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        with holding_model(source, given) as path:
            _export(path, fresh, source.label, merge=merge)
        if folder.exists():
            folder.rmdir()
        fresh.replace(folder)
    except OSError as error:
        raise ConfigError(
            f"{label}: cannot be written: {describe_refusal(error)}. Make room there, or choose another place"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    last = _read_last_iteration(source.run) if iteration is None and source.run is not None else iteration
    return ExportResult(
        model_dir=folder,
        run_dir=source.run,
        summary={"model": source.name, "iteration": last, "merged": merge and is_adapter(given)},
        metrics=[] if source.run is None else _read_metrics(source.run, last),
    )


def _read_metrics(run: Path, last: int | None) -> list[dict[str, Any]]:
    """Rows of a run up to an iteration, those that are whole lines of JSON."""
    found = []
    with suppress(OSError, ValueError):
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if isinstance(row, dict) and (last is None or row.get("iteration", 0) <= last):
                found.append(row)
    return found


def _export(path: str, target: Path, label: str, *, merge: bool) -> None:
    """Writes a model, or an adapter with or without its base, to a directory that is absent."""
    from hf_engine.model_directory import find_model, read_adapter, read_model_directory

    if is_adapter(path) and merge:
        merge_adapter(path, target, label=label)
    elif is_adapter(path):
        # Refuses one that is damaged, or whose base is not there.
        read_adapter(path, label=label, needs_weights=False).read_tensors()
        _copy(Path(path), target)
    else:
        found = find_model(path, label=label)
        read_model_directory(found, label=label)
        _copy(found, target)


def _copy(source: Path, target: Path) -> None:
    """Copies files, and what links point to; hidden ones are nobody's model."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*", "*.part"))


def _find_iteration(source: ModelSource, iteration: int) -> str:
    """The directory with the model of one iteration."""
    if source.run is None:
        raise ConfigError(f"iteration = {iteration}: {source.label} is not a run. Leave the iteration out")
    found = {int(each.name): each for each in _list_folders(source.run / _STEPS) if each.name.isdecimal()}
    last = _read_last_iteration(source.run)
    if iteration == last:
        return source.path
    for folder in (found[iteration], found[iteration] / "model") if iteration in found else ():
        if (folder / "config.json").is_file() or is_adapter(folder):
            return str(folder)
    models = [number for number, folder in found.items() if _has_model(folder)]
    known = sorted({*models, *([] if last is None else [last])})
    if not known:
        raise ConfigError(f"iteration = {iteration}: {source.label} holds no model of any iteration. Leave it out")
    raise ConfigError(
        f"iteration = {iteration}: {source.label} has no model of this iteration, but those of "
        f"{', '.join(map(str, known))}. Choose one of them, or leave the iteration out"
    )


def _has_model(folder: Path) -> bool:
    return any((each / "config.json").is_file() or is_adapter(each) for each in (folder, folder / "model"))


def _list_folders(path: Path) -> Iterable[Path]:
    return (each for each in path.iterdir() if each.is_dir()) if path.is_dir() else ()


def _read_last_iteration(run: Path) -> int | None:
    """The iteration of `model/`, as `summary.json` says; None where it cannot be read."""
    try:
        number = json.loads((run / "summary.json").read_text(encoding="utf-8")).get("model_iteration")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return number if type(number) is int else None


def state_padding(path: Path, tokenizer: Any) -> None:
    """States the padding token of the tokenizer where the model names none: transformers needs it to score batches.

    Not one that ends responses: the score would be read before it.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    pad = tokenizer.pad_token_id
    if config.get("pad_token_id") is None and pad is not None and pad != tokenizer.eos_token_id:
        write_text(path, json.dumps(config | {"pad_token_id": pad}, indent=2, sort_keys=True) + "\n")
