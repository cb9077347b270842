"""The engine's process: `python -m hf_engine.rollout.sglang._server DESCRIPTOR PARENT DIRECTORY`.

SGLang ends the whole tree of the process that it runs in when one of its own fails, so that must not be a rank's.
"""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import sys
import threading
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any

from hf_engine.cpu_support.sglang_plugins import forked_children, is_platform_chosen
from hf_engine.rollout.sglang._session import end_session
from hf_protocols.foreign_code import Caught

__all__ = ["Server", "main"]


_IDLE_TIMEOUT_S = 60.0


class Server:
    """Answers a rank's requests, one method each."""

    def start(self, options: dict[str, Any]) -> dict[str, Any]:
        """Starts the engine with SGLang's own options; says what it found."""
        from hf_engine.rollout.sglang._core import Engine

        with forked_children() if is_platform_chosen() else nullcontext():
            self._engine = Engine(**options)
        self._adapters: set[str] = set()
        return {"cache_tokens": self._engine.get_server_info()["max_total_num_tokens"]}

    def generate(
        self,
        prompts: list[list[int]],
        uniforms: list[list[float]],
        *,
        n: int,
        sampling: dict[str, Any],
        stops: list[int],
        adapter: str | None = None,
    ) -> list[tuple[list[int], list[float], str]]:
        """Token ids, log-probs and finish reason of every sample, the n samples of a prompt one after the other."""
        from hf_engine.rollout.sglang._sampler import Carrier

        repeated = [prompt for prompt in prompts for _ in range(n)]
        parameters = [
            {
                "max_new_tokens": sampling["max_new_tokens"],
                "stop_token_ids": stops,
                "no_stop_trim": True,
                "custom_params": {
                    "uniforms": numbers,
                    "prompt_length": len(prompt),
                    "stops": stops,
                    "sampling": sampling,
                },
            }
            for prompt, numbers in zip(repeated, uniforms, strict=True)
        ]
        answers = self._engine.generate(
            input_ids=repeated,
            sampling_params=parameters,
            return_logprob=True,
            custom_logit_processor=[Carrier.to_str()] * len(repeated),
            lora_path=None if adapter is None else [adapter] * len(repeated),
        )
        return [_read_answer(answer) for answer in answers]

    def begin_weights(self) -> None:
        """Opens an update; one that never ended is ended first."""
        self._engine.end_weight_update()
        _require(self._engine.begin_weight_update())

    def load_weights(self, descriptions: list[str]) -> None:
        """Loads what lies in the staging memory of every rank; each rank's report says whether it went well."""
        import torch

        from hf_engine.rollout.sglang._core import MultiprocessingSerializer, UpdateWeightsFromTensorReqInput
        from hf_engine.rollout.sglang._plugins import LOADER

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[
                MultiprocessingSerializer.serialize([(description, torch.empty(0))]) for description in descriptions
            ],
            load_format=LOADER,
            flush_cache=False,
        )
        engine = self._engine
        _require(engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_tensor(request, None)))

    def end_weights(self) -> None:
        """Closes an update."""
        _require(self._engine.end_weight_update())

    def put_adapter(self, name: str, description: str, config: dict[str, Any]) -> None:
        """Replaces the adapter by what lies in the staging memory of one rank."""
        from hf_engine.rollout.sglang._staging import read_staging

        _, found = read_staging(description)
        if name in self._adapters:
            _require_update(self._engine.unload_lora_adapter(name))
            self._adapters.remove(name)
        factors = {f"base_model.model.{factor}": part.clone() for factor, _, _, part in found}
        _require_update(self._engine.load_lora_adapter_from_tensors(name, factors, config))
        self._adapters.add(name)

    def flush(self) -> None:
        """Drops the prefix cache.

        The last samples reach us a step before the scheduler has put their batch away; until then it drops nothing.
        """
        engine = self._engine
        flushed = engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(_IDLE_TIMEOUT_S))
        _require((flushed.success, "the prefix cache could not be dropped: requests are still running"))

    def release(self) -> None:
        """Frees the KV cache."""
        self._engine.release_memory_occupation(tags=["kv_cache"])

    def resume(self) -> None:
        """Takes the memory of the KV cache again."""
        self._engine.resume_memory_occupation(tags=["kv_cache"])


def main() -> None:
    """Serves until the rank ends or hangs up."""
    connection = Connection(int(sys.argv[1]))
    # A child that held it would keep the rank waiting for an answer after this process has ended.
    os.register_at_fork(after_in_child=connection.close)
    parent, directory = int(sys.argv[2]), sys.argv[3]
    _watch(parent, directory)
    server = Server()
    while True:
        try:
            method, arguments, options = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        with Caught() as caught:
            answer = True, getattr(server, method)(*arguments, **options)
        if caught.error is not None:
            answer = False, f"{type(caught.error).__name__}: {caught.error}"
        connection.send_bytes(pickle.dumps(answer))
    _end(directory)


def _read_answer(answer: dict[str, Any]) -> tuple[list[int], list[float], str]:
    about = answer["meta_info"]
    reason = about["finish_reason"]
    if reason["type"] not in ("stop", "length"):
        raise RuntimeError(f"SGLang gave up on a request: {reason}")
    return answer["output_ids"], [logprob for logprob, *_ in about["output_token_logprobs"]], reason["type"]


def _require_update(outcome: Any) -> None:
    """As `_require`, for what SGLang returns of adapters."""
    _require((outcome.success, outcome.error_message or "the adapter was not taken"))


def _require(outcome: tuple[bool, str]) -> None:
    """SGLang returns whether it did what it was asked for, and why not."""
    succeeded, message = outcome
    if not succeeded:
        raise RuntimeError(message)


def _end(directory: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    end_session(os.getsid(0))
    os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int, directory: str) -> None:
    """Ends this session when the rank ends, however that happens, as a descriptor of the process shows."""
    descriptor = os.pidfd_open(parent)
    if os.getppid() != parent:
        _end(directory)

    def wait() -> None:
        select.select([descriptor], [], [])
        _end(directory)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main()
