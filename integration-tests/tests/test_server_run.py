"""PPO whose samples come from a server of SGLang or vLLM: the weights of every iteration reach it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_testing.local_server import LocalServer
from hf_algorithms.config import load_config
from hf_algorithms.preflight.inputs import load_inputs
from hf_engine import SamplingParams
from hf_engine.rollout.server._connection import ServerConnection
from hf_engine.rollout.server._dialect import Sample
from hf_engine.rollout.server._identify import identify
from small_runs import Outcome, read_metrics

PROMPT = [3, 4, 5]

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang")]
)
def test_every_iteration_generates_from_its_weights(
    small_config: Path,
    hybridflow: Callable[..., Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # ranks import the reward function
    initial = tmp_path / "initial"
    # SGLang's server keeps six positions to itself.
    sizes = ["model.hidden_size=64", "model.num_heads=2", "model.max_positions=24"]
    load_inputs(load_config(small_config, sizes), initial)
    with LocalServer(engine, initial) as server:
        changes = [f"model.path={initial}", "rollout.backend=server", f"rollout.options.urls=['{server.url}']"]
        changes += [*sizes, "optimizer.actor_learning_rate=1e-2", "warm_start.max_steps=0"]
        outcome = hybridflow("train", small_config, *(part for change in changes for part in ("--set", change)))
        assert outcome.exit_code == 0, outcome.errors
        last = identify(ServerConnection(server.url, connect_timeout_s=10, timeout_s=60), "float32")
        (sample,) = last.generate([PROMPT], [0], SamplingParams(max_new_tokens=6), [])
    first, second = read_metrics(tmp_path / "run")
    assert first["actor/grad_norm"] > 0 and second["response/tokens"] > 0
    assert max(row["rollout/logprob_gap_max"] for row in (first, second)) < 1e-4
    # One version to start with and one after each iteration, counted in the server's own words.
    assert int(last.facts.stamp.rpartition("-")[2]) == 3
    assert largest_gap(sample, tmp_path / "run" / "model") < 1e-4
    assert largest_gap(sample, initial) > 1e-2, "the run moved nothing"


def largest_gap(sample: Sample, model: Path) -> float:
    """Between the server's log-probs and those of a whole forward pass of transformers."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + sample.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    return float((torch.tensor(sample.logprobs) - wanted).abs().max())
