"""The rollout backend: a vLLM engine in the process of every rank."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from hf_engine.agreement import together
from hf_engine.backends.base import SamplingParams
from hf_engine.backends.build_arguments import check_rollout_arguments
from hf_engine.backends.gradients import with_gradients
from hf_engine.backends.lora_config import LoraConfig
from hf_engine.backends.versions import VLLM
from hf_engine.model_directory import ModelDirectory
from hf_engine.models.adapter_rules import FLOAT32_REFUSAL, find_engine_refusal, is_adapter_name
from hf_engine.models.lora import plan_engine_adapters
from hf_engine.process_groups import refuse_unused_devices
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.rollout.dtype import RolloutDtype, check_dtype
from hf_engine.rollout.engine_rules import check_vllm_runs
from hf_engine.rollout.loading import WeightState
from hf_engine.rollout.memory import check_sizes, choose_cache_bytes
from hf_engine.rollout.replica import Replica, build_replica, require_process_group, require_ranks
from hf_engine.rollout.vllm._library import embedded
from hf_protocols.errors import BackendError
from hf_protocols.topology import GenerationSpec, Topology

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_engine.rollout.vllm._engine import Engine

__all__ = ["VllmBackend"]


class VllmBackend:
    """Generation by vLLM, tensor parallel inside a replica; see `RolloutBackend` for what every method means.

    Every rank runs an engine of its own; the ranks of a replica go through the same requests in the same order.
    Tokens are drawn with the numbers of every other backend, so a swap of backends keeps the samples up to rounding.

    Supports `gen_pp_size = 1`, and the models that `check_model` takes. vLLM is imported by `build`.
    """

    vllm_version: ClassVar[str] = VLLM.check()
    """The installed version; without a supported version this class cannot be imported."""
    largest_generation: ClassVar[GenerationSpec | None] = GenerationSpec(gen_tp_size=64)

    def __init__(
        self, engine: Engine, *, layout: WeightLayout, replica: Replica, lora: LoraConfig | None = None
    ) -> None:
        self._engine: Engine | None = engine
        self._replica = replica
        self._layout = layout
        self._lora = lora
        self._factors: dict[str, torch.Tensor] = {}
        self._sends_base = False
        self._has_base = True
        self._state = WeightState(layout)

    @classmethod
    @with_gradients()
    def build(
        cls,
        model: str | Path,
        *,
        topology: Topology,
        seed: int = 0,
        dtype: RolloutDtype = "float32",
        cache_bytes: int | None = None,
        cache_fraction: float | None = None,
        max_positions: int | None = None,
        lora: LoraConfig | None = None,
    ) -> VllmBackend:
        """Starts an engine on every rank. Collective over all ranks; the default process group must be there.

        Args:
            model: directory or hub name.
            topology: ranks and generation sizes.
            seed: vLLM's own; samples derive from `SamplingParams.seed`.
            dtype: of weights and computation, for any training dtype: shards are cast on their way.
            cache_bytes: keys and values of one rank; by default 0.3 of the memory of a device, 256 MiB of a host's.
            cache_fraction: instead, as a share of the device's memory (the host's, without a device), below 1.
            max_positions: prompt and response together, where fewer than the model's are enough: the cache must hold
                one sequence of them.
            lora: vLLM computes adapters like those of the training backend, which a transition brings.

        Raises:
            BackendError: on every rank, for a layout, architecture or head size that does not run, a cache too small
                for one sequence, adapters that vLLM does not compute, or another engine in a process.
        """
        require_process_group("vllm")
        with embedded():
            # Ranks connect when the engine starts, and would wait for one that was refused.
            with together("no engine was started"):
                from hf_engine.rollout.vllm._engine import Engine, check_cache, plan_layout

                refuse_unused_devices("vllm")
                check_rollout_arguments(topology, seed)
                check_dtype(dtype)
                topology = require_ranks("vllm", topology)
                cls.check_options({"max_positions": max_positions})
                cache_bytes = choose_cache_bytes(cache_bytes, cache_fraction)
                shape, layout = plan_layout(model, topology, dtype)
                layout, adapted = plan_engine_adapters(cls, model, layout, lora)
                check_cache(shape, topology, dtype=dtype, cache_bytes=cache_bytes, max_positions=max_positions)
            engine = Engine(
                model,
                shape,
                topology,
                dtype=dtype,
                seed=seed,
                cache_bytes=cache_bytes,
                max_positions=max_positions,
                lora=lora,
                adapted=adapted,
            )
            replica = build_replica(topology)
        return cls(engine, layout=layout, replica=replica, lora=lora)

    @classmethod
    def find_adapter_refusal(
        cls, model: ModelDirectory, lora: LoraConfig, options: Mapping[str, Any], *, on_cpu: bool
    ) -> str | None:
        """Says why adapters come merged; see `SupportsUnmergedAdapters`."""
        if not on_cpu and options.get("dtype", "float32") == "float32":
            return FLOAT32_REFUSAL
        return find_engine_refusal(model, lora)

    def held_adapters(self) -> LoraConfig | None:
        """Settings of the adapters; see `SupportsUnmergedAdapters`."""
        return self._lora

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuses a cache or a length that no machine has; see `SupportsOptionCheck`."""
        check_sizes(options)

    @classmethod
    def check_model(cls, model: ModelDirectory, *, on_cpu: bool, options: Mapping[str, Any] | None = None) -> None:
        """Refuses families, experts and head sizes that do not run; see `SupportsModelCheck`."""
        del options
        check_vllm_runs(model, on_cpu=on_cpu)

    @property
    def weight_version(self) -> int:
        """The version last committed; 0 for the weights that the engine was built with."""
        return self._state.version

    @property
    def engine_bytes(self) -> int:
        """Bytes of this rank's weights and of the KV cache, which counts 0 while it is released."""
        engine = self._open()
        return self._layout.held_bytes(dist.get_rank()) + engine.adapter_bytes + engine.cache_bytes

    @property
    def staging_bytes(self) -> int:
        """Most that an update takes: vLLM keeps a module's shards until all are there, then packs them.

        That is twice a module; experts are packed into a third copy. Adapters are kept until all are there.
        """
        sizes: dict[str, int] = defaultdict(int)
        adapters = 0
        for name, (box,) in self._layout.boxes_of(dist.get_rank()).items():
            num_bytes = box.numel * self._layout.element_bytes
            if is_adapter_name(name):
                adapters += num_bytes
            else:
                sizes[_module_of(name)] += num_bytes
        return max((3 if module.endswith(".experts") else 2) * size for module, size in sizes.items()) + adapters

    def replica_ranks(self) -> tuple[int, ...]:
        """The ranks of vLLM's tensor-parallel group."""
        return self._open().tp_ranks()

    def weight_layout(self) -> WeightLayout:
        """VLLM's tensor-parallel layout; a tied embedding once."""
        return self._layout

    def begin_weights(self) -> None:
        """Starts an update; see `SupportsShardLoading`."""
        engine = self._open()
        self._state.begin()
        self._factors, self._sends_base, self._has_base = {}, True, False
        engine.begin_update()

    def begin_adapters(self) -> None:
        """Starts an update of the adapters alone; see `SupportsAdapterUpdates`."""
        self._open()
        if self._lora is None or not self._has_base:
            raise BackendError("begin_adapters needs adapters next to a complete base. Call begin_weights")
        self._state.begin(name for name in self._layout.shapes if not is_adapter_name(name))
        self._factors, self._sends_base = {}, False

    def load_shards(self, shards: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Hands this rank's boxes to vLLM's loaders; a layer is packed as soon as it is complete."""
        self._state.check_shards(shards)
        parts = {name: part for name, (part,) in shards.items()}
        self._factors |= {name: part for name, part in parts.items() if is_adapter_name(name)}
        if base := {name: part for name, part in parts.items() if name not in self._factors}:
            self._open().load(base, self._layout)
        self._state.add(shards)

    def load_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Hands the training model's buffers to vLLM's loaders; see `SupportsBufferLoading`."""
        self._state.require_update("load_buffers")
        self._open().load_buffers(buffers)

    def commit_weights(self, version: int) -> None:
        """Declares the weights complete, drops the prefix cache and stamps the samples that follow.

        Raises:
            ReshardError: if parameters did not arrive since `begin_weights`.
        """
        self._state.check_commit(version)
        engine = self._open()
        if self._state.is_updating:
            if self._sends_base:
                engine.finish_update()
            if self._factors:
                engine.put_adapter(self._factors)
            self._factors, self._has_base = {}, True
        engine.reset_prefix_cache()
        self._state.commit(version)

    def generate(self, batch: TensorDict, sampling: SamplingParams) -> TensorDict:
        """Draws `sampling.n` responses to every prompt; see `RolloutBackend.generate`."""
        from hf_engine.rollout.responses import LENGTH, STOP, build_responses, digest_request, read_prompts
        from hf_engine.rollout.stop_strings import load_stop_strings

        with self._replica.together("generate") as agreement:
            engine = self._open()
            self._state.check_ready()
            ends = engine.stop_token_ids
            limits = {"vocab_size": engine.vocab_size, "positions": engine.max_positions}
            prompts = read_prompts(batch, sampling, **limits, ends=ends)
            agreement.number = digest_request(prompts, batch["row_id"], sampling)
            strings = load_stop_strings(engine.model, sampling)
        stops = sorted(ends | set(sampling.stop_token_ids))
        responses = engine.run(batch, sampling, stops, strings)
        return build_responses(
            torch.tensor([token for response in responses for token in response.token_ids], dtype=torch.int64),
            torch.tensor([logprob for each in responses for logprob in each.logprobs], dtype=torch.float32),
            torch.tensor([len(response.token_ids) for response in responses], dtype=torch.int64),
            torch.tensor([STOP if response.is_stopped else LENGTH for response in responses], dtype=torch.int64),
            n=sampling.n,
            version=self._state.version,
        )

    def release(self) -> int:
        """Frees the KV cache; the weights stay, packed as they are."""
        self._state.is_released = True
        return self._open().release_cache()

    def resume(self) -> None:
        """Takes the KV cache's memory again."""
        if self._state.is_released:
            self._open().resume_cache()
            self._state.is_released = False

    def close(self) -> None:
        """Ends the engine and its groups."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            try:
                engine.close()
            finally:
                self._replica.close()

    def _open(self) -> Engine:
        if self._engine is None:
            raise BackendError("the engine was closed. Build another backend")
        return self._engine


def _module_of(name: str) -> str:
    """Name of the module of vLLM that a parameter is packed into, alone or with q, k and v, gate and up, or experts."""
    module = re.sub(r"\.experts\.\d+\..*", ".experts", name.rpartition(".")[0])
    return re.sub(r"\.[qkv]_proj$", ".qkv_proj", re.sub(r"\.(gate|up)_proj$", ".gate_up_proj", module))
