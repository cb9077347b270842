from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from hf_engine import TrainConfig, load_train_backend
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_batch, reference_outputs, rows_of
from hf_protocols import BackendError, BatchError, ParallelSpec, Topology

VOCAB_SIZE = 64
CONFIG = TrainConfig(learning_rate=1e-2, micro_batch_tokens=40)
ONE = Topology(ParallelSpec())
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}


def build(directory, topology=ONE, config=CONFIG, **options):
    return load_train_backend("megatron").build(directory, topology=topology, config=config, **options)


def negative_logprobs(outputs, micro_batch):
    return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}


def largest_difference(directory):
    """Of log-probs and entropies from those of transformers."""
    backend = build(directory, trainable=False)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    batch = build_batch(5, vocab_size=VOCAB_SIZE)
    scored = backend.compute_logprobs(batch, temperature=0.7, entropy=True)
    backend.close()
    differences = []
    columns = (batch["prompt_ids"], batch["response_ids"], scored["logprobs"], scored["entropy"])
    for prompt, response, logprobs, entropy in zip(*map(rows_of, columns), strict=True):
        with torch.no_grad():
            expected = (reference_outputs(reference, prompt, response) / 0.7).log_softmax(-1)
        differences.append(float((expected.gather(-1, response[:, None])[:, 0] - logprobs).abs().max()))
        differences.append(float((-(expected.exp() * expected).sum(-1) - entropy).abs().max()))
    return max(differences)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 100.0}),
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("mixtral", {}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": False}),
    ],
)
def test_every_family_scores_as_transformers_does(ranks1, tmp_path, family, config):
    model = write_tiny_model(tmp_path / "model", family=family, tie_embeddings=False, **SIZES | config)
    (difference,) = ranks1.run(largest_difference, model)
    assert difference < 2e-5


def changed(model, directory, **entries):
    """The same files with another config.json."""
    directory.mkdir()
    for path in Path(model).iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | entries))
    return directory


def refusal_of(directory):
    with pytest.raises(BackendError) as error:
        build(directory)
    return str(error.value)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "does not know the architecture GemmaForCausalLM"),
        ({"architectures": None}, "does not know the architecture none"),
        ({"hidden_act": "gelu"}, r"cannot express .* exactly: hidden_act='gelu'"),
        ({"attention_bias": True}, "biases in the output projection"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn'; .* default, linear and"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
            "rope_parameters: factor=None must be a number of at least 1",
        ),
        ({"vocab_size": 65}, "1 of .* parameters differ, such as 'model.embed_tokens.weight'"),
        ({"model_type": "unheard-of"}, "model_type='unheard-of' is not supported"),
    ],
)
def test_models_that_it_cannot_express_are_refused(ranks1, tmp_path, entries, message):
    model = write_tiny_model(tmp_path / "model", **SIZES)
    (refusal,) = ranks1.run(refusal_of, changed(model, tmp_path / "changed", **entries))
    with pytest.raises(BackendError, match=message):
        raise BackendError(refusal)


def refuse_directories(folder):
    folder = Path(folder)
    assert "absent': no such directory" in refusal_of(folder / "absent")
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_bytes((folder / "model" / "config.json").read_bytes())
    assert r"holds no safetensors files" in refusal_of(folder / "empty")
    backend = build(folder / "model", trainable=False)
    with pytest.raises(BackendError, match="tie_word_embeddings is True here and False there"):
        backend.load_hf(folder / "untied")
    with pytest.raises(BackendError, match=r"state.json does not exist"):
        backend.load_state(folder)
    with pytest.raises(BackendError, match="trainable=True"):
        backend.train_step(build_batch(1, vocab_size=VOCAB_SIZE), negative_logprobs, 1.0)
    with pytest.raises(BackendError, match="head='value'"):
        backend.compute_values(build_batch(1, vocab_size=VOCAB_SIZE))
    (folder / "occupied").write_text("a file")
    with pytest.raises(BackendError, match=r"rank 0 refused: .*occupied"):
        backend.export_hf(folder / "occupied" / "model")
    backend.close()


def test_what_cannot_be_read_or_written_says_why(ranks1, tmp_path):
    write_tiny_model(tmp_path / "model", **SIZES)
    write_tiny_model(tmp_path / "untied", tie_embeddings=False, **SIZES)
    ranks1.run(refuse_directories, tmp_path)


def refuse_layouts(model, three_heads):
    def refused(message, order="megatron", **sizes):
        with pytest.raises(BackendError, match=message):
            build(model, Topology(ParallelSpec(**sizes), order=order))

    with pytest.raises(BackendError, match=r"does not use torch\.compile. Set compile=False"):
        build(model, Topology(ParallelSpec(dp_size=2)), replace(CONFIG, compile=True))
    with pytest.raises(BackendError, match=r"attn_implementation='eager': .* Use 'auto' or 'sdpa'$"):
        build(model, Topology(ParallelSpec(dp_size=2)), replace(CONFIG, attn_implementation="eager"))
    refused("no context parallelism, got cp_size=2", cp_size=2)
    with pytest.raises(BackendError, match="num_kv_heads=3 do not divide evenly by tp_size=2 in training"):
        build(three_heads, Topology(ParallelSpec(tp_size=2)))
    refused("ep_size=2 spreads experts over ranks, and llama has no experts", dp_size=2, ep_size=2)
    refused("order='contiguous' with pp_size=2 and ep_size=2", pp_size=2, dp_size=2, ep_size=2, order="contiguous")
    with pytest.raises(ValueError, match="the topology has 4 ranks, the default process group 2"):
        build(model, Topology(ParallelSpec(dp_size=4)))
    actor = build(model, Topology(ParallelSpec(pp_size=2)))
    critic = build(model, Topology(ParallelSpec(pp_size=2)), head="value")
    refused("megatron-core keeps one layout in a process", dp_size=2)
    actor.close()
    refused("megatron-core keeps one layout in a process", dp_size=2)
    assert critic.compute_values(build_batch(2, vocab_size=VOCAB_SIZE))["values"].values().eq(0).all()
    critic.close()
    critic.close()
    build(model, Topology(ParallelSpec(dp_size=2))).close()


def test_layouts_that_it_cannot_run_are_refused(ranks2, tmp_path):
    three_heads = write_tiny_model(tmp_path / "three", num_attention_heads=3, num_key_value_heads=3)
    ranks2.run(refuse_layouts, write_tiny_model(tmp_path / "model"), three_heads)


def refuse_rows(model):
    backend = build(model, Topology(ParallelSpec(pp_size=2)), TrainConfig(learning_rate=1e-3, micro_batch_tokens=8))
    batch = TensorDict({"prompt_ids": jagged([[5] * 9]), "response_ids": jagged([[6]])}, batch_size=[1])
    with pytest.raises(BatchError, match="row 0 has 9 prompt"):
        backend.compute_logprobs(batch)
    backend.close()


def jagged(rows):
    return torch.nested.nested_tensor([torch.tensor(row, dtype=torch.int64) for row in rows], layout=torch.jagged)


def test_rows_above_the_token_budget_are_refused(ranks2, tmp_path):
    ranks2.run(refuse_rows, write_tiny_model(tmp_path / "model"))


def losses_in(model, dtype):
    backend = build(model, config=TrainConfig(learning_rate=3e-3, dtype=dtype))
    batch = build_batch(4, vocab_size=VOCAB_SIZE)
    losses = []

    def loss_fn(outputs, micro_batch):
        loss = -(outputs["logprobs"] * micro_batch["response_mask"]).sum()
        losses.append(float(loss.detach()) / 10.0)
        return loss, {}

    for _ in range(4):
        backend.train_step(batch, loss_fn, 10.0)
    assert backend.weight_layout().dtype == dtype
    backend.close()
    return losses


def test_mixed_precision_keeps_float32_masters_and_learns(ranks1, tmp_path):
    model = write_tiny_model(tmp_path / "model", **SIZES)
    exact, mixed = (ranks1.run(losses_in, model, dtype)[0] for dtype in ("float32", "bfloat16"))
    assert mixed[-1] < mixed[0]
    torch.testing.assert_close(torch.tensor(mixed), torch.tensor(exact), atol=0.3, rtol=0)


def set_rates(model):
    backend = build(model, config=TrainConfig(learning_rate=1e-3, warmup_steps=4))
    rates = []
    for step in range(5):
        if step == 2:
            backend.set_learning_rate(1e-2)
        metrics = backend.train_step(build_batch(2, vocab_size=VOCAB_SIZE), negative_logprobs, 1.0)
        rates.append(metrics["learning_rate"][0])
    with pytest.raises(BackendError, match="denominator=0"):
        backend.train_step(build_batch(2, vocab_size=VOCAB_SIZE), negative_logprobs, 0.0)
    backend.close()
    return rates


def test_warm_up_and_a_new_learning_rate(ranks1, tmp_path):
    (rates,) = ranks1.run(set_rates, write_tiny_model(tmp_path / "model", **SIZES))
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-2, 1e-2, 1e-2])
