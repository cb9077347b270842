"""A response token by token, coloured by log-prob, ratio or mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from hf_algorithms.report._sample_files import Token
from hf_protocols.drawing import format_number

__all__ = ["COLOURINGS", "NO_RATIO", "describe_shades", "list_colourings", "render_tokens"]

COLOURINGS = {"trainer": "trainer's probability", "sampler": "sampler's probability", "ratio": "ratio", "mask": "mask"}
"""By what tokens may be coloured, in the order of preference."""
NO_RATIO = "not computed: algorithm.old_logprobs = 'current' takes the trainer's log-probs from the update itself"
"""Reason for which a response has the sampler's log-probs alone."""
_MOST_TOKENS = 4096
_NUM_SHADES = 8
_NARROW_LOG_RATIO = 0.02
"""A log-ratio below has no colour; every further shade is two and a half times as far."""


def list_colourings(tokens: Sequence[Token]) -> list[str]:
    """Returns the names of `COLOURINGS` for which the tokens have values."""
    known = {
        "trainer": any(token.trainer_logprob is not None for token in tokens),
        "sampler": any(token.sampler_logprob is not None for token in tokens),
        "ratio": any(token.ratio is not None for token in tokens),
        "mask": bool(tokens),
    }
    return [name for name in COLOURINGS if known[name]]


def render_tokens(tokens: Sequence[Token], colouring: str) -> str:
    """Returns a list of tokens; each has its numbers as a title, and a line below shows the chosen one's."""
    shown = "".join(_token(number, token, colouring) for number, token in enumerate(tokens[:_MOST_TOKENS]))
    rest = len(tokens) - _MOST_TOKENS
    more = f"<p>{rest:,} further tokens are not drawn.</p>" if rest > 0 else ""
    return (
        f'<div class="tokens" tabindex="0" data-key="tokens" role="group" '
        f'aria-label="tokens; the arrow keys move from token to token">{shown}</div>{more}'
        '<p class="token-line" aria-live="polite">Choose a token to see its numbers.</p>'
    )


def _token(number: int, token: Token, colouring: str) -> str:
    parts = [f"token {number}", repr(token.text)]
    parts += [f"id {token.id}"] if token.id is not None else []
    numbers = {"sampler": token.sampler_logprob, "trainer": token.trainer_logprob, "ratio": token.ratio}
    numbers["advantage"] = token.advantage
    parts += [f"{name} {value:.4g}" for name, value in numbers.items() if value is not None]
    parts.append("trained" if token.is_trained else "not trained")
    style = "tok" + ("" if token.is_trained else " off") + _shade(token, colouring)
    # a token that is only white space would be invisible
    text = escape(token.text).replace("\n", "\u21b5\n") or "\u2205"
    return f'<span class="{style}" title="{escape(", ".join(parts))}">{text}</span>'


def _shade(token: Token, colouring: str) -> str:
    if colouring == "ratio":
        return "" if token.ratio is None else _shade_ratio(token.ratio)
    value = {"trainer": token.trainer_logprob, "sampler": token.sampler_logprob}.get(colouring)
    if value is None:
        return ""
    # improbable tokens are the dark ones
    return f" p{min(_NUM_SHADES - 1, int(_NUM_SHADES * (1 - math.exp(min(value, 0.0)))))}"


def _shade_ratio(ratio: float) -> str:
    distance = abs(math.log(ratio)) if ratio > 0 else math.inf
    level = 0
    while level < 4 and distance >= _NARROW_LOG_RATIO * 2.5**level:
        level += 1
    return f" {'up' if ratio > 1 else 'down'}{level}" if level else ""


def describe_shades(colouring: str) -> str:
    """Returns what the shades mean, in one sentence."""
    if colouring == "ratio":
        least = format_number(_NARROW_LOG_RATIO)
        return f"Orange: the trainer finds the token likelier; blue: less likely; none within {least} in log."
    if colouring == "mask":
        return "Tokens with a line through them are not trained on."
    return "The darker, the less likely; tokens with a line through them are not trained on."
