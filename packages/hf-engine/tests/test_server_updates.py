"""Requests to a vLLM server in an update of its weights, also in one that fails."""

from __future__ import annotations

import contextlib
import copy
import socket
import time
from pathlib import Path

import pytest

from hf_engine.rollout.server import _vllm
from hf_engine.rollout.server._connection import ServerConnection
from hf_engine.rollout.server._vllm import VllmServer
from hf_protocols import BackendError, ReshardError

UPDATE = ["/pause?mode=wait", "/collective_rpc", "/update_weight_version", "/resume"]


class Recording:
    """A connection to a server that takes weights, and refuses some requests."""

    url = "http://127.0.0.1:1"

    def __init__(self):
        self.asked, self.refused = [], {}
        self.seconds, self.deadlines = 3600.0, {}

    def within(self, seconds):
        hurried = copy.copy(self)
        hurried.seconds = seconds
        return hurried

    def get(self, path):
        return {"/v1/models": {"data": [{"max_model_len": 48}]}, "/weight_info": {"weight_version": "new"}}[path]

    def find(self, path, body=None):
        if body is not None:
            return {"choices": [{"logprobs": {"content": [{"logprob": 0.0}]}}]}
        return {"/weight_info": {"weight_version": "old"}}.get(path)

    def post(self, path, body=None):
        self.asked.append(path)
        self.deadlines[path] = self.seconds
        if path in self.refused:
            raise self.refused[path]
        return {"/reset_prefix_cache": {"success": True}}.get(path, {"results": ["LlamaForCausalLM"]})


def found():
    connection = Recording()
    server = VllmServer(connection, "0.32.0", "float32")
    connection.asked.clear()
    return connection, server


def test_an_update_pauses_the_server_and_lets_it_go_on():
    connection, server = found()
    server.load_weights(Path("/weights"), "new")
    assert connection.asked == [*UPDATE, "/reset_prefix_cache"]
    assert {*connection.deadlines.values()} == {3600.0}, "a sound server may take its time to go on"


@pytest.mark.parametrize("refused", UPDATE[:3])
@pytest.mark.parametrize("resumes", [True, False])
def test_a_server_whose_update_fails_goes_on(refused, resumes):
    connection, server = found()
    connection.refused[refused] = BackendError("the first reason")
    if not resumes:
        connection.refused["/resume"] = BackendError("what came of it")
    with pytest.raises(ReshardError, match=r"did not take the weights in /weights: the first reason$"):
        server.load_weights(Path("/weights"), "new")
    assert connection.asked == [*UPDATE[: UPDATE.index(refused) + 1], "/resume"]
    assert connection.deadlines["/resume"] == 10.0 and connection.deadlines[refused] == 3600.0


def test_a_server_that_does_not_go_on_is_an_error():
    connection, server = found()
    connection.refused["/resume"] = BackendError("paused")
    with pytest.raises(ReshardError, match=r"did not take the weights in /weights: paused$"):
        server.load_weights(Path("/weights"), "new")
    assert connection.asked == UPDATE


def test_an_interrupted_update_leaves_no_server_paused():
    connection, server = found()
    connection.refused["/collective_rpc"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        server.load_weights(Path("/weights"), "new")
    assert connection.asked[-1] == "/resume"


@contextlib.contextmanager
def silent():
    """Takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(("most_s", "timeout_s", "twice_s"), [(0.5, 6.0, 12.0), (60.0, 1.0, 61.0)])
def test_a_server_that_hangs_in_an_update_is_not_awaited_twice(monkeypatch, most_s, timeout_s, twice_s):
    monkeypatch.setattr(_vllm, "_RESUME_TIMEOUT_S", most_s)
    _, server = found()
    with silent() as url:
        server._connection = ServerConnection(url, connect_timeout_s=60, timeout_s=timeout_s)
        start = time.monotonic()
        with pytest.raises(ReshardError, match=rf"did not finish /pause\?mode=wait in {timeout_s:g} s. Raise"):
            server.load_weights(Path("/weights"), "new")
        assert timeout_s <= time.monotonic() - start < twice_s
