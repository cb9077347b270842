from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_engine import TrainConfig, load_train_backend
from hf_engine.testing import LocalRanks, check_train_backend, gather_weights, write_tiny_model
from hf_engine.testing._cases import build_batch, reference_outputs, rows_of, select_rows
from hf_engine.testing._oracles import read_whole_state
from hf_protocols import BackendError, ParallelSpec, Topology
from hf_protocols.standard import THREE_D

VOCAB_SIZE = 70  # padded to 128 rows: two ranks hold 64 and 6 real ones
CONFIG = TrainConfig(learning_rate=1e-2, micro_batch_tokens=40)
SCHEDULED = replace(CONFIG, schedule="cosine", total_steps=6)
EXPERTS = ("qwen3_moe", "mixtral")
SIZES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": 46,  # is in prompts and responses, and its embedding must not learn from there
}
ONE_GROUP = SIZES | {"num_key_value_heads": 1}  # two ranks: three queries; a query, the key and the value
TWO_GROUPS = SIZES | {"num_attention_heads": 8, "head_dim": 8}  # four ranks: the same of each group


def topology_of(sizes, order="megatron", ep_size=1):
    pp_size, tp_size, dp_size = map(int, sizes.split("-"))
    return Topology(ParallelSpec(pp_size=pp_size, tp_size=tp_size, dp_size=dp_size, ep_size=ep_size), order=order)


def build(directory, topology, config=CONFIG, **options):
    return load_train_backend("megatron").build(directory, topology=topology, config=config, **options)


def load_reference(directory, head="lm"):
    """The model in one process, float32; for a value head with a zero output layer."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if head == "value":
        model.config.tie_word_embeddings = False
        model.set_output_embeddings(torch.nn.Linear(model.config.hidden_size, 1, bias=False))
        torch.nn.init.zeros_(model.get_output_embeddings().weight)
    return model


@pytest.fixture(scope="module")
def ranks4():
    with LocalRanks(4, timeout_s=60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": write_tiny_model(folder / "tied", **SIZES),
        "untied": write_tiny_model(folder / "untied", tie_embeddings=False, **SIZES),
        "qwen2": write_tiny_model(folder / "qwen2", family="qwen2", num_hidden_layers=3, **SIZES),
        "qwen3": write_tiny_model(folder / "qwen3", family="qwen3", **SIZES),
        "one group": write_tiny_model(folder / "one group", family="qwen2", **ONE_GROUP),
        "two groups": write_tiny_model(folder / "two groups", family="qwen3", tie_embeddings=False, **TWO_GROUPS),
        "qwen3_moe": write_tiny_model(folder / "qwen3_moe", family="qwen3_moe", **SIZES),
        "mixtral": write_tiny_model(folder / "mixtral", family="mixtral", tie_embeddings=False, **SIZES),
    }


def conformance(model, directory, topology, head, eps=1e-6):
    check_train_backend(
        lambda config: build(model, topology, config, head=head),
        load_reference(model, head),
        topology=topology,
        vocab_size=VOCAB_SIZE,
        directory=Path(directory),
        head=head,
        config=TrainConfig(
            learning_rate=3e-3,
            eps=eps,
            weight_decay=0.01,
            max_grad_norm=0.5,
            warmup_steps=2,
            schedule="linear",
            total_steps=8,
            micro_batch_tokens=64,
        ),
    )


@pytest.mark.slow
def test_one_rank_conforms(ranks1, models, tmp_path):
    ranks1.run(conformance, models["untied"], tmp_path, topology_of("1-1-1"), "lm")


@pytest.mark.parametrize(
    ("sizes", "model", "head"),
    [
        ("1-2-1", "tied", "lm"),
        ("2-1-1", "tied", "lm"),
        ("1-2-1", "one group", "lm"),
        pytest.param("1-1-2", "tied", "lm", marks=pytest.mark.slow),
        pytest.param("2-1-1", "qwen2", "value", marks=pytest.mark.slow),
        pytest.param("1-1-2", "qwen2", "value", marks=pytest.mark.slow),
        pytest.param("1-2-1", "untied", "value", marks=pytest.mark.slow),
        pytest.param("1-2-1", "qwen3", "lm", marks=pytest.mark.slow),
        pytest.param("2-1-1", "untied", "lm", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_conform(ranks2, models, tmp_path, sizes, model, head):
    ranks2.run(conformance, models[model], tmp_path, topology_of(sizes), head)


def test_experts_on_two_ranks_conform(ranks2, models, tmp_path):
    topology = topology_of("1-1-2", ep_size=2)
    ranks2.run(conformance, models["qwen3_moe"], tmp_path, topology, "lm", eps_for("qwen3_moe"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "model", "head", "order", "ep_size"),
    [
        ("2-2-1", "tied", "lm", "megatron", 1),
        ("1-2-2", "qwen2", "lm", "megatron", 1),
        ("2-1-2", "tied", "lm", "megatron", 1),
        ("2-1-2", "untied", "value", "contiguous", 1),
        ("1-4-1", "two groups", "lm", "megatron", 1),
        ("1-2-2", "mixtral", "lm", "megatron", 2),
        ("2-1-2", "qwen3_moe", "lm", "megatron", 2),
    ],
)
def test_four_ranks_conform(ranks4, models, tmp_path, sizes, model, head, order, ep_size):
    topology = topology_of(sizes, order, ep_size)
    ranks4.run(conformance, models[model], tmp_path, topology, head, eps_for(model), deadline_s=300)


def eps_for(model):
    """Some weights have gradients near zero: AdamW blows their rounding up, less so with a large eps.

    Experts that few tokens reach, seen in 1-2-2 with ep_size=2: parameters 1e-4 off at eps=1e-8, 3e-6 at 1e-6, 2e-7 at
    1e-4. A neuron of qwen2 in 1-2-2: 3e-4 off at 1e-8, below 1e-4 at 1e-6.
    """
    return 1e-5 if model in EXPERTS else 1e-6


def local_rows(topology, num_rows=4):
    import torch.distributed as dist

    batch = build_batch(num_rows, vocab_size=VOCAB_SIZE)
    return select_rows(batch, list(THREE_D.distribute(topology, num_rows)[dist.get_rank()]))


def negative_logprobs(outputs, micro_batch):
    loss = -(outputs["logprobs"] * micro_batch["response_mask"]).sum()
    return loss, {"loss": (float(loss.detach()), float(micro_batch["response_mask"].sum()))}


def recomputed_conformance(model, directory, topology):
    check_train_backend(
        lambda config: build(model, topology, config),
        load_reference(model),
        topology=topology,
        vocab_size=VOCAB_SIZE,
        directory=Path(directory),
        config=TrainConfig(learning_rate=3e-3, eps=1e-6, activation_checkpointing=True, micro_batch_tokens=64),
    )


@pytest.mark.slow
def test_recomputed_activations_change_nothing(ranks2, models, tmp_path):
    ranks2.run(recomputed_conformance, models["qwen3"], tmp_path, topology_of("1-2-1"))


def save_after_two_steps(model, directory, topology, frozen_too):
    backend = build(model, topology, SCHEDULED)
    for _ in range(2):
        backend.train_step(local_rows(topology), negative_logprobs, 10.0)
    backend.save_state(Path(directory) / "state")
    saved = gather_weights(backend, topology)
    backend.train_step(local_rows(topology), negative_logprobs, 10.0)
    onwards = gather_weights(backend, topology)
    backend.close()
    if frozen_too:
        frozen = build(model, topology, trainable=False)
        frozen.save_state(Path(directory) / "frozen")
        frozen.close()
    return saved, onwards


def step_from_state(model, directory, topology):
    backend = build(model, topology, SCHEDULED)
    backend.load_state(Path(directory) / "state")
    assert backend.optimizer_steps == 2
    backend.save_state(Path(directory) / "again")
    loaded = gather_weights(backend, topology)
    metrics = backend.train_step(local_rows(topology), negative_logprobs, 10.0)
    assert metrics["learning_rate"] == pytest.approx((0.75e-2, 1.0))
    onwards = gather_weights(backend, topology)
    with pytest.raises(BackendError, match=r"saved from a frozen model: it lacks exp_avg, exp_avg_sq"):
        backend.load_state(Path(directory) / "frozen")
    backend.close()
    frozen = build(model, topology, trainable=False)
    frozen.load_state(Path(directory) / "state")
    weights = gather_weights(frozen, topology)
    frozen.close()
    assert all(torch.equal(weights[name], tensor) for name, tensor in loaded.items())
    return loaded, onwards


@pytest.mark.parametrize(
    ("model", "written", "read"),
    [
        ("tied", topology_of("2-1-1"), topology_of("1-2-1")),
        pytest.param("one group", topology_of("1-2-1"), topology_of("2-1-1"), marks=pytest.mark.slow),
        ("qwen3_moe", topology_of("1-1-2", ep_size=2), topology_of("2-1-1")),
    ],
)
def test_a_state_loads_under_another_layout(ranks2, models, tmp_path, model, written, read):
    (saved, onwards), _ = ranks2.run(save_after_two_steps, models[model], tmp_path, written, True)
    (loaded, continued), _ = ranks2.run(step_from_state, models[model], tmp_path, read)
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name
        torch.testing.assert_close(continued[name], onwards[name], atol=1e-4, rtol=0)
    state, again = (read_whole_state(tmp_path / folder) for folder in ("state", "again"))
    assert all(state["exp_avg_sq"][name].any() for name in saved if ".experts." not in name)
    for kind, tensors in state.items():
        assert tensors.keys() == saved.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, again[kind][name]), (kind, name)
    for name, tensor in saved.items():
        assert torch.equal(state["weights"][name], tensor), name


def train_and_export(model, directory, topology):
    backend = build(model, topology)
    backend.export_hf(directory)
    backend.train_step(local_rows(topology), negative_logprobs, 10.0)
    backend.export_hf(directory)
    scored = rows_of(backend.compute_logprobs(build_batch(4, vocab_size=VOCAB_SIZE))["logprobs"])
    backend.close()
    return [row.clone() for row in scored]


@pytest.mark.parametrize("model", ["tied", "mixtral"])
def test_an_export_is_a_hugging_face_model(ranks2, models, tmp_path, model):
    directory = tmp_path / "runs" / "model"
    scored, _ = ranks2.run(train_and_export, models[model], directory, topology_of("2-1-1"))
    loaded = AutoModelForCausalLM.from_pretrained(directory).eval()
    batch = build_batch(4, vocab_size=VOCAB_SIZE)
    for prompt, response, row in zip(rows_of(batch["prompt_ids"]), rows_of(batch["response_ids"]), scored, strict=True):
        with torch.no_grad():
            logprobs = reference_outputs(loaded, prompt, response).log_softmax(-1)
        torch.testing.assert_close(logprobs.gather(-1, response[:, None])[:, 0], row, atol=1e-4, rtol=0)
    assert [path.name for path in directory.parent.iterdir()] == ["model"]


def squared_values(outputs, micro_batch):
    return ((outputs["values"] - 1.0) ** 2 * micro_batch["response_mask"]).sum(), {}


def export_critic(model, directory, topology, backend_name):
    options = {"topology": topology, "config": CONFIG, "head": "value"}
    backend = load_train_backend(backend_name).build(model, **options)
    backend.train_step(local_rows(topology), squared_values, 10.0)
    backend.export_hf(directory)
    values = gather_weights(backend, topology)
    backend.close()
    return values


def load_critic(model, directory, topology, backend_name):
    options = {"topology": topology, "config": CONFIG, "head": "value"}
    backend = load_train_backend(backend_name).build(model, **options)
    assert not gather_weights(backend, topology)["lm_head.weight"].any()
    backend.load_hf(directory)
    weights = gather_weights(backend, topology)
    backend.close()
    return weights


@pytest.mark.parametrize(("writer", "reader"), [("megatron", "fsdp"), ("fsdp", "megatron")])
def test_a_critic_moves_between_backends(ranks2, models, tmp_path, writer, reader):
    layouts = {"megatron": topology_of("1-2-1"), "fsdp": topology_of("1-1-2")}
    exported, _ = ranks2.run(export_critic, models["tied"], tmp_path / "critic", layouts[writer], writer)
    loaded, _ = ranks2.run(load_critic, models["tied"], tmp_path / "critic", layouts[reader], reader)
    assert exported["lm_head.weight"].any()
    for name, tensor in exported.items():
        assert torch.equal(loaded[name], tensor), name


def count_threads_of_groups():
    return sum(Path(f"{task}/comm").read_text().startswith("gloo") for task in Path("/proc/self/task").iterdir())


def open_and_close(model):
    before = count_threads_of_groups()
    backend = build(model, topology_of("1-2-1"))
    opened = count_threads_of_groups()
    backend.close()
    return opened - before, count_threads_of_groups() - before


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc, which Linux has")
def test_a_closed_backend_leaves_no_thread_of_its_groups(models):
    with LocalRanks(2) as ranks:
        for opened, left in ranks.run(open_and_close, models["tied"]):
            assert opened > 8 and left <= 1  # gloo keeps one for the groups that follow
