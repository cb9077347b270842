"""Errors on a rank when a server is not the expected one, without an engine: real sockets, other servers."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from hf_engine import load_rollout_backend
from hf_engine.rollout.server._connection import ServerConnection
from hf_engine.rollout.server._setup import choose_directory, read_key
from hf_engine.testing import write_tiny_model
from hf_protocols import BackendError, GenerationSpec, ParallelSpec, Topology

ONE = Topology(ParallelSpec(), GenerationSpec())

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


@contextlib.contextmanager
def listening(answer: Answer) -> Iterator[str]:
    """A web server that does this with every request."""

    class EngineHandler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answer(self)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), EngineHandler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def reply(handler, body, status=200):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def connect(url, **options):
    return ServerConnection(url, **{"connect_timeout_s": 5, "timeout_s": 5, **options})


def free_url():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:30000", "ftp://host:1", "http://", "http://host:port", "http://[::1", "http://a b", ""]
)
def test_what_is_not_a_url_is_refused(url):
    with pytest.raises(
        BackendError, match=r"rollout.options.urls: '.*' is not a URL. Set it to one such as 'http://127.0.0.1"
    ):
        connect(url)


def test_a_key_is_something_that_a_request_can_carry(monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "ab\ncd")
    with pytest.raises(
        BackendError, match="the key in the environment variable 'SERVER_KEY' has characters"
    ) as refused:
        read_key("SERVER_KEY")
    assert "ab" not in str(refused.value).replace("variable", "")
    with pytest.raises(BackendError, match=r"api_key_variable=5. Use the name of an environment variable"):
        read_key(5)


def test_a_name_that_is_none_answers_nothing():
    with pytest.raises(BackendError, match="nothing answers at http://aaa"):
        connect("http://" + "a" * 300).get("/version")


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Padding: ",
        b"HTTP/1.1 200 ",
    ],
    ids=["body", "size of a chunk", "header", "status"],
)
def test_an_answer_that_comes_byte_by_byte_meets_the_deadline(head):
    def drip(handler):
        handler.wfile.write(head)
        with contextlib.suppress(OSError):  # the client has hung up
            for _ in range(240):
                handler.wfile.write(b"0")
                time.sleep(0.25)

    with listening(drip) as url:
        start = time.monotonic()
        with pytest.raises(BackendError, match=r"did not finish /version in 1 s. Raise .*\.timeout_s"):
            connect(url, timeout_s=1).get("/version")
        assert time.monotonic() - start < 40, "the deadline is 1 s, the answer takes 60"


def test_requests_as_one_share_a_deadline():
    def wait(handler):
        time.sleep(0.6)
        with contextlib.suppress(OSError):
            reply(handler, {})

    with listening(wait) as url:
        connection = connect(url, timeout_s=2)
        assert [connection.get("/version") for _ in range(4)] == [{}] * 4
        joined = connection.as_one()
        with pytest.raises(BackendError, match="did not finish /version in 2 s"):
            [joined.get("/version") for _ in range(4)]


def test_what_never_speaks_is_not_waited_for():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(BackendError, match=r"did not finish /version in 1 s. Raise .*\.connect_timeout_s"):
            connect(url, connect_timeout_s=1, timeout_s=3600).ask("/version")


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), 1e30, "5"])
def test_what_is_not_a_deadline_is_refused(seconds):
    with pytest.raises(BackendError, match=r"rollout.options.timeout_s=.* must be a finite number"):
        connect("http://127.0.0.1:1", timeout_s=seconds)
    with pytest.raises(BackendError, match=r"rollout.options.connect_timeout_s=.* must be a finite number"):
        ServerConnection("http://127.0.0.1:1", connect_timeout_s=seconds, timeout_s=5)


def test_nobody_listens():
    with pytest.raises(BackendError, match=r"nothing answers at http://127.0.0.1:\d+ in 5 s .*rollout.options.urls"):
        connect(free_url()).get("/server_info")


def test_answers_and_keys_and_paths():
    seen = []

    def answer(handler):
        length = int(handler.headers.get("Content-Length", 0))
        seen.append((handler.command, handler.path, handler.headers["Authorization"], handler.rfile.read(length)))
        reply(handler, b"a sentence" if handler.path.endswith("/text") else {"big": [1] * 100_000})

    with listening(answer) as url:
        connection = connect(url + "/behind/", key="secret")
        assert connection.get("/json") == {"big": [1] * 100_000}
        assert connection.post("/text", {"a": [1]}) == "a sentence"
        assert connect(url).find("/text") == "a sentence"
    assert seen == [
        ("GET", "/behind/json", "Bearer secret", b""),
        ("POST", "/behind/text", "Bearer secret", b'{"a": [1]}'),
        ("GET", "/text", None, b""),
    ]


@pytest.mark.parametrize(
    "body", [{"error": {"message": "too long"}}, {"success": False, "message": "too long"}, {"detail": "too long"}]
)
def test_a_refusal_has_the_servers_words(body):
    with listening(lambda handler: reply(handler, body, 400)) as url:
        with pytest.raises(BackendError, match=rf"the server at {url} refused /generate \(status 400\): too long"):
            connect(url).post("/generate", {})
        assert not connect(url).try_post("/generate", {})
    with listening(lambda handler: reply(handler, body, 404)) as url:
        assert connect(url).find("/generate") is None


def hang_up(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"half of it")


@pytest.mark.parametrize("answer", [hang_up, lambda handler: handler.connection.close()])
def test_a_server_that_hangs_up_is_one_typed_error(answer):
    with listening(answer) as url, pytest.raises(BackendError, match=rf"{url} hung up in /generate \(.*Start it again"):
        connect(url).post("/generate", {})


def test_a_server_that_does_not_answer_is_left():
    release = threading.Event()
    with listening(lambda handler: release.wait(30)) as url:
        with pytest.raises(BackendError, match=r"did not finish /generate in 0.2 s. Raise rollout.options.timeout_s"):
            connect(url, timeout_s=0.2).post("/generate", {})
        release.set()


def test_a_server_that_never_ends_its_answer_is_left():
    def trickle(handler):
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(100):
                handler.wfile.write(b" " * (1 << 16))
                time.sleep(0.1)

    with listening(trickle) as url, pytest.raises(BackendError, match=r"did not finish /generate in 0.5 s"):
        connect(url, timeout_s=0.5).post("/generate", {})


@pytest.mark.parametrize("states_length", [True, False])
def test_an_answer_of_gigabytes_is_left(states_length):
    sent = []

    def flood(handler):
        handler.send_response(200)
        if states_length:
            handler.send_header("Content-Length", str(1 << 40))
        handler.end_headers()
        with contextlib.suppress(OSError):  # the client has hung up
            for _ in range(1 << 10):
                handler.wfile.write(b" " * (1 << 20))
                sent.append(1)

    with (
        listening(flood) as url,
        pytest.raises(BackendError, match=rf"{url} sent more than 16781312 bytes .* /generate"),
    ):
        connect(url, timeout_s=60).post("/generate", {}, num_tokens=4)
    assert len(sent) < 64, "a few MiB may be under way"


@pytest.mark.parametrize("url", ["http://me:hidden@host:1", "http://hidden@host:1", "http://host:1/v1?key=hidden"])
def test_a_password_in_a_url_is_refused_and_not_shown(url):
    with pytest.raises(BackendError, match=r"is not sent to the server.*rollout.options.api_key_variable") as refused:
        connect(url)
    assert "hidden" not in str(refused.value)


def test_weights_for_another_machine_need_a_directory():
    assert choose_directory(None, connect("http://localhost:1")).is_dir()
    assert choose_directory("here", connect("http://far:1")) == Path("here").absolute()
    with pytest.raises(BackendError, match=r"http://far:1 may be on another machine. Use rollout.options.weights_dir"):
        choose_directory(None, connect("http://far:1"))


def build(model, urls, topology=ONE):
    load_rollout_backend("server").build(model, topology=topology, urls=urls, connect_timeout_s=30, timeout_s=30)


def refuse(model, foreign, old_sglang, old_vllm):
    with pytest.raises(BackendError, match=r"urls=\[\]. Use a list of 1 to 1 URLs, one for every rank at most"):
        build(model, [])
    for urls in (foreign, [5], None):
        with pytest.raises(BackendError, match=r"urls=.*. Use a list of 1 to 1 URLs"):
            build(model, urls)
    with pytest.raises(BackendError, match=r"Use a list of 1 to 1 URLs"):
        build(model, [foreign, foreign])
    with pytest.raises(BackendError, match=rf"the server at {foreign} is neither SGLang's nor vLLM's"):
        build(model, [foreign])
    with pytest.raises(BackendError, match=r"SGLang server at .* is version 0.4.9, supported are >=0.5.23,<0.5.24"):
        build(model, [old_sglang])
    with pytest.raises(BackendError, match=r"vLLM server at .* is version 0.9.1, supported are >=0.32,<0.33"):
        build(model, [old_vllm])


ODD = {
    "a version that is none": {"/version": {"version": None}},
    "a list without models": {
        "/version": {"version": "0.32.0"},
        "/weight_info": {"weight_version": "x"},
        "/collective_rpc": {"results": ["LlamaForCausalLM"]},
        "/v1/models": {"data": []},
    },
    "an inspection without results": {
        "/version": {"version": "0.32.0"},
        "/weight_info": {"weight_version": "x"},
        "/collective_rpc": {},
    },
    "information that lacks the version": {"/server_info": {"max_total_num_tokens": 1}},
}


def refuse_odd(model, odd, foreign):
    """Each rank says what is wrong with its own server."""
    topology = Topology(ParallelSpec(dp_size=2), GenerationSpec())
    is_odd = rf"the server at {odd} answered in another form than a supported version"
    is_foreign = rf"the server at {foreign} is neither SGLang's nor vLLM's"
    with pytest.raises(BackendError, match=is_foreign if dist.get_rank() else is_odd):
        build(model, [odd, foreign], topology)


@pytest.mark.parametrize("kind", ODD)
def test_malformed_answers_are_one_typed_error_on_all_ranks(ranks2, tmp_path, kind):
    with listening(answer_as(ODD[kind])) as odd, listening(answer_as({})) as foreign:
        ranks2.run(refuse_odd, write_tiny_model(tmp_path), odd, foreign)


def refuse_tensor_parallel(model):
    topology = Topology(ParallelSpec(tp_size=2), GenerationSpec(gen_tp_size=2))
    with pytest.raises(
        BackendError, match=r"gen_tp_size=2 are not supported. Set both to 1, and start the server with"
    ):
        build(model, ["http://127.0.0.1:1"], topology)


def refuse_on_both(model, foreign):
    """The second rank's server is not a server of an engine; nobody listens for the first one."""
    topology = Topology(ParallelSpec(dp_size=2), GenerationSpec())
    with pytest.raises(BackendError, match="is neither SGLang's" if dist.get_rank() else "nothing answers at"):
        build(model, ["http://127.0.0.1:1", foreign], topology)


def answer_as(paths):
    return lambda handler: reply(handler, paths.get(handler.path, {}), 200 if handler.path in paths else 404)


def test_what_is_not_a_server_of_an_engine_is_refused(ranks1, ranks2, tmp_path):
    model = write_tiny_model(tmp_path)
    sglang = {"/server_info": {"version": "0.4.9", "max_total_num_tokens": 1, "dtype": "float32"}}
    with (
        listening(lambda handler: reply(handler, b"<html>hello</html>")) as foreign,
        listening(answer_as(sglang)) as old_sglang,
        listening(answer_as({"/version": {"version": "0.9.1"}})) as old_vllm,
    ):
        ranks1.run(refuse, model, foreign, old_sglang, old_vllm)
        ranks2.run(refuse_on_both, model, foreign)
    ranks2.run(refuse_tensor_parallel, model)
