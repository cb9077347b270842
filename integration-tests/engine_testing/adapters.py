"""Checks of engines that take adapters unmerged: only adapters move, and samples are the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from engine_testing.train_steps import train_step
from hf_engine.backends import LoraConfig, RolloutBackend, SamplingParams, TrainConfig, load_train_backend
from hf_engine.hybrid_engine.hybrid_engine import HybridEngine
from hf_engine.models.adapter_rules import is_adapter_name
from hf_engine.testing._cases import build_prompts
from hf_protocols.topology import Topology

__all__ = ["check_adapter_updates"]

_NUM_UPDATES = 2


def check_adapter_updates(
    build: Callable[[], RolloutBackend],
    model: str,
    *,
    topology: Topology,
    lora: LoraConfig,
    read_base: Callable[[RolloutBackend], Mapping[str, torch.Tensor]] | None = None,
    vocab_size: int = 64,
) -> None:
    """Trains and generates in turn: the base is sent once, then the adapters alone, and samples follow.

    Args:
        build: makes the rollout backend, with `lora`.
        model: directory.
        topology: of both backends.
        lora: settings of the adapters.
        read_base: the base's weights as the engine holds them on this rank; None where they cannot be read.
        vocab_size: of the model.

    Raises:
        AssertionError: naming what does not hold.
    """
    config = TrainConfig(learning_rate=3e-2, max_grad_norm=10.0, lora=lora)
    train: Any = load_train_backend("fsdp").build(model, topology=topology, config=config)
    rollout = build()
    engine, rank = HybridEngine(train, rollout, topology), dist.get_rank()
    prompts = build_prompts(4, vocab_size=vocab_size)
    shapes = engine.plan.target.shapes
    adapters = [name for name in shapes if is_adapter_name(name)]
    item_bytes = engine.plan.target.element_bytes
    sizes = {name.rpartition(".lora_")[0] for name in adapters}
    wanted = item_bytes * lora.rank * sum(sum(shapes[f"{name}.weight"]) for name in sizes)
    received = engine.plan.select(adapters).recv_bytes[rank]
    base: Mapping[str, torch.Tensor] = {}
    for update in range(_NUM_UPDATES + 1):
        train_step(train, topology, vocab_size=vocab_size)
        with engine.generation():
            responses = engine.generate(prompts, SamplingParams(max_new_tokens=6))
        transition = engine.last_transition
        assert transition is not None, "it was entered"
        if update:
            assert transition.fed_bytes == wanted, f"{transition.fed_bytes} bytes were fed, of adapters {wanted}"
            assert transition.recv_bytes == received, f"{transition.recv_bytes} received, of adapters {received}"
        else:
            whole = engine.plan.target.held_bytes(rank)
            assert transition.fed_bytes == whole, f"{transition.fed_bytes} bytes were fed first, not {whole}"
        _check_samples(train, prompts, responses)
        if read_base is not None:
            now = {name: tensor.clone() for name, tensor in read_base(rollout).items()}
            assert now and all(torch.equal(now[name], tensor) for name, tensor in base.items()), "the base changed"
            base = now
    train.load_hf(model)
    with engine.generation():
        responses = engine.generate(prompts, SamplingParams(max_new_tokens=6))
    assert engine.last_transition is not None and engine.last_transition.fed_bytes > wanted, "another base is sent"
    _check_samples(train, prompts, responses, differ=False)
    engine.close()


def _check_samples(train: Any, prompts: TensorDict, responses: TensorDict, *, differ: bool = True) -> None:
    own = TensorDict({"prompt_ids": prompts["prompt_ids"], "response_ids": responses["response_ids"]}, [len(prompts)])
    on = train.compute_logprobs(own)["logprobs"].values()
    with train.adapters_off():
        off = train.compute_logprobs(own)["logprobs"].values()
    torch.testing.assert_close(responses["rollout_logprobs"].values(), on, rtol=0, atol=2e-4)
    moved = float((on - off).abs().mean())
    assert moved > 1e-2 or not differ, f"adapters moved the log-probs by {moved} only"
