"""Rules of docs/security.md that are read off the source: what is unpickled, what is trusted, what is listened to."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "packages"
CODE = {path: ast.parse(path.read_text()) for path in sorted(PACKAGES.glob("*/src/**/*.py"))}
PAGE = ROOT / "docs" / "security.md"

# What runs code that is in the bytes that it reads. JSON, TOML, safetensors, Parquet and tokenizers do not.
UNPICKLES = re.compile(
    r"(\w*pickle|dill|joblib|marshal|_pickle)\.(loads?|Unpickler)|(pickle|cloudpickle)\.\w*Unpickler"
    r"|torch\.load|torch\.hub\.\w+|(np|numpy)\.(load|fromfile)|\w+\.read_pickle|shelve\.open|yaml\.(\w+_)?load(_all)?"
    r"|\w+\.FileSystemReader|(dcp|checkpoint)\.(async_)?load(_state_dict)?|(eval|exec|compile|__import__)"
)
OWN_PROCESSES = {
    # a host of reward processes and its children, over a pair of sockets that only they hold
    "hf-algorithms/src/hf_algorithms/rewards/_pool/client.py": 2,
    "hf-algorithms/src/hf_algorithms/rewards/_pool/host.py": 2,
    "hf-algorithms/src/hf_algorithms/rewards/_pool/process.py": 3,
    # a copy of a value in one process
    "hf-controller/src/hf_controller/executors/rank_copies.py": 1,
    # calls and answers of a controller and its actors, through Ray
    "hf-controller/src/hf_controller/executors/ray/actor.py": 1,
    "hf-controller/src/hf_controller/executors/ray/handles.py": 1,
    "hf-controller/src/hf_controller/executors/ray/wire.py": 2,
    "hf-controller/src/hf_controller/failures.py": 2,
    # an engine's process and its rank, over a pair of sockets
    "hf-engine/src/hf_engine/rollout/sglang/_process.py": 1,
    "hf-engine/src/hf_engine/rollout/sglang/_server.py": 1,
    # ranks that a test starts
    "hf-engine/src/hf_engine/testing/_local_ranks.py": 2,
}
"""Calls that unpickle, by file: each reads what another process of the same program wrote, and no file."""
PASSED_FUNCTIONS = "hf-algorithms/src/hf_algorithms/passed_inputs.py"
"""Writes a file of code that unpickles a function of the program which passed it."""
TRUSTING = re.compile(
    r"(?!(ModelShape|cls|GenerationConfig|PeftModel)\.)\w+\.(from_pretrained|from_config)"
    r"|\w+\.load_dataset|load_dataset|LLM|EngineArgs|AsyncEngineArgs"
)
"""Loads of what may bring code along. The three that are left out read JSON or safetensors alone."""
LISTENS = re.compile(
    r"\w+\.(listen|start_server|create_server)|(\w+\.)?(TCPStore|\w*(HTTP|TCP|UDP)Server)|uvicorn\.Server"
)
LISTENERS = {
    "hf-algorithms/src/hf_algorithms/report/live/_server.py": 2,  # its socket, and the server that takes it
    "hf-algorithms/src/hf_algorithms/trackers/_follow.py": 1,  # a run's listeners: no socket
    "hf-controller/src/hf_controller/groups/default_group.py": 3,  # the rendezvous, and a rank that connects to it
}


def find_calls(tree: ast.AST, pattern: re.Pattern[str]) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and pattern.fullmatch(name_of(node))]


def name_of(call: ast.Call) -> str:
    """The last two parts of what is called, such as `pickle.loads`."""
    return ".".join(ast.unparse(call.func).split(".")[-2:])


def count_calls(pattern: re.Pattern[str]) -> dict[str, int]:
    found = Counter({str(path.relative_to(PACKAGES)): len(find_calls(tree, pattern)) for path, tree in CODE.items()})
    return {path: count for path, count in found.items() if count}


def test_what_is_unpickled_comes_from_own_processes() -> None:
    subclasses = {
        str(path.relative_to(PACKAGES))
        for path, tree in CODE.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("Unpickler" in ast.unparse(base) for base in node.bases)
    }
    written = {
        str(path.relative_to(PACKAGES))
        for path, tree in CODE.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "pickle.load" in node.value
    }
    assert count_calls(UNPICKLES) == OWN_PROCESSES
    assert subclasses == {"hf-controller/src/hf_controller/executors/ray/wire.py"}
    assert written == {PASSED_FUNCTIONS}


def list_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def test_no_loader_hides_behind_another_name() -> None:
    """Calls are found by the names of modules, so nobody may rename these or take functions out of them."""
    hidden = re.compile(r"(pickle|_pickle|cloudpickle|marshal|shelve|dill|joblib|torch\.distributed\.checkpoint)\..*")
    for path, tree in CODE.items():
        assert [name for name in list_imports(tree) if hidden.fullmatch(name)] == [], path
    renamed = [
        f"{path.name}:{node.lineno}"
        for path, tree in CODE.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        and any(each.asname and each.name.split(".")[0] in ("pickle", "cloudpickle", "marshal") for each in node.names)
    ]
    assert renamed == []


def test_no_load_trusts_code_of_others() -> None:
    loads = {f"{path.name}:{call.lineno}": call for path, tree in CODE.items() for call in find_calls(tree, TRUSTING)}
    assert len(loads) >= 8, "the pattern misses loads"
    assert [place for place, call in loads.items() if not says_false(call)] == []
    aliases = [
        place
        for path, tree in CODE.items()
        for place, assigned in list_aliases(tree, path.name)
        if not all(map(says_false, find_calls(tree, re.compile(re.escape(assigned)))))
    ]
    assert aliases == []


def list_aliases(tree: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Places where a loading method is kept under a name, and that name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Attribute):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if node.value.attr in ("from_pretrained", "from_config"):
                yield f"{name}:{node.lineno}", ast.unparse(target)


def says_false(call: ast.Call) -> bool:
    return any(each.arg == "trust_remote_code" and ast.unparse(each.value) == "False" for each in call.keywords)


def test_sglang_starts_without_remote_code_and_on_loopback() -> None:
    options = ast.unparse(CODE[PACKAGES / "hf-engine/src/hf_engine/rollout/sglang/_options.py"])
    assert "'trust_remote_code': False" in options and "'host': '127.0.0.1'" in options


def test_who_listens_is_known() -> None:
    assert count_calls(LISTENS) == LISTENERS


@pytest.mark.parametrize(
    ("line", "pattern", "is_found"),
    [
        ("torch.load(file)", UNPICKLES, True),
        ("torch.distributed.checkpoint.load(state)", UNPICKLES, True),
        ("dcp.FileSystemReader(path)", UNPICKLES, True),
        ("numpy.load(file)", UNPICKLES, True),
        ("cloudpickle.loads(text)", UNPICKLES, True),
        ("json.loads(text)", UNPICKLES, False),
        ("re.compile(text)", UNPICKLES, False),
        ("transformers.AutoModel.from_pretrained(path)", TRUSTING, True),
        ("ModelShape.from_config(path)", TRUSTING, False),
        ("datasets.load_dataset(path)", TRUSTING, True),
        ("distributed.TCPStore('0.0.0.0', 0)", LISTENS, True),
        ("http.server.ThreadingHTTPServer(place, handler)", LISTENS, True),
    ],
)
def test_the_patterns_see_the_difference(line: str, pattern: re.Pattern[str], is_found: bool) -> None:
    assert bool(find_calls(ast.parse(line), pattern)) is is_found


def test_the_page_names_every_file_that_unpickles() -> None:
    text = PAGE.read_text()
    modules = {
        path.partition("/src/")[2].removesuffix(".py").replace("/", ".") for path in [*OWN_PROCESSES, PASSED_FUNCTIONS]
    }
    assert [module for module in sorted(modules) if f"`{module}`" not in text] == []
