"""docs/how-to/cluster.md: its commands start two nodes in two networks, which a run and counted bytes go through."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from small_runs import read_metrics

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "how-to" / "cluster.md"
NAMESPACES = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
BIN = Path(sys.executable).parent


def namespaces() -> list[str]:
    """The command that enters new namespaces, or a skipped test where this machine does not allow them."""
    if sys.platform != "linux" or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("needs Linux with unshare, nsenter and ip")
    for command in (NAMESPACES, [*NAMESPACES, "--user", "--map-root-user"]):
        trial = [*command, "ip", "tuntap", "add", "a", "mode", "tap"]
        if subprocess.run(trial, capture_output=True, timeout=30, check=False).returncode == 0:
            return command
    pytest.skip("this machine does not let us make network namespaces")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_networks(small_config: Path) -> None:
    overrides = ["run.executor=ray", "cluster.machines=2", "cluster.address=10.0.0.1:6379", "cluster.call_timeout_s=60"]
    run = small_config.parent / "run"
    models = ["actor", "critic", "reference"]
    plan = {
        "schema_version": 1,
        "pools": [
            {"name": "models", "machines": [{"gpu_kind": "cpu", "slots": 1}] * 2},
            *({"name": name, "machines": [{"gpu_kind": "cpu", "slots": 1}]} for name in ("reward", "advantage")),
        ],
        "models": {role: {"pool": "models", "backend": "fsdp", "train": {"dp_size": 2}} for role in models}
        | {role: {"pool": role, "backend": "function"} for role in ("reward", "advantage")},
    }
    plan["models"]["actor"]["generation"] = {}
    small_config.with_name("plan.json").write_text(json.dumps(plan))
    command = [*namespaces(), sys.executable, str(HERE / "two_networks.py"), "train", str(small_config)]
    command += ["--plan", str(small_config.with_name("plan.json"))]
    command += [word for override in overrides for word in ("--set", override)]
    token = small_config.with_name("token")
    token.write_text(secrets.token_hex(32))
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    environment |= {"PYTHONPATH": str(HERE.parent), "PATH": f"{BIN}:{os.environ['PATH']}"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [row["iteration"] for row in read_metrics(run)] == [1, 2]
    assert {"controller to ranks", "ranks to rank"} <= {
        re.sub(r"[ \d]+$", "", each) for each in ended.stdout.splitlines()
    }


@pytest.mark.parametrize("command", ["ray start", "ray job submit", "hybridflow train", "hybridflow plan"])
def test_the_options_on_the_page_exist(command: str) -> None:
    program, *words = command.split()
    help_text = subprocess.run(
        [BIN / program, *words, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    joined = PAGE.read_text().replace("\\\n", " ")
    options = {
        option
        for line in re.findall(rf"{command} ([^`\n)]*)", joined)
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", line.partition(" -- ")[0])
    }
    assert options
    assert {option for option in options if not re.search(rf"{option}\b", help_text.stdout)} == set()
