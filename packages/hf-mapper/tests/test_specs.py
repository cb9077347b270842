from __future__ import annotations

import pytest

from hf_mapper import ClusterSpec, EfficiencySpec, GpuSpec, MachineSpec, WorkloadSpec, gpu, host_gpu, known_gpus
from hf_protocols import ConfigError


@pytest.mark.parametrize("kind", known_gpus())
def test_catalogue_is_plausible_and_names_its_sources(kind: str) -> None:
    spec = gpu(kind)
    assert spec.kind == kind
    assert spec.source
    assert 20e9 < spec.usable_bytes < spec.memory_bytes
    assert spec.peak("float32") < spec.peak("bfloat16") <= 0.5 * spec.peak_flops_per_s.get("float8", 1e18) * 1.02
    # An accelerator reaches its peak only where each byte read is used many times.
    assert 100 < spec.peak("bfloat16") / spec.memory_bandwidth_bytes_per_s < 500


def test_catalogue_has_the_kinds_that_the_readers_own() -> None:
    assert known_gpus() == ("a100-40", "a100-80", "b200", "gh200", "h100", "h200", "l40s", "mi300x", "rtx-4090")


@pytest.mark.parametrize(("given", "near"), [("a100", "a100-80"), ("H-100", "h100"), ("rtx4090", "rtx-4090")])
def test_an_unknown_gpu_is_answered_with_the_nearest(given: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"gpu '{given}' is unknown\. Did you mean .*{near}"):
        gpu(given)


def test_a_name_without_neighbours_is_answered_with_all() -> None:
    with pytest.raises(ConfigError, match="Use one of a100-40, a100-80"):
        gpu("zzzz")


def test_a_peak_that_is_not_published_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match="gpu a100-80 has no peak for dtype 'float8'; known: bfloat16, float16, float32"
    ):
        gpu("a100-80").peak("float8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": 0}, "memory_bytes=0 must be above 0"),
        ({"memory_bytes": 10**400}, "memory_bytes=.* must be above 0"),
        ({"memory_bandwidth_bytes_per_s": -1.0}, "memory_bandwidth_bytes_per_s=-1.0 must be above 0"),
        ({"peak_flops_per_s": {"bfloat16": float("nan")}}, r"peak_flops_per_s\[bfloat16\]=nan"),
        ({"kind": ""}, "needs a kind"),
        ({"reserved_bytes": 2**40}, "must be below memory_bytes"),
    ],
)
def test_figures_of_a_gpu_must_be_positive(change: dict[str, object], message: str) -> None:
    figures = {
        "kind": "mine",
        "memory_bytes": 2**33,
        "peak_flops_per_s": {"bfloat16": 1e14},
        "memory_bandwidth_bytes_per_s": 1e12,
        "link_bandwidth_bytes_per_s": 1e11,
        "source": "a test",
        **change,
    }
    with pytest.raises(ConfigError, match=message):
        GpuSpec(**figures)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training_flops": 0.0}, "training_flops=0.0 is a part of a peak"),
        ({"memory_bandwidth": 1.5}, "memory_bandwidth=1.5"),
        ({"fragmentation": 1.0}, "fragmentation=1.0"),
        ({"layer_latency_s": -1e-6}, "layer_latency_s=-1e-06"),
    ],
)
def test_efficiencies_are_parts(change: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EfficiencySpec(**change)


def test_a_machine_links_as_its_gpus_do_unless_told() -> None:
    assert MachineSpec(gpu=gpu("h100"), num_gpus=8).link_bandwidth_bytes_per_s == 450e9
    slower = MachineSpec(gpu=gpu("h100"), num_gpus=8, intra_bandwidth_bytes_per_s=32e9)
    assert slower.link_bandwidth_bytes_per_s == 32e9
    assert MachineSpec(gpu=gpu("h100"), num_gpus=8, num_machines=3).total_gpus == 24


@pytest.mark.parametrize("count", [0, -1, 2.0, True])
def test_counts_are_whole_and_positive(count: object) -> None:
    with pytest.raises(ConfigError, match="must be a whole number of at least 1"):
        MachineSpec(gpu=gpu("h100"), num_gpus=count)  # type: ignore[arg-type]


def test_counts_out_of_all_proportion_are_refused() -> None:
    with pytest.raises(ConfigError, match="global_batch=1000000000000000000000000 must be at most 1,000,000,000"):
        WorkloadSpec(global_batch=10**24, prompt_tokens=1, response_tokens=1)


def test_a_network_is_needed_between_two_machines() -> None:
    machine = MachineSpec(gpu=gpu("h100"), num_gpus=8, num_machines=2)
    with pytest.raises(ConfigError, match="2 machines needs inter_bandwidth_bytes_per_s"):
        ClusterSpec(machines=(machine,))
    assert ClusterSpec(machines=(machine,), inter_bandwidth_bytes_per_s=5e10).num_gpus == 16


def test_a_cluster_has_machines_and_parts_of_one_kind() -> None:
    with pytest.raises(ConfigError, match="at least one machine"):
        ClusterSpec(machines=())
    kinds = (MachineSpec(gpu=gpu("h100"), num_gpus=8), MachineSpec(gpu=gpu("l40s"), num_gpus=4))
    mixed = ClusterSpec(machines=kinds, inter_bandwidth_bytes_per_s=5e10)
    assert mixed.num_gpus == 12
    assert mixed.only(1).machine == kinds[1]
    with pytest.raises(ConfigError, match=r"several kinds of machine \(h100, l40s\)"):
        assert mixed.machine


def test_a_host_is_a_machine_of_slots() -> None:
    host = ClusterSpec.host(2, 3 * 2**30)
    assert host.machine.num_gpus == 2
    assert host.machine.gpu.kind == "cpu"
    assert host.machine.gpu == host_gpu(memory_bytes=3 * 2**30)
    assert host.machine.gpu.usable_bytes == pytest.approx(0.9 * 3 * 2**30)


def test_a_workload_counts_sequences() -> None:
    workload = WorkloadSpec(
        global_batch=32, samples_per_prompt=4, prompt_tokens=100, response_tokens=28, epochs=2, mini_batches=8
    )
    assert workload.num_sequences == 128
    assert workload.mini_batch_sequences == 16
    assert workload.sequence_tokens == 128
    assert workload.element_bytes == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch": 0}, "global_batch=0 must be a whole number of at least 1"),
        ({"mini_batches": 5}, "mini_batches=5 does not divide the 32 sequences"),
        ({"dtype": "bf16"}, "dtype 'bf16' is unknown. Did you mean bfloat16"),
        ({"recompute": "all"}, "recompute 'all' is unknown"),
        ({"response_lengths": (4, 6)}, "response_tokens=8 must be the largest of response_lengths, 6"),
        ({"prompt_lengths": (0, 8)}, r"prompt_lengths\[0\]=0 must be a whole number"),
        ({"response_tokens": 1.5}, "response_tokens=1.5 must be a whole number"),
    ],
)
def test_a_workload_that_cannot_be_is_an_error(change: dict[str, object], message: str) -> None:
    figures = {"global_batch": 32, "prompt_tokens": 8, "response_tokens": 8, **change}
    with pytest.raises(ConfigError, match=message):
        WorkloadSpec(**figures)


def test_a_typical_sequence_has_the_mean_lengths() -> None:
    fixed = WorkloadSpec(global_batch=4, prompt_tokens=8, response_tokens=20)
    assert fixed.typical is fixed
    ragged = WorkloadSpec(
        global_batch=4, prompt_tokens=9, response_tokens=20, prompt_lengths=(1, 2, 9), response_lengths=(10, 20)
    )
    assert (ragged.typical.prompt_tokens, ragged.typical.response_tokens) == (4, 15)
    assert ragged.sequence_tokens == 29
