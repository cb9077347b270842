"""Sequence classifiers in the fsdp backend, against transformers and a plain loop in one process."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
)

from hf_engine import SupportsScores, TrainConfig, derive_shape, load_train_backend
from hf_engine.model_directory import check_model_directory, read_model_directory
from hf_engine.models.causal_lm import find_head_name, load_causal_lm, save_causal_lm
from hf_engine.models.classifier import load_classifier
from hf_engine.testing import write_tiny_family
from hf_engine.training.fsdp._model import load_with_head
from hf_engine.training.fsdp._scored import ScoredBatch
from hf_protocols import BackendError, ModelError, ParallelSpec, Topology

VOCAB_SIZE = 32
CONFIG = TrainConfig(learning_rate=1e-2, eps=1e-3, micro_batch_tokens=64, shard="layer")


def llama_config(**keys):
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        eos_token_id=1,
        **keys,
    )


SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
    "num_labels": 1,
}
CLASSIFIERS = {
    "llama": llama_config(pad_token_id=0, num_labels=1),
    "llama that pads with its eos": llama_config(pad_token_id=1, num_labels=1),
    "gpt2 without a pad token": GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=16, n_layer=2, n_head=2, n_positions=48, initializer_range=0.3, num_labels=1
    ),
    "bert": BertConfig(**SIZES),
    "gemma2 with a cap": Gemma2Config(
        **SIZES, num_key_value_heads=1, head_dim=8, attn_logit_softcapping=0.5, pad_token_id=0
    ),
}


def write_classifier(name: str, directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(CLASSIFIERS[name]).save_pretrained(directory)
    return directory


def jagged(rows):
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def draw_pairs(num_rows: int):
    """Prompts, chosen and rejected responses of unequal lengths; some end with the ids 0 and 1."""
    generator = torch.Generator().manual_seed(3)

    def draw(least, most):
        length = int(torch.randint(least, most, (1,), generator=generator))
        return torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()

    return [(draw(1, 6), [*draw(1, 7), row % 2], [*draw(1, 4), 1]) for row in range(num_rows)]


def batch_of(pairs, *, both=True, first=0):
    columns = {"prompt_ids": jagged([p for p, _, _ in pairs]), "response_ids": jagged([c for _, c, _ in pairs])}
    if both:
        columns["rejected_ids"] = jagged([r for _, _, r in pairs])
    columns["weight"] = torch.arange(first + 1, first + len(pairs) + 1).float()
    return TensorDict(columns, batch_size=[len(pairs)])


def share(pairs, both=True):
    """This rank's rows: unequal numbers of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    cuts = [0, *(len(pairs) * (each + 1) // (size + 1) for each in range(1, size)), len(pairs)]
    first, last = list(pairwise(cuts))[rank]
    return batch_of(pairs[first:last], both=both, first=first), first, last


def build(model, config=CONFIG, **options):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
    return load_train_backend("fsdp").build(model, topology=topology, config=config, head="score", **options)


def score_alone(model, pairs):
    """The logits of transformers for one sequence after the other, without padding: [rows, 2]."""
    with torch.no_grad():
        sides = [[model(torch.tensor([p + side])).logits for side in (c, r)] for p, c, r in pairs]
    return torch.tensor([[float(each.reshape(-1)[-1]) for each in row] for row in sides])


def score(model, pairs, both, config=CONFIG):
    backend = build(model, config, trainable=False)
    assert isinstance(backend, SupportsScores)
    batch, first, last = share(pairs, both)
    return first, last, backend.compute_scores(batch)["scores"]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_equal_transformers(ranks2, tmp_path, name):
    directory, pairs = write_classifier(name, tmp_path / "model"), draw_pairs(9)
    reference = AutoModelForSequenceClassification.from_pretrained(directory, attn_implementation="eager").eval()
    wanted = score_alone(reference, pairs)
    for both in (True, False):
        for first, last, found in ranks2.run(score, directory, pairs, both):
            torch.testing.assert_close(found, wanted[first:last] if both else wanted[first:last, 0])


def end_with_every_token(num_rows):
    pairs = enumerate(draw_pairs(num_rows))
    return [(p, [*c, row % VOCAB_SIZE], [*r, (row + 16) % VOCAB_SIZE]) for row, (p, c, r) in pairs]


def test_rows_that_end_with_every_token_are_scored(ranks1, tmp_path):
    """No token of the vocabulary would be left to pad with, where the model has no token for it."""
    directory, pairs = write_classifier("gpt2 without a pad token", tmp_path / "model"), end_with_every_token(80)
    reference = AutoModelForSequenceClassification.from_pretrained(directory, attn_implementation="eager").eval()
    wanted = score_alone(reference, pairs)[:, 0]
    ((_, _, found),) = ranks1.run(score, directory, pairs, False, replace(CONFIG, micro_batch_tokens=4096))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("both", [True, False])
def test_a_token_is_left_that_ends_no_sequence(both):
    batch = ScoredBatch(batch_of(end_with_every_token(80), both=both), VOCAB_SIZE)
    found = batch.micro_batches(1 << 20)
    assert sorted(torch.cat([each.rows for each in found]).tolist()) == list(range(80))
    assert len(found) == (6 if both else 3)
    for each in found:
        last = each.attention_mask.sum(1) - 1
        assert len(set(each.input_ids[torch.arange(len(last)), last].tolist())) < VOCAB_SIZE


def test_scores_of_a_critic_are_its_last_values(ranks2, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama_config())
    head = torch.randn(1, 16)
    weights = {name: each for name, each in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path / "critic", state_dict=weights | {"value_head.weight": head})
    pairs = draw_pairs(5)
    with torch.no_grad():
        states = [model.model(torch.tensor([p + c])).last_hidden_state[0, -1] for p, c, _ in pairs]
    wanted = torch.stack(states) @ head[0]
    for first, last, found in ranks2.run(score, tmp_path / "critic", pairs, False):
        torch.testing.assert_close(found, wanted[first:last])


@dataclass(frozen=True)
class WeightedDifference:
    """Sums weight * softplus(rejected - chosen)."""

    def __call__(self, outputs, micro_batch):
        chosen, rejected = outputs["scores"].unbind(1)
        loss = (micro_batch["weight"] * torch.nn.functional.softplus(rejected - chosen)).sum()
        return loss, {"rows": (float(len(chosen)), 1.0)}


def train(model, pairs, config, directory):
    backend = build(model, config)
    batch, _, _ = share(pairs)
    total = sum(range(1, len(pairs) + 1))
    metrics = [backend.train_step(batch, WeightedDifference(), float(total)) for _ in range(2)]
    backend.export_hf(directory)
    return [each["grad_norm"][0] for each in metrics]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_training_equals_a_plain_loop(ranks1, ranks2, tmp_path, name):
    """Two steps of pairs: gradient norms and weights, for any micro-batches and ranks."""
    directory, pairs = write_classifier(name, tmp_path / "model"), draw_pairs(7)
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=CONFIG.betas, eps=1e-3, weight_decay=0.0)
    norms = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for row, (prompt, chosen, rejected) in enumerate(pairs, 1):
            better, worse = (model(torch.tensor([prompt + side])).logits[0, 0] for side in (chosen, rejected))
            loss = loss - row * torch.nn.functional.logsigmoid(better - worse) / 28
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.max_grad_norm)))
        optimizer.step()
    for ranks, tokens in ((ranks1, 28), (ranks1, 1000), (ranks2, 28)):
        config = TrainConfig(learning_rate=1e-2, eps=1e-3, micro_batch_tokens=tokens, shard="layer")
        for found in ranks.run(train, directory, pairs, config, tmp_path / "trained"):
            assert found == pytest.approx(norms, rel=1e-4)
        trained = AutoModelForSequenceClassification.from_pretrained(tmp_path / "trained")
        assert trained.config.num_labels == 1
        for parameter, wanted in zip(trained.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted, rtol=2e-4, atol=2e-5)


def continue_training(model, pairs, directory):
    train(model, pairs, CONFIG, directory)
    backend = build(directory, trainable=False)
    batch, *_ = share(pairs)
    scores = backend.compute_scores(batch)["scores"]
    backend.load_hf(directory)
    assert torch.equal(backend.compute_scores(batch)["scores"], scores)
    return scores


def test_a_language_model_starts_at_zero(ranks1, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(llama_config()).save_pretrained(tmp_path / "lm")
    pairs = draw_pairs(4)
    assert ranks1.run(score, tmp_path / "lm", pairs, True)[0][2].eq(0).all()
    assert ranks1.run(continue_training, tmp_path / "lm", pairs, tmp_path / "trained")[0].ne(0).all()


def test_a_family_without_classifier_has_a_value_head(ranks1, tmp_path):
    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "lm")
    found = ranks1.run(continue_training, tmp_path / "lm", draw_pairs(4), tmp_path / "trained")[0]
    assert found.ne(0).all()
    assert "value_head.weight" in read_model_directory(tmp_path / "trained").tensors


@pytest.mark.parametrize("family", ["phi", "gemma3_text", "qwen3_moe", "olmoe"])
def test_models_of_any_family_score_and_are_read_back(tmp_path, family):
    """Heads with a bias, tied heads, stacked experts, and a family without a classifier; dtypes are the source's."""
    model, _ = load_with_head(write_tiny_family(tmp_path / "lm", family), torch.float32, "score")
    weights, name = {key: each.detach() for key, each in model.named_parameters()}, find_head_name(model)
    if name:
        weights["value_head.weight"] = weights.pop(name)
    (tmp_path / "trained").mkdir()
    save_causal_lm(model, weights, tmp_path / "trained", head="value_head.weight" if name else "", dtype="bfloat16")
    files = read_model_directory(tmp_path / "trained")
    check_model_directory(files, head="score")
    assert (name == "", {each.dtype for each in files.tensors.values()}) == (family != "olmoe", {"BF16"})
    again, _ = load_with_head(tmp_path / "trained", torch.bfloat16, "score")
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], tensor.bfloat16(), rtol=0, atol=0)
    assert derive_shape(files).num_layers == 2
    load_with_head(tmp_path / "trained", torch.float32, "value")


def test_a_critic_starts_from_a_classifier(ranks1, tmp_path):
    """The value before a token is the score of what came before."""
    directory, pairs = write_classifier("llama", tmp_path / "model"), draw_pairs(5)
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    wanted = [model(torch.tensor([p + c[:-1]])).logits.item() for p, c, _ in pairs]
    for found in ranks1.run(last_values, directory, pairs):
        assert found == pytest.approx(wanted, abs=1e-5)


def last_values(directory, pairs):
    topology = Topology(ParallelSpec())
    backend = load_train_backend("fsdp").build(directory, topology=topology, config=CONFIG, head="value")
    return [float(row[-1]) for row in backend.compute_values(batch_of(pairs, both=False))["values"].unbind()]


def test_a_row_above_the_budget_is_refused(ranks1, tmp_path):
    directory = write_classifier("llama", tmp_path / "model")
    with pytest.raises(
        RuntimeError, match="BatchError: row 0 has 2 sequences of up to 70 tokens, above micro_batch_tokens=64"
    ):
        ranks1.run(score, directory, [([5] * 60, [3] * 10, [4])], True)


def test_two_labels_are_refused(tmp_path):
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(llama_config(num_labels=2)).save_pretrained(tmp_path)
    for head in ("score", "value"):
        with pytest.raises(ModelError, match=r"has 2 labels in its config\.json .*num_labels = 1"):
            check_model_directory(read_model_directory(tmp_path), head=head)
    assert "num_labels" not in json.loads((tmp_path / "config.json").read_text())


def test_a_classifier_that_lacks_its_head_is_refused(tmp_path):
    model = AutoModelForSequenceClassification.from_config(llama_config(num_labels=1))
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in model.state_dict().items() if "score" not in k})
    with pytest.raises(BackendError, match=r"lacks the parameters score\.weight"):
        load_classifier(tmp_path, torch.float32)
    with pytest.raises(ModelError, match="cannot predict tokens"):
        load_causal_lm(tmp_path, torch.float32)


def test_megatron_has_no_classifiers():
    with pytest.raises(BackendError, match="head='score': this backend has no sequence classifiers"):
        load_train_backend("megatron").build("x", topology=Topology(ParallelSpec()), config=CONFIG, head="score")
