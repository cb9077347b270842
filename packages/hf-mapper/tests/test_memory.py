from __future__ import annotations

import dataclasses
import math
import re

import pytest

from hf_mapper import (
    ClusterSpec,
    WorkloadSpec,
    estimate_memory,
    is_feasible,
    simulate_generation,
    simulate_training,
)
from hf_mapper.simulators.layouts import read_layouts
from hf_mapper.simulators.memory import kv_cache_bytes, training_work_bytes
from hf_mapper.software import FSDP, MEGATRON_2021, ZERO_2021, SoftwareSpec
from hf_protocols import ConfigError, GenerationSpec, ModelShape, ParallelSpec

LLAMA = ModelShape.preset("llama-2-13b")
WORKLOAD = WorkloadSpec(global_batch=1024, prompt_tokens=1024, response_tokens=1024, mini_batches=8)
STATES = ("weight_bytes", "gradient_bytes", "optimizer_bytes")

GRID = (8, 16, 32, 64, 96, 128)
MODELS = ("llama-2-7b", "llama-2-13b", "codellama-34b", "llama-2-70b")
FIRST_POINTS = {
    "ppo": (8, 16, 32, 64),
    "remax": (8, 8, 16, 32),
    "safe_rlhf_one_critic": (8, 16, 32, 64),
}
"""The smallest GPU counts in the paper's Figures 9 to 11, for each of the models."""


@pytest.mark.parametrize("algorithm", FIRST_POINTS)
@pytest.mark.parametrize("size", range(4), ids=MODELS)
def test_the_papers_smallest_clusters_follow_from_memory(paper_problem, algorithm, size) -> None:
    fitting = [count for count in GRID if is_feasible(*paper_problem(algorithm, MODELS[size], count))]
    first = FIRST_POINTS[algorithm][size]
    assert fitting == [count for count in GRID if count >= first]


def bytes_per_parameter(calls, dtype: str, parallel: str) -> float:
    workload = dataclasses.replace(WORKLOAD, dtype=dtype)
    spec = ParallelSpec.parse(parallel)
    cluster = ClusterSpec.host(spec.world_size, 2**40)
    estimate = estimate_memory(LLAMA, cluster, spec, workload, calls=calls)
    return sum(estimate.breakdown[name] for name in STATES) * spec.world_size / LLAMA.num_parameters


@pytest.mark.parametrize("parallel", ["1-1-8", "1-8-1", "2-4-1"])
def test_states_take_18_bytes_trained_and_2_otherwise(parallel: str) -> None:
    assert bytes_per_parameter(["training"], "bfloat16", parallel) == pytest.approx(18)
    assert bytes_per_parameter(["inference"], "bfloat16", parallel) == pytest.approx(2)
    assert bytes_per_parameter(["training", "inference"], "float32", parallel) == pytest.approx(16)
    assert bytes_per_parameter(["inference"], "float32", parallel) == pytest.approx(4)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_model_that_keeps_scores_is_planned_as_unfused(recompute: str) -> None:
    """Passes of training and of scoring differ; engines generate with kernels of their own."""
    unfused = dataclasses.replace(WORKLOAD, recompute=recompute, software=SoftwareSpec(fused_attention=False))
    fused = dataclasses.replace(unfused, software=SoftwareSpec())
    spec, cluster = ParallelSpec.parse("1-2-4"), ClusterSpec.host(8, 2**40)
    keeping = dataclasses.replace(LLAMA, keeps_scores=True)

    def measure(model: ModelShape, workload: WorkloadSpec) -> object:
        return estimate_memory(model, cluster, spec, workload, calls=["training"])

    assert measure(keeping, fused) == measure(LLAMA, unfused)
    if recompute != "full":
        assert measure(keeping, fused) != measure(LLAMA, fused)
    found, wanted, less = (
        simulate_training(model, cluster, spec, workload).latency_s
        for model, workload in ((keeping, fused), (LLAMA, unfused), (LLAMA, fused))
    )
    assert found == wanted != less


@pytest.mark.parametrize(("dtype", "pair_bytes"), [("bfloat16", 2 + 2 + 4), ("float32", 4 + 4 + 4)])
def test_scoring_has_the_scores_of_one_layer(dtype: str, pair_bytes: int) -> None:
    """Two copies in the model's dtype, and one in float32 for the softmax; cut by tensor parallelism."""
    workload = dataclasses.replace(WORKLOAD, dtype=dtype, micro_batch_tokens=3 * 2048)
    cluster = ClusterSpec.host(8, 2**40)
    fused, keeping = (
        estimate_memory(model, cluster, ParallelSpec.parse("1-2-4"), workload, calls=["inference"]).memory_bytes
        for model in (LLAMA, dataclasses.replace(LLAMA, keeps_scores=True))
    )
    assert keeping - fused == pytest.approx(3 * 2048**2 * LLAMA.num_heads / 2 * pair_bytes)


def test_weights_that_are_cast_have_no_copy() -> None:
    workload = dataclasses.replace(WORKLOAD, software=FSDP)
    spec = ParallelSpec(dp_size=8)
    parts = estimate_memory(LLAMA, ClusterSpec.host(8, 2**40), spec, workload, calls=["training"]).breakdown
    assert sum(parts[name] for name in STATES) * 8 / LLAMA.num_parameters == pytest.approx(16)


def test_zero_3_takes_16_bytes_and_gathers_a_matrix_at_a_time() -> None:
    """Rajbhandari et al.: 2 + 2 + 12 bytes a parameter."""
    model = dataclasses.replace(LLAMA, intermediate_size=8 * LLAMA.hidden_size // 3)
    spec = ParallelSpec(dp_size=8)
    plain, zero = (
        estimate_memory(
            model,
            ClusterSpec.host(8, 2**40),
            spec,
            dataclasses.replace(WORKLOAD, software=software),
            calls=["training"],
        ).breakdown
        for software in (dataclasses.replace(ZERO_2021, gathers="layer"), ZERO_2021)
    )
    assert sum(zero[name] for name in STATES) * 8 / model.num_parameters == pytest.approx(16)
    ends = 2 * model.vocab_size * model.hidden_size
    layers = 2 * (ends + 2 * (model.num_parameters - ends) / model.num_layers)
    matrices = 2 * 2 * 4 * model.hidden_size**2
    assert plain["activation_bytes"] - zero["activation_bytes"] == pytest.approx(layers - matrices, rel=1e-3)


def test_megatron_shards_only_the_optimizer_over_dp_ranks() -> None:
    cluster = ClusterSpec.host(8, 2**40)
    estimate = estimate_memory(LLAMA, cluster, ParallelSpec.parse("1-2-4"), WORKLOAD, calls=["training"])
    parameters = LLAMA.num_parameters
    assert [estimate.breakdown[name] for name in STATES] == [parameters, 2 * parameters, 1.5 * parameters]


def count_by_names(model: ModelShape, pp: int, ep: int) -> int:
    """Parameters of the fullest of pp stages, by the model's names: the embedding first, norm and head last."""
    first, last = 0, 0
    for name, shape in model.parameters().items():
        size, of_layer = math.prod(shape), re.search(r"layers\.(\d+)\.", name)
        size //= ep if ".experts." in name else 1
        stage = int(of_layer[1]) * pp // model.num_layers if of_layer else None
        first += size * (stage == 0 or "embed_tokens" in name)
        # A tied head has no name, and stands in the last stage as well.
        is_at_the_end = name.startswith(("model.norm", "lm_head")) or (model.tie_embeddings and "embed" in name)
        last += size * (stage == pp - 1 or (is_at_the_end and (pp > 1 or "embed" not in name)))
    return max(first, last) if pp > 1 else sum(math.prod(shape) for shape in model.parameters().values())


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_the_fullest_stage_has_an_end_of_the_model(pp: int, tied: bool) -> None:
    model = dataclasses.replace(ModelShape.preset("llama-3-8b"), tie_embeddings=tied)
    layout = ParallelSpec(pp_size=pp)
    found = estimate_memory(
        model, ClusterSpec.host(8, 2**40), layout, WORKLOAD, calls=["inference"], backend="megatron"
    )
    assert found.breakdown["weight_bytes"] == pytest.approx(2 * count_by_names(model, pp, 1), rel=1e-4)


@pytest.mark.parametrize(("parallel", "ep"), [("1-1-8", 8), ("1-2-4", 2), ("2-2-2", 2), ("4-1-2", 1)])
def test_experts_are_spread_over_data_parallel_ranks(parallel: str, ep: int) -> None:
    """As many weights as the model's names say, and an optimizer sharded over all replicas in every layout."""
    mixtral, cluster = ModelShape.preset("mixtral-8x7b"), ClusterSpec.host(8, 2**40)
    layout = dataclasses.replace(ParallelSpec.parse(parallel), ep_size=ep)
    experts = sum(math.prod(shape) for name, shape in mixtral.parameters().items() if ".experts." in name)
    whole = count_by_names(mixtral, layout.pp_size, 1)
    spread = experts / layout.pp_size * (1 - 1 / ep)
    held, stepped = (whole - spread) / layout.tp_size, whole / layout.tp_size / layout.dp_size
    found = estimate_memory(mixtral, cluster, layout, WORKLOAD, calls=["training"], backend="megatron").breakdown
    assert [found[name] for name in STATES] == pytest.approx([2 * held, 4 * held, 12 * stepped], rel=1e-4)


@pytest.mark.parametrize(("ranks", "room"), [(1, 8), (2, 4), (3, 3), (8, 1), (16, 1)])
def test_fsdp_ranks_reserve_experts_of_the_fullest_rank(ranks: int, room: int) -> None:
    """Eight experts on three ranks are 3, 3 and 2, on sixteen one on each of the first eight (`torch.chunk`)."""
    mixtral, cluster = ModelShape.preset("mixtral-8x7b"), ClusterSpec.host(ranks, 2**40)
    experts = sum(math.prod(shape) for name, shape in mixtral.parameters().items() if ".experts." in name)
    held = (mixtral.num_parameters - experts) / ranks + room * experts / 8
    workload = dataclasses.replace(WORKLOAD, global_batch=48, mini_batches=1)
    layout = ParallelSpec(dp_size=ranks)
    found = estimate_memory(mixtral, cluster, layout, workload, calls=["training"], backend="fsdp").breakdown
    assert sum(found[name] for name in STATES) == pytest.approx(18 * held, rel=1e-4)


@pytest.mark.parametrize("tp", [1, 8])
def test_mixture_sends_every_token_to_its_expert_and_back(tp: int) -> None:
    """Whole where the experts multiply it, sharded over the tensor group (sequence parallelism) when it comes back."""
    workload = dataclasses.replace(WORKLOAD, recompute="none", micro_batch_tokens=2048)
    model = dataclasses.replace(LLAMA, num_layers=1, num_experts=8, num_experts_per_token=1, vocab_size=1)
    dense, mixture = (
        work_bytes(one, ParallelSpec(tp_size=tp), workload, backend="megatron")
        for one in (dataclasses.replace(model, num_experts=0, num_experts_per_token=0), model)
    )
    assert mixture - dense == 2048 * 2 * LLAMA.hidden_size * (1 + 1 / tp)


def test_fsdp_that_gathers_the_model_holds_it_and_its_gradients() -> None:
    layer, whole = (
        work_bytes(
            LLAMA,
            ParallelSpec(dp_size=8),
            dataclasses.replace(WORKLOAD, software=SoftwareSpec(gathers=unit)),
            backend="fsdp",
        )
        for unit in ("layer", "model")
    )
    ends, gradients = 2 * LLAMA.vocab_size * LLAMA.hidden_size, 4 * LLAMA.num_parameters
    beyond_two_layers = 2 * (LLAMA.num_parameters - ends) * (1 - 2 / LLAMA.num_layers)
    assert whole - layer == pytest.approx(beyond_two_layers + gradients)
    with pytest.raises(ConfigError, match=r"gathers 'layers' is unknown. Did you mean layer"):
        SoftwareSpec(gathers="layers")


def test_fsdp_holds_embedding_and_head_and_two_layers() -> None:
    small, large = (dataclasses.replace(LLAMA, vocab_size=size) for size in (1, 1 + 1000))
    workload = dataclasses.replace(WORKLOAD, recompute="none")
    work = [work_bytes(model, ParallelSpec(dp_size=8), workload, backend="fsdp") for model in (small, large)]
    logits = 8192 * 1000 * 4
    assert work[1] - work[0] - logits == 2 * 2 * 1000 * LLAMA.hidden_size


@pytest.mark.parametrize(("train", "generation"), [("4-8-1", "4-1"), ("8-2-1", "1-2"), ("2-2-1", "2-2")])
def test_a_generation_shard_is_that_of_its_own_fullest_stage(train: str, generation: str) -> None:
    """Training shard and what generation adds to it, by the model's names."""
    model, spec, cut = ModelShape.preset("llama-3-8b"), ParallelSpec.parse(train), GenerationSpec.parse(generation)
    cluster = ClusterSpec.host(spec.world_size, 2**40)
    parts = estimate_memory(model, cluster, spec, WORKLOAD, calls=["generation"], generation=cut).breakdown
    expected = 2 * count_by_names(model, cut.gen_pp_size, 1) / cut.gen_tp_size
    assert parts["weight_bytes"] + parts["gathered_weight_bytes"] == pytest.approx(expected, rel=1e-3)


def test_a_cache_holds_whole_sequences() -> None:
    whole = kv_cache_bytes(LLAMA, GenerationSpec(), WORKLOAD, 3)
    assert whole == 3 * 2048 * (2 * 40 * 5120 * 2)
    assert kv_cache_bytes(LLAMA, GenerationSpec(gen_pp_size=2, gen_tp_size=4), WORKLOAD, 3) == whole / 8


def test_a_cache_is_not_cut_below_a_head() -> None:
    grouped = ModelShape.preset("qwen2-7b")
    four, eight = (kv_cache_bytes(grouped, GenerationSpec(gen_tp_size=tp), WORKLOAD, 1) for tp in (4, 8))
    assert four == eight


def work_bytes(model: ModelShape, spec: ParallelSpec, workload: WorkloadSpec, *, backend: str) -> float:
    return float(training_work_bytes(model, read_layouts(model, spec, backend), workload))


def test_activations_follow_the_published_count() -> None:
    """A multi-head layer with a 4 h MLP keeps about 34 bytes a token and hidden unit (Korthikanti et al.)."""
    model = ModelShape(
        name="plain",
        num_layers=1,
        hidden_size=4096,
        intermediate_size=11008,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        vocab_size=1,
    )
    workload = dataclasses.replace(WORKLOAD, recompute="none", micro_batch_tokens=2048)
    kept = work_bytes(model, ParallelSpec(), workload, backend="fsdp") - 2 * 2048 * 4
    assert kept / (2048 * 4096) == pytest.approx(34, rel=0.1)


def test_recompute_keeps_less() -> None:
    plain, recomputed = (
        work_bytes(LLAMA, ParallelSpec(), dataclasses.replace(WORKLOAD, recompute=recompute), backend="fsdp")
        for recompute in ("none", "full")
    )
    assert recomputed < plain / 5


def test_estimate_is_state_and_the_largest_call() -> None:
    cluster, spec, generation = ClusterSpec.host(8, 2**40), ParallelSpec.parse("1-8-1"), GenerationSpec(gen_tp_size=4)
    calls = ["generation", "inference", "training"]
    estimate = estimate_memory(LLAMA, cluster, spec, WORKLOAD, calls=calls, generation=generation, num_waves=16)
    parts = estimate.breakdown
    assert parts["gathered_weight_bytes"] == pytest.approx(2 * LLAMA.num_parameters * (1 / 4 - 1 / 8))
    assert parts["kv_cache_bytes"] == kv_cache_bytes(LLAMA, generation, WORKLOAD, 32)
    state = sum(parts[name] for name in STATES)
    generating = parts["kv_cache_bytes"] + parts["gathered_weight_bytes"]
    assert estimate.memory_bytes == state + max(parts["activation_bytes"], generating)
    assert estimate.latency_s == 0


@pytest.mark.parametrize("layout", ["1-8-1", "2-2-2", "1-1-8"])
def test_default_model_makes_all_calls_and_keeps_its_layout(layout: str) -> None:
    cluster, spec = ClusterSpec.host(8, 2**40), ParallelSpec.parse(layout)
    cut = GenerationSpec(gen_pp_size=spec.pp_size, gen_tp_size=spec.tp_size)
    calls = ["generation", "inference", "training"]
    given = LLAMA, cluster, spec, WORKLOAD
    assert estimate_memory(*given) == estimate_memory(*given, calls=calls, generation=cut)
    assert simulate_generation(*given) == simulate_generation(*given, generation=cut)
    several = simulate_generation(LLAMA, cluster, [spec, spec], WORKLOAD)
    assert list(several.latency_s) == [simulate_generation(*given).latency_s] * 2


@pytest.mark.parametrize("vocab_size", [1, 10**6])
def test_logits_are_gone_when_a_layer_is_computed_again(vocab_size: int) -> None:
    """The head's backward pass comes before the last layer's: the larger of the two adds to the layers' inputs."""
    model, tokens = dataclasses.replace(LLAMA, vocab_size=vocab_size), 8192
    plain, again = (
        work_bytes(model, ParallelSpec(), dataclasses.replace(WORKLOAD, recompute=recompute), backend="megatron")
        for recompute in ("none", "full")
    )
    inputs, logits = tokens * LLAMA.hidden_size * 2, tokens * vocab_size * 4
    layer = (plain - logits) / LLAMA.num_layers
    assert again == pytest.approx(LLAMA.num_layers * inputs + max(logits, layer - inputs))


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", 4), ("float32", 8)])
def test_fused_loss_keeps_logits_in_the_models_dtype(dtype: str, kept: int) -> None:
    workload = dataclasses.replace(WORKLOAD, recompute="none", dtype=dtype)
    plain, fused = (
        work_bytes(
            LLAMA, ParallelSpec(), dataclasses.replace(workload, software=SoftwareSpec(fused_loss=loss)), backend="fsdp"
        )
        for loss in (False, True)
    )
    assert plain - fused == (12 - kept) * 8192 * 32000


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_activations_match_published_formulas(sequence_parallel: bool) -> None:
    """Korthikanti et al., Table 2, per layer in units of s b h: 10 + 24/t + 5as/(ht), or 34/t + 5as/(ht)."""
    layers, hidden, heads, length, tp = 48, 6144, 64, 2048, 8
    model = ModelShape(
        name="22B", num_layers=layers, hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_heads=heads,
        num_kv_heads=heads, head_dim=hidden // heads, vocab_size=1,
    )  # fmt: skip
    software = dataclasses.replace(MEGATRON_2021, sequence_parallel=sequence_parallel)
    workload = WorkloadSpec(
        global_batch=4, prompt_tokens=1024, response_tokens=1024, micro_batch_tokens=4 * length,
        recompute="none", software=software,
    )  # fmt: skip
    kept = work_bytes(model, ParallelSpec(tp_size=tp), workload, backend="megatron")
    scores = 5 * heads * length / (hidden * tp)
    expected = (34 / tp if sequence_parallel else 10 + 24 / tp) + scores
    assert kept / (layers * length * 4 * hidden) == pytest.approx(expected, rel=1e-4)


def test_interleaved_stages_keep_more_micro_batches() -> None:
    """The first of p stages keeps p + (p - 1) / v micro-batches instead of p (Korthikanti et al.)."""
    base = dataclasses.replace(WORKLOAD, recompute="none", micro_batch_tokens=2048, mini_batches=1)
    model = dataclasses.replace(LLAMA, vocab_size=1)
    plain, cut = (
        work_bytes(
            model, ParallelSpec(pp_size=8), dataclasses.replace(base, pipeline_chunks=chunks), backend="megatron"
        )
        for chunks in (1, 5)
    )
    assert cut / plain == pytest.approx((8 + 7 / 5) / 8, rel=1e-4)


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "software", "copies"),
    [
        (1, "bfloat16", SoftwareSpec(), 0),
        (1, "float32", FSDP, 0),
        (1, "bfloat16", FSDP, 1),  # masters of float32, of which generation has a copy
        (2, "bfloat16", SoftwareSpec(), 1),
    ],
)
def test_fsdps_weights_are_there_once_on_a_single_rank(num_ranks, dtype, software, copies) -> None:
    workload = dataclasses.replace(WORKLOAD, dtype=dtype, software=software)
    spec, cluster = ParallelSpec(dp_size=num_ranks), ClusterSpec.host(num_ranks, 2**40)
    parts = estimate_memory(
        LLAMA, cluster, spec, workload, calls=["generation"], generation=GenerationSpec(), backend="fsdp"
    ).breakdown
    assert parts["gathered_weight_bytes"] == copies * LLAMA.num_parameters * workload.element_bytes
