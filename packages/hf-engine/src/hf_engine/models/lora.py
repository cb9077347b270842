"""Low-rank adapters in a model of transformers: put in by peft, written in peft's format, merged from its files.

Layouts and plans know a module's own weight under its name without adapters, `q_proj.weight`, and the two matrices as
`q_proj.lora_A.weight` and `q_proj.lora_B.weight`: names that do not depend on how peft wraps a module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_engine.backends.base import Head
from hf_engine.backends.capabilities import SupportsUnmergedAdapters
from hf_engine.backends.lora_config import LoraConfig
from hf_engine.backends.versions import PEFT
from hf_engine.model_directory import AdapterDirectory, ModelDirectory, errors_of, read_model_directory
from hf_engine.models.adapter_rules import add_adapters_apart
from hf_engine.models.causal_lm import build_without_memory, find_head_name, load_causal_lm, save_causal_lm
from hf_engine.models.classifier import build_classifier_without_memory, has_classifier, load_classifier
from hf_engine.models.defaults import torch_defaults
from hf_engine.process_groups import keeping_random_numbers, local_device
from hf_engine.resharding.layouts import WeightLayout
from hf_protocols.errors import BackendError
from hf_protocols.similar_names import find_similar
from hf_protocols.validation import show

__all__ = [
    "FACTORS",
    "adapted_weights",
    "adapters_off",
    "add_adapters",
    "check_model_adapters",
    "compute_delta",
    "dropping_inputs",
    "find_targets",
    "is_transposed",
    "list_heads",
    "named_parameters",
    "plan_engine_adapters",
    "write_adapter",
    "write_merged",
]

FACTORS = ("lora_A", "lora_B")
_ADAPTER = "default"
_MOST_NAMED = 3


def find_targets(model: Any, lora: LoraConfig) -> list[str]:
    """Names of the modules that get an adapter.

    Raises:
        BackendError: for a name that is the end of no linear layer's, with the nearest ones.
    """
    head = find_head_name(model).removesuffix(".weight")
    trunk = f"{model.base_model_prefix}."
    linear = [name for name, module in model.named_modules() if _is_linear(module)]
    linear = [name for name in linear if name != head and name.startswith(trunk)]
    if lora.targets is None:
        return linear
    found = {target: [name for name in linear if _ends_with(name, target)] for target in lora.targets}
    for target, names in found.items():
        if not names:
            ends = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            given = f"targets={show(list(lora.targets))}"
            if _ends_with(head, target):
                raise BackendError(f"{given}: {show(target)} is the output layer, which gets no adapter. Leave it out")
            near = find_similar(target.rpartition(".")[2], ends, most=_MOST_NAMED)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"The layers are {', '.join(ends)}"
            raise BackendError(f"{given}: no linear layer of the model is named {show(target)}. {hint}")
    return [name for name in linear if any(name in names for names in found.values())]


def plan_engine_adapters(
    backend: type[SupportsUnmergedAdapters], model: str | Path, layout: WeightLayout, lora: LoraConfig | None
) -> tuple[WeightLayout, list[str]]:
    """The layout of an engine with its adapters apart, and the names of the layers that have one.

    Args:
        backend: the engine's rollout backend.
        model: directory or hub name.
        layout: of the base.
        lora: settings of the adapters; None: without.

    Raises:
        BackendError: for adapters that the engine does not compute, or targets that the model lacks.
    """
    if lora is None:
        return layout, []
    files, on_cpu = read_model_directory(model), local_device().type == "cpu"
    if reason := backend.find_adapter_refusal(files, lora, {"dtype": layout.dtype}, on_cpu=on_cpu):
        raise BackendError(f"lora: {backend.__name__} does not compute adapters unmerged: {reason}. Leave lora out")
    layers = find_targets(build_without_memory(files), lora)
    return add_adapters_apart(layout, layers, lora), layers


def check_model_adapters(files: ModelDirectory, lora: LoraConfig, head: Head) -> None:
    """Refuses adapters that `build` would refuse for a model, by its files.

    Raises:
        BackendError: for targets that the model lacks, a family without sequence classifier, or without peft.
    """
    PEFT.check()
    if head == "score" and not has_classifier(files):
        raise files.refusal(
            f"lora: transformers has no sequence classifier of model_type {show(files.config.get('model_type'))}, "
            "which an adapter of a reward model needs. Leave lora out"
        )
    find_targets(build_classifier_without_memory(files) if head == "score" else build_without_memory(files), lora)


@torch_defaults()
def add_adapters(model: Any, lora: LoraConfig, *, seed: int) -> None:
    """Puts adapters into a model: `B` is 0, `A` drawn from `seed`. All else is frozen, except a head that scores.

    Raises:
        BackendError: for targets that the model lacks, or without peft.
    """
    PEFT.check()
    from peft import inject_adapter_in_model

    targets = find_targets(model, lora)
    heads = list_heads(model)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(_describe(lora, targets), model, _ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_factor(name) or name in heads)


def list_heads(model: Any) -> list[str]:
    """Parameters of a head that scores or values, which is trained whole; none of a language model."""
    output = find_head_name(model)
    if output:
        head = model.get_output_embeddings()
        return [output] if head.weight.shape[0] == 1 else []
    trunk = f"{model.base_model_prefix}."
    return [name for name, _ in model.named_parameters() if not name.startswith(trunk)]


def named_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters by the names that layouts have for them."""
    return {_plain(name): parameter for name, parameter in model.named_parameters()}


def adapted_weights(names: Sequence[str]) -> list[str]:
    """Of the names of parameters, the weights to which an adapter is added."""
    end = f".{FACTORS[0]}.weight"
    return [f"{name.removesuffix(end)}.weight" for name in names if name.endswith(end)]


def is_transposed(model: Any, weight: str) -> bool:
    """True for a layer that keeps its matrix as [in, out]."""
    layer = model.get_submodule(weight.removesuffix(".weight"))
    return bool(getattr(layer, "fan_in_fan_out", False))


def compute_delta(a: torch.Tensor, b: torch.Tensor, lora: LoraConfig, rows: slice, *, transposed: bool) -> torch.Tensor:
    """Rows of what an adapter adds to its weight.

    Args:
        a: [rank, in].
        b: [out, rank].
        lora: whose `scaling` multiplies the product.
        rows: of the weight.
        transposed: the weight is [in, out].
    """
    left, right = (a.T, b.T) if transposed else (b, a)
    return (left[rows] @ right) * lora.scaling


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Inside, the model computes what its base does.

    peft's own switch also freezes the adapters, and FSDP keeps what a parameter was in its first pass.
    """
    layers = list(_layers(model))
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def dropping_inputs(model: Any, *, seed: int) -> Iterator[None]:
    """Within the block adapters drop inputs at random, from a seed; the rest of the model drops nothing."""
    dropouts = [layer.lora_dropout for layer in _layers(model)]
    with keeping_random_numbers():
        torch.manual_seed(seed)
        try:
            for each in dropouts:
                each.train()
            yield
        finally:
            for each in dropouts:
                each.eval()


def write_adapter(
    directory: Path, weights: Mapping[str, torch.Tensor], lora: LoraConfig, model: Any, *, head: Head, base: str
) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, which peft loads.

    Args:
        directory: exists.
        weights: whole factors and heads, by the names of `named_parameters`.
        lora: as the model was built with.
        model: that has the adapters.
        head: of the model.
        base: directory or hub name of the model that the adapter belongs to.
    """
    from safetensors.torch import save_file

    targets = [name.removesuffix(".weight") for name in adapted_weights(list(weights))]
    heads = {name.partition(".")[0] for name in list_heads(model)}
    config = _describe(lora, _shorten_targets(model, targets))
    config.base_model_name_or_path, config.inference_mode = base, True
    config.task_type = "CAUSAL_LM" if head == "lm" else "SEQ_CLS"
    config.modules_to_save = sorted(heads) or None
    config.save_pretrained(str(directory))
    path = directory / "adapter_config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    written["target_modules"].sort()  # a set, in another order in every process
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    stored = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in weights.items()}
    save_file(stored, directory / "adapter_model.safetensors", metadata={"format": "pt"})


@torch_defaults()
def write_merged(adapter: AdapterDirectory, directory: Path) -> None:
    """Writes the model that an adapter makes of its base.

    Raises:
        BackendError: for a base that cannot be loaded, or an adapter that does not fit it.
    """
    PEFT.check()
    from peft import PeftModel

    stored = {name for name in adapter.read_tensors() if any(f".{factor}." in name for factor in FACTORS)}
    loaded = load_classifier(adapter.base, torch.float32) if adapter.is_classifier else None
    if loaded is None:
        loaded = load_causal_lm(adapter.base, torch.float32).model
    failure = f"{adapter.label}: cannot be merged into its base {show(str(adapter.base))}"
    with errors_of("peft", failure):
        merged: Any = PeftModel.from_pretrained(loaded, str(adapter.path))
        # peft leaves factors without a place out, and draws those that the file lacks.
        placed = {_without_adapter(name) for name, _ in merged.named_parameters() if _is_factor(name)}
        if lost := sorted(stored - placed):
            raise BackendError(
                f"{failure}, which has no place for {lost[0]} ({len(lost)} such). Correct base_model_name_or_path in "
                "its adapter_config.json"
            )
        if lacking := sorted(placed - stored):
            raise BackendError(
                f"{failure}: its adapter_config.json describes {lacking[0]} ({len(lacking)} such), which its file "
                "lacks. Give the whole directory that peft saved"
            )
        _untie_adapted_head(merged.get_base_model())
        merged = merged.merge_and_unload()
    weights = dict(merged.named_parameters())
    save_causal_lm(merged, weights, directory, head=find_head_name(merged))


def _untie_adapted_head(model: Any) -> None:
    """Gives the head memory of its own if it is the embedding and one of the two has an adapter, for that one alone."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not {id(embedding), id(head)} & {id(layer) for layer in _layers(model)}:
        return
    own, source = (getattr(layer, "base_layer", layer) for layer in (head, embedding))
    if own is not None and own.weight is source.weight:
        own.weight = torch.nn.Parameter(own.weight.detach().clone())
        model.config.tie_word_embeddings = False


def _describe(lora: LoraConfig, targets: Sequence[str]) -> Any:
    from peft import LoraConfig as PeftConfig

    alpha: Any = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha
    return PeftConfig(r=lora.rank, lora_alpha=alpha, lora_dropout=lora.dropout, target_modules=list(targets))


def _shorten_targets(model: Any, targets: Sequence[str]) -> list[str]:
    """The last parts of the names, if those name the same modules: a file that people can read."""
    ends = sorted({name.rpartition(".")[2] for name in targets})
    modules = {name.removesuffix(".base_layer") for name, module in model.named_modules() if _is_linear(module)}
    modules = {name for name in modules if not any(f".{factor}." in f".{name}." for factor in FACTORS)}
    named = {name for name in modules if any(_ends_with(name, end) for end in ends)}
    return ends if named == {*targets} else sorted(targets)


def _layers(model: Any) -> Iterator[Any]:
    from peft.tuners.lora import LoraLayer

    return (module for module in model.modules() if isinstance(module, LoraLayer))


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"


def _ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _is_factor(name: str) -> bool:
    return any(f".{factor}.{_ADAPTER}." in name for factor in FACTORS)


def _plain(name: str) -> str:
    return _without_adapter(name.replace(".base_layer.", "."))


def _without_adapter(name: str) -> str:
    """The name that peft writes to files."""
    for factor in FACTORS:
        name = name.replace(f".{factor}.{_ADAPTER}.", f".{factor}.")
    return name
