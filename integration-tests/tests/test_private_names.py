"""Every private name of a library that the packages read, as an attribute or by getattr, is known here, and is in the
installed release.

A name of an engine, of megatron-core, Ray or c10d is looked for where its list is; those of torch, transformers and
peft here.
"""

from __future__ import annotations

import ast
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
LISTS = [
    runpy.run_path(str(PACKAGES / "hf-engine" / "src" / "hf_engine" / folder / "_core.py"))
    for folder in ("rollout/sglang", "rollout/vllm", "training/megatron")
]
"""Of the engines, none of which is imported here."""
OF_NAMED_TUPLES = {"_make", "_replace"}
OF_PYTHON = {"_current_frames", "_exit", "_getframe"}
"""Documented names of `sys` and `os`."""
ELSEWHERE = {
    "test_default_group": {"_new_process_group_helper", "_set_group_name", "_world"},
    "test_process_groups": {"_get_backend", "_get_default_group", "_timeout", "_world"},
    "test_ray_internals": {"_actor_id"},
    "test_engine_names": {"_disable_adapters"}
    | {name for each in LISTS for kind in ("PRIVATE", "OF_INSTANCES") for _, name in each.get(kind, ())},
}
"""Names that another test looks for, by its module."""


def build_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )


LOOKED_UP: dict[str, Callable[[], Any]] = {
    "_C": lambda: torch._C,
    "_GLOBAL_DEVICE_CONTEXT": lambda: torch._GLOBAL_DEVICE_CONTEXT,
    "_attn_implementation": lambda: build_model().config._attn_implementation,
    "_buffers": lambda: torch.nn.Module()._buffers,
    "_cdata": lambda: torch.empty(1).untyped_storage()._cdata,
    "_foreach_mul_": lambda: torch._foreach_mul_,
    "_foreach_norm": lambda: torch._foreach_norm,
    "_is_stateful": lambda: build_model()._is_stateful,
    "_keys_to_ignore_on_load_unexpected": lambda: hasattr(build_model(), "_keys_to_ignore_on_load_unexpected") or None,
    "_len_torch_function_stack": lambda: torch._C._len_torch_function_stack,
    "_make_wrapper_subclass": lambda: torch.Tensor._make_wrapper_subclass,
    "_no_split_modules": lambda: build_model()._no_split_modules,
    "_non_persistent_buffers_set": lambda: torch.nn.Module()._non_persistent_buffers_set,
    "_parameters": lambda: torch.nn.Module()._parameters,
    "_pop_mode": lambda: torch.overrides._pop_mode,
    "_push_mode": lambda: torch.overrides._push_mode,
    "_ragged_idx": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)._ragged_idx,
    "_version": lambda: torch.empty(1).add_(1)._version,
}


@pytest.mark.parametrize("name", sorted(LOOKED_UP))
def test_a_private_name_is_in_the_library(name: str) -> None:
    assert LOOKED_UP[name]() is not None


def test_every_private_name_is_known() -> None:
    known = OF_NAMED_TUPLES | OF_PYTHON | set(LOOKED_UP) | set().union(*ELSEWHERE.values())
    used = {
        name: path.name for path in sorted(PACKAGES.glob("*/src/**/*.py")) for name in find_foreign(path.read_text())
    }
    ours = {name for path in PACKAGES.glob("*/src/**/*.py") for name in list_own(ast.parse(path.read_text()))}
    assert {name: place for name, place in used.items() if name not in known | ours} == {}
    assert sorted((set(LOOKED_UP) | OF_NAMED_TUPLES | OF_PYTHON) - used.keys()) == [], "not used any more"


def test_the_search_sees_the_difference() -> None:
    source = "class A:\n    def _own(self): return self._own()\n\nx = A()._own() + torch._add(getattr(y, '_ragged', 1))"
    assert sorted(find_foreign(source)) == ["_add", "_ragged"]


def test_private_modules_are_used_in_their_room() -> None:
    files = sorted(PACKAGES.glob("*/src/**/*.py"))
    found = [f"{path.name}: {name}" for path in files for name in find_private(path.read_text(), path)]
    known = ["vllm_worker.py: hf_engine.rollout.vllm._groups"]  # by the contract of hf_engine's rooms
    assert found == known
    inside = PACKAGES / "a" / "src" / "a" / "b" / "c.py"
    assert list(find_private("from a.b._c import d\nfrom a.e._f.g import h\nimport a._h", inside)) == ["a.e._f.g"]


def find_private(source: str, path: Path) -> Iterator[str]:
    """Private modules of our packages that a file imports from outside the folder that has them."""
    place = path.relative_to(PACKAGES).parts[2:-1]
    for node in ast.walk(ast.parse(source)):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [each.name for each in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            parts = module.split(".")
            first = next((number for number, part in enumerate(parts) if part.startswith("_")), None)
            if first and parts[0] == place[0] and tuple(parts[:first]) != place[:first]:
                yield module


def find_foreign(source: str) -> Iterator[str]:
    """Names with one leading underscore that are read of something else than the module's own objects."""
    tree = ast.parse(source)
    own = list_own(tree)
    for node in ast.walk(tree):
        found = _read(node)
        if found and found.startswith("_") and not found.startswith("__") and found not in own:
            yield found


def list_own(tree: ast.Module) -> set[str]:
    """Names that a module defines, on its top, in its classes, or on `self`."""
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and _is_self(node.value):
            own.add(node.attr)
    return own


def _read(node: ast.AST) -> str:
    """Returns the name that is read of something else than `self`; empty for other nodes."""
    if isinstance(node, ast.Attribute):
        return "" if _is_self(node.value) else node.attr
    is_getattr = isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1
    name = node.args[1] if is_getattr else None
    return str(name.value) if isinstance(name, ast.Constant) else ""


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in {"cls", "self"}
