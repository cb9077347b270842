"""vLLM's engine inside this process: how it is started, what it is asked, how it ends."""

from __future__ import annotations

import gc
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_engine.backends.base import SamplingParams
from hf_engine.backends.lora_config import LoraConfig
from hf_engine.model_directory import check_model_directory, read_end_of_sequence_ids, read_model_directory
from hf_engine.process_groups import default_timeout
from hf_engine.resharding.layouts import DTYPE_BYTES, WeightLayout
from hf_engine.resharding.model_layouts import generation_layout
from hf_engine.rollout.engine_rules import check_vllm_runs, window_override
from hf_engine.rollout.memory import choose_positions, take_again
from hf_engine.rollout.shard import ShardTensor
from hf_engine.rollout.vllm._adapters import EngineAdapter, build_adapter_arguments
from hf_engine.rollout.vllm._core import (
    CPUAttentionBackend,
    EngineArgs,
    LLMEngine,
    WeightTransferConfig,
    current_platform,
    parallel_state,
)
from hf_engine.rollout.vllm._draws import DrawProcessor
from hf_engine.rollout.vllm._families import expected_head_size, families_as_trained
from hf_engine.rollout.vllm._groups import GROUPS, current_tp_ranks, destroy_groups
from hf_engine.rollout.vllm._library import options_set, serving_threads
from hf_engine.rollout.vllm._process import collector_kept, started_here
from hf_engine.rollout.vllm._requests import EngineResponse, run_requests
from hf_engine.rollout.vllm._weights import TRANSFER, register_transfer
from hf_protocols.errors import BackendError
from hf_protocols.foreign_code import raised_as
from hf_protocols.models import ModelShape
from hf_protocols.topology import Topology

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_engine.rollout.stop_strings import StopStrings


__all__ = ["Engine", "check_cache", "plan_layout"]


def plan_layout(model: str | Path, topology: Topology, dtype: str) -> tuple[ModelShape, WeightLayout]:
    """The model's shape, and the layout that vLLM will have.

    Raises:
        BackendError: before anything starts, for a model or a layout that does not run here.
    """
    generation = topology.generation
    assert generation is not None, "the backend has set it"
    if generation.gen_pp_size != 1:
        raise BackendError(
            f"backend 'vllm' has no pipeline stages in generation: gen_pp_size={generation.gen_pp_size} is not "
            "supported. Set it to 1 and raise gen_tp_size"
        )
    if unordered := [group for group in topology.groups("gen_tp") if list(group) != sorted(group)]:
        raise BackendError(f"vLLM orders the ranks of a group by number; the groups {unordered} are ordered otherwise")
    files = read_model_directory(model)
    shape = check_vllm_runs(files, on_cpu=current_platform.is_cpu(), gen_tp_size=generation.gen_tp_size)
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    is_latent = files.text_config.get("kv_lora_rank") is not None
    if current_platform.is_cpu() and not is_latent and shape.head_dim not in sizes:
        raise files.refusal(
            f"has head_dim={shape.head_dim}; vLLM on a CPU runs {sizes}. Choose another model, or rollout backend "
            "'transformers'"
        )
    check_model_directory(files)
    return shape, generation_layout(shape, topology, dtype=dtype)


def check_cache(
    shape: ModelShape, topology: Topology, *, dtype: str, cache_bytes: int, max_positions: int | None
) -> None:
    """Refuses a second engine in the process, and a cache that holds no sequence.

    Raises:
        BackendError: before anything starts.
    """
    if parallel_state.model_parallel_is_initialized():
        raise BackendError("a process runs one vLLM engine at a time. Close the other backend first")
    positions = choose_positions(max_positions, shape.max_positions)
    needed = positions * _cache_bytes_per_token(shape, topology, dtype)
    if needed > cache_bytes:
        raise BackendError(
            f"one sequence of {positions} positions needs {needed} bytes of keys and values, above "
            f"cache_bytes={cache_bytes}. Raise cache_bytes or lower max_positions"
        )


_ON_DEVICES = {
    # vLLM refuses to start where less than this share is free, though the size of its cache is given. Training weights
    # are there too.
    "gpu_memory_utilization": 0.01,
    # It looks for the GPUs of other ranks, of which a process on Ray sees none, and it knows no deadline.
    "disable_custom_all_reduce": True,
}
"""Arguments on GPUs, read in vLLM 0.32 and not run."""


class Engine:
    """One rank's engine; the ranks of a replica call every method with the same arguments.

    Args:
        model: directory or hub name.
        shape: the same, as we read it.
        topology: generation replicas.
        dtype: of weights and computation.
        seed: vLLM's own.
        cache_bytes: keys and values of this rank.
        max_positions: longest sequence; None for the model's.
        lora: settings of an adapter that is computed unmerged; None: without one.
        adapted: names of the layers that have it.

    Raises:
        BackendError: if another engine is in this process, or vLLM refuses.
    """

    def __init__(
        self,
        model: str | Path,
        shape: ModelShape,
        topology: Topology,
        *,
        dtype: str,
        seed: int,
        cache_bytes: int,
        max_positions: int | None,
        lora: LoraConfig | None = None,
        adapted: Collection[str] = (),
    ) -> None:
        register_transfer()
        files, groups = read_model_directory(model), topology.groups("gen_tp")
        deadline_s = math.ceil(default_timeout().total_seconds())  # torch's own would be half an hour
        positions = choose_positions(max_positions, shape.max_positions)
        on_cpu, on_gpu = "cpu_support.vllm_worker.TopologyCpuWorker", "rollout.vllm._gpu_worker.TopologyGpuWorker"
        worker = on_cpu if current_platform.is_cpu() else on_gpu
        arguments = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            trust_remote_code=False,
            load_format="safetensors",  # else it would unpickle where a directory has other files
            dtype=dtype,
            seed=seed % (1 << 32),  # vLLM takes no other; nothing is drawn with it
            # vLLM itself would take more than the model has where rotary positions are scaled
            max_model_len=positions,
            kv_cache_memory_bytes=cache_bytes,
            tensor_parallel_size=len(groups[0]),
            distributed_executor_backend="external_launcher",
            worker_cls=f"hf_engine.{worker}",
            additional_config={GROUPS: groups},
            distributed_timeout_seconds=deadline_s,
            cpu_distributed_timeout_seconds=deadline_s,
            weight_transfer_config=WeightTransferConfig(backend=TRANSFER),
            logits_processors=[DrawProcessor],
            logprobs_mode="processed_logits",
            enforce_eager=True,
            async_scheduling=False,
            disable_log_stats=True,
            hf_overrides=window_override(files),
            **({} if current_platform.is_cpu() else _ON_DEVICES),
            **({} if lora is None else build_adapter_arguments(lora, adapted)),
        )
        with (
            raised_as(  # vLLM and what it builds on raise errors of many kinds
                lambda error: BackendError(
                    f"vLLM did not start with {str(model)!r}, gen_tp_size={len(groups[0])}, cache_bytes={cache_bytes}, "
                    f"max_positions={positions}: {str(error).rstrip('.')}. Raise cache_bytes if the cache is too "
                    "small, lower it if there is less memory"
                )
            ),
            ExitStack() as undo,
            families_as_trained(),
            started_here(),
        ):
            undo.callback(destroy_groups)
            self._engine = LLMEngine.from_engine_args(arguments)
            undo.pop_all()
        # It would destroy the default process group, which is the caller's; `close` does the rest of it.
        self._engine.engine_core._finalizer.detach()
        layers = self._engine.vllm_config.compilation_config.static_forward_context.values()
        sizes = {layer.head_size for layer in layers if hasattr(layer, "head_size")}
        if sizes != {head_size := expected_head_size(files, shape)}:
            self.close()
            raise BackendError(
                f"vLLM built {str(model)!r} with heads of {sorted(sizes)}, its config says {head_size}: vLLM's "
                "class of this family derives it. Choose another model, or the rollout backend 'transformers'"
            )
        self._worker = self._engine.model_executor.driver_worker.worker
        self._adapter = None if lora is None else EngineAdapter(self._worker, lora, adapted)
        caches = [cache.untyped_storage() for cache in self._worker.model_runner.kv_caches]
        self._caches = list({storage._cdata: storage for storage in caches}.values())
        self._cache_sizes = [storage.nbytes() for storage in self._caches]
        self._is_broken = False
        self._num_frozen = gc.get_freeze_count()

    @property
    def model(self) -> str:
        """Directory or hub name."""
        return str(self._engine.model_config.model)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return int(self._engine.model_config.get_vocab_size())

    @property
    def max_positions(self) -> int:
        """Longest sequence, prompt and response together."""
        return int(self._engine.model_config.max_model_len)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The model's own end-of-sequence tokens."""
        return read_end_of_sequence_ids(read_model_directory(self.model))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache that are allocated now."""
        return sum(storage.nbytes() for storage in self._caches)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the buffers in which layers hold the adapter."""
        return 0 if self._adapter is None else self._adapter.num_bytes

    def tp_ranks(self) -> tuple[int, ...]:
        """Global ranks of vLLM's tensor-parallel group."""
        return current_tp_ranks()

    @options_set()
    def run(
        self, batch: TensorDict, sampling: SamplingParams, stops: Sequence[int], strings: StopStrings | None
    ) -> list[EngineResponse]:
        """All samples of a batch; see `run_requests`.

        Raises:
            BackendError: if an earlier call failed on the way; the engine is of no use any more.
        """
        if self._is_broken:
            # What it left of its requests keeps vLLM busy without an end.
            raise BackendError("vLLM failed in an earlier generate. Close this backend and build another")
        self._is_broken = True
        adapter = None if self._adapter is None else self._adapter.request
        with serving_threads():
            responses = run_requests(self._engine, batch, sampling, stops, strings, adapter=adapter)
        self._is_broken = False
        return responses

    @options_set()
    def begin_update(self) -> None:
        """Prepares the layers for new weights; an update that did not finish is dropped."""
        self._worker._weight_update_active = False
        self._engine.collective_rpc("start_weight_update")

    @options_set()
    def load(self, parts: dict[str, torch.Tensor], layout: WeightLayout) -> None:
        """Hands this rank's part of every parameter to vLLM's loaders, which see whole ones."""
        held = layout.boxes_of(dist.get_rank())
        shards = []
        for name, part in parts.items():
            (box,) = held[name]
            shards.append((name, ShardTensor(name, layout.shapes[name], box, part)))
        self._send(shards)

    @options_set()
    def load_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Hands whole tensors to vLLM's loaders; copies, since an update keeps them until a module is complete."""
        self._send([(name, buffer.clone()) for name, buffer in buffers.items()])

    @options_set()
    def finish_update(self) -> None:
        """Packs the weights. vLLM forgets the adapter then."""
        self._engine.collective_rpc("finish_weight_update")

    @options_set()
    def put_adapter(self, factors: Mapping[str, torch.Tensor]) -> None:
        """Replaces the adapter; the base stays."""
        assert self._adapter is not None, "the layout has no adapter"
        self._adapter.put(factors)

    @options_set()
    def reset_prefix_cache(self) -> None:
        """Forgets the keys and values of all prompts.

        Raises:
            BackendError: if vLLM keeps them, which requests under way would have it do.
        """
        if not self._engine.reset_prefix_cache():
            raise BackendError("vLLM did not drop its prefix cache. Close this backend and build another")

    def _send(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._engine.collective_rpc("update_weights", args=({"shards": named},))

    def release_cache(self) -> int:
        """Frees the KV cache; the bytes freed."""
        freed = self.cache_bytes
        self.reset_prefix_cache()
        for storage in self._caches:
            storage.resize_(0)
        return freed

    def resume_cache(self) -> None:
        """Takes the KV cache's memory again."""
        take_again(self._caches, self._cache_sizes)

    @options_set()
    def close(self) -> None:
        """Ends what vLLM's own shutdown ends, except the default process group."""
        core = self._engine.engine_core.engine_core
        core.structured_output_manager.clear_backend()
        with collector_kept():
            core.model_executor.shutdown()
        core.scheduler.shutdown()
        is_frozen = gc.get_freeze_count() > self._num_frozen
        del core
        vars(self).clear()
        destroy_groups()
        if is_frozen:  # by the rank after the start, with the engine's cycles
            gc.unfreeze()
        gc.collect()


def _cache_bytes_per_token(shape: ModelShape, topology: Topology, dtype: str) -> int:
    """Keys and values of one token over all layers on one rank; vLLM rounds tokens up to blocks."""
    generation = topology.generation
    assert generation is not None, "the backend has set it"
    heads = max(1, shape.num_kv_heads // generation.gen_tp_size)
    return 2 * shape.num_layers * heads * shape.head_dim * DTYPE_BYTES[dtype]
