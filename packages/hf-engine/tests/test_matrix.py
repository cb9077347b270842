"""Every training layout into every engine: after training and a transition, generation is that of the exported model.

Greedy tokens come from whole forward passes of transformers over the exported checkpoint; bytes are counted by wrappers
around torch.distributed that know no plan. `make test` runs the pairs with the embedded engine, `make test-vllm` a
pairwise cover of the others, `make test-sglang` its pairs of two ranks, `make test-matrix` all of them. An engine that
is not embedded is started once for all training layouts that have its replicas.
"""

from __future__ import annotations

import contextlib
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine_testing.traffic import count_traffic
from hf_engine import HybridEngine, SamplingParams, TrainConfig, load_rollout_backend, load_train_backend
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_engine.testing._cases import build_batch, build_prompts, greedy_response, rows_of, select_rows
from hf_protocols import GenerationSpec, ParallelSpec, Topology

VOCAB_SIZE = 64
GREEDY = SamplingParams(max_new_tokens=6, greedy=True)
TRAINING = {
    "fsdp 1-1-2": ("fsdp", ParallelSpec(dp_size=2)),
    "megatron 1-2-1": ("megatron", ParallelSpec(tp_size=2)),
    "megatron 2-1-1": ("megatron", ParallelSpec(pp_size=2)),
    "megatron 1-1-2": ("megatron", ParallelSpec(dp_size=2)),
    "fsdp 1-1-4": ("fsdp", ParallelSpec(dp_size=4)),
    "megatron 1-2-2": ("megatron", ParallelSpec(tp_size=2, dp_size=2)),
    "megatron 2-2-1": ("megatron", ParallelSpec(pp_size=2, tp_size=2)),
}
ENGINES = {
    "transformers": {},
    "vllm": {"cache_bytes": 16 << 20},
    "sglang": {"cache_bytes": 4 << 20, "max_rows": 16, "start_timeout_s": 350},
}
COVER = {
    ("fsdp 1-1-2", 1),
    ("fsdp 1-1-2", 2),
    ("megatron 1-2-1", 1),
    ("megatron 1-1-2", 2),
    ("megatron 2-1-1", 1),
    ("megatron 1-2-2", 1),
    ("megatron 2-2-1", 2),
}
"""Pairs that a short run takes: any two sizes that meet in the whole matrix meet in one of them, except dp_size 4."""


def replicas(name, gen_tp):
    topology = Topology(TRAINING[name][1], GenerationSpec(gen_tp_size=gen_tp))
    return topology.world_size, topology.groups("gen_tp")


def cases(engine, largest_tp):
    """Those that share an engine follow each other."""
    pairs = [(name, gen_tp) for name in TRAINING for gen_tp in range(1, largest_tp + 1)]
    for name, gen_tp in sorted(pairs, key=lambda pair: replicas(*pair)):
        short = engine == "transformers" or (name, gen_tp) in COVER
        marks = [] if engine == "transformers" else [getattr(pytest.mark, engine)]
        marks += [] if short else [pytest.mark.slow]
        # Each starts up to four engines; test_sglang.py has strided replicas of four ranks.
        marks += [pytest.mark.matrix] if engine == "sglang" and TRAINING[name][1].world_size > 2 else []
        yield pytest.param(name, engine, gen_tp, marks=marks, id=f"{name} {engine} tp {gen_tp}")


CASES = [*cases("transformers", 1), *cases("vllm", 2), *cases("sglang", 2)]


def meetings(names_and_sizes):
    """Returns the values of two axes that come together."""
    found = set()
    for name, gen_tp in names_and_sizes:
        backend, spec = TRAINING[name]
        axes = {"backend": backend, "gen_tp": gen_tp, "dp": spec.dp_size, "pp": spec.pp_size, "tp": spec.tp_size}
        found |= set(combinations(sorted(axes.items()), 2))
    return found


def test_the_cover_is_pairwise():
    whole = meetings((name, gen_tp) for name in TRAINING if name != "fsdp 1-1-4" for gen_tp in (1, 2))
    assert meetings(COVER) == whole


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    return write_tiny_model(tmp_path_factory.mktemp("model"), tie_embeddings=False, **heads)


@pytest.fixture(scope="module")
def ranks_of():
    """Processes of one world size at a time, and of one engine: its library is imported once."""
    held: dict[tuple[str, int], LocalRanks] = {}

    def release():
        for key in list(held):
            ranks = held.pop(key)
            try:
                ranks.run(close_engines)
            finally:
                ranks.__exit__(None, None, None)

    def take(engine, size):
        if (engine, size) not in held:
            release()
            held[engine, size] = LocalRanks(size, timeout_s=360).__enter__()
        return held[engine, size]

    yield take
    release()


ENGINES_HERE = {}
"""In a rank: its engine by what it was started as, one at a time."""


def close_engines():
    while ENGINES_HERE:
        ENGINES_HERE.popitem()[1].close()


@contextlib.contextmanager
def engine_of(model, topology, rollout):
    """This rank's engine; it stays when a `HybridEngine` is closed, unless something failed."""
    key = rollout, topology.groups("gen_tp")
    if key not in ENGINES_HERE:
        close_engines()
        ENGINES_HERE[key] = load_rollout_backend(rollout).build(model, topology=topology, **ENGINES[rollout])
    try:
        with pytest.MonkeyPatch.context() as patch:
            if rollout != "transformers":
                patch.setattr(ENGINES_HERE[key], "close", lambda: None)
            yield ENGINES_HERE[key]
    except BaseException:
        close_engines()
        raise
    if rollout == "transformers":
        close_engines()


def train_and_generate(model, directory, training, rollout, gen_tp):
    """Two steps and two transitions; the second one's traffic, its planned bytes, and the versions."""
    name, train_spec = TRAINING[training]
    topology = Topology(train_spec, GenerationSpec(gen_tp_size=gen_tp))
    config = TrainConfig(learning_rate=3e-2, max_grad_norm=10.0)
    train = load_train_backend(name).build(model, topology=topology, config=config)
    with engine_of(model, topology, rollout) as generator:
        engine, before = HybridEngine(train, generator, topology), generator.weight_version
        prompts = build_prompts(4, vocab_size=VOCAB_SIZE)
        versions = []
        for number in range(2):
            step(train, topology)
            with contextlib.ExitStack() as inside:
                with count_traffic() as traffic:
                    inside.enter_context(engine.generation())
                responses = engine.generate(prompts, GREEDY)
            versions += [version - before for version in responses["weight_version"].tolist()]
            exported = Path(directory) / f"{training} {rollout} {gen_tp} {number}"
            train.export_hf(exported)
            check_greedy(exported, prompts, responses)
        planned = engine.plan.recv_bytes[dist.get_rank()]
        engine.close()
    return traffic, planned, versions


def step(train, topology):
    batch = build_batch(8, vocab_size=VOCAB_SIZE)
    rows = range(topology.coordinate(dist.get_rank()).dp, 8, topology.train.dp_size)

    def loss(outputs, micro_batch):
        return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}

    train.train_step(select_rows(batch, rows), loss, 24.0)


def check_greedy(exported, prompts, responses):
    reference = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    for prompt, found in zip(rows_of(prompts["prompt_ids"]), rows_of(responses["response_ids"]), strict=True):
        wanted = greedy_response(reference, prompt, 6, frozenset())
        assert torch.equal(found, wanted), (found, wanted)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("training", "rollout", "gen_tp"), CASES)
def test_generation_is_that_of_the_exported_model(model, ranks_of, tmp_path, training, rollout, gen_tp):
    ranks = ranks_of(rollout, TRAINING[training][1].world_size)
    results = ranks.run(train_and_generate, model, tmp_path, training, rollout, gen_tp, deadline_s=380)
    for traffic, planned, versions in results:
        assert versions == [1] * 4 + [2] * 4
        # The ranks of an engine in a process of its own exchange names and places, no weights.
        objects = 1 << 16 if rollout == "sglang" else 0
        assert traffic.matches(planned, most_object_bytes=objects), (traffic, planned)
