"""The model and the tokenizer that a run starts from: loaded, or made afresh from sizes and the training texts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_algorithms.data import (
    build_character_tokenizer,
    count_spare_logits,
    load_tokenizer,
    read_tokenizer_files,
    train_bpe_tokenizer,
)
from hf_controller.executors.shared_process import taking_turns
from hf_engine import SupportsModelCheck, SupportsScores, derive_shape, load_rollout_backend, load_train_backend
from hf_engine.model_directory import (
    ModelDirectory,
    check_end_tokens,
    check_model_directory,
    errors_of,
    find_score_head,
    is_hub_name,
    read_end_of_sequence_ids,
    read_model_directory,
)
from hf_protocols import BackendError, ConfigError, ModelError, ModelShape, read_machine_limits
from hf_protocols.validation import show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_algorithms.config import ModelConfig
    from hf_algorithms.data import Row

__all__ = ["Head", "InitialModel", "build_initial_model", "check_vocabulary", "read_role_model", "without_progress"]

Head = Literal["lm", "value", "score"]
"""Of a role's model: tokens, a value at each token, or one number for a sequence."""

_LOADERS: Mapping[str, Callable[[str], type]] = {"rollout.backend": load_rollout_backend}
"""Of keys that do not name a training backend."""
_MADE = ("characters", "bpe")
"""Values of `model.tokenizer` that make one from the training texts."""
_LONGEST_WAIT_S = 600.0
"""For calls of in-process executors on other threads, before a fresh model is drawn."""


@dataclass(frozen=True, kw_only=True)
class InitialModel:
    """A model and its tokenizer, as a run reads them before anything starts.

    Attributes:
        path: what backends load.
        tokenizer_path: directory or hub name of the tokenizer.
        tokenizer: loaded from there.
        tokenizer_files: its files by name, for exports.
        shape: for the mapper.
        label: beginning of messages: the key of the tokenizer and its value.
        end_ids: `eos_token_id` of the generation configuration.
        num_spare_logits: logits beyond the tokenizer's ids.
        own_tokenizer_path: of a model that scores texts and has another tokenizer or chat template than the run;
            None where they are alike.
        shares_ids: the own tokenizer has the run's vocabulary: what is not a chat is read as token ids.
    """

    path: str
    tokenizer_path: str
    tokenizer: PreTrainedTokenizerBase
    tokenizer_files: Mapping[str, bytes]
    shape: ModelShape
    label: str
    end_ids: frozenset[int]
    num_spare_logits: int
    own_tokenizer_path: str | None = None
    shares_ids: bool = False


def build_initial_model(
    config: ModelConfig,
    rows: Iterable[Row],
    *,
    directory: Path,
    seed: int,
    backends: Mapping[str, str] | None = None,
    rollout_options: Mapping[str, Any] | None = None,
    on_cpu: bool = True,
    head: Head = "lm",
) -> InitialModel:
    """Checks the configured model by its files, or writes a fresh random one (and its tokenizer) to `directory`.

    Nothing is loaded but configuration, headers of the weights and the tokenizer: what they say is compared with each
    other, and with what the run's backends take.

    Args:
        config: the model's section.
        rows: from which a tokenizer may be made.
        directory: for what is made.
        seed: of fresh weights.
        backends: names by key: `rollout.backend`; others, such as `training.backend`, name training backends.
        rollout_options: of the rollout backend, which may bound the tokens of a sequence.
        on_cpu: whether ranks run on host processors.
        head: that the model is given: `"score"` also takes sequence classifiers and critics.

    Raises:
        ConfigError: for a model or tokenizer that cannot be used, naming the key and the file.
    """
    files: ModelDirectory | None = None
    if config.path is not None:
        files = _read_given(
            config.path,
            backends or {},
            rollout_options,
            label=_label("path", config.path),
            on_cpu=on_cpu,
            head=head,
        )
    tokenizer_path = _build_tokenizer(config, rows, directory)
    key, given = ("tokenizer", config.tokenizer) if config.tokenizer else ("path", config.path)
    tokenizer = load_tokenizer(tokenizer_path, label=_label(key, given), needs_end=head != "score")
    if files is None:
        _write_fresh_model(config, tokenizer, directory, seed)
        files = read_model_directory(directory, label="the fresh model")
        _check_backends(files, backends or {}, rollout_options, on_cpu=on_cpu, head=head)
    elif config.tokenizer in _MADE:
        _check_made(config, tokenizer, files)
    shape = derive_shape(files)
    if config.path is not None:
        _check_sizes(config, shape)
    check_vocabulary(tokenizer, files, label=_label(key, given))
    path = _find(str(directory) if config.path is None else config.path)
    return InitialModel(
        path=path,
        tokenizer_path=tokenizer_path,
        tokenizer=tokenizer,
        tokenizer_files=read_tokenizer_files(tokenizer_path, tokenizer),
        shape=replace(shape, name=Path(path).name),
        label=_label(key, given),
        end_ids=read_end_of_sequence_ids(files),
        num_spare_logits=count_spare_logits(tokenizer, files.vocab_size),
    )


def read_role_model(
    path: str,
    main: InitialModel,
    *,
    label: str,
    backends: Mapping[str, str],
    rollout_options: Mapping[str, Any] | None = None,
    on_cpu: bool,
    head: Head = "lm",
    template: str | None = None,
) -> InitialModel:
    """Checks a directory that one role starts from, for the tokenizer of `main`.

    Args:
        path: a directory, or a name on the hub.
        main: the model of `[model]`.
        label: beginning of messages: the key and the value that the user wrote.
        backends: names by key, as for `build_initial_model`.
        rollout_options: of the rollout backend.
        on_cpu: whether ranks run on host processors.
        head: of the role's model. One that scores may have another tokenizer, and must have a head.
        template: of the run's chats; by default that of the tokenizer of `main`.

    Raises:
        ConfigError: for a model that cannot be used, or whose embedding has too few rows for the tokenizer.
    """
    files = _read_given(path, backends, rollout_options, label=label, on_cpu=on_cpu, head=head)
    found = _find(path)
    model = replace(
        main,
        path=found,
        shape=replace(derive_shape(files), name=Path(found).name),
        end_ids=read_end_of_sequence_ids(files),
        num_spare_logits=0,
    )
    if head == "score":
        own_path, shares_ids = _find_own_tokenizer(files, main, label, template)
        return replace(model, own_tokenizer_path=own_path, shares_ids=shares_ids)
    check_vocabulary(main.tokenizer, files, label=label)
    if _has_tokenizer(files):
        own = load_tokenizer(str(files.path), label=label)
        if own.get_vocab() != main.tokenizer.get_vocab():
            raise ModelError(
                f"{label}: its tokenizer has another vocabulary than the run's. All roles read the same token ids. "
                "Give a model of the same tokenizer"
            )
    return replace(model, num_spare_logits=count_spare_logits(main.tokenizer, files.vocab_size))


def _find_own_tokenizer(
    files: ModelDirectory, main: InitialModel, label: str, template: str | None
) -> tuple[str | None, bool]:
    """The directory of a scoring model with another tokenizer or chat template; None for the same.

    Also returns whether its vocabulary is the run's. A tokenizer without a template reads the run's rendering.
    """
    if files.tensors and find_score_head(files) is None:
        raise ModelError(
            f"{label}: is a language model without a head that scores. Train one with hybridflow reward-model and "
            "give its model/"
        )
    if not _has_tokenizer(files):
        check_vocabulary(main.tokenizer, files, label=label)
        return None, True
    own = load_tokenizer(str(files.path), label=label, needs_end=False)
    check_vocabulary(own, files, label=label)
    shares_ids = own.get_vocab() == main.tokenizer.get_vocab()
    has_template = own.chat_template is not None and own.chat_template != (template or main.tokenizer.chat_template)
    return (str(files.path) if has_template or not shares_ids else None), shares_ids


def _read_given(
    path: str,
    backends: Mapping[str, str],
    options: Mapping[str, Any] | None,
    *,
    label: str,
    on_cpu: bool,
    head: Head = "lm",
) -> ModelDirectory:
    """A hub's model by what is there of it without fetching its weights; ranks check them when they load them."""
    files = read_model_directory(path, label=label, needs_weights=not is_hub_name(path))
    check_model_directory(files, head=head)
    check_end_tokens(files)
    if ModelShape.knows(files.config):
        files.require_shape()
    # Before the tokenizer, which reads config.json as well.
    _check_backends(files, backends, options, on_cpu=on_cpu, head=head)
    return files


def _check_sizes(config: ModelConfig, shape: ModelShape) -> None:
    """Refuses a size that is given in addition to a path and differs from the model's."""
    for key, value in config.sizes_given().items():
        if value != getattr(shape, key):
            raise ConfigError(
                f"model.{key} = {value}: {_label('path', config.path)} has {key} = {getattr(shape, key)}. Leave "
                f"model.{key} out: it is a size of a fresh model"
            )


def _label(key: str, value: str | None) -> str:
    return f"model.{key} = {show(value)}"


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, files: ModelDirectory, *, label: str) -> None:
    """Refuses a tokenizer with an id beyond the rows of the model's embedding, which may have more.

    Raises:
        ModelError: naming the token with the largest id.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda each: each[1])
    if files.vocab_size and largest >= files.vocab_size:
        raise ModelError(
            f"{label}: its tokenizer has the token {token!r:.40} with id {largest}, the model's embedding has "
            f"{files.vocab_size} rows. Use the model's own tokenizer, or resize the model's embedding"
        )


def _check_backends(
    files: ModelDirectory, backends: Mapping[str, str], options: Mapping[str, Any] | None, *, on_cpu: bool, head: Head
) -> None:
    for key, name in backends.items():
        try:
            backend = _LOADERS.get(key, load_train_backend)(name)
        except BackendError as error:
            raise type(error)(f"{key} = {show(name)}: {error}") from None
        if head == "score" and not issubclass(backend, SupportsScores):
            raise ConfigError(f"{key} = {show(name)}: it has no sequence classifiers. Set it to 'fsdp'")
        if issubclass(backend, SupportsModelCheck):
            try:
                backend.check_model(files, on_cpu=on_cpu, options=options if key in _LOADERS else None)
            except BackendError as error:
                raise ConfigError(f"{key} = {show(name)}: {error}") from error


def _build_tokenizer(config: ModelConfig, rows: Iterable[Row], directory: Path) -> str:
    texts = map(_join_texts, rows)
    if config.tokenizer == "characters":
        build_character_tokenizer("".join(sorted(set(chain.from_iterable(texts)))), directory)
    elif config.tokenizer == "bpe":
        train_bpe_tokenizer(texts, vocab_size=config.vocab_size, directory=directory)
    elif config.tokenizer is None and config.path is None:
        raise ConfigError("model.path and model.tokenizer are both absent. Set model.tokenizer for a fresh model")
    else:
        return _find(config.tokenizer or config.path or "")
    return str(directory)


def _check_made(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, files: ModelDirectory) -> None:
    """Refuses ids that mean other texts to a model than those that it was trained with."""
    path = _label("path", config.path)
    if _has_tokenizer(files) and load_tokenizer(str(files.path), label=path).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{_label('tokenizer', config.tokenizer)}: makes a tokenizer for a fresh model, and {path} has one of its "
            "own with another vocabulary. Leave model.tokenizer out"
        )


def _has_tokenizer(files: ModelDirectory) -> bool:
    return any((files.path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def _join_texts(row: Row) -> str:
    parts = [row.prompt] if isinstance(row.prompt, str) else [str(each.get("content", "")) for each in row.prompt]
    return "".join([*parts, row.answer or ""])


def _find(path: str) -> str:
    """Returns a directory as an absolute path, for processes that run in other folders; a hub name as it is."""
    expanded = os.path.expanduser(path)
    return os.path.abspath(expanded) if os.path.isdir(expanded) else path


def _write_fresh_model(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, directory: Path, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    if config.hidden_size % config.num_heads:
        raise ConfigError(
            f"model.hidden_size={config.hidden_size} is not a multiple of model.num_heads={config.num_heads}"
        )
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=config.max_positions,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    _check_room(config, ModelShape.from_config(llama.to_dict()))
    with (
        taking_turns(_LONGEST_WAIT_S),  # ranks in process on other threads draw from the same generator
        torch.random.fork_rng(devices=[]),
        errors_of("transformers", "the fresh model cannot be written"),
    ):
        torch.manual_seed(seed)
        with torch.device("cpu"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                llama, trust_remote_code=False, dtype=torch.float32
            )
        with without_progress():
            model.save_pretrained(directory)


def _check_room(config: ModelConfig, shape: ModelShape) -> None:
    """Refuses a model whose float32 weights this machine's memory does not hold.

    Raises:
        ConfigError: with its sizes and both numbers.
    """
    needed, room = 4 * shape.num_parameters, read_machine_limits().memory_bytes
    if needed > room:
        keys = ("hidden_size", "intermediate_size", "num_layers")
        sizes = ", ".join(f"{key} = {getattr(config, key)}" for key in keys)
        raise ConfigError(
            f"model: {sizes} make a fresh model of {shape.num_parameters / 1e9:.1f}B parameters, which are "
            f"{needed / 2**30:.0f} GiB in float32, and this machine has {room / 2**30:.0f} GiB of memory. Lower them, "
            "or set model.path"
        )


@contextmanager
def without_progress() -> Iterator[None]:
    """Keeps the progress bars of transformers off the terminal, which would stand before an error's one line."""
    from transformers.utils import logging

    bars: Any = logging
    is_shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            bars.enable_progress_bar()
