"""Training with FSDP2: any causal language model of transformers, sharded on dimension 0 over all ranks.

The same code runs on CPUs over gloo and on GPUs over NCCL.
"""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh

from hf_engine.agreement import together
from hf_engine.backends.base import Head, LossFunction, TrainConfig
from hf_engine.backends.build_arguments import check_data_parallel, check_train_arguments, require_head
from hf_engine.backends.closed import Closed
from hf_engine.backends.gradients import with_gradients
from hf_engine.backends.lora_config import LoraConfig
from hf_engine.model_directory import VALUE_HEAD, ExportDtype, ModelDirectory, check_export_dtype
from hf_engine.models.attention import choose_attention
from hf_engine.models.causal_lm import find_head_name, save_causal_lm
from hf_engine.models.classifier import build_by_architecture
from hf_engine.models.conversions import find_buffer_owners, persistent_buffers, read_file_names
from hf_engine.models.lora import check_model_adapters, named_parameters
from hf_engine.models.rope import find_rope_limits
from hf_engine.models.stacked_experts import layout_in_files, tensors_in_files
from hf_engine.process_groups import build_groups, keeping_random_numbers, local_device, sum_over_group
from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import WeightLayout, fsdp_layout
from hf_engine.training.batch_agreement import agree_on_micro_batches
from hf_engine.training.directories import check_directory, write_directory
from hf_engine.training.fsdp._kept_pass import KeptPass, WeightState, is_small
from hf_engine.training.fsdp._model import (
    check_same_shapes,
    forward_tokens,
    gather_on_first,
    load_with_head,
    shapes_of,
    shard_model,
)
from hf_engine.training.fsdp._scored import forward_scores, read_sequences
from hf_engine.training.fsdp._shared_prompts import SharedPrompts
from hf_engine.training.fsdp._state import FsdpState, StateFacts
from hf_engine.training.loss import StepLoss
from hf_engine.training.micro_batches import MicroBatch, SequenceBatch, find_enough_tokens
from hf_engine.training.offload import OffloadedMemory
from hf_engine.training.optimizer import ShardedAdamW, local_shard
from hf_engine.training.outputs import OutputRequest, TokenColumn
from hf_engine.training.steps import StepOptimizer, TrainSteps, require_trainable
from hf_protocols.errors import BackendError
from hf_protocols.models import ModelShape
from hf_protocols.topology import ParallelSpec, Topology
from hf_protocols.validation import Checks

__all__ = ["FsdpBackend"]

_check = Checks(BackendError)

_MOST_KEPT_BYTES = 256 << 20
"""Limit of gathered weights that are kept between passes. The mapper plans no memory for them."""


class FsdpBackend(TrainSteps):
    """The FSDP2 training backend; see `TrainBackend` for what every method means.

    Supports data parallelism only: `pp_size = tp_size = cp_size = ep_size = 1`. Dropout is off, so that scored,
    sampled and trained log-probs agree.
    """

    one_layout_per_process: ClassVar[bool] = False
    _adapted_kind: ClassVar[type[FsdpBackend]]
    """The class of models with adapters; it registers itself."""

    def __init_subclass__(cls, *, is_adapted: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        if is_adapted:
            FsdpBackend._adapted_kind = cls

    def __init__(
        self, model: Any, *, topology: Topology, config: TrainConfig, head: Head, trainable: bool, seed: int
    ) -> None:
        self._config, self._head, self._adapting = config, head, (config.lora, seed)
        self._head_name = find_head_name(model)
        self._device, self._model, self._file_names = local_device(), model, read_file_names(model)
        self._shared_prompts = SharedPrompts(model, config, head=head)
        self._rope_limits = find_rope_limits(model.config.get_text_config())
        self._group, self._ranks = build_groups(topology, "dp"), topology.group_of("dp", dist.get_rank())
        super().__init__(self._group, config)
        self._facts = StateFacts(topology, config, head=head, head_name=self._head_name, seed=seed)
        self._root = shard_model(
            model, config, DeviceMesh.from_group(self._group, self._device.type, mesh_dim_names=("dp",))
        )
        self._parameters, self._buffer_owners = named_parameters(model), find_buffer_owners(model)
        self._own = {name: local_shard(parameter) for name, parameter in self._parameters.items()}
        # Of the shards under the names of the modules, which need not be the files'.
        shapes, dtype = shapes_of(self._parameters), str(self._dtype).removeprefix("torch.")
        self._layout = fsdp_layout(shapes, self._ranks, dtype=dtype)
        self._optimizer = ShardedAdamW(self._parameters.values(), config) if trainable else None
        self._offloaded = OffloadedMemory(lambda: self._shards().values())
        self._has_unreduced_gradients = False
        self._kept: KeptPass | None = None
        whole_bytes = sum(map(math.prod, shapes.values())) * getattr(torch, config.dtype).itemsize
        self._keeps_gathered = trainable and config.shard == "root" and whole_bytes <= _MOST_KEPT_BYTES
        """True if scoring keeps the weights that it gathered, for the update that follows."""
        self._gathered: WeightState | None = None
        """Weights that a scoring has kept. `state_dict()` of the model would free them behind this note."""

    @classmethod
    @with_gradients()
    def build(
        cls,
        model: str | Path,
        *,
        topology: Topology,
        config: TrainConfig,
        head: Head = "lm",
        trainable: bool = True,
        seed: int = 0,
    ) -> FsdpBackend:
        """Loads the model on every rank and keeps this rank's shards; see `TrainBackend.build`.

        Raises:
            BackendError: for a layout with more than data parallelism, or on every rank for a model that any of them
                cannot load.
        """
        check_train_arguments(topology, config, head=head, trainable=trainable, seed=seed, scores=True, adapts=True)
        check_data_parallel("fsdp", topology.train)
        dtype = torch.float32 if trainable else getattr(torch, config.dtype)
        kind = cls if config.lora is None else cls._adapted_kind
        with together("nothing was loaded"), keeping_random_numbers():
            loaded, _ = load_with_head(model, dtype, head, config.lora, seed)
            choose_attention(loaded, config.attn_implementation, local_device())
        if not trainable:
            loaded.requires_grad_(False)
        return kind(loaded, topology=topology, config=config, head=head, trainable=trainable, seed=seed)

    @classmethod
    def check_model(cls, model: ModelDirectory, *, on_cpu: bool, options: Mapping[str, Any] | None = None) -> None:
        """Refuses a configuration that transformers cannot build; see `SupportsModelCheck`."""
        del on_cpu, options
        build_by_architecture(model)

    @classmethod
    def check_adapters(cls, model: ModelDirectory, lora: LoraConfig, *, head: Head) -> None:
        """Refuses targets that the model lacks; see `SupportsAdapterCheck`."""
        check_model_adapters(model, lora, head)

    @classmethod
    def check_layout(cls, sizes: ParallelSpec, shape: ModelShape) -> None:
        """Refuses more than data parallelism; see `SupportsLayoutCheck`."""
        check_data_parallel("fsdp", sizes)

    @property
    def compute_dtype(self) -> str:
        """Of forward and backward passes, by torch's name."""
        return self._config.dtype

    def weight_layout(self) -> WeightLayout:
        """dim-0 shards of every parameter, experts whole: those of a layer are stacked. A tied embedding once."""
        return layout_in_files(self._file_names, self._layout)

    def local_weights(self) -> Mapping[str, torch.Tensor]:
        """This rank's shards, views of the live weights."""
        self._offloaded.require_weights("local_weights")
        self._drop_passes()  # a transition takes the shards' memory, or others write to them
        first_rows = {name: box.offset[0] for name, (box,) in self._layout.boxes_of(dist.get_rank()).items()}
        return tensors_in_files(self._file_names, self._shards(), first_rows)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The model's persistent buffers, whole on every rank; see `SupportsBuffers`."""
        return tensors_in_files(self._file_names, persistent_buffers(self._buffer_owners))

    def padding(self) -> Sequence[torch.Tensor]:
        """Of every parameter of which this rank has no rows: room for as many as the fullest rank has."""
        return [shard for shard in self._shards().values() if not shard.numel()]

    def compute_logprobs(
        self,
        batch: TensorDict,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        top_k: int = 0,
        keep_graph: bool = False,
    ) -> TensorDict:
        """Columns `logprobs` and more of the response tokens; see `TrainBackend.compute_logprobs`."""
        require_head(self._head, "lm", "compute_logprobs")
        request = OutputRequest(temperature=temperature, entropy=entropy, top_k=top_k)
        return self._score(batch, request, request.columns(), keep_graph=keep_graph)

    def compute_values(self, batch: TensorDict, *, keep_graph: bool = False) -> TensorDict:
        """Column `values`; see `TrainBackend.compute_values`."""
        require_head(self._head, "value", "compute_values")
        return self._score(batch, OutputRequest(), {"values": TokenColumn()}, keep_graph=keep_graph)

    def compute_scores(self, batch: TensorDict) -> TensorDict:
        """Column `scores`; see `SupportsScores`."""
        require_head(self._head, "score", "compute_scores")
        return self._score(batch, OutputRequest(), {"scores": TokenColumn()})

    def set_learning_rate(self, learning_rate: float, *, constant: bool = False) -> None:
        """Uses another learning rate from the next step on; see `TrainBackend.set_learning_rate`."""
        require_trainable(self._optimizer, "set_learning_rate").learning_rate.set(learning_rate, constant=constant)

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        """Adds each value over the data-parallel ranks."""
        return sum_over_group(values, self._group, self._device)

    @with_gradients()
    def load_hf(self, directory: str | Path) -> None:
        """Replaces the weights by those of a Hugging Face directory; see `TrainBackend.load_hf`."""
        self._offloaded.require_all("load_hf")
        with together("nothing was loaded", self._group):
            check_directory(directory)
            loaded, has_head = load_with_head(Path(directory), self._dtype, self._head, *self._adapting)
            full, buffers = named_parameters(loaded), persistent_buffers(find_buffer_owners(loaded))
            own = persistent_buffers(self._buffer_owners)
            check_same_shapes({**self._layout.shapes, **shapes_of(own)}, full | buffers, directory)
        full.pop("" if has_head else self._head_name, None)
        boxes = self._layout.boxes_of(dist.get_rank())
        self._note_change()
        with torch.no_grad():
            for name, buffer in buffers.items():
                own[name].copy_(buffer)
            for name, shard in ((name, shard) for name, shard in self._shards().items() if name in full):
                shard.copy_(full[name][boxes[name][0].slices_in(Box.whole(full[name].shape))])
        if self._optimizer is not None:
            self._optimizer = ShardedAdamW(self._parameters.values(), self._config)

    def export_hf(self, directory: str | Path, *, dtype: ExportDtype = "source") -> None:
        """Writes config and safetensors from rank 0; see `TrainBackend.export_hf`."""
        self._offloaded.require_weights("export_hf")
        with together("nothing was written", self._group):
            check_directory(directory)
            check_export_dtype(dtype)
        is_writer = dist.get_rank(self._group) == 0
        full = gather_on_first(*self._whole_model(), self._ranks, self._group, self._device)
        if self._head != "lm" and self._head_name and is_writer:
            full[VALUE_HEAD] = full.pop(self._head_name)

        def write(path: Path) -> None:
            if is_writer:
                head = VALUE_HEAD if VALUE_HEAD in full else self._head_name
                save_causal_lm(self._model, full, path, head=head, dtype=dtype)

        write_directory(directory, write, self._group)

    def offload(self, *, weights: bool = False) -> int:
        """Gives up moments and gradients; the weights are the float32 masters. See `TrainBackend.offload`."""
        self._drop_passes()
        states = [] if self._optimizer is None else list(self._optimizer.moments())
        if self._optimizer is not None and self._waiting.calls:
            states += self._optimizer.gradients()
        return self._offloaded.give_up(states=states, weights=weights)

    def reload(self) -> None:
        """Takes back what `offload` gave up."""
        self._offloaded.restore()

    def close(self) -> None:
        """Frees weights, gradients and optimizer state."""
        self._kept = None
        closed = cast("Any", Closed())
        self._model = self._root = self._parameters = self._own = self._file_names = closed
        self._optimizer = self._offloaded = closed
        gc.collect()  # FSDP's hooks and modules refer to each other

    def _shards(self) -> dict[str, torch.Tensor]:
        return dict(self._own)

    def _state_optimizer(self) -> ShardedAdamW | None:
        return self._optimizer

    def _state_parts(self, method: str) -> FsdpState:
        self._offloaded.require_all(method)
        self._free_gathered()  # they would hide a load
        return FsdpState(
            self._facts, self._parameters, self._layout, self._file_names, self._optimizer, buffers=self.buffers()
        )

    def _whole_model(self) -> tuple[WeightLayout, Mapping[str, torch.Tensor]]:
        """Layout and shards of the model that an export holds, under the names of its modules."""
        return self._layout, self._shards()

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self._parameters.values())).dtype

    def _score(
        self,
        batch: TensorDict,
        request: OutputRequest,
        kinds: Mapping[str, TokenColumn],
        *,
        keep_graph: bool = False,
    ) -> TensorDict:
        self._offloaded.require_weights("scoring")
        sequences, micro_batches = self._agreed_micro_batches(batch, request, 1.0, needs_rows=False)
        keeps = keep_graph and self._may_keep(micro_batches)
        if keep_graph:
            self._kept = None
        if keeps and self._head == "lm":
            request = replace(request, entropy=True)  # which most losses of a policy report
        parts: dict[str, list[tuple[MicroBatch, torch.Tensor]]] = defaultdict(list)
        # Buffers that FSDP2 allocates in inference mode cannot be written outside it.
        with torch.inference_mode(False), torch.set_grad_enabled(keeps), ExitStack() as end:
            end.callback(self._free_gathered)
            for micro_batch in micro_batches:
                outputs = self._forward(micro_batch, request=request)
                for name in kinds:
                    parts[name].append((micro_batch, outputs[name].detach()))
                if keeps:
                    tokens = [each.clone() for each in sequences.list_tokens()]
                    self._kept = KeptPass(tokens, micro_batches, request, self._weights_now(), outputs)
            if self._keeps_gathered:
                self._gathered = self._weights_now()
                end.pop_all()
        return TensorDict({name: sequences.jagged(parts[name], *kind) for name, kind in kinds.items()}, [len(batch)])

    def _weights_now(self) -> WeightState:
        """Changes that were counted, and writes to the shards: others may write to what `local_weights` returned."""
        return self.weight_changes, sum(shard._version for shard in self._shards().values())

    def _free_gathered(self) -> None:
        self._gathered = None
        self._root.reshard()

    def _drop_passes(self) -> None:
        """Drops the kept pass and the gathered weights."""
        self._kept = None
        self._free_gathered()

    def _may_keep(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Returns True if an update can go on from a pass on these, and what it holds until then is little."""
        has_graph = self._optimizer is not None and not torch.is_inference_mode_enabled()
        return has_graph and is_small(micro_batches, self._config.micro_batch_tokens)

    def _take_kept(self, micro_batches: Sequence[MicroBatch], request: OutputRequest) -> dict[str, torch.Tensor] | None:
        """The requested outputs of the kept pass if it was on these, which all ranks know alike; drops another one."""
        kept, self._kept = self._kept, None
        return kept.select(request) if kept is not None and micro_batches is kept.micro_batches else None

    def _drop_gradients(self, optimizer: StepOptimizer | None) -> None:
        self._drop_passes()
        super()._drop_gradients(optimizer)

    def _forward(self, micro_batch: MicroBatch, *, request: OutputRequest) -> dict[str, torch.Tensor]:
        """Outputs at the response tokens [b, T], or one score for each sequence."""
        if self._head == "score":
            return forward_scores(self._model, micro_batch, self._device)
        return forward_tokens(self._model, micro_batch, self._device, head=self._head, request=request)

    def _prepare_step(self, method: str) -> ShardedAdamW:
        optimizer = require_trainable(self._optimizer, method)
        self._offloaded.require_all(method)
        return optimizer

    def _add_gradients(
        self,
        loss: StepLoss,
        micro_batches: Sequence[MicroBatch],
        request: OutputRequest,
        denominator: float,
        *,
        is_first: bool,
    ) -> None:
        kept = self._take_kept(micro_batches, request)
        self._gathered = None  # the last backward pass frees them
        with self._accumulating(is_first=is_first):
            for number, micro_batch in enumerate(micro_batches, 1):
                self._reduce_after_backward(number == len(micro_batches))
                outputs = self._forward(micro_batch, request=request) if kept is None else kept
                torch.autograd.backward(loss.of(micro_batch, outputs) / denominator)

    @contextmanager
    def _accumulating(self, *, is_first: bool) -> Iterator[None]:
        """Starts a step without gradients, those included that a call which failed left before their reduction."""
        if self._has_unreduced_gradients:
            self._reduce_after_backward(True)
            outputs = self._forward(MicroBatch.dummy(), request=OutputRequest())
            torch.autograd.backward([output.sum() * 0.0 for output in outputs.values()])
        if is_first:
            require_trainable(self._optimizer, "a step").zero_grad()
        self._has_unreduced_gradients = True
        with ExitStack() as on_failure:
            on_failure.callback(self._root.reshard)  # else a load or an offload that follows would be missed
            yield
            on_failure.pop_all()
        self._has_unreduced_gradients = False

    def _reduce_after_backward(self, reduces: bool) -> None:
        """Sets whether the next backward pass sums gradients over ranks and releases the gathered weights.

        With `shard="root"` weights and gradients are whole at the end of every backward pass: only the last one of a
        step has to. With `shard="layer"` each one does, so that one layer at a time is whole.
        """
        if self._config.shard == "root":
            self._root.set_requires_gradient_sync(reduces)
            self._root.set_reshard_after_backward(reduces)

    def _agreed_micro_batches(
        self,
        batch: TensorDict,
        request: OutputRequest,
        denominator: float,
        *,
        needs_rows: bool,
        loss_fn: LossFunction | None = None,
    ) -> tuple[SequenceBatch, Sequence[MicroBatch]]:
        del loss_fn  # ranks of their own rows may have losses of their own

        def prepare() -> SequenceBatch:
            _check.number("denominator", denominator)
            vocab_size = self._model.get_input_embeddings().weight.shape[0]
            request.check(vocab_size)
            sequences = read_sequences(self._head, batch, vocab_size, candidates=request.candidates)
            sequences.rope_limits = self._rope_limits
            return self._shared_prompts.prepare(sequences)

        # With `shard="layer"` every micro-batch gathers every layer.
        gathers = self._config.shard == "layer" and len(self._ranks) > 1
        kept = self._kept if self._kept is not None and self._kept.serves(request, self._weights_now()) else None
        agreed = agree_on_micro_batches(
            prepare,
            self._config.micro_batch_tokens,
            self._group,
            self._device,
            needs_rows=needs_rows,
            enough_tokens=None if gathers else find_enough_tokens(self._device),
            arguments={"temperature": request.temperature, "denominator": denominator},
            kept=None if kept is None else (kept.tokens, kept.micro_batches),
            holds_weights=self._gathered is not None and self._gathered == self._weights_now(),
        )
        if not agreed.all_hold_weights:
            # Another rank may have freed its gathered weights, or may have other shards: all ranks gather, or none.
            self._free_gathered()
        return agreed.sequences, agreed.micro_batches

    def _measure(self, loss: float, failed: bool) -> tuple[float, float, bool]:
        optimizer = require_trainable(self._optimizer, "a step")
        total, squared_norm, failures = self.sum_over_data([loss, optimizer.squared_grad_norm(), float(failed)])
        return total, float(squared_norm**0.5), failures > 0
