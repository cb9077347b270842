"""The rules of scripts/check_wheels.py, each with a package that keeps it and one that breaks it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROVIDERS = {"numpy": ["numpy"], "yaml": ["pyyaml"]}


@pytest.fixture
def check_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_wheels", ROOT / "scripts" / "check_wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def _write(tmp_path: Path, source: str) -> None:
    folder = tmp_path / "packages" / "hf-sample" / "src" / "hf_sample"
    folder.mkdir(parents=True)
    (folder / "module.py").write_text(source)


@pytest.mark.parametrize(
    ("source", "declared", "problems"),
    [
        ("import json\nfrom hf_sample import other\nimport numpy.linalg", ["numpy"], []),
        ("def load():\n    import yaml", ["pyyaml"], []),
        ("if TYPE_CHECKING:\n    import yaml", [], []),
        (
            "def load():\n    import yaml",
            [],
            ["module.py:2 imports yaml, which no dependency that it declares provides"],
        ),
        ("import absent", [], ["module.py:1 imports absent, which no dependency that it declares provides"]),
        ("", ["numpy"], ["it declares numpy and never imports it"]),
    ],
)
def test_dependencies_are_honest(
    check_wheels: ModuleType, tmp_path: Path, source: str, declared: list[str], problems: list[str]
) -> None:
    _write(tmp_path, source)
    found = check_wheels.dishonest_dependencies("hf-sample", {"providers": PROVIDERS, "declared": declared})
    assert [problem.rpartition("/")[2] for problem in found] == problems


@pytest.mark.parametrize(
    ("package", "loaded", "installed", "problems"),
    [
        ("hf-protocols", [], ["hf-protocols"], []),
        ("hf-protocols", ["numpy"], ["hf-protocols"], ["importing it loads numpy, not of the standard library"]),
        ("hf-protocols", [], ["hf-protocols", "numpy"], ["installing it brings numpy"]),
        ("hf-mapper", ["click", "numpy"], ["numpy"], []),
        ("hf-mapper", ["ray", "torch"], ["numpy"], ["importing it loads ray", "importing it loads torch"]),
        ("hf-engine", ["torch"], ["torch"], []),
        ("hf-engine", ["transformers"], ["torch"], ["importing it loads transformers"]),
    ],
)
def test_promises_on_import(
    check_wheels: ModuleType, package: str, loaded: list[str], installed: list[str], problems: list[str]
) -> None:
    facts = {"missing": [], "loaded": loaded, "installed": installed}
    assert check_wheels.broken_promises(package, facts) == problems


def test_a_name_that_does_not_exist(check_wheels: ModuleType) -> None:
    facts = {"missing": ["absent"], "loaded": [], "installed": []}
    assert check_wheels.broken_promises("hf-mapper", facts) == ["`__all__` names absent, which does not exist"]
