"""Conventions of other projects: the keys with which an algorithm computes the same numbers as theirs.

The tables hold keys of `[algorithm]` whose value differs from our default or must not follow it. They mean what the
releases do, read in their code: TRL 1.16.0 (its PPO: 1.12.0) and verl 0.9.1, and `docs/reference/conformance.md` shows
the comparison. OpenRLHF 0.11 and NeMo-RL 0.7 were read, not run.

A project often has one default for several algorithms. Where its documentation names another value for one of them
(GSPO's clip, CISPO's bound), the table has that.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hf_protocols import ConfigError
from hf_protocols.validation import show

__all__ = ["CONVENTIONS", "RELEASES", "expand_conventions"]

Switches = Mapping[str, Any]

RELEASES = {"trl": "TRL 1.16.0", "verl": "verl 0.9.1", "openrlhf": "OpenRLHF 0.11", "nemo": "NeMo-RL 0.7"}
"""The releases whose defaults the tables hold."""

_UNCLIPPED: Switches = {"dual_clip": None, "log_ratio_clamp": None}
_CLIP: Switches = {"clip_low": 0.2, "clip_high": 0.2}
_KL_OFF: Switches = {"kl_coefficient": 0.0, "kl_place": "loss", "kl_estimator": "k3"}

_TRL_KL: Switches = {**_KL_OFF, "kl_gradient": "ratio", "correction_statistic": "product"}
_TRL_GROUP: Switches = {
    **_TRL_KL,
    "std_ddof": 1,
    "std_eps": 1e-4,
    "std_on": "s+eps",
    "std_over": "group",
    "baseline": "mean",
    "log_ratio_clamp": None,
    "aggregation": "token-mean",
}
_TRL: Mapping[str, Switches] = {
    "ppo": {
        **_CLIP,
        **_UNCLIPPED,
        "gamma": 1.0,
        "gae_lambda": 0.95,
        "value_clip": 0.2,
        "bootstrap": "zero",
        "reward_position": "after",
        "whiten": True,
        "std_ddof": 1,
        "std_eps": 1e-8,
        "kl_coefficient": 0.05,
        "kl_place": "reward",
        "kl_estimator": "k1",
        "aggregation": "token-mean",
    },
    "grpo": {**_TRL_GROUP, **_CLIP, "dual_clip": None},
    "dapo": {**_TRL_GROUP, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    "dr_grpo": {**_TRL_KL, **_CLIP, **_UNCLIPPED, "aggregation": "constant"},
    "gspo": {**_TRL_GROUP, "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"},
    # Its bound is absolute, 5, and there is no lower one.
    "cispo": {**_TRL_GROUP, "clip_low": 1.0, "clip_high": 4.0},
    "sapo": {**_TRL_GROUP, "tau_positive": 1.0, "tau_negative": 1.05, "aggregation": "seq-mean-token-mean"},
    "gmpo": {
        **_TRL_GROUP,
        "kl_gradient": "value",
        "clip_low": 0.4,
        "clip_high": 0.4,
        "aggregation": "seq-mean-token-mean",
    },
    "rloo": {
        **_CLIP,
        **_UNCLIPPED,
        "ratio": "sequence",
        "kl_coefficient": 0.05,
        "kl_place": "reward",
        "kl_estimator": "k1",
        "kl_return": "sequence",
        "aggregation": "seq-mean-token-sum",
    },
    "online_dpo": {"beta": 0.1, "preference_loss": "dpo"},
}

_VERL_POLICY: Switches = {
    **_KL_OFF,
    **_CLIP,
    "kl_gradient": "value",
    "dual_clip": 3.0,
    "log_ratio_clamp": 20.0,
    "aggregation": "token-mean",
}
_VERL_LOSS: Switches = {key: value for key, value in _VERL_POLICY.items() if key not in ("dual_clip", *_CLIP)}
_VERL_STD: Switches = {
    "std_ddof": 1,
    "std_eps": 1e-6,
    "std_on": "s+eps",
    "std_over": "group",
    "baseline": "mean",
    "group_of_one": "raw",
}
_VERL_WHITE: Switches = {"whiten": True, "std_ddof": 1, "std_eps": 1e-8}
_VERL_REWARD_KL: Switches = {"kl_coefficient": 0.0, "kl_place": "reward", "kl_estimator": "k1"}
_VERL: Mapping[str, Switches] = {
    "ppo": {
        **_VERL_POLICY,
        **_VERL_REWARD_KL,
        **_VERL_WHITE,
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "value_clip": 0.5,
        "bootstrap": "zero",
        "reward_position": "last",
    },
    "remax": {**_VERL_POLICY, **_VERL_REWARD_KL, "gamma": 1.0, "kl_return": "cumulative", "ratio": "token"},
    "grpo": {**_VERL_POLICY, **_VERL_STD},
    # The group of one of its dynamic sampling is refused here as everywhere: it is dropped before.
    "dapo": {**_VERL_POLICY, **_VERL_STD, "group_of_one": "error", "clip_high": 0.28},
    "dr_grpo": {**_VERL_POLICY, "group_of_one": "raw", "aggregation": "constant"},
    "rloo": {**_VERL_POLICY, "group_of_one": "raw", "ratio": "token"},
    "reinforce_pp": {**_VERL_POLICY, **_VERL_REWARD_KL, **_VERL_WHITE, "gamma": 1.0, "kl_return": "cumulative"},
    "reinforce_pp_baseline": {**_VERL_POLICY, **_VERL_WHITE, "group_of_one": "raw"},
    "opo": {**_VERL_POLICY, "group_of_one": "raw"},
    "gspo": {
        **_VERL_LOSS,
        **_VERL_STD,
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "log_ratio_clamp": 10.0,
        "aggregation": "seq-mean-token-mean",
    },
    "cispo": {**_VERL_LOSS, **_VERL_STD, **_CLIP},
    "sapo": {
        **_VERL_LOSS,
        **_VERL_STD,
        "tau_positive": 1.0,
        "tau_negative": 1.05,
        "aggregation": "seq-mean-token-mean",
    },
    "gmpo": {**_VERL_LOSS, **_VERL_STD, **_CLIP, "log_ratio_clamp": None, "aggregation": "seq-mean-token-mean"},
    # The cap is its `clip_ratio_c`, whose default is 3; the 20 in the loss is never reached.
    "dppo_tv": {**_VERL_LOSS, **_VERL_STD, "threshold": 0.2, "ratio_cap": 3.0, "anchor": "old"},
}

_OPENRLHF: Switches = {
    **_CLIP,
    "dual_clip": None,
    "log_ratio_clamp": 20.0,
    "aggregation": "token-mean",
    "kl_coefficient": 0.01,
    "kl_place": "reward",
    "kl_estimator": "k1",
}
_OPENRLHF_WHITE: Switches = {"whiten": True, "std_ddof": 0, "std_eps": 1e-8}
_OPENRLHF_STD: Switches = {"std_ddof": 1, "std_eps": 1e-9, "std_on": "s+eps", "std_over": "group", "baseline": "mean"}
# Its `reward_clip_range`, after the baseline and before the KL; GAE has no baseline, so there it cuts the score.
_OPENRLHF_CUT: Switches = {"score_clip": 10.0}
_OPENRLHF_TABLE: Mapping[str, Switches] = {
    "ppo": {
        **_OPENRLHF,
        **_OPENRLHF_WHITE,
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "value_clip": 0.5,
        "bootstrap": "zero",
        "reward_position": "last",
        "reward_clip": 10.0,
    },
    "grpo": {**_OPENRLHF, **_OPENRLHF_STD, **_OPENRLHF_CUT},
    "rloo": {**_OPENRLHF, **_OPENRLHF_CUT, "ratio": "token", "kl_return": "cumulative"},
    "reinforce_pp": {**_OPENRLHF, **_OPENRLHF_WHITE, **_OPENRLHF_CUT, "gamma": 1.0, "kl_return": "cumulative"},
    "reinforce_pp_baseline": {**_OPENRLHF, **_OPENRLHF_WHITE, **_OPENRLHF_CUT, "kl_return": "cumulative"},
    "gspo": {
        **{key: value for key, value in _OPENRLHF.items() if key != "dual_clip"},
        **_OPENRLHF_STD,
        **_OPENRLHF_CUT,
        "aggregation": "seq-mean-token-mean",
    },
}

_NEMO: Switches = {
    "log_ratio_clamp": None,
    "aggregation": "token-mean",
    "kl_coefficient": 0.01,
    "kl_place": "loss",
    "kl_estimator": "k3",
    "kl_gradient": "unbiased",
}
_NEMO_STD: Switches = {
    "std_ddof": 1,
    "std_eps": 1e-6,
    "std_on": "positive",
    "std_over": "group",
    "baseline": "leave_one_out",
}
_NEMO_TABLE: Mapping[str, Switches] = {
    # Discount and lambda are those of its example, for it has no defaults.
    "ppo": {
        **_NEMO,
        **_CLIP,
        "dual_clip": None,
        "gamma": 1.0,
        "gae_lambda": 0.95,
        "value_clip": None,
        "bootstrap": "zero",
        "reward_position": "last",
        "whiten": True,
        "std_ddof": 1,
        "std_eps": 1e-8,
    },
    "grpo": {**_NEMO, **_NEMO_STD, **_CLIP, "dual_clip": None},
    "dapo": {**_NEMO, **_NEMO_STD, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    "gspo": {**_NEMO, **_NEMO_STD, "aggregation": "seq-mean-token-mean"},
    "cispo": {**_NEMO, **_NEMO_STD, **_CLIP},
    "reinforce_pp_baseline": {
        **_NEMO,
        **_CLIP,
        "dual_clip": None,
        "whiten": True,
        "std_ddof": 1,
        "kl_place": "reward",
        "kl_estimator": "k1",
        "kl_return": "token",
    },
}

CONVENTIONS: Mapping[str, Mapping[str, Switches]] = MappingProxyType(
    {"trl": _TRL, "verl": _VERL, "openrlhf": _OPENRLHF_TABLE, "nemo": _NEMO_TABLE}
)
"""`{convention: {algorithm: {key: value}}}`; "ours" is the default of each key."""


def expand_conventions(conventions: object, algorithm: str) -> dict[str, Any]:
    """Returns the keys of `[algorithm]` that `conventions` stands for in this algorithm; none for "ours".

    A word that is not known gives none either: it is refused as the key's value.

    Raises:
        ConfigError: the project lacks the algorithm, or has one of that name which computes something else.
    """
    if not isinstance(conventions, str) or conventions not in CONVENTIONS:
        return {}
    tables = CONVENTIONS[conventions]
    if algorithm not in tables:
        release = RELEASES[conventions]
        raise ConfigError(
            f"algorithm.conventions = {show(conventions)}: {release} has nothing that computes {show(algorithm)}. "
            f"Use 'ours', or one of its {', '.join(tables)}"
        )
    return dict(tables[algorithm])
