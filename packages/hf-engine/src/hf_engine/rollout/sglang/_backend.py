"""The rollout backend: one SGLang engine for each generation replica, fed by the replica's ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

import torch
import torch.distributed as dist

from hf_engine.agreement import together
from hf_engine.backends.base import SamplingParams
from hf_engine.backends.build_arguments import check_rollout_arguments
from hf_engine.backends.lora_config import LoraConfig
from hf_engine.backends.versions import SGLANG
from hf_engine.model_directory import ModelDirectory
from hf_engine.models.adapter_rules import FLOAT32_REFUSAL, find_engine_refusal, is_adapter_name
from hf_engine.models.lora import plan_engine_adapters
from hf_engine.process_groups import refuse_unused_devices
from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.resharding.model_layouts import generation_layout
from hf_engine.rollout.dtype import RolloutDtype, check_dtype
from hf_engine.rollout.engine_rules import SGLANG_RESERVED, check_sglang_runs
from hf_engine.rollout.loading import WeightState
from hf_engine.rollout.memory import check_sizes, choose_cache_bytes, choose_positions
from hf_engine.rollout.replica import Replica, build_replica, require_process_group
from hf_engine.rollout.sglang._adapters import ADAPTER, build_adapter_options, describe_adapter, find_partial_stack
from hf_engine.rollout.sglang._options import EngineModel, build_options, check_cache_rows, check_more
from hf_engine.rollout.sglang._process import EngineProcess, cut_sample
from hf_engine.rollout.sglang._replicas import build_engine, require_topology
from hf_engine.rollout.sglang._staging import REPORT_BYTES, Staging, cut_buckets, staged_bytes
from hf_protocols.errors import BackendError
from hf_protocols.topology import GenerationSpec, Topology
from hf_protocols.validation import Checks, show

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["AdaptedSglangBackend", "SglangBackend"]

_check = Checks(BackendError)

_SENT = ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "greedy")


class SglangBackend:
    """Generation by SGLang, tensor parallel inside a replica; see `RolloutBackend` for what every method means.

    The first rank of every replica starts the replica's engine in a process of its own, which ends with the rank.
    Tokens are drawn with the numbers of every other backend, so a swap of backends keeps the samples up to rounding.

    Supports `gen_pp_size = 1`, replicas whose ranks share a machine, and models whose parameters `ModelShape` knows.
    """

    sglang_version: ClassVar[str] = SGLANG.check()
    """The installed version; without a supported version this class cannot be imported."""
    largest_generation: ClassVar[GenerationSpec | None] = GenerationSpec(gen_tp_size=8)

    def __init__(
        self,
        engine: EngineProcess | None,
        replica: Replica,
        *,
        model: EngineModel,
        layout: WeightLayout,
        max_positions: int,
        staging_bytes: int,
        timeout_s: float,
    ) -> None:
        self._engine = engine
        self._replica = replica
        self._model = model
        self._layout = layout
        self._cache_tokens = 0
        self._cache_token_bytes = model.cache_token_bytes(len(replica.ranks), layout.dtype)
        self._max_positions = max_positions
        self._max_staging_bytes = staging_bytes
        self._timeout_s = timeout_s
        self._staging = Staging()
        self._is_closed = False
        self._state = WeightState(layout)
        self._requested: dict[str, Any] = {}

    @classmethod
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
        max_rows: int = 256,
        staging_bytes: int = 64 << 20,
        start_timeout_s: float = 900.0,
        timeout_s: float = 3600.0,
        engine_options: Mapping[str, Any] | None = None,
        lora: LoraConfig | None = None,
    ) -> SglangBackend:
        """Starts an engine for every replica. Collective over all ranks; the default process group must be there.

        Args:
            model: directory or hub name.
            topology: ranks and generation sizes.
            seed: SGLang's own; samples derive from `SamplingParams.seed`.
            dtype: of weights and computation, for any training dtype: shards are cast on their way.
            cache_bytes: keys and values of one rank; by default 0.3 of the memory of a device, 256 MiB of a host's.
            cache_fraction: instead, as a share of the device's memory (the host's, without a device), below 1.
            max_positions: prompt and response together, where fewer than the model's are enough.
            max_rows: samples that are decoded together.
            staging_bytes: memory of every rank through which its shards reach the engine.
            start_timeout_s: deadline of the start.
            timeout_s: deadline of every later request to the engine, one whole `generate` included.
            engine_options: more of SGLang's own server arguments, in addition to those that the others set.
            lora: SGLang computes adapters like those of the training backend, which a transition brings.

        Raises:
            BackendError: on every rank, for a layout, a model or adapters that do not run, too small a cache, or an
                engine that does not start.
        """
        require_process_group("sglang")
        # Ranks meet when the replicas form, and would wait there for one that was refused.
        with together("no engine was started"):
            refuse_unused_devices("sglang")
            check_rollout_arguments(topology, seed)
            check_dtype(dtype)
            sizes = {"max_positions": max_positions, "max_rows": max_rows, "staging_bytes": staging_bytes}
            cls.check_options({**sizes, "start_timeout_s": start_timeout_s, "timeout_s": timeout_s})
            cache_bytes = choose_cache_bytes(cache_bytes, cache_fraction)
            topology = require_topology(topology)
            found_model = EngineModel(model, max_positions)
            layout = generation_layout(found_model.shape, topology, dtype=dtype)
            layout, adapted = plan_engine_adapters(cls, found_model.directory, layout, lora)
            positions = choose_positions(max_positions, found_model.shape.max_positions)
            options = build_options(
                found_model,
                dtype=dtype,
                seed=seed,
                tp_size=len(topology.groups("gen_tp")[0]),
                positions=positions,
                cache_bytes=cache_bytes,
                max_rows=max_rows,
                more={} if engine_options is None else engine_options,
            ) | ({} if lora is None else build_adapter_options(lora, adapted))
        with ExitStack() as undo:
            replica = build_replica(topology)
            undo.callback(replica.close)
            engine = build_engine(replica)
            undo.callback(engine.close if engine is not None else lambda: None)
            kind = cls if lora is None else partial(AdaptedSglangBackend, lora=lora, adapted=adapted)
            backend = kind(
                engine,
                replica,
                model=found_model,
                layout=layout,
                max_positions=positions,
                staging_bytes=staging_bytes,
                timeout_s=timeout_s,
            )
            backend._start(options, start_timeout_s)
            undo.pop_all()
        return backend

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuses sizes, deadlines and arguments of SGLang's that no engine can have; see `SupportsOptionCheck`."""
        check_sizes(options)
        for name in ("max_rows", "staging_bytes"):
            if name in options:
                _check.count(name, options[name])
        for name in ("start_timeout_s", "timeout_s"):
            if name in options:
                _check.number(name, options[name])
        check_more(options.get("engine_options", {}))

    @classmethod
    def check_model(cls, model: ModelDirectory, *, on_cpu: bool, options: Mapping[str, Any] | None = None) -> None:
        """Refuses families that SGLang does not run, and what it leaves out; see `SupportsModelCheck`."""
        check_sglang_runs(model, on_cpu=on_cpu, max_positions=(options or {}).get("max_positions"))

    @classmethod
    def find_adapter_refusal(
        cls, model: ModelDirectory, lora: LoraConfig, options: Mapping[str, Any], *, on_cpu: bool
    ) -> str | None:
        """Says why adapters come merged; see `SupportsUnmergedAdapters`."""
        if not on_cpu and options.get("dtype", "float32") == "float32":
            return FLOAT32_REFUSAL
        return find_engine_refusal(model, lora) or find_partial_stack(lora)

    def held_adapters(self) -> LoraConfig | None:
        """None: an engine with adapters has a class of its own; see `SupportsUnmergedAdapters`."""
        return None

    @property
    def weight_version(self) -> int:
        """The version last committed; 0 for the weights that the engine was built with."""
        return self._state.version

    @property
    def engine_bytes(self) -> int:
        """Bytes of this rank's weights and KV cache, in the engine's processes; 0 once they were closed."""
        if self._is_closed:
            return 0
        cache = 0 if self._state.is_released else self._cache_tokens * self._cache_token_bytes
        return self._layout.held_bytes(dist.get_rank()) + cache

    @property
    def staging_bytes(self) -> int:
        """Memory shared with the engine's processes: the `staging_bytes` of `build`, or what all or the largest shard
        takes.
        """
        sizes = [self._staged_bytes(name) for name in self._layout.shapes]
        return REPORT_BYTES + min(sum(sizes), max(self._max_staging_bytes, *sizes))

    def replica_ranks(self) -> tuple[int, ...]:
        """The ranks that feed one engine, in the order of its tensor-parallel ranks."""
        return self._replica.ranks

    def weight_layout(self) -> WeightLayout:
        """SGLang's tensor-parallel layout; a tied embedding once."""
        return self._layout

    def begin_weights(self) -> None:
        """Starts an update; see `SupportsShardLoading`."""
        self._check_open()
        self._state.begin()
        self._call("begin_weights")

    def load_shards(self, shards: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Hands this rank's boxes to SGLang's loaders, through `staging_bytes` of shared memory at a time."""
        with self._replica.together("load_shards") as agreement:
            self._check_open()
            self._state.check_shards(shards)
            agreement.number = crc32(repr(list(shards)).encode())
        self._load_parts(shards)
        self._state.add(shards)

    def load_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Hands the training model's buffers to SGLang's loaders; see `SupportsBufferLoading`."""
        with self._replica.together("load_buffers"):
            self._check_open()
            self._state.require_update("load_buffers")
        boxes = {name: Box.whole(tuple(buffer.shape)) for name, buffer in buffers.items()}
        self._load(buffers, {name: box.shape for name, box in boxes.items()}, boxes)

    def _load_parts(self, shards: Mapping[str, Sequence[torch.Tensor]]) -> None:
        held = {name: boxes[0] for name, boxes in self._layout.boxes_of(dist.get_rank()).items()}
        for names in cut_buckets(list(shards), self._staged_bytes, self._max_staging_bytes):
            self._load({name: shards[name][0] for name in names}, self._layout.shapes, held)

    def _load(
        self, shards: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]], boxes: Mapping[str, Box]
    ) -> None:
        with self._replica.together("load_weights"):
            filled = self._staging.fill(shards, shapes=shapes, boxes=boxes)
        self._call("load_weights", self._replica.gather(filled))
        with self._replica.together("load_weights"):
            self._staging.check_report()

    def commit_weights(self, version: int) -> None:
        """Declares the weights complete, drops the prefix cache and stamps the samples that follow.

        Raises:
            ReshardError: if parameters did not arrive since `begin_weights`.
        """
        with self._replica.together("commit_weights"):
            self._state.check_commit(version)
        if self._state.is_updating:
            self._end_update()
        self._call("flush")
        self._state.commit(version)

    def _end_update(self) -> None:
        self._call("end_weights")

    def generate(self, batch: TensorDict, sampling: SamplingParams) -> TensorDict:
        """Draws `sampling.n` responses to every prompt; see `RolloutBackend.generate`."""
        from hf_engine.rollout.responses import LENGTH, STOP, build_responses, digest_request, read_prompts
        from hf_engine.rollout.sampling import draw_uniforms
        from hf_engine.rollout.stop_strings import load_stop_strings

        with self._replica.together("generate") as agreement:
            self._check_ready()
            ends, vocab_size = self._model.stop_token_ids, self._model.shape.vocab_size
            prompts = read_prompts(batch, sampling, vocab_size=vocab_size, positions=self._max_positions, ends=ends)
            agreement.number = digest_request(prompts, batch["row_id"], sampling)
            check_cache_rows(prompts.lengths.tolist(), sampling, self._cache_tokens, self._cache_token_bytes)
            strings = load_stop_strings(self._model.directory, sampling)
        rows = [row.tolist() for row in batch["prompt_ids"].unbind()]
        uniforms = draw_uniforms(batch["row_id"], sampling).tolist()
        options = {name: getattr(sampling, name) for name in _SENT}
        stops = sorted(ends | set(sampling.stop_token_ids))
        asked = {"n": sampling.n, "sampling": options, "stops": stops, **self._requested}
        samples = self._call("generate", rows, uniforms, **asked) if rows else []
        if strings is not None:
            samples = [cut_sample(sample, strings.cut(sample[0])) for sample in samples]
        return build_responses(
            torch.tensor([token for ids, _, _ in samples for token in ids], dtype=torch.int64),
            torch.tensor([logprob for _, logprobs, _ in samples for logprob in logprobs], dtype=torch.float32),
            torch.tensor([len(ids) for ids, _, _ in samples], dtype=torch.int64),
            torch.tensor([STOP if reason == "stop" else LENGTH for _, _, reason in samples], dtype=torch.int64),
            n=sampling.n,
            version=self._state.version,
        )

    def release(self) -> int:
        """Frees the KV cache on a GPU; SGLang on a CPU can free nothing. The weights stay in the engine."""
        self._call("flush")
        if not torch.cuda.is_available():
            return 0
        if not self._state.is_released:  # SGLang ends where it is asked twice
            self._call("release")
            self._state.is_released = True
        return self._cache_tokens * self._cache_token_bytes

    def resume(self) -> None:
        """Takes the memory of the KV cache again."""
        self._check_open()
        if self._state.is_released:
            self._give_back_memory()
            self._call("resume")
            self._state.is_released = False

    def close(self) -> None:
        """Ends the engine's process."""
        if not self._is_closed:
            self._is_closed = True
            with ExitStack() as each:  # in the reverse order, even if one of them raises
                each.callback(self._replica.close)
                if self._engine is not None:
                    each.callback(self._engine.close)
                each.callback(self._staging.close)

    def _start(self, options: Mapping[str, Any], timeout_s: float) -> None:
        self._give_back_memory()
        try:
            found = self._call("start", options, timeout_s=timeout_s)
        except BackendError as error:
            raise BackendError(
                f"SGLang did not start with {show(self._model.name)}, gen_tp_size={options['tp_size']}, "
                f"max_total_tokens={options['max_total_tokens']} (cache_bytes), "
                f"context_length={options['context_length']} (max_positions + {SGLANG_RESERVED}): {error}"
            ) from error
        self._cache_tokens = found["cache_tokens"]

    def _give_back_memory(self) -> None:
        """Returns the memory that torch keeps of the ranks' devices, so that the engine's processes can take it."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            self._replica.gather(None)  # on all ranks, before the first one asks

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = None, **options: Any) -> Any:
        self._check_open()

        def on_first() -> Any:
            assert self._engine is not None, "the first rank has the engine"
            return self._engine.call(method, *arguments, timeout_s=timeout_s or self._timeout_s, **options)

        return self._replica.on_first(on_first)

    def _check_open(self) -> None:
        if self._is_closed:
            raise BackendError("the engine was closed. Build the backend again")

    def _check_ready(self) -> None:
        self._check_open()
        self._state.check_ready()

    def _staged_bytes(self, name: str) -> int:
        """Of the largest part that a rank of the replica has of a parameter."""
        numel = max(self._layout.boxes_of(rank)[name][0].numel for rank in self._replica.ranks)
        return staged_bytes(numel * self._layout.element_bytes)


class AdaptedSglangBackend(SglangBackend):
    """`SglangBackend` of an engine with one adapter, whose factors every rank holds whole; the first rank's are sent.

    Args:
        lora: settings of the adapter.
        adapted: names of the layers that have it.
        options: of `SglangBackend`.
    """

    def __init__(self, *given: Any, lora: LoraConfig, adapted: Collection[str], **options: Any) -> None:
        super().__init__(*given, **options)
        self._lora = lora
        self._config = describe_adapter(lora, adapted)
        self._factors: dict[str, torch.Tensor] = {}
        self._has_base = True

    def held_adapters(self) -> LoraConfig | None:
        """Settings of the adapters; see `SupportsUnmergedAdapters`."""
        return self._lora

    @property
    def staging_bytes(self) -> int:
        """As that of other engines; the adapter passes the same memory at once."""
        sizes = [self._staged_bytes(name) for name in self._layout.shapes if is_adapter_name(name)]
        return max(super().staging_bytes, REPORT_BYTES + sum(sizes)) + sum(sizes)

    def begin_weights(self) -> None:
        """Starts an update of all; see `SupportsShardLoading`."""
        self._factors, self._has_base = {}, False
        super().begin_weights()

    def begin_adapters(self) -> None:
        """Starts an update of the adapters alone; see `SupportsAdapterUpdates`."""
        self._check_open()
        if not self._has_base:
            raise BackendError("begin_adapters needs a complete base. Call begin_weights")
        self._factors = {}
        self._state.begin(name for name in self._layout.shapes if not is_adapter_name(name))

    def _load_parts(self, shards: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self._factors |= {name: parts[0] for name, parts in shards.items() if is_adapter_name(name)}
        super()._load_parts({name: parts for name, parts in shards.items() if name not in self._factors})

    def _end_update(self) -> None:
        if not self._has_base:
            super()._end_update()
        boxes = {name: Box.whole(tuple(part.shape)) for name, part in self._factors.items()}
        shapes = {name: box.shape for name, box in boxes.items()}
        with self._replica.together("put_adapter"):
            filled = self._staging.fill(self._factors, shapes=shapes, boxes=boxes) if self._factors else ""
        self._call("put_adapter", ADAPTER, filled, self._config)
        self._requested = {"adapter": ADAPTER}
        self._factors, self._has_base = {}, True
