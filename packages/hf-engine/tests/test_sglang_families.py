"""Families of models in real SGLang engines, one for each, in the environment of `make test-sglang`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_testing.engine_families import write_engine_family
from engine_testing.shared_engine import build
from engine_testing.train_steps import follow_the_training
from hf_engine.model_directory import read_model_directory
from hf_engine.rollout.engine_rules import check_sglang_runs
from hf_engine.testing import TINY_FAMILIES, LocalRanks
from hf_protocols import BackendError, GenerationSpec, ParallelSpec, Topology

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def alone() -> Iterator[LocalRanks]:
    with LocalRanks(1, timeout_s=300) as ranks:
        yield ranks


WINDOWS = {"mistral": {"sliding_window": 64}}
"""A window of all positions, where SGLang leaves a shorter one out."""
REFUSED = (
    *("bloom", "falcon", "phi"),  # SGLang does not run them, or leaves a part out
    *("exaone4", "gemma2"),  # on devices only
    *("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite", "gpt_oss"),  # experts
    *("granitemoe", "llama4_text", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"),
)
"""Families that are refused on a CPU."""
ROUNDED = {"apertus": 5e-3}
"""SGLang has two numbers of each layer of Apertus in bfloat16."""


@pytest.mark.parametrize("family", sorted(set(TINY_FAMILIES) - set(REFUSED)))
def test_a_family_that_the_engine_runs_follows_the_training(alone, tmp_path, family):
    model = write_engine_family(tmp_path / "model", family, **WINDOWS.get(family, {}))
    check_sglang_runs(read_model_directory(model), on_cpu=True)
    alone.run(train_and_follow, model, tmp_path / "export", ROUNDED.get(family, 5e-4), deadline_s=600)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_the_engine_cannot_run_is_refused(tmp_path, family):
    model = read_model_directory(write_engine_family(tmp_path, family))
    with pytest.raises(BackendError, match=r"(?i)sglang"):
        check_sglang_runs(model, on_cpu=True)


def train_and_follow(model, directory, tolerance):
    topology = Topology(ParallelSpec(), GenerationSpec())
    follow_the_training(build(model, topology), model, directory, topology, vocab_size=64, tolerance=tolerance)
