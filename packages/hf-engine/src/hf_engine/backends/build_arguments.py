"""Checks of the arguments of `build`, for every backend: before a file is read or an engine started."""

from __future__ import annotations

import torch

from hf_engine.backends.base import TrainConfig
from hf_protocols.errors import BackendError
from hf_protocols.topology import ParallelSpec, Topology
from hf_protocols.validation import Checks, show

__all__ = ["check_data_parallel", "check_rollout_arguments", "check_train_arguments", "require_head"]

_check = Checks(BackendError)


def check_data_parallel(backend: str, sizes: ParallelSpec) -> None:
    """Refuses sizes with more than data parallelism.

    Raises:
        BackendError: naming the sizes.
    """
    if sizes.world_size != sizes.dp_size or sizes.ep_size != 1:
        raise BackendError(
            f"backend {show(backend)} shards over data-parallel ranks only; got pp_size={sizes.pp_size}, "
            f"tp_size={sizes.tp_size}, cp_size={sizes.cp_size}, ep_size={sizes.ep_size}. Set all four to 1"
        )


def check_rollout_arguments(topology: object, seed: object) -> None:
    """Refuses values of other types as topology or seed, and a default device of torch.

    Raises:
        BackendError: naming what was given and what is wanted.
    """
    _refuse_default_device()
    wanted = "a Topology, such as Topology(ParallelSpec(dp_size=2))"
    _check.kind("topology", topology, Topology, wanted)
    _check.kind("seed", seed, int, "a whole number")


def require_head(own: str, wanted: str, method: str) -> None:
    """Refuses a method of a model with another head.

    Raises:
        BackendError: naming both heads.
    """
    if own != wanted:
        raise BackendError(f"{method} needs a model built with head={show(wanted)}, this one has head={show(own)}")


def check_train_arguments(
    topology: object,
    config: object,
    *,
    head: object,
    trainable: object,
    seed: object,
    scores: bool = False,
    adapts: bool = False,
) -> None:
    """Refuses values of other types as arguments of a training backend.

    Args:
        topology: of the ranks.
        config: of the training.
        head: of the model.
        trainable: False for a frozen model.
        seed: of what is drawn.
        scores: the backend has the head `"score"`.
        adapts: the backend trains low-rank adapters.

    Raises:
        BackendError: naming what was given and what is wanted.
    """
    check_rollout_arguments(topology, seed)
    _check.kind("config", config, TrainConfig, "a TrainConfig(learning_rate=...)")
    _check.kind("trainable", trainable, bool, "True or False")
    assert isinstance(config, TrainConfig), "it was checked"
    if config.lora is not None and not adapts:
        raise BackendError("lora: this backend trains whole weights only. Use the backend 'fsdp', or leave lora out")
    if config.lora is not None and not trainable:
        raise BackendError("lora with trainable=False: nothing is trained. Leave lora out")
    if head == "score" and not scores:
        raise BackendError("head='score': this backend has no sequence classifiers. Use the backend 'fsdp'")
    if head not in ("lm", "value", "score"):
        raise BackendError(f"head={show(head)}. Use lm, value or score")


def _refuse_default_device() -> None:
    device = torch.get_default_device()
    if device.type != "cpu":
        raise BackendError(
            f"torch's default device is {show(str(device))}, and backends need the host as the default. Call "
            "torch.set_default_device(None), or leave the `with torch.device(...)` block"
        )
