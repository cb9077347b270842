"""Contents of the repository: no machine's traces, one version, licences, links that lead somewhere."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hf-protocols", "hf-engine", "hf-mapper", "hf-controller", "hf-algorithms")
READMES = [ROOT / "README.md", *(ROOT / "packages" / package / "README.md" for package in PACKAGES)]

# In pieces, so that this file does not find itself.
MACHINE_PATHS = re.compile(r"(?<![\w.~-])/(?:" + "|".join(("work", "opt", "root", "home", "Users")) + r")/\w")
REGISTRY_HOSTS = re.compile(
    "|".join(("pypi" + r"\.org", "python" + "hosted", "download" + r"\.pytorch", "index" + r"-url\s*="))
)


def _tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def _project(package: str) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    return project


@pytest.mark.parametrize("pattern", [MACHINE_PATHS, REGISTRY_HOSTS], ids=["paths", "hosts"])
def test_nothing_names_a_machine_or_a_registry(pattern: re.Pattern[str]) -> None:
    found = []
    for path in _tracked():
        content = path.read_bytes()
        if b"\0" not in content:
            lines = content.decode().splitlines()
            found += [
                f"{path.relative_to(ROOT)}:{number}" for number, line in enumerate(lines, 1) if pattern.search(line)
            ]
    assert found == []


def test_no_lock_file_and_no_runs_are_committed() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in _tracked()}
    assert names.isdisjoint({"uv.lock", "runs", "site", ".venv"})


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_a_readme_begins_with_the_name_of_the_project(path: Path) -> None:
    assert "HybridFlow" in "\n".join(path.read_text().splitlines()[:3])


def test_the_home_page_alone_says_what_hf_stands_for() -> None:
    pages = [*READMES, *sorted((ROOT / "docs").rglob("*.md"))]
    found = [path.relative_to(ROOT) for path in pages if "HybridFlow, not Hugging Face" in path.read_text()]
    assert found == [Path("docs/index.md")]


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_a_readme_names_the_siblings_that_plain_pip_needs(path: Path) -> None:
    assert "not on the registry yet" in path.read_text()
    for line in re.findall(r"^pip install .*", path.read_text(), re.MULTILINE):
        named = set(re.findall(r"\./packages/(hf-\w+)", line))
        needed = {sibling for package in named for sibling in PACKAGES if sibling in _dependency_names(package)}
        assert needed <= named, line
        assert "[" not in re.sub(r'"[^"]*"', "", line), f"an extra must be quoted: {line}"


def _dependency_names(package: str) -> set[str]:
    project = _project(package)
    optional = project.get("optional-dependencies", {}).values()
    requirements = [*project["dependencies"], *(requirement for extra in optional for requirement in extra)]
    return {re.match(r"[\w.-]+", requirement).group() for requirement in requirements}  # type: ignore[union-attr]


def test_the_packages_share_one_version() -> None:
    versions = {package: _project(package)["version"] for package in PACKAGES}
    integration = tomllib.loads((ROOT / "integration-tests" / "pyproject.toml").read_text())["project"]["version"]
    assert set(versions.values()) == {integration}
    for package in PACKAGES:
        for requirement in _project(package)["dependencies"]:
            if requirement.startswith("hf-"):
                assert requirement.endswith(f"=={integration}"), f"{package} needs {requirement}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_typed_and_licensed(package: str) -> None:
    folder = ROOT / "packages" / package
    assert (folder / "src" / package.replace("-", "_") / "py.typed").is_file()
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_constraints_pin_every_dependency_by_name_only() -> None:
    lines = [line for path in ROOT.glob("constraints*.txt") for line in path.read_text().splitlines()]
    # An engine's build for CUDA brings pins of its own.
    pins = {re.split("[=; ]", line)[0] for line in lines} | {"vllm"}
    declared = {name for package in PACKAGES for name in _dependency_names(package)} - set(PACKAGES)
    assert declared <= pins
    assert [line for line in lines if "+" in line or "@" in line or "/" in line or "==" not in line] == []


def test_examples_parse() -> None:
    for path in sorted((ROOT / "examples").rglob("*.toml")):
        assert tomllib.loads(path.read_text()), path


@pytest.mark.parametrize("path", [*READMES, ROOT / "CONTRIBUTING.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text())]
    local = [target for target in targets if target and "://" not in target]
    assert [target for target in local if not (path.parent / target).exists()] == []


def test_every_target_has_a_line_of_help() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = " ".join(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE))
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # The parts of `make test` are not lines of their own: CONTRIBUTING.md says how to test one.
    assert re.sub(r"\$\(.*?\) ", "", phony).split() == re.findall(r"^  make ([a-z0-9-]+) +\S", shown, re.MULTILINE)
