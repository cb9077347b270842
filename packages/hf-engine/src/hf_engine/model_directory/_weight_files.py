"""Finds the files of a directory that hold the weights, and names what a directory without weights is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from hf_engine.model_directory._headers import StoredTensor, read_header
from hf_protocols.errors import ModelError
from hf_protocols.outer_files import read_json_object
from hf_protocols.validation import shorten, show

__all__ = ["INDEX", "WHOLE", "find_weight_files", "has_weights", "read_index", "read_tensors", "refuse_other_kinds"]

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_FOREIGN = {".gguf": "GGUF", ".msgpack": "Flax", ".h5": "TensorFlow", ".onnx": "ONNX", ".npz": "NumPy"}


def has_weights(directory: Path) -> bool:
    """True if there are files for `read_tensors` to read."""
    return (directory / WHOLE).exists() or (directory / INDEX).exists() or (directory / WHOLE).is_symlink()


def find_weight_files(directory: Path) -> list[Path]:
    """The safetensors files that transformers reads: the one that has everything, else those that the index names.

    Raises:
        ModelError: if there are none, or the index cannot be read or names files that are not there.
    """
    whole = directory / WHOLE
    if whole.exists() or whole.is_symlink():
        return [whole]
    return [directory / name for name in sorted({*read_index(directory).values()})]


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor in the directory's safetensors files by name.

    Raises:
        ModelError: if there are none, one cannot be read, two hold the same tensor, or the index names a file or
            tensor that is not there.
    """
    found: dict[str, StoredTensor] = {}
    for path in find_weight_files(directory):
        for name, tensor in read_header(path).items():
            if name in found:
                raise ModelError(
                    f"{show(name)} is stored twice, in {found[name].path.name} and {path.name}. Remove one"
                )
            found[name] = tensor
    indexed = {} if (directory / WHOLE).is_file() else read_index(directory)
    if lost := sorted(name for name, file in indexed.items() if name not in found or found[name].path.name != file):
        raise ModelError(
            f"{INDEX} names {show(lost[0])} in {indexed[lost[0]]}, which lacks it or lies elsewhere ({len(lost)} "
            "such). Give a whole directory of one model"
        )
    return found


def read_index(directory: Path) -> dict[str, str]:
    """File by tensor, of a model in several files.

    Raises:
        ModelError: if there is no index, or it names files outside the directory or that are not there.
    """
    index = directory / INDEX
    if not index.exists() and not index.is_symlink():
        raise ModelError(_describe_lack(directory))
    body = read_json_object(ModelError, index, name=INDEX)
    files = body.get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(each, str) for each in files.values()):
        raise ModelError(f"{INDEX} is not an index of safetensors files: its weight_map maps no names to files")
    names = sorted({*files.values()})
    if outside := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise ModelError(f"{INDEX} names {show(outside[0])}, which is not a safetensors file next to it")
    if missing := [name for name in names if not (directory / name).exists()]:
        raise ModelError(
            f"{INDEX} names {', '.join(map(shorten, missing[:3]))} ({len(missing)} of {len(names)} files), which the "
            "directory lacks. Fetch the missing files"
        )
    if not isinstance(body.get("metadata"), dict):  # transformers writes into it
        raise ModelError(f'{INDEX} has no object "metadata", which transformers needs. Add "metadata": {{}} to it')
    return files


def refuse_other_kinds(directory: Path) -> None:
    """Refuses a directory that is something else than a model: an adapter, a training state, a run, a hub's cache.

    Raises:
        ModelError: with the directory to give instead, where there is one.
    """
    if (directory / "adapter_config.json").exists() and has_weights(directory):
        raise ModelError(
            "holds an adapter (adapter_config.json) next to a whole model's weights, and transformers would load the "
            "adapter's base instead of these. Move one of the two to a directory of its own"
        )
    if (directory / "adapter_config.json").exists():
        raise ModelError(
            "holds an adapter (adapter_config.json), such as LoRA's, not a whole model. Merge it into its base with "
            "`hybridflow export ADAPTER --merge`, or peft's merge_and_unload(), and give that directory"
        )
    if (directory / "config.json").exists() or (directory / "config.json").is_symlink():
        return
    if (directory / "state.json").exists() or (directory / ".metadata").exists():
        raise ModelError("is the state of a training backend, not a model. Give an exported model")
    if inner := sorted(path.parent for path in _below(directory, ("model", "*", "snapshots/*"))):
        raise ModelError(f"has no config.json. Did you mean {str(inner[-1])!r}?")
    raise ModelError(f"has no config.json: {_describe_contents(directory)}. Give a model in Hugging Face format")


def _below(directory: Path, patterns: Iterable[str]) -> set[Path]:
    return next((found for each in patterns if (found := {*directory.glob(f"{each}/config.json")})), set())


def _describe_contents(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    if not names:
        return "it is empty"
    return f"it holds {', '.join(names[:3])}" + (f" and {len(names) - 3} more files" if len(names) > 3 else "")


def _describe_lack(directory: Path) -> str:
    """Returns why a directory has no usable weights."""
    suffixes: Mapping[str, str] = {path.suffix: path.name for path in sorted(directory.iterdir(), reverse=True)}
    lack = f"holds no safetensors files, neither {WHOLE} nor {INDEX}"
    if ".safetensors" in suffixes:
        return f"{lack}, but {suffixes['.safetensors']}. Save the model again with save_pretrained(), or add the index"
    if pickled := next((suffixes[each] for each in _PICKLED if each in suffixes), None):
        return (
            f"{lack}, but {pickled}, whose reading may run any code. Load the model "
            "with transformers and save it with save_pretrained()"
        )
    if foreign := next((each for each in _FOREIGN if each in suffixes), None):
        return f"{lack}, but {suffixes[foreign]}, the format of {_FOREIGN[foreign]}. Give the model's safetensors files"
    return f"{lack}. Give a model in Hugging Face format"
