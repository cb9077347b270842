"""Tokenizers: small ones for models that start from nothing, and those of a directory, read with one error."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_protocols.errors import ConfigError, ModelError
from hf_protocols.outer_files import check_is_itself, read_json_object
from hf_protocols.validation import shorten, show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = ["build_character_tokenizer", "load_tokenizer", "read_tokenizer_files", "train_bpe_tokenizer"]

_PAD, _EOS, _UNK = "<pad>", "<eos>", "<unk>"
_NUM_BYTES = 256
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
_READ_AS_JSON = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
_READ_AS_THEY_ARE = ("tokenizer.model", "spiece.model", "vocab.txt", "merges.txt", "chat_template.jinja")
_PROBE = "a 1"
_FILES = {*_VOCABULARIES, *_READ_AS_JSON, *_READ_AS_THEY_ARE, "chat_template.json", "sentencepiece.bpe.model"}
_FILE_PATTERNS = ("tokenizer.*.json", "additional_chat_templates/*.jinja")
"""Of older and newer forms of tokenizer.json, and of further templates by name."""


def build_character_tokenizer(characters: str, directory: str | Path) -> PreTrainedTokenizerFast:
    """Builds and saves a tokenizer with one token per character, and `<pad>`, `<eos>` and `<unk>`.

    Ids 0 to 2 are the three special tokens, then the characters in the order given. Any other character becomes
    `<unk>`. `AutoTokenizer.from_pretrained(directory)` loads the same tokenizer.

    Raises:
        ConfigError: when no character is given, or one twice.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if not characters or len(set(characters)) < len(characters):
        raise ConfigError(f"characters={show(characters)}. Give every character of the vocabulary once")
    vocabulary = {token: index for index, token in enumerate([_PAD, _EOS, _UNK, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _save(tokenizer, directory, pad_token=_PAD, eos_token=_EOS, unk_token=_UNK)


def train_bpe_tokenizer(texts: Iterable[str], *, vocab_size: int, directory: str | Path) -> PreTrainedTokenizerFast:
    """Trains and saves a byte-level BPE tokenizer of at most `vocab_size` tokens, `<pad>` and `<eos>` included.

    Every byte has a token, so that any text survives encoding and decoding; digits are never merged, so that a
    number reads the same wherever it stands. A short text yields fewer merges and so a smaller vocabulary.

    Raises:
        ConfigError: when `vocab_size` has no room for the 256 bytes and the two special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special_tokens = [_PAD, _EOS]
    smallest = _NUM_BYTES + len(special_tokens)
    if vocab_size < smallest:
        raise ConfigError(
            f"vocab_size={vocab_size} is too small: {_NUM_BYTES} bytes + {len(special_tokens)} special tokens "
            f"= {smallest} at least"
        )
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return _save(tokenizer, directory, pad_token=_PAD, eos_token=_EOS)


def load_tokenizer(path: str, *, label: str | None = None, needs_end: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or hub name.

    Args:
        path: what transformers loads.
        label: what messages begin with, such as the user's key and value; the path by default.
        needs_end: False also takes a tokenizer without an end-of-sequence token, for models that do not generate.

    Raises:
        ModelError: a ConfigError, if there is none, its files are damaged, or it has no end-of-sequence token.
    """
    from hf_engine.model_directory import errors_of, find_model

    name = label or repr(path)
    directory = find_model(path, label=name, needs_weights=False)
    _check_files(directory, name)
    from transformers import AutoTokenizer

    with errors_of("transformers", f"{name}: its tokenizer cannot be loaded", advice="Save it again"):
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
        except ValueError:
            _refuse_own_code(directory, name)
            raise
        ids = tokenizer(_PROBE)["input_ids"]
        tokenizer.decode(ids)
        end: Any = tokenizer.eos_token_id
    if type(end) is not int and needs_end:
        raise ModelError(
            f"{name}: its tokenizer has no eos_token, so responses could never end. Set eos_token in its "
            "tokenizer_config.json to a token of its vocabulary"
        )
    return tokenizer


def read_tokenizer_files(path: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """The files from which a tokenizer was loaded, by their paths in its directory.

    Args:
        path: directory or hub name, as for `load_tokenizer`.
        tokenizer: what was loaded from it; its class names further files.

    Raises:
        ModelError: a ConfigError, if one cannot be read.
    """
    from hf_engine.model_directory import find_model

    directory = find_model(path, needs_weights=False)
    found = {directory / name for name in {*_FILES, *tokenizer.vocab_files_names.values()}}
    found |= {each for pattern in _FILE_PATTERNS for each in directory.glob(pattern)}
    try:
        return {each.relative_to(directory).as_posix(): each.read_bytes() for each in sorted(found) if each.is_file()}
    except OSError as error:
        raise ModelError(f"{path!r}: a file of its tokenizer cannot be read: {error.strerror}") from None


def _check_files(directory: Path, name: str) -> None:
    """Says what is wrong with a file before a library stumbles over it."""

    def is_there(file: str) -> bool:
        return (directory / file).exists() or (directory / file).is_symlink()

    try:
        if not any(map(is_there, _VOCABULARIES)):
            raise ModelError("holds no tokenizer. Set model.tokenizer to a directory with one")
        for file in filter(is_there, _READ_AS_JSON):
            read_json_object(ModelError, directory / file, name=file)
        for file in filter(is_there, _READ_AS_THEY_ARE):
            check_is_itself(ModelError, directory / file, name=file)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    except OSError as error:
        raise ModelError(f"{name}: a file of its tokenizer cannot be read: {error.strerror}") from None


def _refuse_own_code(directory: Path, name: str) -> None:
    """Refuses a tokenizer whose class is a file of its directory or of a hub: that file is never run."""
    import transformers

    file = directory / "tokenizer_config.json"
    settings = read_json_object(ModelError, file, name=file.name) if file.is_file() else {}
    class_name = settings.get("tokenizer_class")
    if settings.get("auto_map") and isinstance(class_name, str) and not hasattr(transformers, class_name):
        raise ModelError(
            f"{name}: its tokenizer is a {shorten(class_name)}, which is code of its own (auto_map in {file.name}) and "
            "is never run. Save it with a class of transformers, as a tokenizer.json"
        )


def _save(tokenizer: Any, directory: str | Path, **special_tokens: str) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    from hf_engine.model_directory import errors_of

    build: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = build(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, padding_side="left", **special_tokens
    )
    with errors_of("transformers", f"the tokenizer cannot be written to {str(directory)!r}"):
        fast.save_pretrained(directory)
    return fast
