"""The section of deadlines: `[deadlines]`."""

from __future__ import annotations

from hf_algorithms.config._section import Positive, Section

__all__ = ["DeadlinesConfig"]


class DeadlinesConfig(Section):
    """`[deadlines]`: how long a call of each phase may take before its group counts as hanging, with the Ray executor.

    A call that misses its deadline ends its group; the message names the ranks that did not move, and the key.
    """

    start_s: Positive | None = None
    """Start of workers, which load models and engines; left out: `cluster.call_timeout_s`, at least 120."""
    generate_s: Positive | None = None
    """Generation, with the move of the weights before it; left out: `cluster.call_timeout_s`."""
    score_s: Positive | None = None
    """Reward and cost functions; left out: `cluster.call_timeout_s`."""
    logprobs_s: Positive | None = None
    """Forward passes: log-probs, values and scores of models; left out: `cluster.call_timeout_s`."""
    train_s: Positive | None = None
    """Updates; left out: `cluster.call_timeout_s`."""
    sync_s: Positive | None = None
    """Weights that a role takes over from another; left out: `cluster.call_timeout_s`."""
    evaluate_s: Positive | None = None
    """Any call of an evaluation; left out: `cluster.call_timeout_s`."""
    checkpoint_s: Positive | None = None
    """Weights and states that are written or read; left out: `cluster.call_timeout_s`."""
