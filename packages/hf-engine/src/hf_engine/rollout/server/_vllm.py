"""vLLM's server with its development and scale-out endpoints, in the words of vLLM 0.32."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from hf_engine.backends.base import SamplingParams
from hf_engine.model_directory import ModelDirectory
from hf_engine.rollout.server._connection import LostServerError, ServerConnection
from hf_engine.rollout.server._dialect import Sample, ServerFacts, require_version
from hf_protocols.errors import BackendError, ReshardError
from hf_protocols.models import ModelShape
from hf_protocols.validation import show

__all__ = ["VllmServer"]

_VERSIONS = (0, 32), (0, 33)
_GENERATE = "/inference/v1/generate"
_NO_LOGPROB = -9999.0
"""Value that vLLM sends in place of a log-prob that is not finite."""
_LIKELIEST = {
    "token_ids": [0],
    "sampling_params": {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False},
}
"""A request for the most likely token, of which a model's logit is rarely below 0."""
_LEAST_TEMPERATURE = 0.01
"""vLLM draws at this temperature where a lower one is requested."""
_NUM_REQUESTS = 256
"""Requests under way at once: there is one for every sample, each with its seed."""
_RESUME_TIMEOUT_S = 10.0
"""For a server that failed already: it may hang, and the first error must not wait for a second deadline."""


class VllmServer:
    """One server.

    Args:
        connection: to it.
        version: its response to `/version`.
        dtype: the model's, which vLLM computes in unless it was started with another.

    Raises:
        BackendError: for a version that has not been tried, or a server without the endpoints that training needs.
    """

    def __init__(self, connection: ServerConnection, version: str, dtype: str) -> None:
        self._connection = connection
        name = f"the vLLM server at {connection.url}"
        require_version(name, version, *_VERSIONS)
        weights = connection.find("/weight_info")
        if weights is None:
            raise BackendError(f"{name} does not take weights. Start it with VLLM_SERVER_DEV_MODE=1 in its environment")
        inspected = str(connection.post("/collective_rpc", {"method": "get_model_inspection"})["results"][0])
        (card, *_) = connection.get("/v1/models")["data"]
        cached = re.search(r'kv_cache_size_tokens="(\d+)"', str(connection.find("/metrics")))
        self.facts = ServerFacts(
            name=name,
            url=connection.url,
            architectures=tuple(re.findall(r"^\w+", inspected)),
            dtype=dtype,
            max_positions=card["max_model_len"],
            cache_tokens=int(cached[1]) if cached else 0,
            has_seeds=True,
            seeds_knob="",
            keeps_tied="CPUAttention" in inspected,
            experts=() if "CPUAttention" in inspected else None,
            can_release=False,
            stamp=weights["weight_version"],
        )
        self._reports_drawn = self._probe_mode()

    def knows(self, token_id: int) -> bool:
        """Returns True if the token is in the vocabulary: vLLM refuses to draw others."""
        return self._connection.try_post(_GENERATE, _only(token_id))

    def find_model_fault(self, model: ModelDirectory, shape: ModelShape) -> str | None:
        """See `Dialect`."""
        del model, shape
        return None

    def find_unsupported(self, sampling: SamplingParams) -> str | None:
        """See `Dialect`: vLLM reports log-probs from before the temperature, or from after everything."""
        if self._reports_drawn:
            if sampling.top_k or sampling.top_p < 1 or sampling.min_new_tokens:
                return (
                    "--logprobs-mode processed_logprobs reports what is left by top_k, top_p and min_new_tokens. Leave "
                    "them out, or start it with raw_logprobs and draw at temperature 1"
                )
            if sampling.greedy and sampling.temperature != 1:
                return "greedy log-probs are those of temperature 1. Set temperature to 1"
            if sampling.temperature < _LEAST_TEMPERATURE:
                return (
                    f"vLLM draws at temperature {_LEAST_TEMPERATURE} instead of lower ones. Raise temperature, or set "
                    "greedy to True and temperature to 1"
                )
        elif sampling.temperature != 1:
            return (
                "--logprobs-mode raw_logprobs reports log-probs at temperature 1. Set temperature to 1, or start the "
                "server with processed_logprobs"
            )
        return None

    def generate(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], sampling: SamplingParams, stops: Sequence[int]
    ) -> list[Sample]:
        """See `Dialect`."""
        shared = {
            "max_tokens": sampling.max_new_tokens,
            "min_tokens": sampling.min_new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(stops),
            "ignore_eos": True,  # the tokenizer's, which may not be the model's; those are among the stops
            "logprobs": 0,
            "detokenize": False,
        }

        connection = self._connection.as_one()

        def request(prompt: list[int], seed: int) -> Sample:
            body = {"token_ids": prompt, "sampling_params": shared | {"seed": seed}}
            num_tokens = len(prompt) + sampling.max_new_tokens
            return self._read(connection.post(_GENERATE, body, num_tokens=num_tokens)["choices"][0])

        with ThreadPoolExecutor(min(max(1, len(prompts)), _NUM_REQUESTS)) as pool:
            return list(pool.map(request, prompts, seeds))

    def load_weights(self, directory: Path, stamp: str) -> None:
        """See `Dialect`."""
        post = self._connection.post
        try:
            with ExitStack() as undo:
                undo.callback(self._resume)
                post("/pause?mode=wait")
                post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
                post("/update_weight_version", {"new_version": stamp})
                undo.pop_all()
            post("/resume")
        except LostServerError:
            raise
        except BackendError as error:
            raise ReshardError(f"{self.facts.name} did not take the weights in {directory}: {error}") from error
        self.flush()
        found = self._connection.get("/weight_info")["weight_version"]
        if found != stamp:
            raise ReshardError(f"{self.facts.name} calls its weights {show(found)} after an update to {show(stamp)}")

    def _resume(self) -> None:
        """The server is the user's and runs on: paused it would answer nobody. What failed first says more."""
        with suppress(BackendError):
            self._connection.within(_RESUME_TIMEOUT_S).post("/resume")

    def flush(self) -> None:
        """See `Dialect`."""
        if not self._connection.post("/reset_prefix_cache")["success"]:
            raise BackendError(f"{self.facts.name} did not drop its prefix cache: others use it. Give the run its own")

    def release(self) -> None:
        """Does nothing: `facts.can_release` is False."""

    def resume(self) -> None:
        """Nothing was released."""

    def _probe_mode(self) -> bool:
        """Returns True if log-probs are over the truncated distribution: the only token left then has log-prob 0."""
        answer = self._connection.find(_GENERATE, _only(0))
        if answer is None:
            raise BackendError(f"{self.facts.name} takes no token ids. Start it with --enable-scale-out")
        if _first_logprob(self._connection.find(_GENERATE, _LIKELIEST)) > 0:
            raise BackendError(
                f"{self.facts.name} reports logits in place of log-probs. Start it with --logprobs-mode raw_logprobs "
                "or processed_logprobs"
            )
        return _first_logprob(answer) == 0

    def _read(self, choice: Mapping[str, Any]) -> Sample:
        if choice["finish_reason"] not in ("stop", "length"):
            raise BackendError(f"{self.facts.name} gave up on a request: {choice['finish_reason']}")
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        return Sample(
            token_ids=choice["token_ids"],
            logprobs=[logprob if logprob > _NO_LOGPROB else float("-inf") for logprob in logprobs],
            is_stopped=choice["finish_reason"] == "stop",
            stamp=" and ".join(span["version"] for span in choice["weight_versions"]),
        )


def _first_logprob(answer: Mapping[str, Any]) -> float:
    logprob: float = answer["choices"][0]["logprobs"]["content"][0]["logprob"]
    return logprob


def _only(token_id: int) -> dict[str, Any]:
    """A request that can draw one token only."""
    sampling = {"max_tokens": 1, "logprobs": 0, "allowed_token_ids": [token_id], "detokenize": False}
    return {"token_ids": [0], "sampling_params": sampling}
