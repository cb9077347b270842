"""Stand-ins on a CPU are written for one version of a library each. Another fails here until they are read again."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_engine.cpu_support
from hf_engine.backends.versions import MEGATRON, SGLANG, VLLM, Supported
from hf_engine.cpu_support.megatron import _REPLACED, REPLACEMENTS
from hf_engine.cpu_support.sglang_plugins import PLATFORM

STAND_INS = {
    "megatron": (MEGATRON, "0.16.1"),
    "sglang_platform": (SGLANG, "0.5.23"),
    "sglang_plugins": (SGLANG, "0.5.23"),
    "torchvision": (SGLANG, "0.5.23"),  # for what this version imports of torchvision
    "vllm_worker": (VLLM, "0.32.0"),
}


def check_stand_ins(library: Supported) -> None:
    installed = library.check().partition("+")[0]
    for name, (supported, version) in STAND_INS.items():
        assert supported is not library or installed == version, (
            f"hf_engine.cpu_support.{name} was written for {library.library} {version}, and {installed} is installed: "
            "read it again next to the new sources, then change the version here"
        )


def test_every_stand_in_has_a_version():
    assert {module.name for module in pkgutil.iter_modules(hf_engine.cpu_support.__path__)} == {*STAND_INS}


@pytest.mark.parametrize("name", STAND_INS)
def test_pins_are_the_versions_of_stand_ins(name):
    library, version = STAND_INS[name]
    root = Path(__file__).parents[3]
    pinned = {
        found[1]
        for path in root.glob("constraints*.txt")
        for found in re.finditer(rf"^(?:{'|'.join(library.distributions)})==(\S+)$", path.read_text(), re.MULTILINE)
    }
    assert pinned == {version}


def test_stand_ins_are_for_the_installed_megatron():
    check_stand_ins(MEGATRON)


def test_every_pattern_replaces_something_in_megatron():
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    sources = [path.read_text() for path in folder.rglob("*.py")]
    assert [pattern.pattern for pattern, _ in _REPLACED if not any(map(pattern.search, sources))] == []


def find_replaced_functions():
    for module, functions in REPLACEMENTS.items():
        for function in functions:
            assert callable(pkgutil.resolve_name(f"{module}:{function}")), f"{module} has no {function}"


def test_every_replaced_function_is_in_megatron(ranks1):
    ranks1.run(find_replaced_functions)


@pytest.mark.sglang
def test_stand_ins_are_for_the_installed_sglang():
    check_stand_ins(SGLANG)


@pytest.mark.vllm
def test_stand_ins_are_for_the_installed_vllm():
    check_stand_ins(VLLM)


HOOKS = """
import json, pkgutil
from hf_engine.cpu_support import sglang_plugins
path = sglang_plugins.activate_platform()
from sglang.srt.plugins.hook_registry import HookRegistry
targets = []
HookRegistry.register = lambda target, *_: targets.append(target)
sglang_plugins.register_for_engines()
sglang_plugins.register_for_servers()
found = [callable(pkgutil.resolve_name(each)) for each in (path, *targets)]
print(json.dumps([len(targets), found]))
"""


@pytest.mark.sglang
def test_every_hooked_function_is_in_sglang():
    environment = os.environ | {"SGLANG_PLATFORM": PLATFORM}
    done = subprocess.run([sys.executable, "-c", HOOKS], env=environment, capture_output=True, text=True, check=True)
    count, found = json.loads(done.stdout.splitlines()[-1])
    assert count == 6 and all(found)
