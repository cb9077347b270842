from __future__ import annotations

import pytest

from hf_engine import TrainConfig
from hf_protocols import ConfigError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens=0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"learning_rate": float("inf")}, "learning_rate=inf"),
        ({"weight_decay": float("nan")}, "weight_decay=nan"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan"),
        ({"micro_batch_tokens": 1.5}, "micro_batch_tokens=1.5"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"betas": (0.9,)}, r"betas=\(0.9,\)"),
        ({"betas": 0.9}, "betas=0.9"),
        ({"betas": (0.9, "x")}, "beta='x'"),
        ({"activation_checkpointing": "no"}, "activation_checkpointing='no'"),
        ({"dtype": "int8"}, "float32 or bfloat16"),
        ({"shard": "column"}, "root or layer"),
    ],
)
def test_values_out_of_range_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**({"learning_rate": 1e-4} | changes))


def test_clipping_can_be_turned_off():
    assert TrainConfig(learning_rate=1e-4, max_grad_norm=float("inf")).max_grad_norm == float("inf")
