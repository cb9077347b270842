"""Adapters on FSDP, against peft on plain transformers with the same seed, rows and optimizer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, get_peft_model
from peft import LoraConfig as PeftConfig
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_engine import (
    HybridEngine,
    LoraConfig,
    SamplingParams,
    SupportsAdapters,
    SupportsUnmergedAdapters,
    TrainConfig,
    load_rollout_backend,
    load_train_backend,
    merge_adapter,
)
from hf_engine.model_directory import read_adapter, read_model_directory
from hf_engine.testing import gather_weights, write_tiny_model
from hf_engine.testing._cases import build_batch, select_rows
from hf_protocols import BackendError, ConfigError, GenerationSpec, ModelError, ParallelSpec, Topology

LORA = LoraConfig(rank=3, alpha=6.0)
CONFIG = TrainConfig(
    learning_rate=1e-2, micro_batch_tokens=64, max_grad_norm=1e9, eps=1e-2, lora=LORA
)  # eps: else rounding grows
SEED = 5


def topology_of_all_ranks():
    return Topology(ParallelSpec(dp_size=dist.get_world_size()), GenerationSpec())


def build(directory, config=CONFIG, **options):
    return load_train_backend("fsdp").build(
        directory, topology=topology_of_all_ranks(), config=config, seed=SEED, **options
    )


def negative_logprobs(outputs, micro_batch):
    return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}


def own_rows(batch):
    return select_rows(batch, range(dist.get_rank(), len(batch), dist.get_world_size()))


def logprobs_of(model, batch):
    found = []
    for prompt, response in zip(batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True):
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, response[:, None])[:, 0])
    return torch.cat(found)


def wrap(directory, targets):
    """The same adapters by peft on the plain model."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    torch.manual_seed(SEED)
    config = PeftConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(model, config).eval()


def train_like_peft(directory, config):
    """Two optimizer steps on all ranks, and the same two in this process."""
    backend, batch = build(directory, config), build_batch(vocab_size=64, num_rows=5)
    reference = wrap(directory, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    tokens = float(sum(len(row) for row in batch["response_ids"].unbind()))
    trained = [parameter for parameter in reference.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=1e-2, betas=config.betas, eps=config.eps, weight_decay=0.0)
    before = {name: tensor.clone() for name, tensor in gather_weights(backend, topology_of_all_ranks()).items()}
    for step in range(2):
        if step:  # the second one in two halves
            for rows in (range(3), range(3, 5)):
                backend.forward_backward(own_rows(select_rows(batch, rows)), negative_logprobs, tokens)
            backend.optim_step()
        else:
            backend.train_step(own_rows(batch), negative_logprobs, tokens)
        adam.zero_grad()
        (-logprobs_of(reference, batch).sum() / tokens).backward()
        adam.step()
    found = backend.compute_logprobs(own_rows(batch))["logprobs"].values()
    with torch.no_grad():
        torch.testing.assert_close(found, logprobs_of(reference, own_rows(batch)), rtol=0, atol=1e-4)
    backend.keep_adapters_apart(True)
    apart = gather_weights(backend, topology_of_all_ranks())
    wanted = {
        name.removeprefix("base_model.model.").replace(".default", "").replace(".base_layer", ""): tensor.detach()
        for name, tensor in reference.named_parameters()
    }
    assert apart.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if ".lora_" in name:
            torch.testing.assert_close(apart[name], tensor, rtol=0, atol=1e-5, msg=name)
        else:
            assert torch.equal(apart[name], before[name]) and torch.equal(apart[name], tensor), name
    assert any(bool(tensor.any()) for name, tensor in apart.items() if ".lora_B." in name)
    with backend.adapters_off(), torch.no_grad(), reference.disable_adapter():
        off = backend.compute_logprobs(own_rows(batch))["logprobs"].values()
        torch.testing.assert_close(off, logprobs_of(reference, own_rows(batch)), rtol=0, atol=1e-4)


def step(backend, batch):
    backend.train_step(own_rows(batch), negative_logprobs, 20.0)


def transition(directory, takes):
    """The sampler has the adapters, apart or merged, and the training weights are as they were."""
    backend, batch, topology = build(directory), build_batch(vocab_size=64, num_rows=4), topology_of_all_ranks()
    options = {"lora": LORA} if takes else {}
    rollout = load_rollout_backend("transformers").build(directory, topology=topology, **options)
    assert isinstance(rollout, SupportsUnmergedAdapters) and (rollout.held_adapters() is not None) == takes
    engine = HybridEngine(backend, rollout, topology)
    prompts = own_rows(TensorDict({"prompt_ids": batch["prompt_ids"], "row_id": torch.arange(4)}, [4]))
    for _ in range(2):
        step(backend, batch)
        before = {name: tensor.clone() for name, tensor in gather_weights(backend, topology_of_all_ranks()).items()}
        with engine.generation():
            found = engine.generate(prompts, SamplingParams(max_new_tokens=6))
        after = gather_weights(backend, topology_of_all_ranks())
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        own = TensorDict({"prompt_ids": prompts["prompt_ids"], "response_ids": found["response_ids"]}, [len(prompts)])
        on = backend.compute_logprobs(own)["logprobs"].values()
        with backend.adapters_off():
            off = backend.compute_logprobs(own)["logprobs"].values()
        torch.testing.assert_close(found["rollout_logprobs"].values(), on, rtol=0, atol=1e-4)
        assert float((on - off).abs().mean()) > 1e-2
    adapters = any(".lora_" in name for name in engine.plan.target.shapes)
    assert adapters == takes
    engine.close()


def probe(directory):
    """`B` is another inside and back to the bit outside, alike on all ranks."""
    backend, batch = build(directory), own_rows(build_batch(vocab_size=64, num_rows=4))
    step(backend, build_batch(vocab_size=64, num_rows=4))
    backend.keep_adapters_apart(True)
    before = {name: tensor.clone() for name, tensor in gather_weights(backend, topology_of_all_ranks()).items()}
    changes = backend.weight_changes
    with backend.perturbed_adapters(seed=1, std=0.1):
        inside = gather_weights(backend, topology_of_all_ranks())
        assert backend.weight_changes > changes
    after = gather_weights(backend, topology_of_all_ranks())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    changed = {name for name, tensor in inside.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if ".lora_B." in name}
    assert backend.weight_changes > changes + 1
    assert float(backend.compute_logprobs(batch)["logprobs"].values().isfinite().all())


def come_back(directory, folder):
    """A state brings the adapters back, `load_hf` starts them again on another base."""
    backend, batch = (
        build(directory, replace(CONFIG, lora=replace(LORA, dropout=0.5))),
        build_batch(vocab_size=64, num_rows=4),
    )
    first = backend.compute_logprobs(own_rows(batch))["logprobs"].values()
    step(backend, batch)
    trained = backend.compute_logprobs(own_rows(batch))["logprobs"].values()
    backend.save_state(folder / "state")
    backend.load_hf(directory)
    assert torch.equal(backend.compute_logprobs(own_rows(batch))["logprobs"].values(), first)
    assert backend.optimizer_steps == 0
    backend.load_state(folder / "state")
    assert torch.equal(backend.compute_logprobs(own_rows(batch))["logprobs"].values(), trained)
    other = build(directory, replace(CONFIG, lora=replace(LORA, dropout=0.5)))
    step(other, batch)
    assert torch.equal(other.compute_logprobs(own_rows(batch))["logprobs"].values(), trained), "the same seed drops"
    plain = build(directory)
    step(plain, batch)
    assert not torch.equal(plain.compute_logprobs(own_rows(batch))["logprobs"].values(), trained)


def nothing_finite(outputs, micro_batch):
    return outputs["logprobs"].sum() * float("nan"), {}


def count_changes(directory):
    """Changes of the weights and of the base, by steps, skipped ones, drawn adapters and a load."""
    backend, found = build(directory, replace(CONFIG, on_nonfinite="skip")), []
    batch = own_rows(build_batch(vocab_size=64, num_rows=4))

    def draw():
        with backend.perturbed_adapters(seed=0, std=1.0):
            pass

    for act in (
        lambda: backend.train_step(batch, negative_logprobs, 1.0),
        lambda: backend.train_step(batch, nothing_finite, 1.0),
        draw,
        lambda: backend.load_hf(directory),
    ):
        before = backend.weight_changes, backend.base_changes
        act()
        found.append((backend.weight_changes - before[0], backend.base_changes - before[1]))
    return found


def test_only_a_load_changes_the_base(ranks1, models):
    assert ranks1.run(count_changes, models["tied"]) == [[(1, 0), (0, 0), (2, 0), (1, 1)]]


def export(directory, folder):
    backend, batch = build(directory), build_batch(vocab_size=64, num_rows=4)
    step(backend, batch)
    backend.export_adapter(folder / "adapter", base=str(directory))
    backend.export_hf(folder / "merged")
    return backend.compute_logprobs(batch)["logprobs"].values()


def export_score(directory, folder):
    backend, batch = (
        build(directory, head="score"),
        build_batch(vocab_size=64, num_rows=4).select("prompt_ids", "response_ids"),
    )
    for _ in range(2):
        backend.train_step(own_rows(batch), lambda outputs, _: (-outputs["scores"].sum(), {}), 4.0)
    backend.export_adapter(folder / "adapter", base=str(directory))
    return backend.compute_scores(batch)["scores"]


def train_value(directory):
    backend, batch = build(directory, head="value"), build_batch(vocab_size=64, num_rows=4)

    def loss(outputs, micro_batch):
        return -(outputs["values"] * micro_batch["response_mask"]).sum(), {}

    for _ in range(2):
        backend.train_step(own_rows(batch), loss, 20.0)
    backend.keep_adapters_apart(True)
    weights = gather_weights(backend, topology_of_all_ranks())
    assert bool(weights["lm_head.weight"].any())
    assert any(bool(tensor.any()) for name, tensor in weights.items() if ".lora_B." in name)
    with pytest.raises(BackendError, match="no format for a value head"):
        backend.export_adapter("elsewhere", base=str(directory))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": write_tiny_model(folder / "tied"),
        "qwen2": write_tiny_model(folder / "qwen2", family="qwen2", tie_embeddings=False),
        "mixtral": write_tiny_model(folder / "mixtral", family="mixtral"),
    }


@pytest.mark.parametrize(("model", "shard"), [("tied", "root"), ("qwen2", "layer")])
def test_two_ranks_train_like_peft(ranks2, models, model, shard):
    ranks2.run(train_like_peft, models[model], replace(CONFIG, shard=shard))


def test_checkpointed_layers_train_like_peft(ranks1, models):
    ranks1.run(train_like_peft, models["tied"], replace(CONFIG, shard="layer", activation_checkpointing=True))


@pytest.mark.parametrize("takes", [True, False])
def test_two_ranks_generate_with_adapters(ranks2, models, takes):
    ranks2.run(transition, models["qwen2"], takes)


def test_one_rank_generates_with_experts(ranks1, models):
    ranks1.run(transition, models["mixtral"], True)


def test_perturbed_adapters_come_back(ranks2, models):
    ranks2.run(probe, models["tied"])


def test_state_and_load_bring_adapters_back(ranks2, models, tmp_path):
    ranks2.run(come_back, models["qwen2"], tmp_path)


def test_value_head_is_trained_whole(ranks2, models):
    ranks2.run(train_value, models["tied"])


def test_exports_load_with_peft_and_transformers(ranks2, models, tmp_path):
    (trained, *_) = ranks2.run(export, models["tied"], tmp_path)
    with torch.device("meta"):  # a program's default device
        merge_adapter(tmp_path / "adapter", tmp_path / "again")
    batch, found = build_batch(vocab_size=64, num_rows=4), {}
    for name, load in (("adapter", AutoPeftModelForCausalLM), ("merged", AutoModelForCausalLM)):
        model = load.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        with torch.no_grad():
            found[name] = logprobs_of(model, batch)
        torch.testing.assert_close(found[name], trained, rtol=0, atol=1e-4, msg=name)
    merged, again = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).state_dict()
        for name in ("merged", "again")
    )
    for name, tensor in merged.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=1e-6, msg=name)
    assert (tmp_path / "again" / "tokenizer.json").is_file(), "copied from the base: the adapter has no tokenizer"
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == LORA.rank


def test_score_adapter_loads_with_peft(ranks2, models, tmp_path):
    (scores, *_) = ranks2.run(export_score, models["qwen2"], tmp_path)
    with torch.device("meta"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    with_adapter = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=1).eval()
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    batch = build_batch(vocab_size=64, num_rows=4)
    for row, score in enumerate(scores):
        ids = torch.cat([batch["prompt_ids"].unbind()[row], batch["response_ids"].unbind()[row]])[None]
        for model in (with_adapter, merged):
            with torch.no_grad():
                torch.testing.assert_close(model(input_ids=ids).logits[0, 0], score, rtol=0, atol=1e-4)


def test_absent_targets_are_refused_with_the_nearest(models):
    files, backend = read_model_directory(models["tied"]), load_train_backend("fsdp")
    backend.check_adapters(files, LoraConfig(targets=("q_proj", "layers.1.mlp.down_proj")), head="lm")
    backend.check_adapters(files, LoraConfig(targets=("q_proj",)), head="score")
    with pytest.raises(BackendError, match=r"is named 'q_prj'\. Did you mean q_proj.*\?"):
        backend.check_adapters(files, LoraConfig(targets=("k_proj", "q_prj")), head="lm")
    with pytest.raises(BackendError, match="'lm_head' is the output layer, which gets no adapter"):
        backend.check_adapters(files, LoraConfig(targets=("lm_head",)), head="lm")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 0}, "rank=0 must be a whole number"),
        ({"dropout": 1.0}, "must be below 1"),
        ({"targets": ()}, r"targets=\[\]: names no layer"),
        ({"targets": "q_proj"}, "a tuple of names"),
    ],
)
def test_wrong_lora_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**given)


def build_frozen(directory):
    with pytest.raises(BackendError, match="lora with trainable=False"):
        build(directory, trainable=False)
    backend = build(directory)
    assert isinstance(backend, SupportsAdapters)
    rollout = load_rollout_backend("transformers").build(directory, topology=topology_of_all_ranks())
    with pytest.raises(BackendError, match="merged adapters are copies"):
        HybridEngine(backend, rollout, topology_of_all_ranks(), training_weights="move")


def test_unfit_uses_are_refused(ranks1, models):
    ranks1.run(build_frozen, models["tied"])


def write_config(folder, **changes):
    body = {"peft_type": "LORA", "base_model_name_or_path": str(folder / "base"), "r": 2, **changes}
    (folder / "adapter").mkdir(exist_ok=True)
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(body))
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    return folder / "adapter"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"is an adapter of '.*base': no such directory\. Correct base_model_name_or_path"),
        ({"base_model_name_or_path": None}, "does not name its base model"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
    ],
)
def test_adapters_without_a_base_are_refused(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        read_adapter(write_config(tmp_path, **changes))
