"""docs/how-to/swap-inference-backend.md, as written, in a fresh checkout: an engine is set up and trains a policy."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hf_algorithms.config import parse_config
from hf_algorithms.preflight.placement import check_rollout_options
from small_runs import SMALL_RUN, read_metrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "swap-inference-backend.md").read_text()
FOREIGN = ("PYTHON", "VIRTUAL_ENV", "CONDA", "OMP_", "HF_", "RAY_", "VLLM_", "SGLANG_", "ENGINE_", "MAKE", "PYTEST")
"""Beginnings of variables that a user's shell would not have."""


def commands(engine: str) -> list[str]:
    """The lines of the page's shell blocks that set an engine up and run it."""
    sections = "".join(re.findall(r"^## (?:Set up|Run)\n.*?(?=^## )", PAGE, re.MULTILINE | re.DOTALL))
    blocks = re.findall(r"^```sh\n(.*?)^```$", sections, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    return [line for line in lines if re.match(rf"scripts/env\.sh {engine}\b|\.venv-{engine}/", line)]


def check_out(folder: Path) -> None:
    """Copies the files that git tracks, as they are in the working tree."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listing.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def fresh_environment() -> dict[str, str]:
    """A shell without this program's environment, and without a model hub: only packages may come over a network."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    path = [each for each in os.environ["PATH"].split(os.pathsep) if Path(each) != Path(sys.executable).parent]
    interpreter = Path(sys.base_prefix) / "bin" / "python3"
    return inherited | {"PATH": os.pathsep.join(path), "PYTHON": str(interpreter), "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("block", re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
def test_a_configuration_takes_the_pages_block(block: str) -> None:
    settings, shown = tomllib.loads(SMALL_RUN), tomllib.loads(block)
    assert shown
    for table, keys in shown.items():
        settings[table] = settings.get(table, {}) | keys
    config = parse_config(settings)
    if config.rollout.options:  # a table that takes any value
        check_rollout_options(config.rollout)
    for table, keys in shown.items():
        assert {key: getattr(getattr(config, table), key) for key in keys} == keys


@pytest.mark.slow
@pytest.mark.timeout(2700)
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang")]
)
def test_an_engine_set_up_as_the_page_says_gains_twenty_points(engine: str, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    check_out(checkout)
    data = checkout / "runs" / f"quickstart-{engine}" / "data"
    (checkout / "config.toml").write_text(
        SMALL_RUN.format(output="elsewhere", data=data)
        .replace("small_runs:response_length", "hf_algorithms.rewards:exact_match")
        .replace("hidden_size = 32", "hidden_size = 64")
        .replace("num_heads = 1", "num_heads = 2")
    )
    found = commands(engine)
    assert [command.split()[0] for command in found] == ["scripts/env.sh", *[f".venv-{engine}/bin/hybridflow"] * 2]
    for command in found:
        ended = subprocess.run(
            ["bash", "-ec", command],
            cwd=checkout,
            env=fresh_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        assert ended.returncode == 0, (command, ended.stdout[-4000:], ended.stderr[-4000:])
    summary = json.loads((data.parent / "summary.json").read_text())
    assert summary["score_after"] - summary["score_before"] >= 0.2
    for run, iterations in ((data.parent, summary["iterations"]), (checkout / "runs" / engine, 2)):
        assert tomllib.loads((run / "config.toml").read_text())["rollout"]["backend"] == engine
        assert len(read_metrics(run)) == iterations
