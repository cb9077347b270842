"""A model as FSDP2 sees it: loading, sharding, forward passes at tokens, the head, and tensors of a directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hf_engine.backends.base import Head, TrainConfig
from hf_engine.backends.lora_config import LoraConfig
from hf_engine.model_directory import SCORE_HEADS
from hf_engine.models.causal_lm import lacking_without_head, load_causal_lm, move_to, read_tensor, refuse_lacking
from hf_engine.models.classifier import load_classifier
from hf_engine.models.lora import add_adapters
from hf_engine.resharding.execute import execute_reshard
from hf_engine.resharding.layouts import WeightLayout, replicated_layout
from hf_engine.resharding.plan import plan_reshard
from hf_engine.training.fsdp._packed_masks import attend_in_packs
from hf_engine.training.micro_batches import MicroBatch
from hf_engine.training.outputs import OutputRequest, place_at
from hf_protocols.errors import BackendError
from hf_protocols.validation import show

__all__ = [
    "Gathering",
    "check_same_shapes",
    "forward_tokens",
    "gather_on_first",
    "load_with_head",
    "shapes_of",
    "shard_model",
]

_CHECKPOINTED = "GradientCheckpointingLayer"
"""transformers' class of layers that can be computed again."""


def load_with_head(
    model: str | Path, dtype: torch.dtype, head: Head, lora: LoraConfig | None = None, seed: int = 0
) -> tuple[Any, bool]:
    """Loads a causal language model; for a value head, says whether the directory had one. True for other heads.

    For `"score"` it is a sequence classifier, or a value head where transformers has none of the family. With `lora` it
    has adapters, drawn from `seed`.
    """
    loaded, has_head = _load_whole(model, dtype, head)
    if lora is not None:
        add_adapters(loaded, lora, seed=seed)
    return loaded, has_head


def _load_whole(model: str | Path, dtype: torch.dtype, head: Head) -> tuple[Any, bool]:
    if head == "score":
        classifier = load_classifier(model, dtype)
        return _load_whole(model, dtype, "value") if classifier is None else (classifier, True)
    loaded, missing, files = load_causal_lm(model, dtype, head)
    if head == "lm":
        refuse_lacking(files, missing)
        return loaded, True
    value_head = torch.nn.Linear(loaded.get_output_embeddings().weight.shape[1], 1, bias=False, dtype=dtype)
    stored = next((found for name in SCORE_HEADS if (found := read_tensor(files, name)) is not None), None)
    with torch.no_grad():
        value_head.weight.copy_(torch.zeros(()) if stored is None else stored)
    refuse_lacking(files, lacking_without_head(loaded, missing, value_head))
    _return_heads_output(loaded)
    return loaded, stored is not None


def _return_heads_output(model: Any) -> None:
    """Has the model return what its head does: some cap or scale it, which is for logits only.

    It comes before FSDP2's hooks, which start the backward pass at what the model returns.
    """
    kept: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        kept[:] = [output]

    def put(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        output.logits = kept.pop()
        return output

    model.get_output_embeddings().register_forward_hook(keep)
    model.register_forward_hook(put)


class Gathering(Protocol):
    """Controls when weights are gathered and gradients are summed, as `FSDPModule` does."""

    def reshard(self) -> None:
        """Frees gathered weights."""
        ...

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Sets whether a backward pass sums gradients over ranks."""
        ...

    def set_reshard_after_backward(self, reshard_after_backward: bool) -> None:
        """Sets whether a backward pass frees gathered weights."""
        ...


class _NothingGathered:
    """One rank's: every method does nothing."""

    def reshard(self) -> None: ...

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None: ...

    def set_reshard_after_backward(self, reshard_after_backward: bool) -> None: ...


def shard_model(model: Any, config: TrainConfig, mesh: DeviceMesh) -> Gathering:
    """Applies FSDP2, activation checkpointing and torch.compile. Gradients are summed over ranks, not averaged.

    On one rank, of a model in the dtype it computes in, FSDP2 would only copy weights and gradients: it is not applied.

    Raises:
        BackendError: if an option needs the layers of a model that does not name them, if transformers cannot compute
            them again, or if torch.compile does not work.
    """
    model.eval()
    layers = _list_units(model)
    is_classifier = model.get_output_embeddings() is None  # some encoders name no layers, and are small
    if not layers and not is_classifier and (config.shard == "layer" or config.compile):
        raise BackendError(
            f"{type(model).__name__} does not name its decoder layers. Use shard='root' and compile=False"
        )
    if config.compile:
        _require_compiler(mesh.device_type)
        for layer in layers:
            # The layers share what is compiled, for any number of rows and tokens; FSDP2's hooks stay outside.
            layer.forward = torch.compile(layer.forward, dynamic=True)
    if config.activation_checkpointing:
        _checkpoint_layers(model)
    if mesh.size() == 1 and all(each.dtype == getattr(torch, config.dtype) for each in model.parameters()):
        move_to(torch.device(mesh.device_type), model)
        return _NothingGathered()
    compute = None if config.dtype == "float32" else getattr(torch, config.dtype)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
    for module in [*(layers if config.shard == "layer" else ()), model]:
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        if mesh.size() > 1:  # alone, FSDP2 would divide by it all the same
            sharded.set_gradient_divide_factor(1.0)
        # gloo has no reduction that scales
        sharded.set_force_sum_reduction_for_comms(True)
    return cast("Gathering", model)


def _checkpoint_layers(model: Any) -> None:
    """Has layers compute their activations again in the backward pass.

    transformers does so for a layer in training mode alone. Some layers (OPT, XGLM, Falcon) have dropout of their own
    in that mode, so each computes outside of it.

    Raises:
        BackendError: for a model whose layers transformers cannot compute again.
    """
    layers = [each for each in model.modules() if any(kind.__name__ == _CHECKPOINTED for kind in type(each).__mro__)]
    if not model.supports_gradient_checkpointing or not layers:
        raise BackendError(
            f"activation_checkpointing=True: transformers cannot compute the layers of {type(model).__name__} again. "
            "Set activation_checkpointing=False"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True
        layer.forward = partial(_compute_without_dropout, layer, layer.forward)


def _compute_without_dropout(layer: torch.nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    layer.training = False
    try:
        return forward(*args, **kwargs)
    finally:
        layer.training = True


def _list_units(model: Any) -> list[torch.nn.Module]:
    """Returns the modules that transformers does not split.

    Modules with a tied parameter are left out: FSDP2 would untie the parameter.
    """
    owners = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    return [
        module
        for module in model.modules()
        if type(module).__name__ in (model._no_split_modules or ())
        and all(owners[id(parameter)] == 1 for parameter in module.parameters())
    ]


def _require_compiler(device: str) -> None:
    """Compiles something small, so that what is missing is said before a model is trained."""
    try:
        torch.compile(torch.cos)(torch.ones(2, device=device))
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise BackendError(
            f"compile=True needs a torch.compile that works on {show(device)}, which it does not: {reason}. Install a "
            "C++ compiler (CXX names it), or set compile=False"
        ) from error


def forward_tokens(
    model: Any, micro_batch: MicroBatch, device: torch.device, *, head: Head, request: OutputRequest
) -> dict[str, torch.Tensor]:
    """Outputs [b, T] at the response tokens, zeros at their padding; no logits are computed elsewhere."""
    mask = micro_batch.response_mask
    positions = mask.flatten().nonzero().squeeze(1)
    ids = micro_batch.response_ids.flatten()[positions].to(device)
    positions = positions.to(device)
    heads_inputs = _head_only_at(micro_batch.predicting_positions.to(device), model)
    with heads_inputs, attend_in_packs(model, micro_batch, device):
        logits = model(
            input_ids=micro_batch.input_ids.to(device),
            attention_mask=micro_batch.attention_mask.to(device),
            position_ids=micro_batch.position_ids.to(device),
            use_cache=False,
        ).logits
    if head == "value":
        found = {"values": logits.squeeze(-1).float()}
    else:
        candidates = micro_batch.candidate_ids
        if candidates is not None:
            candidates = candidates.to(device).flatten(0, 1)[positions]
        found = request.answer(logits, ids, candidates)
    return {name: place_at(positions, output, mask.shape) for name, output in found.items()}


@contextmanager
def _head_only_at(positions: torch.Tensor, model: Any) -> Iterator[None]:
    """Inside, the model's head sees some positions only, and its logits are [n, V]: padding costs no logits.

    Args:
        positions: int64 [n], of the flattened [b * L] hidden states that the head is given.
        model: a causal language model.
    """
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, inputs: (inputs[0].flatten(0, 1).index_select(0, positions),))
    try:
        yield
    finally:
        handle.remove()


def gather_on_first(
    layout: WeightLayout,
    shards: Mapping[str, torch.Tensor],
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Whole tensors on the first of the ranks that hold their shards, none on the others. Collective."""
    whole = replicated_layout(layout.shapes, ranks[:1], dtype=layout.dtype)
    dtype = getattr(torch, layout.dtype)
    is_first = dist.get_rank(group) == 0
    full = {name: torch.empty(shape, dtype=dtype) for name, shape in layout.shapes.items() if is_first}
    execute_reshard(plan_reshard(layout, whole), shards, full, group, device=device)
    return full


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_same_shapes(
    shapes: Mapping[str, tuple[int, ...]], full: Mapping[str, torch.Tensor], directory: str | Path
) -> None:
    found = shapes_of(full)
    if differing := sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name)):
        name = differing[0]
        raise BackendError(
            f"{directory} holds another model: {len(differing)} parameters differ, such as {show(name)}, which is "
            f"{shapes.get(name, 'absent')} here and {found.get(name, 'absent')} there"
        )
