"""A causal language model as FSDP2 sees it: loading, sharding, the output head, and tensors of a directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hf_engine.backends._base import Head, TrainConfig
from hf_engine.backends._causal_lm import load_causal_lm, refuse_lacking
from hf_engine.backends._classifier import load_classifier
from hf_engine.model_directory import SCORE_HEADS, ModelDirectory, errors_of
from hf_protocols.arguments import show
from hf_protocols.errors import BackendError

__all__ = [
    "check_same_shapes",
    "find_head_name",
    "head_only_at",
    "load_with_head",
    "read_tensor",
    "shard_model",
]


def load_with_head(model: str | Path, dtype: torch.dtype, head: Head) -> tuple[Any, bool]:
    """Loads a causal language model; for a value head, says whether the directory had one. True for other heads.

    For `"score"` it is a sequence classifier, or a value head where transformers has none of the family.
    """
    if head == "score":
        classifier = load_classifier(model, dtype)
        return load_with_head(model, dtype, "value") if classifier is None else (classifier, True)
    loaded, missing, files = load_causal_lm(model, dtype, head)
    refuse_lacking(files, [name for name in missing if head == "lm" or name != find_head_name(loaded)])
    if head == "lm":
        return loaded, True
    value_head = torch.nn.Linear(loaded.get_output_embeddings().weight.shape[1], 1, bias=False, dtype=dtype)
    stored = next((found for name in SCORE_HEADS if (found := read_tensor(files, name)) is not None), None)
    with torch.no_grad():
        value_head.weight.copy_(torch.zeros(()) if stored is None else stored)
    loaded.config.tie_word_embeddings = False
    if getattr(loaded.config, "final_logit_softcapping", None) is not None:
        loaded.config.final_logit_softcapping = None
    loaded.set_output_embeddings(value_head)
    return loaded, stored is not None


def shard_model(model: Any, config: TrainConfig, mesh: DeviceMesh) -> FSDPModule:
    """Applies FSDP2, activation checkpointing and torch.compile. Gradients are summed over ranks, not averaged.

    Raises:
        BackendError: if layers are to be told apart in a model that does not name them, or torch.compile does not work.
    """
    model.eval()
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            # transformers checkpoints a layer only in training mode; what is inside it stays without dropout.
            layer.training = True
    is_classifier = model.get_output_embeddings() is None  # some encoders name no layers, and are small
    if not layers and not is_classifier and (config.shard == "layer" or config.compile):
        raise BackendError(f"{type(model).__name__} does not name its decoder layers: use shard='root', compile=False")
    if config.compile:
        _require_compiler(mesh.device_type)
        for layer in layers:
            # The layers share what is compiled, for any number of rows and tokens; FSDP2's hooks stay outside.
            layer.forward = torch.compile(layer.forward, dynamic=True)
    compute = None if config.dtype == "float32" else getattr(torch, config.dtype)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
    for module in [*(layers if config.shard == "layer" else ()), model]:
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        if mesh.size() > 1:  # alone, FSDP2 would divide by it all the same
            sharded.set_gradient_divide_factor(1.0)
        # gloo has no reduction that scales
        sharded.set_force_sum_reduction_for_comms(True)
    return cast("FSDPModule", model)


def _require_compiler(device: str) -> None:
    """Compiles something small, so that what is missing is said before a model is trained."""
    try:
        torch.compile(torch.cos)(torch.ones(2, device=device))
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise BackendError(
            f"compile=True needs a torch.compile that works on {show(device)}, which it does not: {reason}; "
            f"install a C++ "
            "compiler (CXX names it), or set compile=False"
        ) from error


def find_head_name(model: Any) -> str:
    head = model.get_output_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


@contextmanager
def head_only_at(positions: torch.Tensor, model: Any) -> Iterator[None]:
    """Inside, the model's head sees some positions only, and its logits are [n, V]: padding costs no logits.

    Args:
        positions: int64 [n], of the flattened [b * T] hidden states that the head is given.
        model: a causal language model.
    """
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, inputs: (inputs[0].flatten(0, 1).index_select(0, positions),))
    try:
        yield
    finally:
        handle.remove()


def read_tensor(files: ModelDirectory, name: str) -> torch.Tensor | None:
    """One tensor of a Hugging Face directory, or None where no file of it has that name."""
    if name not in files.tensors:
        return None
    path = files.tensors[name].path
    with (
        errors_of("safetensors", f"{files.label}: {path.name} cannot be read"),
        safe_open(path, framework="pt") as file,
    ):
        found: torch.Tensor = file.get_tensor(name)
    return found


def check_same_shapes(
    shapes: Mapping[str, tuple[int, ...]], full: Mapping[str, torch.Tensor], directory: str | Path
) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in full.items()}
    if differing := sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name)):
        name = differing[0]
        raise BackendError(
            f"{directory} holds another model: {len(differing)} parameters differ, such as {show(name)}, which is "
            f"{shapes.get(name, 'absent')} here and {found.get(name, 'absent')} there"
        )
