"""Causal language models of transformers, read from a directory and written to one, with errors of ours."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from hf_engine.backends.base import Head
from hf_engine.backends.versions import TRANSFORMERS
from hf_engine.model_directory import (
    SCORE_HEADS,
    ExportDtype,
    ExportSource,
    ModelDirectory,
    check_head,
    check_model_directory,
    describe_export,
    errors_of,
    is_buffer,
    read_end_of_sequence_ids,
    read_model_directory,
)
from hf_engine.models.attention import is_capped, keep_cap
from hf_engine.models.conversions import buffers_in_files, find_buffer_owners, persistent_buffers, read_file_names
from hf_engine.models.defaults import torch_defaults
from hf_engine.models.stacked_experts import shapes_in_files
from hf_engine.resharding.tensor_parallel import layer_of
from hf_protocols.models import ModelShape
from hf_protocols.validation import show

__all__ = [
    "LoadedModel",
    "build_without_memory",
    "find_head_name",
    "keeps_state",
    "lacking_without_head",
    "load_causal_lm",
    "move_to",
    "prepare_loaded",
    "read_shape",
    "read_tensor",
    "read_text_config",
    "refuse_lacking",
    "save_causal_lm",
]

_OUTPUTS = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
"""Keys of config.json that change what a forward pass returns: backends read its logits by name."""
_RECURRENT = ("conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "recurrent")
"""Kinds of layers, in transformers' words, that carry a state from token to token."""
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention")
"""Kinds of layers that keep keys and values alone."""


class LoadedModel(NamedTuple):
    """A model in memory, and the files that it is from."""

    model: Any
    missing: list[str]
    """Parameters that the files lack: transformers draws these at random."""
    files: ModelDirectory


@torch_defaults()
def load_causal_lm(model: str | Path, dtype: torch.dtype, head: Head = "lm") -> LoadedModel:
    """Loads a causal language model whose files are checked first.

    Raises:
        BackendError: for a directory that transformers cannot load one from, or an unsupported version of it.
    """
    TRANSFORMERS.check()
    files = read_model_directory(model)
    check_model_directory(files, head=head)
    read_end_of_sequence_ids(files)
    with errors_of("transformers", f"{files.label}: cannot be loaded as a causal language model"):
        # Its own error of a size that differs names no parameter.
        answer: Any = AutoModelForCausalLM.from_pretrained(
            files.path,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            **_OUTPUTS,
        )
    loaded, report = answer
    _refuse_other_sizes(files, report["mismatched_keys"])
    _refuse_surplus(files, loaded, report["unexpected_keys"], () if head == "lm" else SCORE_HEADS)
    _refuse_unfit(files, loaded, head)
    prepare_loaded(files, loaded, dtype)
    return LoadedModel(loaded, sorted(report["missing_keys"]), files)


def move_to(device: torch.device, model: Any) -> None:
    """Moves a loaded model to a device, and gives each parameter memory of its own, on the same device, too.

    What was loaded may be a view of a file's pages, which could not be freed and taken again.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, copy=True, memory_format=torch.contiguous_format)
    model.to(device)


def prepare_loaded(files: ModelDirectory, loaded: Any, dtype: torch.dtype) -> None:
    """Gives a loaded model one dtype, an embedding that learns, attention with its cap, and its source for exports."""
    keep_cap(loaded)
    for parameter in loaded.parameters():  # of some families transformers keeps a few in float32
        parameter.data = parameter.data.to(dtype)
    embedding = loaded.get_input_embeddings()
    if getattr(embedding, "padding_idx", None) in read_end_of_sequence_ids(files):
        embedding.padding_idx = None  # an end of earlier turns is input like any other, and its embedding learns
    loaded.export_source = ExportSource.of(files)


def build_without_memory(files: ModelDirectory) -> Any:
    """Builds the model of a configuration with transformers, on the device `meta`, so that refusals are reported early.

    Raises:
        BackendError: for a configuration from which it builds none.
    """
    family: Any = files.config.get("model_type", "llama")
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        raise files.refusal(
            f"has model_type={show(family)} in its config.json, which transformers does not build without code of the "
            "model's own. Choose a model that it builds"
        )
    with errors_of("transformers", f"{files.label}: its config.json cannot be used"):
        config = AutoConfig.from_pretrained(files.path, trust_remote_code=False, **_OUTPUTS)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise files.refusal(
            f"has model_type={show(family)} in its config.json, which is not a causal language model in transformers. "
            "Choose a model that predicts the next token"
        )
    with errors_of("transformers", f"{files.label}: its config.json cannot be used"), torch.device("meta"):
        built: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    if files.generation_config:
        with errors_of("transformers", f"{files.label}: its generation_config.json cannot be used"):
            GenerationConfig.from_pretrained(files.path)
    _refuse_unfit(files, built, "lm")
    _compare_headers(files, built)
    return built


def read_text_config(files: ModelDirectory) -> Any:
    """Reads the configuration of the language model as transformers does, with its defaults.

    Raises:
        BackendError: for one that transformers refuses.
    """
    with errors_of("transformers", f"{files.label}: its config.json cannot be used"):
        return AutoConfig.from_pretrained(files.path, trust_remote_code=False).get_text_config()


def read_shape(files: ModelDirectory, built: Any) -> ModelShape:
    """The generic shape of a model of any family: names in files and sizes of the one that transformers builds.

    Raises:
        BackendError: for sizes that cannot be read.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    names = {id(parameter): name for name, parameter in built.named_parameters()}
    embedding, head = names[id(built.get_input_embeddings().weight)], find_head_name(built)
    with errors_of("transformers", f"{files.label}: the sizes of its model cannot be read"):
        in_files = read_file_names(built)
        embedding, head = (in_files[name][0].name if name in in_files else name for name in (embedding, head))
        return ModelShape.from_parameters(
            built.config.get_text_config().to_dict(),
            shapes_in_files(in_files, shapes),
            embedding=embedding,
            head=head,
            keeps_scores=is_capped(built) or built.config.get_text_config()._attn_implementation == "eager",
        )


def keeps_state(model: Any) -> bool:
    """True for layers that carry more than keys and values from token to token.

    transformers calls whole classes stateful; a model of one whose layers are all attention, like the small Granite 4,
    is not.
    """
    kinds = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())}
    return bool(kinds & {*_RECURRENT}) or (model._is_stateful and not (kinds and kinds <= {*_ATTENTION}))


def find_head_name(model: Any) -> str:
    """Name of the output layer's weight, also where it is the embedding's; empty for a classifier."""
    head = model.get_output_embeddings()
    return "" if head is None else next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def lacking_without_head(model: Any, missing: Collection[str], head: torch.nn.Module | None = None) -> list[str]:
    """Puts another head into a model, and returns which of the missing parameters it still has.

    A critic's files lack what belongs to the output layer: its bias, too, which some families hold apart from it.

    Args:
        model: of transformers.
        missing: names of parameters that its files lack.
        head: the other head; by default one without memory.
    """
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(torch.nn.Linear(1, 1, bias=False, device="meta") if head is None else head)
    kept = {name for name, _ in model.named_parameters()} - {find_head_name(model)}
    return [name for name in missing if name in kept]


def refuse_lacking(files: ModelDirectory, missing: Sequence[str]) -> None:
    """Refuses a model whose files lack parameters, or have them under other names.

    Raises:
        BackendError: naming them.
    """
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise files.refusal(f"lacks the parameters {shown}. Give a whole directory of one model")


def save_causal_lm(
    model: Any, weights: Mapping[str, torch.Tensor], directory: Path, *, head: str, dtype: ExportDtype = "source"
) -> None:
    """Writes the configuration of a model that `prepare_loaded` prepared, these weights and its buffers.

    Args:
        model: as it was loaded.
        weights: by the names of its modules.
        directory: where to write.
        head: name of the output layer's weight; empty for a classifier.
        dtype: see `TrainBackend.export_hf`.
    """
    source: ExportSource = model.export_source
    named = {**weights, **persistent_buffers(find_buffer_owners(model))}
    stored = {
        name: tensor.to(getattr(torch, source.dtype_of(name, dtype))) if tensor.is_floating_point() else tensor
        for name, tensor in revert_weight_conversion(model, named).items()
    }
    generation = getattr(model, "generation_config", None) if head else None
    # transformers reads settings of generation that contradict each other, and refuses to write them.
    model.generation_config = None if generation is None else type(generation)()
    try:
        model.save_pretrained(directory, state_dict=stored, save_original_format=False)
    finally:
        model.generation_config = generation
    if generation is not None:
        generation.to_json_file(directory / "generation_config.json", use_diff=True)
    source.write_generation_config(directory)
    path = directory / "config.json"
    written = describe_export(
        json.loads(path.read_text(encoding="utf-8")),
        dtype=source.main_dtype if dtype == "source" else dtype,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        ties_embeddings=head not in weights if head else bool(model.config.get_text_config().tie_word_embeddings),
    )
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _compare_headers(files: ModelDirectory, built: Any) -> None:
    """Refuses parameters of another size, missing or surplus, before ranks load them.

    Some families have other names in files than in modules. Sizes are compared where names are equal. Surplus ones are
    not refused where parameters are missing: files may hold those merged, under names that loading alone knows.
    """
    held = files.tensors
    wanted = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    sizes = ((name, held[name].shape, shape) for name, shape in wanted.items() if name in held)
    _refuse_other_sizes(files, [each for each in sizes if each[1] != each[2]])
    tied = built.get_expanded_tied_weights_keys(all_submodels=True)
    optional = {*tied, *tied.values(), find_head_name(built)}
    parts = read_file_names(built)
    in_files = {name: [part.name for part in parts.get(name, ())] or [name] for name in wanted}
    known = {*chain.from_iterable(in_files.values()), *optional, *buffers_in_files(built), *SCORE_HEADS}
    needed = chain.from_iterable(names for name, names in in_files.items() if name not in optional)
    missing = sorted(name for name in needed if name not in held) if held else []
    if missing and any(name in held for name in SCORE_HEADS):
        missing = lacking_without_head(deepcopy(built), missing)
    surplus = [name for name in held if name not in known and not is_buffer(name)]
    if not surplus:
        refuse_lacking(files, missing)
    elif not missing:  # else names may be those that loading converts
        ignored = getattr(built, "_keys_to_ignore_on_load_unexpected", None) or ()
        _refuse_surplus(files, built, [name for name in surplus if not any(re.search(each, name) for each in ignored)])


def _refuse_other_sizes(files: ModelDirectory, differing: Collection[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    if differing:
        name, given, wanted = min(differing, key=lambda each: each[0])
        raise files.refusal(
            f"holds other weights than its config.json says: {len(differing)} parameters differ, such as {name!r}, "
            f"which is {tuple(given)} and must be {tuple(wanted)}. Give a whole directory of one model"
        )


def _refuse_surplus(
    files: ModelDirectory, loaded: Any, unexpected: Collection[str], heads: Collection[str] = ()
) -> None:
    """Of families that `ModelShape` does not know; transformers leaves out known additional tensors of a family."""
    surplus = sorted(name for name in unexpected if not is_buffer(name) and name not in heads)
    if files.num_extra_layers:  # which predict further tokens: neither trained nor used to generate
        num_layers = loaded.config.get_text_config().num_hidden_layers
        surplus = [name for name in surplus if (layer_of(name) or 0) < num_layers]
    if surplus:
        raise files.refusal(
            f"holds {surplus[0]} ({len(surplus)} such), for which a {type(loaded).__name__} has no place: it would be "
            "ignored. Give a whole directory of one model"
        )


def _find_bidirectional(config: Any) -> str | None:
    """The key of a configuration by which tokens see later ones, with its value; None for causal attention."""
    # In encoders only this key makes attention causal; other models have the key without using it.
    if getattr(config, "is_decoder", True) is False and hasattr(config, "add_cross_attention"):
        return "is_decoder=false"
    found = getattr(config, "use_bidirectional_attention", None)
    # Gemma 4 has "vision" for the tokens of images, which no row here holds.
    if found in (True, "all"):
        return f"use_bidirectional_attention={json.dumps(found)}"
    return "is_causal=false" if getattr(config, "is_causal", True) is False else None


def _refuse_unfit(files: ModelDirectory, model: Any, head: Head) -> None:
    """Refuses files that would be another model here than in transformers: other heads, windows or use of padding."""
    if head == "lm":
        _check_heads(files, model)
    _refuse_unused(files, model)
    config, name = model.config.get_text_config(), type(model).__name__
    if (stated := _find_bidirectional(config)) is not None:
        raise files.refusal(
            f"has {stated} in its config.json: the tokens of such a {name} see later ones. Choose a causal language "
            "model, or change the key if this is one"
        )
    if keeps_state(model):
        kinds = sorted({*(getattr(config, "layer_types", None) or ())} - {*_ATTENTION})
        named = f" ({', '.join(kinds)})" if kinds else ""
        raise files.refusal(
            f"is a {name}, with recurrent layers{named}: rows are padded together, and padding would change their "
            "state. Choose a model with attention in all layers"
        )
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if not takes_positions and any("Position" in type(module).__name__ for module in model.modules()):
        raise files.refusal(
            f"is a {name}, which counts the positions of padding. Choose a model whose forward takes position_ids"
        )
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise files.refusal(
            f"is a {name}, whose positions begin after the id of its padding token. Choose a model whose positions "
            "begin at 0"
        )


def _check_heads(files: ModelDirectory, model: Any) -> None:
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    for name, source in tied.items():
        check_head(files, name, source, is_tied=True)
    name = find_head_name(model)
    sources = {id(parameter): each for each, parameter in model.named_parameters()}
    if name not in tied and name not in tied.values():
        check_head(files, name, sources[id(model.get_input_embeddings().weight)], is_tied=False)


def _refuse_unused(files: ModelDirectory, loaded: Any) -> None:
    """Refuses windows that no layer knows: transformers' caches and engines drop tokens outside of them anyway."""
    config = loaded.config.get_text_config()
    known = type(config)()
    for key in ("sliding_window", "attention_chunk_size", "layer_types"):
        value = getattr(config, key, None)
        is_full = key == "layer_types" and set(value or ()) <= {"full_attention"}
        if value is not None and not is_full and not hasattr(known, key):
            raise files.refusal(
                f"has {key}={value} in its config.json, which no layer of a {type(loaded).__name__} has. Remove it"
            )


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
