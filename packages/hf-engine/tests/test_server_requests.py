"""Requests to servers that draw by the rules of SGLang 0.5.23 and vLLM 0.32, and settings that are refused."""

from __future__ import annotations

import pytest
import torch

from hf_engine import SamplingParams
from hf_engine.model_directory import read_model_directory
from hf_engine.rollout.engine_rules import require_known_layout
from hf_engine.rollout.server import ServerBackend
from hf_engine.rollout.server._connection import LostServerError
from hf_engine.rollout.server._files import WeightFiles
from hf_engine.rollout.server._sglang import SglangServer
from hf_engine.rollout.server._vllm import VllmServer
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_prompts
from hf_protocols import BackendError

LOGITS = torch.tensor([1.0, 2.5, 0.5, 1.5])
LIKELIEST = 1
PROMPTS, SEEDS = [[0], [2]], [1, 2]


class Sglang:
    """A connection to a server that has one distribution for every token."""

    url = "http://127.0.0.1:1"

    def __init__(self, *, preferred=None, num_answers=None):
        self._preferred, self._num_answers = preferred, num_answers

    def get(self, path):
        model = {"architectures": ["LlamaForCausalLM"], "weight_version": "default"}
        model["preferred_sampling_params"] = self._preferred
        return {"/model_info": model, "/v1/models": {"data": [{"max_model_len": 48}]}}[path]

    def post(self, path, body, *, num_tokens):
        assert path == "/generate" and num_tokens
        return [{"meta_info": _draw_as_sglang(each)} for each in body["sampling_params"][: self._num_answers]]


def _draw_as_sglang(sampling):
    """Of srt/layers/sampler.py: a batch of top_k = 1 is greedy, and greedy log-probs know no temperature."""
    is_greedy = sampling["top_k"] == 1
    logprobs = (LOGITS if is_greedy else LOGITS / sampling["temperature"]).log_softmax(-1)
    likeliest = int(logprobs.argmax())
    assert is_greedy or sampling["top_p"] <= logprobs[likeliest].exp(), "other tokens could be drawn"
    return {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [(float(logprobs[likeliest]), likeliest, None)] * sampling["max_new_tokens"],
        "weight_version": "default",
    }


def find_sglang(**options):
    info = {
        "version": "0.5.23",
        "dtype": "float32",
        "max_total_num_tokens": 4096,
        "enable_deterministic_inference": True,
        "enable_memory_saver": False,
    }
    return SglangServer(Sglang(**options), info, "float32")


class Vllm:
    """A connection to a server whose tokenizer ends a response at the most likely token."""

    url = "http://127.0.0.1:1"

    def __init__(self, mode):
        self._mode, self.is_gone = mode, False

    def get(self, path):
        return {"/v1/models": {"data": [{"max_model_len": 48}]}}[path]

    def as_one(self):
        return self

    def find(self, path, body=None):
        if body is not None:
            return self.post(path, body)
        return {"/weight_info": {"weight_version": "default"}}.get(path)

    def post(self, path, body, *, num_tokens=0):
        if self.is_gone:
            raise LostServerError("nothing answers")
        if path == "/collective_rpc":
            return {"results": ["LlamaForCausalLM"]}
        return {"choices": [_draw_as_vllm(body["sampling_params"], self._mode)]}


def _draw_as_vllm(sampling, mode):
    """Of sampling_params.py, v1/sample/sampler.py and v1/core/sched/utils.py."""
    allowed = sampling.get("allowed_token_ids", range(len(LOGITS)))
    processed = torch.full_like(LOGITS, -torch.inf)
    processed[list(allowed)] = LOGITS[list(allowed)]
    if temperature := sampling.get("temperature", 1.0):
        processed = processed / max(temperature, 0.01)
    logits = processed if mode.startswith("processed") else LOGITS
    reported = logits.log_softmax(-1) if mode.endswith("logprobs") else logits
    drawn = int(processed.argmax())
    stops = [*sampling.get("stop_token_ids", []), *([] if sampling.get("ignore_eos") else [LIKELIEST])]
    count = 1 if drawn in stops else sampling["max_tokens"]
    return {
        "finish_reason": "stop" if drawn in stops else "length",
        "token_ids": [drawn] * count,
        "logprobs": {"content": [{"logprob": max(float(reported[drawn]), -9999.0)}] * count},
        "weight_versions": [{"version": "default"}],
    }


def find_vllm(mode):
    return VllmServer(Vllm(mode), "0.32.0", "float32")


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("options", [{"greedy": True}, {"top_k": 1}, {"top_k": 1, "top_p": 0.5}])
def test_sglang_reports_the_likeliest_at_the_temperature(temperature, options):
    sampling = SamplingParams(max_new_tokens=2, temperature=temperature, **options)
    wanted = float((LOGITS / temperature).log_softmax(-1)[LIKELIEST])
    for sample in find_sglang().generate(PROMPTS, SEEDS, sampling, []):
        assert sample.token_ids == [LIKELIEST] * 2 and sample.logprobs == pytest.approx([wanted] * 2, abs=1e-6)


def test_a_server_that_changes_what_is_drawn_is_refused():
    preferred = {"repetition_penalty": 1.2}
    with pytest.raises(BackendError, match=r"has --preferred-sampling-params .*repetition_penalty.* Start it without$"):
        find_sglang(preferred=preferred)
    assert find_sglang(preferred={}).facts.stamp == "default"


def test_each_prompt_has_an_answer():
    with pytest.raises(ValueError, match="shorter"):
        find_sglang(num_answers=1).generate(PROMPTS, SEEDS, SamplingParams(max_new_tokens=2, greedy=True), [])


def test_only_the_models_own_tokens_end_a_response_of_vllm():
    sampling = SamplingParams(max_new_tokens=3, greedy=True)
    server = find_vllm("raw_logprobs")
    for stops, length in (([], 3), ([LIKELIEST], 1)):
        samples = server.generate(PROMPTS, SEEDS, sampling, stops)
        assert [(len(each.token_ids), each.is_stopped) for each in samples] == [(length, length == 1)] * 2


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_a_vllm_server_that_reports_logits_is_refused(mode):
    with pytest.raises(BackendError, match=r"reports logits in place of log-probs. Start it with --logprobs-mode raw"):
        find_vllm(mode)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.01, 0.009, 1e-6])
def test_vllm_reports_the_temperature_or_it_is_refused(temperature):
    server = find_vllm("processed_logprobs")
    sampling = SamplingParams(max_new_tokens=1, temperature=temperature)
    refusal = server.find_unsupported(sampling)
    assert (refusal is None) == (temperature >= 0.01)
    assert refusal is None or "Raise temperature" in refusal
    if refusal is None:
        (sample, _) = server.generate(PROMPTS, SEEDS, sampling, [])
        assert sample.logprobs == pytest.approx([float((LOGITS / temperature).log_softmax(-1)[LIKELIEST])], abs=1e-6)


def draw_from_another_mode(model):
    gone = find_vllm("processed_logprobs")
    backend = ServerBackend(
        gone,
        find=lambda: find_vllm("raw_logprobs"),
        restart_timeout_s=60.0,
        num_servers=1,
        some_can_release=False,
        directory=model,
        shape=require_known_layout(read_model_directory(model)),
        stops=frozenset(),
        files=WeightFiles(model / "weights", "run", 0),
    )
    prompts, cold = build_prompts(2, vocab_size=64), SamplingParams(max_new_tokens=1, temperature=0.5)
    wanted = pytest.approx(float((LOGITS / 0.5).log_softmax(-1)[LIKELIEST]), abs=1e-6)
    assert backend.generate(prompts, cold)["rollout_logprobs"].values().tolist() == [wanted] * 2
    gone._connection.is_gone = True
    with pytest.raises(BackendError, match=r"cannot generate with .*raw_logprobs reports log-probs at temperature 1"):
        backend.generate(prompts, cold)


def test_a_server_that_restarts_in_another_mode_is_refused(ranks1, tmp_path):
    model = write_tiny_model(tmp_path)
    ranks1.run(draw_from_another_mode, model)
    assert not (model / "weights").exists(), "no weights were sent"
