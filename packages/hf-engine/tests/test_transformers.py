from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM

from hf_engine import SamplingParams, load_rollout_backend
from hf_engine.backends.jagged import to_jagged
from hf_engine.rollout.memory import host_bytes
from hf_engine.testing import check_rollout_backend, write_tiny_family, write_tiny_model
from hf_engine.testing._cases import build_prompts, rows_of
from hf_protocols import BackendError, GenerationSpec, ParallelSpec, Topology

VOCAB_SIZE, MAX_POSITIONS = 64, 48
ONE_RANK = Topology(ParallelSpec(), GenerationSpec())


def build(directory, **options):
    return load_rollout_backend("transformers").build(directory, topology=ONE_RANK, **options)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": write_tiny_model(folder / "tied"),
        "untied": write_tiny_model(folder / "untied", tie_embeddings=False),
        "mistral": write_tiny_model(folder / "mistral", family="mistral", sliding_window=4),
        "qwen2": write_tiny_model(folder / "qwen2", family="qwen2"),
        "mixtral": write_tiny_model(folder / "mixtral", family="mixtral"),
        "stopping": write_tiny_model(folder / "stopping", eos_token_id=[7, 30]),
    }


def conformance(model, cache_bytes):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()), GenerationSpec())
    check_rollout_backend(
        lambda: load_rollout_backend("transformers").build(model, topology=topology, cache_bytes=cache_bytes),
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(),
        vocab_size=VOCAB_SIZE,
        max_positions=MAX_POSITIONS,
    )


@pytest.mark.parametrize("model", ["tied", "untied", "mistral", "qwen2", "mixtral"])
def test_the_backend_conforms(ranks1, models, model):
    ranks1.run(conformance, models[model], 1 << 30)


def test_the_backend_conforms_on_two_ranks_and_in_turns(ranks2, models):
    """A cache for about two rows: generation goes in several turns."""
    ranks2.run(conformance, models["tied"], 30_000)


@pytest.mark.parametrize("model", ["tied", "mistral", "stopping"])
def test_greedy_tokens_are_those_of_generate(models, model):
    backend = build(models[model])
    reference = AutoModelForCausalLM.from_pretrained(models[model], dtype=torch.float32).eval()
    batch = build_prompts(9, vocab_size=VOCAB_SIZE, seed=3)
    prompts = rows_of(batch["prompt_ids"])
    width = max(len(row) for row in prompts)
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in prompts])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (width - len(row), 0)) for row in prompts])
    expected = reference.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=12, pad_token_id=63
    )[:, width:]
    result = backend.generate(batch, SamplingParams(max_new_tokens=12, greedy=True))
    for found, wanted in zip(rows_of(result["response_ids"]), expected, strict=True):
        assert torch.equal(found, wanted[: len(found)])
        assert (wanted[len(found) :] == 63).all()


def test_the_models_own_stop_tokens_end_a_response(models):
    backend = build(models["stopping"])
    batch = build_prompts(40, vocab_size=VOCAB_SIZE)
    result = backend.generate(batch, SamplingParams(max_new_tokens=30, temperature=3.0, stop_token_ids=(11,)))
    for ids, reason in zip(rows_of(result["response_ids"]), result["finish_reason"].tolist(), strict=True):
        stops = [token for token in ids.tolist() if token in (7, 11, 30)]
        assert stops == ids.tolist()[-1:] if reason == 0 else not stops
    assert set(result["finish_reason"].tolist()) == {0, 1}


def test_draws_follow_the_distribution(models):
    """4,000 first tokens of one prompt against the probabilities of a plain forward pass."""
    backend = build(models["tied"])
    reference = AutoModelForCausalLM.from_pretrained(models["tied"], dtype=torch.float32).eval()
    batch = build_prompts(1, vocab_size=VOCAB_SIZE)
    with torch.no_grad():
        logits = reference(input_ids=batch["prompt_ids"][0][None]).logits[0, -1]
    for temperature, top_p in ((2.0, 1.0), (2.0, 0.5)):
        sampling = SamplingParams(max_new_tokens=1, n=4000, temperature=temperature, top_p=top_p)
        drawn = backend.generate(batch, sampling)["response_ids"].values()
        probabilities = (logits / temperature).softmax(-1)
        ordered = probabilities.sort(descending=True)
        kept = ordered.indices[: int((ordered.values.cumsum(-1) < top_p).sum()) + 1]
        allowed = torch.zeros_like(probabilities).index_fill(0, kept, 1.0) * probabilities
        expected = allowed / allowed.sum()
        frequencies = drawn.bincount(minlength=VOCAB_SIZE) / 4000
        assert (frequencies - expected).abs().max() < 4 * (0.25 / 4000) ** 0.5
        assert frequencies[expected == 0].sum() == 0


def test_columns_can_be_used_in_training(models):
    result = build(models["tied"]).generate(build_prompts(3, vocab_size=VOCAB_SIZE), SamplingParams(max_new_tokens=4))
    weight = torch.ones((), requires_grad=True)
    (weight * result["rollout_logprobs"].values()).sum().backward()
    assert weight.grad is not None
    assert result["response_ids"].offsets() is result["rollout_logprobs"].offsets()
    assert result["response_ids"].to_padded_tensor(0).shape == (3, 4)
    assert result["weight_version"].tolist() == [0, 0, 0]
    assert isinstance(result, TensorDict)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_samples_do_not_depend_on_the_programs_default_dtype(models, dtype):
    backend, prompts = build(models["tied"]), build_prompts(3, vocab_size=VOCAB_SIZE)
    sampling = SamplingParams(max_new_tokens=4)
    expected = backend.generate(prompts, sampling)
    torch.set_default_dtype(dtype)
    try:
        found = backend.generate(prompts, sampling)
    finally:
        torch.set_default_dtype(torch.float32)
    for name in ("response_ids", "rollout_logprobs"):
        assert torch.equal(found[name].values(), expected[name].values())
    assert found["rollout_logprobs"].dtype == torch.float32


def test_memory_is_given_back_and_taken_again(models):
    backend = build(models["untied"])
    shapes = dict(backend.weight_layout().shapes)
    assert {name: tuple(tensor.shape) for name, tensor in backend.weight_buffers().items()} == shapes
    backend.release()
    with pytest.raises(BackendError, match=r"were released\. Call resume\(\) and send them again"):
        backend.commit_weights(1)
    assert {tensor.untyped_storage().size() for tensor in backend.weight_buffers().values()} == {0}
    assert dict(backend.weight_layout().shapes) == shapes
    backend.resume()
    assert {name: tuple(tensor.shape) for name, tensor in backend.weight_buffers().items()} == shapes


def test_the_cache_is_sized_by_a_share_of_the_memory_too(models):
    memory = host_bytes()
    if torch.cuda.is_available():
        memory = torch.cuda.mem_get_info()[1]
    share = 1000.5 / memory
    with pytest.raises(BackendError, match=r"bytes of keys and values, above cache_bytes=1000. Raise cache_bytes"):
        build(models["tied"], cache_fraction=share).generate(
            build_prompts(1, vocab_size=VOCAB_SIZE), SamplingParams(max_new_tokens=9)
        )
    with pytest.raises(BackendError, match=r"cache_bytes=1 and cache_fraction=0.5 both size the cache. Use one"):
        build(models["tied"], cache_bytes=1, cache_fraction=0.5)


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_scores_of_a_prefill_count_where_attention_writes_them(tmp_path, family):
    """Gemma 2 has a cap on attention's logits, and computes them without a fused function: 12 bytes for two tokens."""
    write = write_tiny_model if family == "llama" else partial(write_tiny_family, family=family)
    model, least = write(tmp_path), 120_000
    ids = to_jagged(torch.arange(3, 33).repeat(8), torch.arange(0, 241, 30))
    prompts = TensorDict({"prompt_ids": ids, "row_id": torch.arange(8)}, [8])
    sampling, found = SamplingParams(max_new_tokens=2), []
    for cache_bytes in (least, 1 << 30):
        backend, passes = build(model, cache_bytes=cache_bytes), []
        backend._model.register_forward_pre_hook(
            lambda module, _, inputs, passes=passes: passes.append(inputs["input_ids"].shape), with_kwargs=True
        )
        found.append(backend.generate(prompts, sampling)["response_ids"].values())
        rows = [shape[0] for shape in passes if shape[1] > 1]
        assert sum(rows) == 8
        if cache_bytes > least:
            assert rows == [8]
            continue
        config = backend._model.config
        keys = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        scores = 12 * config.num_attention_heads if family == "gemma2" else 0
        most = least // ((30 + 2) * keys + 30 * 30 * scores)
        assert most > 1
        assert rows == [most] * (8 // most) + [8 % most] * bool(8 % most)
    assert torch.equal(*found)


@pytest.mark.parametrize("fails", ["on the host", "on a device"])
def test_lack_of_memory_is_one_error_and_the_next_batch_is_drawn(models, monkeypatch, fails):
    backend, prompts = build(models["tied"], cache_bytes=1 << 20), build_prompts(3, vocab_size=VOCAB_SIZE)
    sampling = SamplingParams(max_new_tokens=4)
    before = backend.generate(prompts, sampling)

    def allocate(model, capacity, **_):
        if fails == "on the host":
            return torch.empty(1 << 60, dtype=torch.uint8)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr("hf_engine.rollout.transformers._backend.build_cache", allocate)
        with pytest.raises(BackendError, match=r"to decode 3 rows .* cache_bytes=1048576 .*. Lower cache_bytes"):
            backend.generate(prompts, sampling)
    after = backend.generate(prompts, sampling)
    assert torch.equal(before["response_ids"].values(), after["response_ids"].values())


def test_other_failures_keep_their_names(models, monkeypatch):
    def fail(model, capacity, **_):
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr("hf_engine.rollout.transformers._backend.build_cache", fail)
    with pytest.raises(RuntimeError, match="a kernel is missing"):
        build(models["tied"]).generate(build_prompts(3, vocab_size=VOCAB_SIZE), SamplingParams(max_new_tokens=4))


@pytest.mark.parametrize(
    ("family", "config", "found"),
    [
        ("mamba", {"state_size": 4}, r"recurrent layers \(linear_attention\)"),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_attention_heads": 2}, r"recurrent layers \(conv\)"),
        ("recurrent_gemma", {"num_attention_heads": 2, "attention_window_size": 8}, "recurrent layers"),
        ("rwkv", {"attention_hidden_size": 32}, "recurrent layers"),
    ],
)
def test_models_with_state_beyond_keys_and_values_are_refused(tmp_path, family, config, found):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **config)).save_pretrained(tmp_path)
    with pytest.raises(BackendError, match=rf"with {found}: .* Choose a model with attention in all layers"):
        build(tmp_path)


def test_what_cannot_be_generated_is_refused(models):
    with pytest.raises(BackendError, match=r"gen_pp_size=1, gen_tp_size=2 are not supported. Set both to 1"):
        load_rollout_backend("transformers").build(
            models["tied"], topology=Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=2))
        )
    with pytest.raises(BackendError, match=r"absent': no such directory"):
        build(models["tied"] / "absent")
    with pytest.raises(BackendError, match=r"cache_bytes='1G' must be a whole number of at least 1"):
        build(models["tied"], cache_bytes="1G")
    backend = build(models["tied"], cache_bytes=1000)
    prompts = [torch.arange(3, 8), torch.arange(3, 43)]
    ids = torch.nested.nested_tensor(prompts, layout=torch.jagged)
    batch = TensorDict({"prompt_ids": ids, "row_id": torch.arange(2)}, batch_size=[2])
    with pytest.raises(
        BackendError, match=r"row 1 has 40 tokens, above the model's 48 positions - max_new_tokens=9 = 39"
    ):
        backend.generate(batch, SamplingParams(max_new_tokens=9))
    with pytest.raises(
        BackendError, match=r"row 1 needs 42 tokens x 2 samples = 43008 bytes .* above cache_bytes=1000"
    ):
        backend.generate(batch, SamplingParams(max_new_tokens=2, n=2))
    with pytest.MonkeyPatch.context() as patch:
        # It takes the memory that is not there.
        patch.setattr("hf_engine.rollout.transformers._backend.draw_uniforms", None)
        with pytest.raises(BackendError, match="lower n or max_new_tokens"):
            backend.generate(batch, SamplingParams(max_new_tokens=2, n=10**5))
    empty = torch.nested.nested_tensor([torch.arange(0)], layout=torch.jagged)
    with pytest.raises(BackendError, match="prompt of row 0 is empty"):
        backend.generate(
            TensorDict({"prompt_ids": empty, "row_id": torch.arange(1)}, batch_size=[1]),
            SamplingParams(max_new_tokens=2),
        )


def batch_of_nothing():
    ids = torch.nested.nested_tensor_from_jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    return TensorDict({"prompt_ids": ids, "row_id": torch.zeros(0, dtype=torch.int64)}, batch_size=[0])


def test_no_prompts_have_no_responses_or_one_typed_error(models):
    backend = build(models["tied"])
    responses = backend.generate(batch_of_nothing(), SamplingParams(max_new_tokens=4, n=1000))
    assert responses.batch_size == torch.Size([0])
    for sampling in (
        SamplingParams(max_new_tokens=2, n=10**30),
        SamplingParams(max_new_tokens=10**12),
        SamplingParams(max_new_tokens=10**30),
    ):
        with pytest.raises(BackendError, match=r"even one prompt x n=.* Lower n or max_new_tokens"):
            backend.generate(batch_of_nothing(), sampling)


def test_a_minimum_length_needs_a_token_that_does_not_stop(models):
    backend, prompts = build(models["stopping"]), build_prompts(2, vocab_size=VOCAB_SIZE)
    stops = tuple(token for token in range(VOCAB_SIZE) if token not in (7, 30))
    with pytest.raises(BackendError, match="all 64 tokens in stop_token_ids or the model's own eos_token_id: none is"):
        backend.generate(prompts, SamplingParams(max_new_tokens=4, min_new_tokens=2, stop_token_ids=stops))
    left = SamplingParams(max_new_tokens=4, min_new_tokens=2, stop_token_ids=stops[1:])
    assert all(row[:2].tolist() == [0, 0] for row in rows_of(backend.generate(prompts, left)["response_ids"]))
