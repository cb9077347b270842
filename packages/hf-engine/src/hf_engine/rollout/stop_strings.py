"""End of a response at a string: found in the text of its last tokens, for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_engine.model_directory import errors_of, find_file
from hf_protocols.errors import BackendUnavailableError, ModelError
from hf_protocols.outer_files import read_json_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hf_engine.backends.base import SamplingParams

__all__ = ["StopStrings", "load_stop_strings"]

_FILE = "tokenizer.json"
_MOST_BYTES = 4
"""Of a character in UTF-8."""


class StopStrings:
    """Finds the token that completes one of some strings.

    Args:
        tokenizer: decodes token ids, with special tokens.
        strings: what ends a response. One next to bytes that never become a character may be overlooked.
        min_tokens: a response of this many tokens or fewer goes on; what was complete by then ends nothing later on.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], min_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._min_tokens = min_tokens
        # A token is a byte or more; a few further ones give decoders that look back their context.
        self._window = max(len(string.encode()) for string in strings) + 8
        self.most_tokens = self._window + _MOST_BYTES - 1
        """Last tokens of a response that `ends` reads."""

    def ends(self, tokens: Sequence[int], num_tokens: int | None = None) -> bool:
        """Returns True if the last token of a response so far completes a string.

        Args:
            tokens: the response, or its last `most_tokens` tokens.
            num_tokens: of the response; None: as many as `tokens`.
        """
        if (len(tokens) if num_tokens is None else num_tokens) <= self._min_tokens:
            return False
        window, text = self._read_end(tokens)
        if not any(string in text for string in self._strings):
            return False
        # One that was complete before, under the minimum length, ends nothing any more. A character of which bytes are
        # missing is none yet, and with some tokenizers hides what bytes before it say.
        earlier = (self._decode(window[:count]).rstrip("\ufffd") for count in range(1, len(window)))
        old = max((_common_length(before, text) for before in earlier), default=0)
        return any(string in text[max(0, old - len(string) + 1) :] for string in self._strings)

    def _read_end(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """The last tokens and their text, from the beginning of a character: one whose first bytes are missing hides
        what follows it with some tokenizers.
        """
        for further in range(_MOST_BYTES):
            window = list(tokens[-self._window - further :])
            text = self._decode(window)
            if not text.startswith("\ufffd"):
                break
        return window, text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def cut(self, tokens: Sequence[int]) -> int | None:
        """Returns how many tokens a response keeps that was drawn without looking for strings; None if it keeps all."""
        most = self.most_tokens
        ends = (count for count in range(1, len(tokens) + 1) if self.ends(tokens[max(0, count - most) : count], count))
        return next(ends, None)


def _common_length(first: str, second: str) -> int:
    """Characters with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def load_stop_strings(model: str | Path, sampling: SamplingParams) -> StopStrings | None:
    """Returns the strings that end responses in addition to stop tokens; None without strings.

    Raises:
        BackendError: without a tokenizer next to the model, or with one that cannot be read.
    """
    if not sampling.stop_strings:
        return None
    try:
        path = find_file(model, _FILE)
    except ModelError as error:
        raise ModelError(
            f"stop_strings={sampling.stop_strings} needs {_FILE} of {str(model)!r} to read the responses: "
            f"{str(error).rstrip('.')}. Save the tokenizer next to the model, or set stop_token_ids"
        ) from error
    return StopStrings(_read_tokenizer(path), sampling.stop_strings, sampling.min_new_tokens)


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            'stop_strings need tokenizers, which is not installed: pip install "tokenizers>=0.22"'
        ) from error
    read_json_object(ModelError, path)
    advice = "Save the tokenizer again, or set stop_token_ids"
    with errors_of("tokenizers", f"the tokenizer cannot be read from {str(path)!r}", advice=advice):
        return Tokenizer.from_file(str(path))
