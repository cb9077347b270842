"""Refusals of vLLM: by real engines in the environment of `make test-vllm`, by its absence elsewhere."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hf_engine import SamplingParams, load_rollout_backend
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_engine.testing._cases import build_prompts, rows_of
from hf_protocols import (
    BackendError,
    BackendUnavailableError,
    BatchError,
    GenerationSpec,
    NonFiniteLossError,
    ParallelSpec,
    ReshardError,
    Topology,
)

VOCAB_SIZE = 64
CACHE_BYTES = 16 << 20
GREEDY = SamplingParams(max_new_tokens=6, greedy=True)

with_vllm = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": write_tiny_model(folder / "tied"),
        "stopping": write_tiny_model(folder / "stopping", eos_token_id=[7, 30]),
        "heads": write_tiny_model(folder / "heads", head_dim=48),
        "derived": write_tiny_model(folder / "derived", family="qwen2", num_attention_heads=4),
    }


@pytest.fixture(scope="module")
def alone() -> Iterator[LocalRanks]:
    with LocalRanks(1, timeout_s=60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[LocalRanks]:
    with LocalRanks(2, timeout_s=60) as ranks:
        yield ranks


def build(model, topology, **options):
    return load_rollout_backend("vllm").build(model, topology=topology, **{"cache_bytes": CACHE_BYTES, **options})


def refuse(models, directory):
    one = Topology(ParallelSpec(), GenerationSpec())
    with pytest.raises(BackendError, match=r"topology=None. Use a Topology"):
        build(models["tied"], None)
    with pytest.raises(BackendError, match="it has 1 ranks, the topology 2"):
        build(models["tied"], Topology(ParallelSpec(dp_size=2), GenerationSpec()))
    with pytest.raises(BackendError, match=r"has head_dim=48; vLLM on a CPU runs \[32, 64, .* 'transformers'"):
        build(models["heads"], one)
    with pytest.raises(BackendError, match=r"heads of \[16\], its config says 32: .* 'transformers'"):
        build(models["derived"], one)
    with pytest.raises(BackendError, match=r"absent': no such directory"):
        build(models["tied"] / "absent", one)
    unknown = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    with pytest.raises(BackendError, match=r"its files hold 'transformer.*' in other parts .* 'transformers'"):
        build(change_config(models["tied"], "gpt2", **unknown), one)
    with pytest.raises(BackendError, match=r"48 positions needs 24576 bytes .* above cache_bytes=24575. Raise"):
        build(models["tied"], one, cache_bytes=24_575)
    # vLLM's blocks have more tokens than the model positions.
    with pytest.raises(BackendError, match=r"vLLM did not start .* cache_bytes=30000, .* Raise cache_bytes if the"):
        build(models["tied"], one, cache_bytes=30_000)
    with pytest.raises(BackendError, match=r"vLLM did not start with '.*activation', .*: .*swish"):
        build(change_config(models["tied"], "activation", hidden_act="swish-swish"), one)
    for entries in ({"num_attention_heads": 0}, {"vocab_size": "many"}, {"dtype": "float7"}, {"rope_scaling": 5}):
        odd = change_config(models["tied"], f"odd-{next(iter(entries))}", **entries)
        with pytest.raises(BackendError, match=r"odd.*': (has \w+=|config.json: |its parameters have no known layout)"):
            build(odd, one)
    with pytest.raises(BackendError, match=r"max_positions=49 is above the model's 48 positions. Lower max_positions"):
        build(models["tied"], one, max_positions=49)
    damaged = change_config(models["tied"], "damaged")
    (file,) = damaged.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:10_000])
    with pytest.raises(BackendError, match=r"damaged': model.safetensors cannot be read: it has 10000 bytes"):
        build(damaged, one)
    lacking = change_config(models["tied"], "lacking")
    weights = load_file(lacking / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, lacking / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BackendError, match=r"lacking': lacks the parameters model.norm.weight. Give a"):
        build(lacking, one)


def change_config(model, name, **entries):
    """Makes a copy of a model next to it."""
    copy = shutil.copytree(model, model.parent / name)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | entries))
    return copy


def refuse_stages(model):
    with pytest.raises(BackendError, match=r"gen_pp_size=2 is not supported. Set it to 1 and raise gen_tp_size"):
        build(model, Topology(ParallelSpec(pp_size=2), GenerationSpec(gen_pp_size=2)))
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96}
    uneven = write_tiny_model(model.parent / f"uneven-{dist.get_rank()}", **heads)
    with pytest.raises(ReshardError, match="3 heads do not divide evenly by gen_tp_size=2 in generation"):
        build(uneven, Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=2)))


def assert_environment(before):
    """Checks that the variables that were set for vLLM are gone after it."""
    names = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    left = {name for name in names if name.startswith("VLLM_") or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    assert not left, left


def count_threads(backend, prompts):
    """Threads while it generates, and afterwards, in a rank that trains with two and was not told OMP_NUM_THREADS."""
    from hf_engine.rollout.vllm import _engine

    run, seen = _engine.run_requests, []
    torch.set_num_threads(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)

        def count(*inputs, **options):
            seen.append(torch.get_num_threads())
            return run(*inputs, **options)

        patch.setattr(_engine, "run_requests", count)
        backend.generate(prompts, GREEDY)
    after = torch.get_num_threads()
    torch.set_num_threads(1)
    return seen[0], after


def use_wrongly(models):
    """After all refusals: the process still starts an engine, and only one."""
    topology = Topology(ParallelSpec())
    torch.manual_seed(3)
    random.seed(3)
    state = random.getstate()
    before = torch.get_num_threads(), torch.get_rng_state()
    environment = dict(os.environ)
    for wrong, message in (
        ({"max_positions": -1}, "max_positions=-1 must be a whole number of at least 1"),
        ({"cache_bytes": None, "cache_fraction": 2.0}, "cache_fraction=2.0. Use a share of the memory"),
    ):
        with pytest.raises(BackendError, match=message):
            build(models["tied"], topology, **wrong)
        with pytest.raises(BackendError, match=message):
            load_rollout_backend("vllm").check_options(wrong)
    backend = build(models["stopping"], topology, seed=-1, max_positions=20, cache_bytes=None, cache_fraction=1e-4)
    held = backend.weight_layout().held_bytes(0)
    assert held < backend.engine_bytes <= held + 1e-4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert random.getstate() == state and torch.equal(torch.get_rng_state(), before[1])
    assert torch.get_num_threads() == before[0] == 1
    assert_environment(environment)
    torch.set_num_threads(1)  # vLLM would leave a warning in its place
    with pytest.raises(BackendError, match=r"one vLLM engine at a time. Close the other backend first"):
        build(models["tied"], topology)
    prompts = build_prompts(40, vocab_size=VOCAB_SIZE)
    assert count_threads(backend, prompts) == (1, 2)
    with pytest.raises(BackendError, match="above the model's 20 positions - max_new_tokens=16 = 4"):
        backend.generate(prompts, SamplingParams(max_new_tokens=16))
    result = backend.generate(prompts, SamplingParams(max_new_tokens=12, temperature=3.0, stop_token_ids=(11,)))
    for ids, reason in zip(rows_of(result["response_ids"]), result["finish_reason"].tolist(), strict=True):
        stops = [token for token in ids.tolist() if token in (7, 11, 30)]
        assert stops == ids.tolist()[-1:] if reason == 0 else not stops
    assert set(result["finish_reason"].tolist()) == {0, 1}
    assert_environment(environment)
    with pytest.raises(BackendError, match="Call begin_weights first"):
        backend.load_shards({})
    weights = {name: [torch.full(shape, torch.nan)] for name, shape in backend.weight_layout().shapes.items()}
    backend.begin_weights()
    backend.load_shards(weights)
    backend.commit_weights(4)
    with pytest.raises(NonFiniteLossError, match="row 0 are not finite at weight version 4"):
        backend.generate(prompts, GREEDY)
    backend.release()
    with pytest.raises(BackendError, match=r"the KV cache was released\. Call resume\(\)"):
        backend.generate(prompts, GREEDY)
    backend.resume()
    prompts["prompt_ids"].values()[-1] = VOCAB_SIZE
    with pytest.raises(BatchError, match="row 39 of 'prompt_ids' holds the token id 64, the model's are 0 to 63"):
        backend.generate(prompts, GREEDY)
    with pytest.raises(IndexError):
        backend._engine.run(prompts, GREEDY, [], None)
    prompts["prompt_ids"].values()[-1] = 3
    with pytest.raises(BackendError, match="vLLM failed in an earlier generate"):
        backend.generate(prompts, GREEDY)
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="the engine was closed"):
        backend.generate(prompts, GREEDY)


def refuse_on_rank_1(model):
    """Far within the groups' deadline, and the next engines start."""
    rank, topology = dist.get_rank(), Topology(ParallelSpec(dp_size=2), GenerationSpec())
    told = "^one sequence of 48 positions" if rank else "^rank 1 refused: one sequence of 48 positions"
    with pytest.raises(BackendError, match=told):
        build(model, topology, cache_bytes=1 if rank else CACHE_BYTES)
    build(model, topology).close()


class TestRefusingEngines:
    pytestmark = with_vllm

    def test_what_one_rank_cannot_start_no_rank_starts(self, two, models):
        two.run(refuse_on_rank_1, models["tied"], deadline_s=200)

    def test_what_cannot_run_is_refused_and_the_next_start_is_clean(self, alone, two, models, tmp_path):
        alone.run(refuse, models, tmp_path, deadline_s=300)
        alone.run(use_wrongly, models, deadline_s=300)
        two.run(refuse_stages, models["tied"], deadline_s=300)


without_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")


@without_vllm
def test_the_error_of_a_missing_vllm_has_the_install_command():
    with pytest.raises(BackendUnavailableError, match=r'not installed: pip install "hf-engine\[vllm\]" .*env.sh vllm'):
        load_rollout_backend("vllm")


@without_vllm
def test_another_version_is_refused_with_the_install_command(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda distribution: "0.33.1")
    with pytest.raises(BackendError, match=r"supports vLLM >=0.32,<0.33 and vllm 0.33.1 is installed: pip install"):
        load_rollout_backend("vllm")
