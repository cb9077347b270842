"""`samples/<iteration>.jsonl` of a run: rows of prompts and responses, with tokens where the run wrote them."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_algorithms.report._json_values import parse_json, read_number

__all__ = ["SampleFiles", "SampleRecord", "Token"]

_FOLDER = "samples"
_MOST_BYTES = 16 << 20
"""Read of one iteration's file; what is beyond is left out, and said."""
_TRAINED = "train"
_TOKEN_COLUMNS = ("token_ids", "token_texts", "rollout_logprobs", "old_logprobs", "advantages", "response_mask")


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of a response.

    Attributes:
        id: in the vocabulary; None where the file has no id.
        text: as the tokenizer decodes it alone.
        sampler_logprob: as the generation engine reported it, or None.
        trainer_logprob: of the training engine before the update, or None.
        advantage: that its loss is weighted by, or None.
        is_trained: False for what an environment wrote.
    """

    id: int | None
    text: str
    sampler_logprob: float | None
    trainer_logprob: float | None
    advantage: float | None
    is_trained: bool

    @property
    def ratio(self) -> float | None:
        """Trainer's probability over the sampler's; None where one of them is unknown."""
        if self.sampler_logprob is None or self.trainer_logprob is None:
            return None
        return math.exp(min(max(self.trainer_logprob - self.sampler_logprob, -50.0), 50.0))


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """One row of a samples file; a field that the file lacks is empty or None.

    Attributes:
        number: of the line, from 0.
        set: name of the rows that it belongs to: `train`, or an evaluation's.
        group: responses to the same prompt have the same one.
        sample: name of the response in its run, `epoch/row/number/attempt`; empty where the file has no name.
        rewards: by name; the weighted sum is `score`.
        num_tokens: of the response; 0 where unknown.
        tokens: of the response, where the run wrote them.
        extra: other columns.
    """

    number: int
    set: str
    group: str
    sample: str
    prompt: str
    response: str
    answer: str | None
    finish_reason: str
    score: float | None
    rewards: Mapping[str, float]
    advantage: float | None
    num_tokens: int = 0
    tokens: Sequence[Token] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lacks_ratios(self) -> bool:
        """True if the sampler's log-probs of the response are known, and the trainer's are not."""
        return any(token.sampler_logprob is not None for token in self.tokens) and all(
            token.ratio is None for token in self.tokens
        )

    def reward(self, name: str) -> float | None:
        """Returns the reward of that name, or the score for an empty name."""
        return self.rewards.get(name) if name else self.score


class SampleFiles:
    """The samples of a run by iteration; a folder that was deleted keeps what was read of it.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / _FOLDER
        self._changed = -1
        self._newest = (0, 0)
        self._iterations: list[int] = []
        self._read: tuple[object, list[SampleRecord], list[str]] | None = None

    @property
    def version(self) -> str:
        """Changes when a file appears, and when the newest one grows."""
        return f"{self._changed}:{self._newest}"

    def iterations(self) -> Sequence[int]:
        """Returns the iterations that have samples, ascending."""
        try:
            changed = self._folder.stat().st_mtime_ns
            if changed != self._changed:
                with os.scandir(self._folder) as entries:
                    stems = (entry.name.removesuffix(".jsonl") for entry in entries if entry.name.endswith(".jsonl"))
                    self._iterations = sorted(int(stem) for stem in stems if stem.isascii() and stem.isdigit())
                self._changed = changed
            if self._iterations:
                newest = (self._folder / f"{self._iterations[-1]}.jsonl").stat()
                self._newest = (newest.st_mtime_ns, newest.st_size)
        except OSError:
            pass
        return self._iterations

    def nearest(self, iteration: int | None) -> tuple[int | None, int | None, int | None]:
        """Returns the iteration with samples at or before `iteration`, the one before that, and the one after it.

        Args:
            iteration: None for the last one.
        """
        known = self.iterations()
        if not known:
            return None, None, None
        place = len(known) - 1 if iteration is None else max(bisect_right(known, iteration) - 1, 0)
        assert 0 <= place < len(known)
        return known[place], known[place - 1] if place else None, known[place + 1] if place + 1 < len(known) else None

    def read(self, iteration: int) -> tuple[list[SampleRecord], list[str]]:
        """Returns the rows of an iteration, and one sentence for what could not be read of it."""
        path = self._folder / f"{iteration}.jsonl"
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                key = (iteration, stat.st_mtime_ns, stat.st_size, stat.st_ino)
                if self._read is None or self._read[0] != key:
                    self._read = (key, *_parse(file.read(_MOST_BYTES), path.name, stat.st_size))
        except OSError as error:
            if self._read is not None and isinstance(self._read[0], tuple) and self._read[0][0] == iteration:
                return self._read[1], [f"samples/{path.name} was deleted; its rows as they were read before"]
            return [], [f"samples/{path.name} cannot be read: {error.strerror}"]
        return self._read[1], self._read[2]


def _parse(data: bytes, name: str, size: int) -> tuple[list[SampleRecord], list[str]]:
    notes: list[str] = []
    if len(data) < size:
        data = data[: data.rfind(b"\n") + 1]
        notes.append(f"samples/{name} has {size:,} bytes; rows beyond the first {_MOST_BYTES:,} bytes are left out")
    rows: list[SampleRecord] = []
    for number, line in enumerate(data.splitlines()):
        try:
            body = parse_json(line)
        except ValueError:
            body = None
        if isinstance(body, dict):
            rows.append(_to_sample(number, body))
        elif len(notes) < 3:
            notes.append(f"samples/{name}, line {number + 1}, is not a JSON object")
    return rows, notes


def _to_sample(number: int, body: Mapping[str, Any]) -> SampleRecord:
    prompt = _text(body.get("prompt"))
    given: dict[str, Any] = next((body[name] for name in ("rewards", "scores") if isinstance(body.get(name), dict)), {})
    rewards = {str(name): value for name, each in given.items() if (value := read_number(each)) is not None}
    tokens = _read_tokens(body)
    row = next((body[name] for name in ("group", "row") if body.get(name) is not None), prompt)
    extra = body.get("extra")
    return SampleRecord(
        number=number,
        set=_text(body.get("set")) or _TRAINED,
        group=_text(row),
        sample=_name_sample(body.get("sample")),
        prompt=prompt,
        response=_text(body.get("response")),
        answer=None if body.get("answer") is None else _text(body["answer"]),
        finish_reason=_text(body.get("finish_reason")),
        score=read_number(body.get("score")),
        rewards=rewards,
        advantage=read_number(body.get("advantage")),
        num_tokens=len(tokens) or int(read_number(body.get("tokens")) or 0),
        tokens=tokens,
        extra=extra if isinstance(extra, dict) else {},
    )


def _name_sample(value: object) -> str:
    return "/".join(map(_text, value)) if isinstance(value, list) else _text(value)


def _read_tokens(body: Mapping[str, Any]) -> tuple[Token, ...]:
    """From columns of one length; a column that is absent or shorter has no values for the rest."""
    columns = {name: value for name in _TOKEN_COLUMNS if isinstance(value := body.get(name), list)}

    def at(name: str, place: int) -> Any:
        column = columns.get(name, ())
        return column[place] if place < len(column) else None

    return tuple(
        Token(
            id=number if type(number := at("token_ids", place)) is int else None,
            text=_text(at("token_texts", place)),
            sampler_logprob=read_number(at("rollout_logprobs", place)),
            trainer_logprob=read_number(at("old_logprobs", place)),
            advantage=read_number(at("advantages", place)),
            is_trained=at("response_mask", place) not in (0, False),
        )
        for place in range(max(map(len, columns.values()), default=0))
    )


def _text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)
