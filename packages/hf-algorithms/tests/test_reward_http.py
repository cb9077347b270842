"""Scores from a real server on this machine."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from hf_algorithms.rewards import CallExpired, FunctionSpec, HTTPScorer, Samples, ScoringFunctions
from hf_protocols import ConfigError, RewardError


class ByPath(BaseHTTPRequestHandler):
    """Answers by the path; remembers requests."""

    seen: ClassVar[list[tuple[str, dict[str, Any], str | None]]] = []
    busy: ClassVar[int] = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ByPath.seen.append((self.path, body, self.headers["Authorization"]))
        texts = next(body[name] for name in ("responses", "query", "completions") if name in body)
        status, text = 200, json.dumps({"rewards": [len(each) for each in texts]})
        if self.path == "/busy" and ByPath.busy:
            ByPath.busy -= 1
            status = 503
        if self.path.startswith("/wrong"):
            status = 400
        if self.path == "/down":
            status = 500
        if self.path == "/moved":
            status = 307
        if self.path == "/text":
            text = "fine"
        if self.path == "/long":
            text = json.dumps(["x" * (2 << 20)])
        self.send_response(status)
        self.send_header("Location", "http://127.0.0.2:9/score")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ByPath)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_server_scores_groups_in_the_pool(url: str) -> None:
    scoring = ScoringFunctions([FunctionSpec(name="server", function=f"{url}/score")], num_processes=1)
    batch = Samples(prompts=["p"] * 3, responses=["a", "bb", "ccc"], answers=["1"] * 3, groups=[0, 0, 1])
    (scored,) = scoring.score(batch)
    scoring.close()
    assert scored.scores == [1.0, 2.0, 3.0]
    bodies = sorted((body for path, body, _ in ByPath.seen if path == "/score"), key=lambda body: body["responses"])
    assert [body["responses"] for body in bodies] == [["a", "bb"], ["ccc"]]
    assert bodies[0]["prompts"] == ["p", "p"] and bodies[0]["answers"] == ["1", "1"]


def test_a_server_of_trls_convention_gets_what_json_holds(url: str) -> None:
    scoring = ScoringFunctions([FunctionSpec(name="server", function=f"{url}/trl", style="trl")], num_processes=0)
    chat = [{"role": "user", "content": "p"}]
    scoring.score(Samples(prompts=["<p>"], responses=["a"], answers=["1"], messages=[chat]))
    scoring.close()
    (body,) = [body for path, body, _ in ByPath.seen if path == "/trl"]
    assert (body["prompts"], body["completions"]) == ([chat], [[{"role": "assistant", "content": "a"}]])
    assert not {"trainer_state", "log_extra", "log_metric"} & set(body)


def test_trouble_of_the_server_is_tried_again(url: str) -> None:
    ByPath.busy = 2
    assert HTTPScorer(f"{url}/busy")(responses=["aa"]) == {"rewards": [2]}
    assert [path for path, _, _ in ByPath.seen].count("/busy") == 3
    with pytest.raises(CallExpired):
        HTTPScorer(f"{url}/down", deadline_s=0.25)(responses=["a"])
    with pytest.raises(CallExpired):
        HTTPScorer("http://127.0.0.1:9", deadline_s=0.25)(responses=["a"])


class CountedSleep:
    """A clock that sleeps move, and nothing else."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(
    ("style", "values", "num_rows"),
    [
        ("verl", {"solution_str": "a", "response_ids": list(range(50))}, 1),
        ("verifiers", {"completion": "a", "prompt": [{"role": "user", "content": "p"}] * 3}, 1),
        ("trl", {"completions": ["a", "b", "c"], "prompts": ["p"] * 3}, 3),
        ("auto", {"responses": ["a", "b"]}, 2),
    ],
)
def test_the_deadline_counts_responses_and_not_tokens(
    monkeypatch: pytest.MonkeyPatch, style: Any, values: Any, num_rows: int
) -> None:
    clock = CountedSleep()
    monkeypatch.setattr("hf_algorithms.rewards._http.time", clock)
    with pytest.raises(CallExpired):
        HTTPScorer("http://127.0.0.1:9", deadline_s=2.0, style=style)(**values)
    assert clock.now_s == pytest.approx(2.0 * num_rows)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("wrong", "returned status 400"),
        ("moved", "returned status 307"),
        ("text", "returned 'fine', which is not JSON. Let"),
        ("long", "returned more than 10"),
    ],
)
def test_a_wrong_answer_is_an_error_at_once(url: str, path: str, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        HTTPScorer(f"{url}/{path}")(responses=["a"])


def test_a_password_is_sent_and_not_shown(url: str) -> None:
    with_password = url.replace("://", "://me:se%40cret@")
    scorer = HTTPScorer(f"{with_password}/wrong", style="openrlhf")
    with pytest.raises(RewardError) as caught:
        scorer(queries=["a"], prompts=["p"], labels=["l"])
    assert "cret" not in str(caught.value) + repr(scorer)
    _, body, authorization = ByPath.seen[-1]
    assert set(body) == {"query", "prompts", "labels"}
    assert authorization == "Basic " + base64.b64encode(b"me:se@cret").decode()


def test_variables_are_read_when_the_server_is_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_PASSWORD", "se/cr et@")
    address = url.replace("://", "://me:${SCORER_PASSWORD}@") + "/wrong?key=${SCORER_PASSWORD}"
    spec = FunctionSpec(name="server", function=address)
    scoring = ScoringFunctions([spec], num_processes=1)
    with pytest.raises(RewardError) as caught:
        scoring.score(Samples(prompts=["p"], responses=["a"], answers=["1"]))
    scoring.close()
    path, _, authorization = ByPath.seen[-1]
    assert path == "/wrong?key=se%2Fcr%20et%40"
    assert authorization == "Basic " + base64.b64encode(b"me:se/cr et@").decode()
    assert "${SCORER_PASSWORD}" in str(caught.value)
    assert address not in repr([spec, scoring.specs])
    assert "cr et" not in str(caught.value) and "%20" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("http://example.com/score", r"the host 'example.com' is not this machine, .* Add it to allowed_hosts$"),
        ("http://me:secret@10.0.0.1/score", r"'http://\*\*\*@10.0.0.1/score': the host '10.0.0.1' is not this machine"),
        (
            "http://me:sec/secret@10.0.0.1/score",
            r"'http://\*\*\*' is not the address .* in a password are written as %XX",
        ),
        ("http://127.0.0.1/a b", "it has characters to be written as %XX"),
        ("http://me:${NO_SUCH_VARIABLE}@127.0.0.1", "the environment variable NO_SUCH_VARIABLE is not set"),
        ("http:///score", "it has no host"),
        ("http://127.0.0.1:x/score", "is not the address of a server"),
    ],
)
def test_other_hosts_and_bad_addresses_are_refused(address: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        HTTPScorer(address)
    assert "secret" not in str(caught.value)
    assert HTTPScorer("https://example.com/score", allowed_hosts=("example.com",)).url
    assert HTTPScorer("http://[::1]:8000").url


def test_an_unpaired_surrogate_in_a_column_is_sent(url: str) -> None:
    scoring = ScoringFunctions([FunctionSpec(name="server", function=f"{url}/half")], num_processes=0)
    rows = [{"note": "\ud83d"}, {"note": "\u00e9"}]
    (scored,) = scoring.score(Samples(prompts=["p"] * 2, responses=["a", "bb"], answers=["1"] * 2, columns=rows))
    scoring.close()
    assert scored.scores == [1.0, 2.0]
    assert sorted(body["note"][0] for path, body, _ in ByPath.seen if path == "/half") == ["\u00e9", "\ud83d"]
