"""Names, attributes, hooks and arguments that a backend uses of its engine's library are in the installed version."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hf_engine
from hf_engine.backends.library_names import import_name
from hf_engine.cpu_support.sglang_plugins import PLATFORM

SOURCES = Path(hf_engine.__file__).parent
ROOMS = {"megatron": "training/megatron", "sglang": "rollout/sglang", "vllm": "rollout/vllm"}


def test_a_name_is_an_object_or_a_module():
    homes = {"Path": "pathlib", "abc": "collections", "absent": "collections"}
    assert import_name(homes, "Path", "here") is Path
    assert import_name(homes, "abc", "here").__name__ == "collections.abc"
    with pytest.raises(AttributeError, match="module 'here' has no attribute 'other'"):
        import_name(homes, "other", "here")
    with pytest.raises(ImportError, match="absent"):
        import_name(homes, "absent", "here")


@pytest.mark.parametrize("library", ROOMS)
def test_every_name_is_used_somewhere_in_the_room(library):
    folder = SOURCES / ROOMS[library]
    tree = ast.parse((folder / "_core.py").read_text())
    (homes,) = (
        ast.literal_eval(each.value)
        for each in tree.body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "HOMES"
    )
    sources = "\n".join(path.read_text() for path in folder.glob("*.py") if path.name != "_core.py")
    assert homes and [name for name in homes if name not in sources] == []


def refused(calls):
    """Yields why a call of a function, its arguments and its options does not fit the function's signature."""
    for function, arguments, options in calls:
        try:
            inspect.signature(function).bind(*arguments, **options)
        except TypeError as error:
            yield f"{function}: {error}"


def count_megatron_names():
    from hf_engine.training.megatron import _core

    found = [name for name in _core.HOMES if getattr(_core, name) is not None]
    private = [name for owner, name in _core.PRIVATE if hasattr(getattr(_core, owner), name)]
    return len(found) + len(private), len(_core.HOMES) + len(_core.PRIVATE)


def test_every_name_is_in_megatron(ranks1):
    ((found, listed),) = ranks1.run(count_megatron_names)
    assert found == listed > 0


def test_the_switch_of_adapters_is_in_peft():
    """`adapters_off` sets it on every layer; where peft reads another name, that would change nothing."""
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    assert BaseTunerLayer._disable_adapters is False and issubclass(Linear, BaseTunerLayer)
    assert "self._disable_adapters" in inspect.getsource(BaseTunerLayer.disable_adapters.fget)
    assert "self.disable_adapters" in inspect.getsource(Linear.forward)


@pytest.mark.vllm
def test_every_name_is_in_vllm():
    from hf_engine.rollout.vllm import _core

    for name in _core.HOMES:
        assert getattr(_core, name) is not None
    # Annotated without a value where vLLM has made no group of that kind yet.
    missing = [
        f"{owner}.{name}"
        for owner, name in (*_core.REPLACED, *_core.PRIVATE)
        if not hasattr(getattr(_core, owner), name) and name not in getattr(_core, owner).__annotations__
    ]
    missing += [
        f"{module}: {name}"
        for module, name in _core.OF_INSTANCES
        if f"self.{name} = " not in inspect.getsource(importlib.import_module(module))
    ]
    assert missing == []


@pytest.mark.vllm
def test_vllm_takes_the_arguments_that_it_is_given():
    from hf_engine.rollout.vllm import _core

    groups = _core.parallel_state
    calls = [
        (groups.init_distributed_environment, (2, 0, "env://", 0, "gloo"), {}),
        (
            groups.init_model_parallel_group,
            ([[0, 1]], 0, "gloo"),
            {"use_message_queue_broadcaster": False, "group_name": "tp"},
        ),
        (groups.set_custom_all_reduce, (True,), {}),
        (groups.destroy_model_parallel, (), {}),
        (_core.process_dict_updates, ({}, None, max), {}),
        (_core.default_weight_loader, (None, None), {}),
        (_core.initialize_layerwise_reload, (None,), {}),
        (_core.finalize_layerwise_reload, (None, None), {}),
        (_core.get_layerwise_info, (None,), {}),
        (_core.is_deferred_attention_layer, (None,), {}),
        (_core.replace_submodule, (None, "name", None), {}),
        (_core.PEFTHelper, (), {"r": 8, "lora_alpha": 16, "target_modules": []}),
        (_core.LoRARequest, (), {"lora_name": "a", "lora_int_id": 1, "lora_path": "b"}),
        (
            _core.LoRAModel.from_lora_tensors,
            (1, {}, None),
            {"device": "cpu", "dtype": None, "weights_mapper": None},
        ),
        (_core.WeightTransferEngineFactory.register_engine, ("name", type), {}),
        (_core._ModelInfo.from_model_cls, (None,), {}),
    ]
    assert list(refused(calls)) == []


def look_into_sglang() -> None:
    """Fails where SGLang lacks something. In a program of its own: what a CPU needs for it comes first."""
    from hf_engine.cpu_support import sglang_plugins

    sglang_plugins.activate_platform()
    from hf_engine.rollout.sglang import _core

    for name in _core.HOMES:
        assert getattr(_core, name) is not None
    for owner, name in _core.PRIVATE:
        assert hasattr(getattr(_core, owner), name), f"{owner}.{name}"
    for path in _core.HOOKED:
        assert callable(pkgutil.resolve_name(path)), path
    sampled = inspect.signature(_core.Sampler.forward).parameters
    positional = ["logits_output", "sampling_info", "return_logprob", "top_logprobs_nums", "token_ids_logprobs"]
    assert list(sampled)[1:7] == [*positional, "positions"]
    calls = [
        (_core.register_sampler_backend, ("pytorch", type), {}),
        (_core.HookRegistry.register, ("path", max, _core.HookType.REPLACE), {}),
        (_core.replace_submodule, (None, "name", None), {}),
        (_core.MultiprocessingSerializer.serialize, ([],), {}),
        (
            _core.UpdateWeightsFromTensorReqInput,
            (),
            {"serialized_named_tensors": [], "load_format": "path", "flush_cache": False},
        ),
    ]
    assert list(refused(calls)) == []
    print(f"{len(_core.HOMES)} names")


@pytest.mark.sglang
def test_names_and_arguments_are_those_of_sglang():
    environment = os.environ | {"SGLANG_PLATFORM": PLATFORM}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "10 names"


if __name__ == "__main__":
    look_into_sglang()
