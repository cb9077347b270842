"""SGLang's server, in the words of SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_engine.backends.base import SamplingParams
from hf_engine.model_directory import ModelDirectory
from hf_engine.rollout.engine_rules import SGLANG_EXPERTS, SGLANG_RESERVED, find_sglang_fault
from hf_engine.rollout.server._connection import LostServerError, ServerConnection
from hf_engine.rollout.server._dialect import Sample, ServerFacts, require_version
from hf_protocols.errors import BackendError, ReshardError
from hf_protocols.models import ModelShape
from hf_protocols.validation import show

__all__ = ["SglangServer"]

_VERSIONS = (0, 5, 23), (0, 5, 24)
_IDLE_TIMEOUT_S = 60
_CACHE = {"tags": ["kv_cache"]}


class SglangServer:
    """One server. It ends responses at the tokens of config.json and of generation_config.json alike. `ignore_eos`,
    with which it would not, makes it ignore the stop tokens of a request too.

    Args:
        connection: to it.
        info: its response to `/server_info`.
        dtype: the model's, for a server that was started to choose.

    Raises:
        BackendError: for a version that has not been tried.
    """

    def __init__(self, connection: ServerConnection, info: Mapping[str, Any], dtype: str) -> None:
        self._connection = connection
        name = f"the SGLang server at {connection.url}"
        require_version(name, info["version"], *_VERSIONS)
        model = connection.get("/model_info")
        if preferred := model.get("preferred_sampling_params"):
            raise BackendError(
                f"{name} has --preferred-sampling-params {show(preferred)}, which would change what every sample is "
                "drawn from. Start it without"
            )
        self._on_cpu = info.get("device") == "cpu"
        chosen = "float16" if dtype == "float32" else dtype
        (card, *_) = connection.get("/v1/models")["data"]
        self.facts = ServerFacts(
            name=name,
            url=connection.url,
            architectures=tuple(model["architectures"] or ()),
            dtype=chosen if info["dtype"] == "auto" else info["dtype"],
            max_positions=min(card["max_model_len"], info["max_total_num_tokens"]) - SGLANG_RESERVED,
            cache_tokens=info["max_total_num_tokens"],
            has_seeds=info["enable_deterministic_inference"],
            seeds_knob="--enable-deterministic-inference",
            keeps_tied=False,
            experts=() if self._on_cpu else SGLANG_EXPERTS,
            can_release=info["enable_memory_saver"],
            stamp=model["weight_version"],
        )

    def knows(self, token_id: int) -> bool:
        """Returns True if the token is in the vocabulary: SGLang refuses to report on others."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        return self._connection.try_post("/generate", body | {"token_ids_logprob": [token_id]})

    def find_model_fault(self, model: ModelDirectory, shape: ModelShape) -> str | None:
        """See `Dialect`."""
        positions = min(shape.max_positions, self.facts.max_positions)
        return find_sglang_fault(model, shape, on_cpu=self._on_cpu, positions=positions)

    def find_unsupported(self, sampling: SamplingParams) -> str | None:
        """See `Dialect`: SGLang restricts what it reports to the tokens that a minimum length allows."""
        if sampling.min_new_tokens:
            return "SGLang's log-probs are not of the full distribution with min_new_tokens. Set min_new_tokens to 0"
        return None

    def generate(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], sampling: SamplingParams, stops: Sequence[int]
    ) -> list[Sample]:
        """See `Dialect`."""
        shared = _translate(sampling) | {"stop_token_ids": list(stops), "no_stop_trim": True}
        body = {
            "input_ids": list(prompts),
            "sampling_params": [shared | {"sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
        }
        num_tokens = sum(map(len, prompts)) + len(prompts) * sampling.max_new_tokens
        answers = self._connection.post("/generate", body, num_tokens=num_tokens)
        return [self._read(answer["meta_info"]) for _, answer in zip(prompts, answers, strict=True)]

    def load_weights(self, directory: Path, stamp: str) -> None:
        """See `Dialect`."""
        self.flush()  # waits for the last batch, which SGLang puts away after its samples have reached us
        body = {"model_path": str(directory), "weight_version": stamp, "load_format": "safetensors"}
        try:
            self._connection.post("/update_weights_from_disk", body)
        except LostServerError:
            raise
        except BackendError as error:
            raise ReshardError(f"{self.facts.name} did not take the weights in {directory}: {error}") from error
        found = self._connection.get("/model_info")["weight_version"]
        if found != stamp:
            raise ReshardError(f"{self.facts.name} calls its weights {show(found)} after an update to {show(stamp)}")

    def flush(self) -> None:
        """See `Dialect`."""
        self._connection.post(f"/flush_cache?timeout={_IDLE_TIMEOUT_S}")

    def release(self) -> None:
        """See `Dialect`."""
        self.flush()
        self._connection.post("/release_memory_occupation", _CACHE)

    def resume(self) -> None:
        """See `Dialect`."""
        self._connection.post("/resume_memory_occupation", _CACHE)

    def _read(self, about: Mapping[str, Any]) -> Sample:
        reason = about["finish_reason"]
        if reason["type"] not in ("stop", "length"):
            raise BackendError(f"{self.facts.name} gave up on a request: {reason}")
        return Sample(
            token_ids=[token for _, token, *_ in about["output_token_logprobs"]],
            logprobs=[float("nan") if each is None else each for each, *_ in about["output_token_logprobs"]],
            is_stopped=reason["type"] == "stop",
            stamp=about["weight_version"],
        )


def _translate(sampling: SamplingParams) -> dict[str, Any]:
    """SGLang takes top_k = 1 as greedy, and reports greedy log-probs without the temperature. A tiny top_p leaves the
    most likely token alone, too, and is reported with the temperature.
    """
    drawn = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
    }
    if not sampling.greedy and sampling.top_k != 1:
        return drawn
    return drawn | ({"top_p": 1.0, "top_k": 1} if sampling.temperature == 1 else {"top_p": 1e-6, "top_k": -1})
