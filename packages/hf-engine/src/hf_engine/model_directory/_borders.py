"""The border to libraries that read model files: their exceptions become one error that names the file."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from hf_protocols.errors import HybridFlowError, ModelError
from hf_protocols.validation import shorten

__all__ = ["errors_of", "one_line"]


_MOST_REASON = 300
"""Most characters that are kept of another library's message, which says more than the value that it is about."""


@contextmanager
def errors_of(library: str, what: str, *, advice: str = "") -> Iterator[None]:
    """Turns any exception of a library inside the block into a `ModelError` of one line.

    Parsers of transformers, tokenizers and safetensors raise `KeyError`, `AttributeError`, `TypeError` and bare
    `Exception` of damaged files, and extensions in Rust panic with an exception that is not an `Exception`.

    Warnings of the library are not shown: their causes were checked before, or are in the error.

    Args:
        library: that is called inside the block.
        what: cannot be done, named as the user wrote it: `"'path/to/model': its tokenizer cannot be loaded"`.
        advice: a sentence, what to do.

    Raises:
        ModelError: of everything but errors of HybridFlow and what ends a program.
    """
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except HybridFlowError:
        raise
    except BaseException as error:  # the tokenizers' Rust code panics with an exception that is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        remedy = f". {advice}" if advice else ""
        raise ModelError(f"{what}: {library} says {one_line(error).rstrip('.')}{remedy}") from error
    finally:
        logger.setLevel(level)


def one_line(error: BaseException) -> str:
    """The text of an error, with its type where the text alone would not say what happened."""
    text = shorten(" ".join(str(error).split()), _MOST_REASON)
    return text if " " in text and not isinstance(error, KeyError) else f"{type(error).__name__}: {text}".rstrip(": ")
