"""Rows, functions and sections that a program or a notebook passes in place of files.

They are turned into the values that a configuration file would have. Rows and functions of a run are written next to
the run's directory, in `OUTPUT.inputs`, so that its `config.toml` runs again. Those of `generate` and `evaluate` are
written into a folder that is removed when these functions return.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from keyword import iskeyword
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeGuard

from hf_algorithms.held_functions import hold, release
from hf_algorithms.users_code import describe_raised, pickle_with_module
from hf_algorithms.value_names import rewording
from hf_protocols.errors import ConfigError, DataError
from hf_protocols.foreign_code import Caught, raised_as
from hf_protocols.validation import show

__all__ = ["NAME", "InputFolder", "are_texts", "check_name", "temporary_inputs"]

NAME = re.compile(r"[\w.-]+")
"""Names of sets and metrics."""
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Places of a class's name where a word begins."""

_SETS = ("train", "validation", "test")
_DATA = "data"
"""Name of rows that are passed without one."""
_COLUMNS = ("prompt", "messages", "question", "answer", "chosen", "rejected", "text")
"""Names that are columns of a mapping of columns to lists, rather than names of sets."""
_LOADER = '''"""Loads a function that was passed from a program."""

from pathlib import Path

import cloudpickle

{name} = cloudpickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
# SHA-256 of the function: {digest}
'''


class InputFolder:
    """Files of one run's inputs.

    Args:
        path: the folder; it is made where something is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._missing = [each for each in (path, *path.parents) if not each.exists()]
        self._held: list[str] = []
        self._names: dict[str, tuple[str, str]] = {}
        """By key of a configuration: its value, and the argument that it stands for."""

    def close(self, *, is_used: bool) -> None:
        """Drops the functions that this process holds, and removes the folder of a run that was refused.

        Args:
            is_used: True if the run began; otherwise the folder is removed, unless an earlier run has left it.
        """
        for reference in self._held:
            release(reference)
        if not is_used and self.path in self._missing:
            shutil.rmtree(self.path, ignore_errors=True)
            for folder in self._missing[1:]:
                with suppress(OSError):
                    folder.rmdir()

    def name_arguments(self, text: str) -> str:
        """Returns a message with the arguments that were written to this folder in place of their files."""
        for key, (file, name) in self._names.items():
            path, shown = re.escape(file), re.escape(show(file))  # a long path is cut where it is shown
            pattern = rf"{re.escape(key)} = (?:{path}|{shown})|{path}(?=\W|$)"
            text = re.sub(pattern, name.replace("\\", r"\\"), text)
            text = text.replace(f"{name}, line ", f"{name}, row ")
        return text

    @property
    def holds_functions(self) -> bool:
        """True if this process holds a function that cannot be pickled, so that no other process can call it."""
        return bool(self._held)

    def name_data(self, dataset: Any, *, text_column: str | None = None) -> dict[str, Any]:
        """Returns keys of `[data]` for what was passed as a data set.

        Args:
            dataset: a path, a hub name, or rows: a list of mappings, or a `datasets.Dataset`. Or a mapping of
                `train`, `validation` and `test` to any of these, as a `datasets.DatasetDict` is.
            text_column: column of a row that is a text alone; None: such rows are refused.

        Raises:
            ConfigError: for something else, such as a generator, which can be read once.
            DataError: for a row that is not a mapping, or that JSON cannot hold.
        """
        if not isinstance(dataset, Mapping):
            return {"train": self.name_rows(dataset, "train", text_column=text_column)}
        unknown = [name for name in dataset if name not in _SETS]
        if unknown or "train" not in dataset:
            raise ConfigError(
                f"dataset: a mapping with the keys {', '.join(map(str, dataset)) or 'none'}. Pass rows as a list, or "
                f"a mapping of train, and of {' and '.join(_SETS[1:])} if you have them"
            )
        return {name: self.name_rows(rows, name, text_column=text_column) for name, rows in dataset.items()}

    def name_reward(self, reward: Any, *, is_in_process: bool) -> dict[str, Any]:
        """Returns keys of `[reward]` for what was passed as a reward.

        Args:
            reward: a function, or `module:function`, `file.py:function` or a URL; or several of them in a list or by
                name, whose sum counts.
            is_in_process: a function that cannot be pickled may run in this process.

        Raises:
            ConfigError: for a function that cannot be pickled, where workers are other processes.
        """
        if isinstance(reward, str) or callable(reward):
            name, holds = self._name_function(reward, "reward", kind="reward", is_in_process=is_in_process)
            self._names["reward.function"] = (name, "reward")
            return {"function": name} | ({"processes": 0} if holds else {})
        given = reward
        if isinstance(reward, Sequence):
            reward = _name_each(reward)
        if not isinstance(reward, Mapping) or not reward:
            what = "is empty" if reward in ({}, []) else "is not a function"
            raise ConfigError(f"reward = {show(given)}: {what}. Pass a function, its name, or a list of these")
        named = {
            key: self._name_function(each, key, kind="reward", is_in_process=is_in_process)
            for key, each in _by_texts(reward, "reward").items()
        }
        for number, (key, (name, _)) in enumerate(named.items()):
            self._names[f"reward.functions[{number}].function"] = (name, f"reward {key!r}")
        keys: dict[str, Any] = {"functions": [{"name": key, "function": name} for key, (name, _) in named.items()]}
        return keys | ({"processes": 0} if any(holds for _, holds in named.values()) else {})

    def name_values(self, body: dict[str, Any], *, is_in_process: bool) -> None:
        """Replaces functions and rows that are values of a configuration: `reward.metric`, and sets of `evaluation`.

        Args:
            body: the sections, which are changed.
            is_in_process: as for `name_reward`.

        Raises:
            ConfigError, DataError: as `name_reward` and `name_data` do.
        """
        reward = body.get("reward")
        if isinstance(reward, dict) and callable(reward.get("metric")):
            name = _find_own_name(reward["metric"]) or "metric"
            reward["metric"], holds = self._name_function(
                reward["metric"], name, kind="metric", is_in_process=is_in_process
            )
            self._names["reward.metric"] = (reward["metric"], f"metric {name!r}")
            reward.update({"processes": 0} if holds else {})
        sets = body.get("evaluation")
        for number, given in enumerate(sets if isinstance(sets, list) else []):
            if isinstance(given, dict) and not _is_path(given.get("data", "")):
                label = f"evaluation[{number}].data"
                given["data"] = self.name_rows(given["data"], f"evaluation_{number}", label=label, key=label)
            metrics: Any = given.get("metrics") if isinstance(given, dict) else None
            for place, metric in enumerate(metrics if isinstance(metrics, list) else []):
                if callable(metric):
                    name = _find_name(metric, place + 1)
                    metrics[place], holds = self._name_function(
                        metric, name, kind="metric", is_in_process=is_in_process
                    )
                    if holds:
                        body.setdefault("reward", {})["processes"] = 0

    def name_sets(self, data: Any) -> Any:
        """Returns the sets of an evaluation as paths, for what was passed as its data.

        Args:
            data: rows, which become the set `data`; a mapping of names to rows or paths; or paths, which stay as they
                are, in a list too.

        Raises:
            ConfigError, DataError: as `name_data` does.
        """
        if isinstance(data, Mapping):
            columns = [str(name) for name, rows in data.items() if str(name) in _COLUMNS and not _has_rows(rows)]
            if columns or not data:
                what = f"a mapping of the columns {', '.join(columns)}" if columns else "an empty mapping"
                raise ConfigError(
                    f"data: is {what}. Pass rows as a list of mappings, or a mapping of set names to rows"
                )
            for name in (sets := _by_texts(data, "data")):
                check_name(name, f"data {name!r}")
            return {
                name: self.name_rows(rows, name, label=f"data {name!r}", text_column="prompt")
                for name, rows in sets.items()
            }
        paths = data if isinstance(data, list | tuple) else [data]
        if data is None or (paths and all(map(_is_path, paths))):
            return data
        return {_DATA: self.name_rows(data, _DATA, label=_DATA, text_column="prompt")}

    def name_metrics(self, metrics: Any) -> dict[str, str] | list[str]:
        """Returns metric functions as a configuration names them; names alone stay a list.

        Args:
            metrics: a function or its name; or several in a list, or by the name of the metric.

        Raises:
            ConfigError: for something that is neither.
        """
        if isinstance(metrics, str) or callable(metrics):
            metrics = [metrics]
        if isinstance(metrics, Sequence):
            if all(isinstance(each, str) for each in metrics):
                return list(metrics)
            metrics = _name_each(metrics)
        if not isinstance(metrics, Mapping):
            raise ConfigError(f"metrics = {show(metrics)}: is not a function. Pass one, its name, or a list of these")
        return {
            name: self._name_function(each, name, kind="metric", is_in_process=True)[0]
            for name, each in _by_texts(metrics, "metrics").items()
        }

    def name_rows(self, rows: Any, name: str, *, label: str = "", key: str = "", text_column: str | None = None) -> str:
        """Returns the path of rows, which are written unless they are a path.

        Args:
            rows: a path, a hub name, or rows as for `name_data`.
            name: of the data set.
            label: beginning of messages; by default the data set by its name.
            key: of the configuration that has the path; by default that of the data set.
            text_column: as for `name_data`.

        Raises:
            ConfigError, DataError: as `name_data` does.
        """
        if _is_path(rows):
            return fspath(rows)
        label = label or f"dataset {name!r}"
        _refuse_other_rows(rows, label)
        file, found = self.path / f"{name}.jsonl", _read_rows(rows, label)
        self.path.mkdir(parents=True, exist_ok=True)
        with file.open("w", encoding="utf-8") as lines:
            for number, row in enumerate(found, start=1):
                lines.write(_write_row(row, f"{label}, row {number}", text_column) + "\n")
        self._names[key or f"data.{name}"] = (str(file), label)
        return str(file)

    def _name_function(self, function: Any, name: str, *, kind: str, is_in_process: bool) -> tuple[str, bool]:
        """The function as a configuration names it; and whether this process holds it."""
        if isinstance(function, str):
            return function, False
        if not callable(function):
            raise ConfigError(f"{kind} {name!r} = {show(function)}: is not a function. Pass one, or its name")
        stem = "".join(each if each.isalnum() else "_" for each in name)
        with Caught() as caught:  # pickling calls a user's code
            pickled = pickle_with_module(function, function)
        if caught.error is not None:
            if not is_in_process:
                raise ConfigError(
                    f"{kind} {name!r}: cannot be pickled for workers on Ray ({type(caught.error).__name__}: "
                    f"{caught.error}). Define it in a module, or set run.executor to 'in_process'"
                ) from caught.error
            self._held.append(hold(function, stem))
            return self._held[-1], True
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / f"passed_{stem}.py"
        file.with_suffix(".pkl").write_bytes(pickled)
        digest = hashlib.sha256(pickled).hexdigest()  # another digest is another file, so that it is loaded again
        own = _find_own_name(function)
        name = own or (name if name.isidentifier() and not iskeyword(name) else "function")
        file.write_text(_LOADER.format(name=name, digest=digest), encoding="utf-8")
        return f"{file}:{name}", False


def check_name(name: str, label: str) -> str:
    """Returns the name of a set or a metric, which is part of a file's name.

    Raises:
        ConfigError: for one with other characters, such as those of a path.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{label}: the name {show(name)} must consist of letters, digits, hyphens, dots and underscores"
        )
    return name


@contextmanager
def temporary_inputs() -> Iterator[InputFolder]:
    """Yields a folder that goes with its inputs when the block ends; errors name what was passed, not its files."""
    with TemporaryDirectory(prefix="hybridflow-") as folder:
        inputs = InputFolder(Path(folder))
        file = re.compile(rf"{re.escape(folder)}/(?:passed_)?([\w.-]+)\.\w+(:\w+)?")
        try:
            with rewording(lambda text: file.sub(r"\1", text)):
                yield inputs
        finally:
            inputs.close(is_used=True)


def _name_each(functions: Sequence[Any]) -> dict[str, Any]:
    """The functions by their names; a later one of the same name has a number in it."""
    found: dict[str, Any] = {}
    for number, function in enumerate(functions, start=1):
        name = _find_name(function, number)
        numbered = (f"{name}_{other}" for other in range(number, number + len(functions)))
        found[next(each for each in (name, *numbered) if each not in found)] = function
    return found


def _by_texts(given: Mapping[Any, Any], label: str) -> dict[str, Any]:
    """The values by their names as texts, of which no two may be equal."""
    found = {str(name): value for name, value in given.items()}
    if len(found) < len(given):
        texts = [str(name) for name in given]
        twice = next(name for name in texts if texts.count(name) > 1)
        raise ConfigError(f"{label}: two of its names are {show(twice)} as texts. Rename one")
    return found


def _find_name(function: Any, number: int) -> str:
    return _find_own_name(function) or f"function_{number}"


def _find_own_name(function: Any) -> str:
    """The name of a function; of another object that can be called, its class in snake case; empty for a lambda."""
    if isinstance(function, partial):
        return _find_own_name(function.func)
    name: Any = function.rpartition(":")[2] if isinstance(function, str) else getattr(function, "__name__", None)
    if not isinstance(name, str) and callable(function):
        name = _WORD_START.sub("_", type(function).__name__).lower()
    return name if isinstance(name, str) and name.isidentifier() and not iskeyword(name) else ""


def are_texts(dataset: Any) -> bool:
    """True for texts, or sets of texts by name: prompts without answers.

    Args:
        dataset: as `InputFolder.name_data` took it.
    """
    if isinstance(dataset, Mapping):
        return all(map(are_texts, dataset.values()))
    return dataset is not None and not _is_path(dataset) and all(isinstance(each, str) for each in dataset)


def _is_path(data: Any) -> TypeGuard[str | PathLike[str]]:
    return isinstance(data, str | PathLike)


def _has_rows(data: Any) -> bool:
    """True for a path and for rows that are mappings, which a column has not."""
    return _is_path(data) or not isinstance(data, list | tuple) or all(isinstance(each, Mapping) for each in data)


def _refuse_other_rows(rows: Any, label: str) -> None:
    """Refuses what is not a list of rows: iterated, a mapping or a frame yields names that would be read as prompts."""
    kind = type(rows).__name__
    if isinstance(rows, Mapping):
        raise ConfigError(
            f"{label}: is one mapping, with the keys {', '.join(map(str, rows)) or '(none)'}. Pass the rows of one set "
            "as a list of mappings"
        )
    if hasattr(rows, "columns") and hasattr(rows, "to_dict"):
        raise ConfigError(f"{label}: is a data frame. Pass its to_dict('records')")
    if isinstance(rows, bytes | bytearray | set | frozenset) or not hasattr(rows, "__iter__"):
        raise ConfigError(f"{label}: is of type {kind}. Pass a list of mappings, or a path")
    if not hasattr(rows, "__len__"):
        raise ConfigError(
            f"{label}: is of type {kind}, which has no length, and rows are read more than once. Pass list(...) of it, "
            "or a path"
        )


def _read_rows(rows: Any, label: str) -> Iterator[Any]:
    """Yields the rows of a list or of an object that may be a user's own."""
    number = 0
    with raised_as(lambda error: DataError(f"{label}: row {number + 1} cannot be read: {describe_raised(error)}")):
        if not len(rows):
            raise DataError(f"{label}: is empty. Pass at least one row")
        for number, row in enumerate(rows, start=1):  # noqa: B007 - the message names it
            yield row


def _is_chat(row: Any) -> bool:
    messages = row if isinstance(row, list | tuple) else []
    return bool(messages) and all(isinstance(each, Mapping) and "role" in each for each in messages)


def _write_row(row: Any, label: str, text_column: str | None) -> str:
    if isinstance(row, str) and text_column is not None:
        row = {text_column: row}
    if _is_chat(row):
        raise DataError(f'{label}: is a chat alone. Pass it as {{"messages": [...]}}')
    if not isinstance(row, Mapping):
        raise DataError(
            f"{label}: is of type {type(row).__name__}, not a mapping of columns to values. Pass a list of mappings, "
            "such as to_dict('records') of a data frame"
        )
    try:
        text = json.dumps(dict(row), ensure_ascii=False)
        text.encode()
        return text
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(
            f"{label}: has {half!r}, half of a character, which no file can hold. Decode the text again, or drop the "
            "row"
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        wrong = next((name for name, value in row.items() if not _fits_json(value)), None)
        column = "" if wrong is None else f"column {show(wrong)}: "
        raise DataError(
            f"{label}: {column}{error}. Convert the column to texts, numbers or lists, or leave it out"
        ) from None


def _fits_json(value: Any) -> bool:
    with Caught() as caught:
        json.dumps(value)
    return caught.error is None
