"""A run with secrets, in the environment and in the address of its reward: no file and no message of it has them."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from small_runs import Outcome, read_metrics

PASSWORD = "pass/word-of-the-scorer"
LITERAL = "pass%2Fword-of-the-scorer"
PLANTED = "planted-in-the-environment"
VARIABLES = {
    "AWS_SECRET_ACCESS_KEY": PLANTED,
    "HF_TOKEN": f"hf_{PLANTED}",
    "MLFLOW_TRACKING_URI": f"http://me:{PLANTED}@127.0.0.1:9",
    "MY_SECRET": PLANTED,
    "RAY_RUNTIME_ENV_SECRET": PLANTED,
    "WANDB_API_KEY": PLANTED,
}


class LetterHandler(BaseHTTPRequestHandler):
    """Scores letters for clients that know the password."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_known = self.headers["Authorization"] == "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()
        self.send_response(200 if is_known else 401)
        self.end_headers()
        self.wfile.write(json.dumps([len(each) for each in body["responses"]]).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), LetterHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}/score"
    server.shutdown()


def test_secrets_are_in_no_file_and_no_message(
    small_config: Path, hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    few = ("--set", "run.iterations=1", "--set", "warm_start.max_steps=0", "--set", "run.checkpoint_every=1")
    literal = f"reward.function=http://me:{LITERAL}@{address}"
    for command in ("train", "plan", "config"):
        refused = hybridflow(command, small_config, "--set", literal)
        assert refused.exit_code == 2 and "http://***@127.0.0.1" in refused.errors
        assert "of-the-scorer" not in refused.output + refused.errors
    assert not (small_config.parent / "run").exists()

    named = f"http://me:${{SCORER_PASSWORD}}@{address}"
    monkeypatch.setenv("SCORER_PASSWORD", PASSWORD)
    done = hybridflow("train", small_config, *few, "--set", f"reward.function={named}")
    assert done.exit_code == 0, done.errors
    run = small_config.parent / "run"
    assert read_metrics(run)[0]["reward/mean"] == read_metrics(run)[0]["reward/score/mean"] > 0
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"COMMIT", "config.toml", "report.html", "summary.json", "trace.json"} <= {path.name for path in files}
    written = b"".join(path.read_bytes() for path in files)
    assert named.encode() in written
    for text in (written.decode(errors="replace"), done.output, done.errors):
        assert "of-the-scorer" not in text and PLANTED not in text

    monkeypatch.delenv("SCORER_PASSWORD")
    again = hybridflow("train", run / "config.toml", "--overwrite")
    assert again.exit_code == 2
    assert f"reward.function = '{named}': the environment variable SCORER_PASSWORD is not set. Set it" in again.errors
