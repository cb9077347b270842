"""State that the program itself keeps of a run between iterations, as JSON: no weight is here."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_algorithms.atomic_files import write_text
from hf_algorithms.checkpoints.commit import CheckpointError, leaves_folder
from hf_protocols import ConfigError
from hf_protocols.validation import show

__all__ = ["PROGRAM", "Program", "load_generators", "read_program", "refuse_unkept", "save_generators", "write_program"]

PROGRAM = "program.json"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A run after an iteration.

    Attributes:
        iteration: the last one.
        state: of the recipe and its controllers, see `StepContext.state`.
        summary: numbers of `summary.json` that an uninterrupted run would have.
        totals: sums from which such numbers are computed.
        ledger: samples by state.
        data: `rows_drawn` of the training rows so far, and how many `rows` there are.
        generators: of the program's random numbers.
        sizes: bytes of the files that grow, by their names.
        best: scores of the commits that `run.keep_best` keeps, by iteration.
        skipped_draws: draws of an iteration's rows that rollbacks passed over.
    """

    iteration: int
    state: Mapping[str, Any]
    summary: Mapping[str, Any]
    totals: Mapping[str, float]
    ledger: Mapping[str, int]
    data: Mapping[str, Any]
    generators: Mapping[str, Any]
    sizes: Mapping[str, int]
    best: Mapping[str, float] = field(default_factory=dict)
    skipped_draws: int = 0


def write_program(folder: Path, program: Program) -> None:
    """Writes this state into the folder of a step.

    Raises:
        ConfigError: for a value of `context.state` that JSON does not keep as it is.
        OSError: when the file system refuses.
    """
    refuse_unkept(program.state)
    write_text(folder / PROGRAM, json.dumps(asdict(program)) + "\n")


def refuse_unkept(state: Mapping[Any, Any]) -> None:
    """Refuses what a recipe keeps between iterations and JSON does not keep as it is.

    Raises:
        ConfigError: with the key in `context.state`.
    """
    for key, value in state.items():
        if not isinstance(key, str):
            raise ConfigError(f"context.state[{show(key)}]: a checkpoint keeps values by texts. Make the key a text")
        if not _is_kept(value):
            raise ConfigError(
                f"context.state[{show(key)}] = {show(value)}: a checkpoint keeps numbers, texts, lists and tables. "
                "Store it as one of these"
            )


def read_program(folder: Path) -> Program:
    """Reads the state that was written.

    Raises:
        CheckpointError: if it cannot be read, or names a file outside the run's directory, which a resume would cut.
    """
    path = folder / PROGRAM
    try:
        program = Program(**json.loads(path.read_text(encoding="utf-8")))
        if not _is_program(program):
            raise ValueError("values of other kinds")
    except (OSError, ValueError, TypeError, RecursionError):
        raise CheckpointError(f"{path}: is not the state of a program") from None
    if outside := [name for name in program.sizes if leaves_folder(name)]:
        raise CheckpointError(f"{path}: names {show(outside[0])}, which is outside the run's directory")
    return program


def _is_program(program: Program) -> bool:
    """True if all values are of their kinds."""
    tables = (program.state, program.summary, program.data, program.generators)
    numbers = (*_values_of(program.totals), *_values_of(program.ledger), *_values_of(program.sizes))
    is_counted = all(type(each) in (int, float) and each >= 0 for each in numbers)
    are_numbers = type(program.iteration) is type(program.skipped_draws) is int and program.skipped_draws >= 0
    are_tables = all(isinstance(each, Mapping) for each in tables)
    return is_counted and are_numbers and are_tables and type(program.data.get("rows_drawn")) is int


def _values_of(table: Any) -> list[Any]:
    """Values of a table, or one that is not a number."""
    return list(table.values()) if isinstance(table, Mapping) else [None]


def save_generators() -> dict[str, Any]:
    """Returns the states of the program's generators: Python's, and those of numpy and torch if they are loaded."""
    found: dict[str, Any] = {"python": random.getstate()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = [name, keys.tolist(), *rest]
    if "torch" in sys.modules:
        found["torch"] = bytes(sys.modules["torch"].get_rng_state().tolist()).hex()
    return found


def load_generators(states: Mapping[str, Any]) -> None:
    """Sets the generators to saved states."""
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    if "numpy" in states:
        import numpy

        name, numbers, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.array(numbers, dtype=numpy.uint32), *rest))
    if "torch" in states:
        import torch

        torch.set_rng_state(torch.tensor(list(bytes.fromhex(states["torch"])), dtype=torch.uint8, device="cpu"))


def _is_kept(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_kept(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_kept, value))
    return value is None or type(value) in (bool, int, float, str)
