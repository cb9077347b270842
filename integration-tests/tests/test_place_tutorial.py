"""The tutorial "Place 13B PPO on your cluster": its blocks run in order, in an environment without torch.

Run this file as a program to write into the page what its blocks print now.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorials" / "place-13b-ppo.md"
PACKAGES = ("hf-protocols", "hf-mapper")
BLOCK = re.compile(
    r"^```(sh|python|toml)\n(.*?)^```$(?:\n\nwhich prints\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)
INSTALL = "pip install ./packages/hf-protocols ./packages/hf-mapper\n"
SEVEN_MINUTES = 420


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the two packages' wheels and what they declare."""
    return _build_environment(tmp_path_factory.mktemp("place"))


def _build_environment(folder: Path) -> Path:
    uv, constraints = str(Path(sys.executable).with_name("uv")), str(ROOT / "constraints.txt")
    environment = folder / "environment"
    for package in PACKAGES:
        source = str(ROOT / "packages" / package)
        _run(
            [uv, "build", "-q", "--wheel", "--build-constraints", constraints, "--out-dir", str(folder), source], folder
        )
    _run([uv, "venv", "-q", "--python", sys.executable, str(environment)], folder)
    python = str(environment / "bin" / "python")
    wheels = [str(wheel) for wheel in sorted(folder.glob("*.whl"))]
    assert len(wheels) == len(PACKAGES)
    _run([uv, "pip", "install", "-q", "--python", python, "-c", constraints, *wheels], folder)
    return environment


def _run(command: list[str], folder: Path, environment: Path | None = None) -> str:
    """Returns the output of a command outside the workspace's environment, with pip's settings where uv reads them."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if environment is not None:
        variables["PATH"] = f"{environment / 'bin'}:{variables['PATH']}"
    finished = subprocess.run(
        ["bash", "-c", 'source "$0" && exec "$@"', str(ROOT / "scripts" / "registry.sh"), *command],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, f"{command}: {finished.stdout}"
    return finished.stdout


def _run_blocks(page: str, environment: Path, folder: Path) -> Iterator[tuple[str, str | None, str]]:
    """Each block in order: its code, what the page shows that it prints, and what it prints."""
    for language, code, shown in BLOCK.findall(page):
        if language == "toml":
            (folder / "place.toml").write_text(code)
            continue
        if code == INSTALL:
            continue
        command = ["bash", "-euc", code] if language == "sh" else [str(environment / "bin" / "python"), "-c", code]
        yield code, shown or None, _run(command, folder, environment)


@pytest.mark.slow
@pytest.mark.timeout(SEVEN_MINUTES)
def test_the_tutorials_blocks_run_without_torch(environment: Path, tmp_path: Path) -> None:
    page = PAGE.read_text()
    assert INSTALL in page
    shown = [(code, expected, printed) for code, expected, printed in _run_blocks(page, environment, tmp_path)]
    assert len(shown) == 7
    for code, expected, printed in shown:
        assert printed or ">" in code or "--html" in code
        if expected is not None:
            assert printed == expected, f"run {Path(__file__).name} as a program to write what the blocks print now"
    assert sum(expected is not None for _, expected, _ in shown) == 4
    assert (tmp_path / "place.html").read_text().startswith("<!doctype html>")
    assert _run(["python", "-c", "import importlib.util as u; print(u.find_spec('torch'))"], tmp_path, environment) == (
        "None\n"
    )


def main() -> None:
    """Write what each block prints now below it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = PAGE.read_text()
        printed = {code: text for code, _, text in _run_blocks(page, _build_environment(folder), folder)}

    def fill(block: re.Match[str]) -> str:
        head, _, _ = block.group(0).partition("\n\nwhich prints\n\n")
        return (
            block.group(0)
            if head == block.group(0)
            else f"{head}\n\nwhich prints\n\n```text\n{printed[block.group(2)]}```"
        )

    PAGE.write_text(BLOCK.sub(fill, page))


if __name__ == "__main__":
    main()
