"""Sampling parameters of a rollout backend."""

from __future__ import annotations

from dataclasses import dataclass

from hf_protocols.errors import ConfigError
from hf_protocols.validation import Checks, show

__all__ = ["SamplingParams"]

_check = Checks(ConfigError)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of responses.

    A sample's random numbers derive from (seed, step, row_id, sample index) only: the same samples come out of any
    number of replicas. Reported log-probs are always those of the full distribution at `temperature`, which
    `TrainBackend.compute_logprobs` reproduces: `top_p`, `top_k` and `min_new_tokens` restrict what may be drawn and
    never rescale what is reported, so that no truncation leaks into a policy ratio.

    Raises:
        ConfigError: for a value out of range.
    """

    max_new_tokens: int
    """A response ends here at the latest, with finish reason 1 (length)."""
    min_new_tokens: int = 0
    """Stop tokens cannot be drawn before this many tokens, and a stop string that is complete by then ends nothing."""
    temperature: float = 1.0
    """Logits are divided by it."""
    top_p: float = 1.0
    """Draw from the smallest set of most likely tokens whose probabilities reach this sum."""
    top_k: int = 0
    """Draw from this many most likely tokens; 0 means all."""
    n: int = 1
    """Samples per prompt."""
    greedy: bool = False
    """Take the most likely token instead of drawing; temperature still scales the reported log-probs."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with any of these, or of the model's own end-of-sequence tokens; the token is kept."""
    stop_strings: tuple[str, ...] = ()
    """A response ends with the token that completes any of these in its text; the token is kept. Needs
    `tokenizer.json` next to the model, in its directory or on the hub."""
    seed: int = 0
    """Seed of the run."""
    step: int = 0
    """Iteration of the run; another step draws other numbers."""

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("n", 1), ("min_new_tokens", 0), ("top_k", 0)):
            _check.count(name, getattr(self, name), least=least)
        for name in ("seed", "step"):
            _check.kind(name, getattr(self, name), int, "a whole number")
        _check.kind("greedy", self.greedy, bool, "True or False")
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}")
        _check.number("greedy=True takes the most likely token; temperature", self.temperature)
        if self.temperature < 1e-6:  # logits divided by less may overflow
            raise ConfigError(f"temperature={self.temperature} is below 1e-06. Use greedy=True for the likeliest token")
        _check.number("top_p", self.top_p)
        if self.top_p > 1:
            raise ConfigError(f"top_p={self.top_p} must be at most 1")
        _check.kind("stop_token_ids", self.stop_token_ids, tuple | list, "a tuple of token ids, (3,)")
        for token_id in self.stop_token_ids:
            _check.count("an id in stop_token_ids", token_id, least=0)
        _check.kind("stop_strings", self.stop_strings, tuple | list, 'a tuple of strings, ("end",)')
        for text in self.stop_strings:
            _check.kind("a text in stop_strings", text, str, "strings")
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise ConfigError(f"a text in stop_strings={show(text)} contains an unpaired surrogate. Remove it")
        if "" in self.stop_strings:
            raise ConfigError("stop_strings has an empty string, which would stop everything. Remove it")
        if self.greedy and self.n > 1:
            raise ConfigError(f"n={self.n} with greedy=True: all samples would be equal")
