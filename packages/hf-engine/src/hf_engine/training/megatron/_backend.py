"""The megatron training backend."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from tensordict import TensorDict

from hf_engine.agreement import together
from hf_engine.backends.base import Head, LossFunction, Metrics, TrainConfig
from hf_engine.backends.build_arguments import check_train_arguments
from hf_engine.backends.closed import Closed
from hf_engine.backends.gradients import with_gradients
from hf_engine.model_directory import (
    ExportDtype,
    ExportSource,
    ModelDirectory,
    check_export_dtype,
    check_model_directory,
    read_model_directory,
)
from hf_engine.process_groups import local_device, refuse_unused_devices, sum_over_group, world_group
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.training.batch_agreement import agree_on_micro_batches
from hf_engine.training.directories import write_directory
from hf_engine.training.loss import StepLoss
from hf_engine.training.megatron._config import MegatronModelConfig, check_divisible, estimate_sharing
from hf_engine.training.megatron._export import export_stage
from hf_engine.training.megatron._optimizer import DistributedAdamW
from hf_engine.training.megatron._parallel import ParallelGroups, check_sizes
from hf_engine.training.megatron._schedule import run_backward, run_forward
from hf_engine.training.megatron._stage import PipelineStage
from hf_engine.training.megatron._state import MegatronState
from hf_engine.training.micro_batches import MicroBatch, SequenceBatch
from hf_engine.training.outputs import OutputRequest, TokenColumn
from hf_engine.training.steps import TrainSteps, require_trainable
from hf_protocols.errors import BackendError, HybridFlowError
from hf_protocols.models import ModelShape
from hf_protocols.topology import ParallelSpec, Topology
from hf_protocols.validation import Checks, show

__all__ = ["MegatronBackend"]

_check = Checks(BackendError)


class MegatronBackend(TrainSteps):
    """The megatron-core training backend; see `TrainBackend` for what every method means.

    Runs any pp-tp-dp layout, and ep for a mixture of experts. Every rank of a replica gets the same rows, which is
    checked, and returns the same results: the last pipeline stage computes them and sends them to the others.
    `TrainConfig.shard` is FSDP's and has no meaning here. Dropout is off.
    """

    one_layout_per_process: ClassVar[bool] = True

    def __init__(
        self,
        model: MegatronModelConfig,
        source: ExportSource,
        *,
        groups: ParallelGroups,
        config: TrainConfig,
        head: Head,
        trainable: bool,
    ) -> None:
        self._config = config
        self._head = head
        self._source = source
        self._groups = groups
        self._window = model.window
        self._sharing = estimate_sharing(model.shape, groups.topology.train, config)
        self._world = world_group()
        self._device = local_device()
        super().__init__(self._world, config)
        self._stage = PipelineStage(model, groups, config, head=head, trainable=trainable, device=self._device)

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
    ) -> MegatronBackend:
        """Loads a directory in Hugging Face format, or a name on the hub; see `TrainBackend.build`.

        Every rank reads its own boxes only. Two backends of one process must have the same layout.
        """
        check_train_arguments(topology, config, head=head, trainable=trainable, seed=seed)
        if config.compile:
            raise BackendError("backend 'megatron' does not use torch.compile. Set compile=False")
        if config.attn_implementation not in ("auto", "sdpa"):
            raise BackendError(
                f"attn_implementation={show(config.attn_implementation)}: backend 'megatron' computes attention with "
                "torch's scaled_dot_product_attention. Use 'auto' or 'sdpa'"
            )
        with together("nothing was loaded"):
            refuse_unused_devices("megatron")
            files = read_model_directory(model)
            described = MegatronModelConfig.of(files)
            check_model_directory(files, head=head)
            source = ExportSource.of(files)
        groups = ParallelGroups(topology, seed=seed)
        with ExitStack() as undo:
            undo.callback(groups.close)
            backend = cls(described, source, groups=groups, config=config, head=head, trainable=trainable)
            backend._stage.load_hf(backend._stage.open_hf(files.path))
            undo.pop_all()
        return backend

    @classmethod
    def check_model(cls, model: ModelDirectory, *, on_cpu: bool, options: Mapping[str, Any] | None = None) -> None:
        """Refuses what megatron-core's layers do not express exactly; see `SupportsModelCheck`."""
        del on_cpu, options
        MegatronModelConfig.of(model)

    @classmethod
    def check_layout(cls, sizes: ParallelSpec, shape: ModelShape) -> None:
        """Refuses context parallelism and sizes that do not divide the model's; see `SupportsLayoutCheck`."""
        check_sizes(sizes)
        check_divisible(shape, sizes)

    @property
    def compute_dtype(self) -> str:
        """Of forward and backward passes, by torch's name."""
        return self._config.dtype

    def weight_layout(self) -> WeightLayout:
        """Tensor-parallel boxes of each pipeline stage, in the dtype of the computation."""
        return self._stage.layout

    def local_weights(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """This rank's boxes, views of the live weights."""
        self._stage.offloaded.require_weights("local_weights")
        return self._stage.local_weights()

    def compute_logprobs(
        self,
        batch: TensorDict,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        top_k: int = 0,
        keep_graph: bool = False,
    ) -> TensorDict:
        """Columns `logprobs` and more of the response tokens; see `TrainBackend.compute_logprobs`.

        With `top_k` the output layer is computed twice. No graph is kept: Megatron's schedules pass forward and
        backward in one.
        """
        del keep_graph
        self._require_head("lm", "compute_logprobs")
        request = OutputRequest(temperature=temperature, entropy=entropy, top_k=top_k)
        return self._score(batch, request, request.columns())

    def compute_values(self, batch: TensorDict, *, keep_graph: bool = False) -> TensorDict:
        """Column `values`; see `TrainBackend.compute_values`. No graph is kept."""
        del keep_graph
        self._require_head("value", "compute_values")
        return self._score(batch, OutputRequest(), {"values": TokenColumn()})

    def set_learning_rate(self, learning_rate: float, *, constant: bool = False) -> None:
        """Uses another learning rate from the next step on; see `TrainBackend.set_learning_rate`."""
        require_trainable(self._stage.optimizer, "set_learning_rate").learning_rate.set(
            learning_rate, constant=constant
        )

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        """Adds each value over the data-parallel ranks."""
        return sum_over_group(values, self._groups.dp, self._device)

    def load_hf(self, directory: str | Path) -> None:
        """Replaces the weights by those of a Hugging Face directory; see `TrainBackend.load_hf`."""
        self._stage.offloaded.require_all("load_hf")
        files = self._stage.open_hf(directory)
        self._note_change()
        self._stage.load_hf(files)

    def export_hf(self, directory: str | Path, *, dtype: ExportDtype = "source") -> None:
        """Writes config and safetensors from rank 0; see `TrainBackend.export_hf`."""
        self._stage.offloaded.require_weights("export_hf")
        with together("nothing was written", self._world):
            check_export_dtype(dtype)

        def write(path: Path) -> None:
            export_stage(path, self._source, self._stage, dtype=dtype)

        write_directory(directory, write, self._world)

    def offload(self, *, weights: bool = False) -> int:
        """Gives up gradients, moments, and masters that are not the weights; see `TrainBackend.offload`."""
        return self._stage.offload(weights=weights, keeps_gradients=self._waiting.calls > 0)

    def reload(self) -> None:
        """Takes back what `offload` gave up."""
        self._stage.offloaded.restore()

    def close(self) -> None:
        """Frees weights, gradients and optimizer state."""
        if not isinstance(self._stage, Closed):
            self._stage = cast("Any", Closed())
            # hooks of the gradient buffers and the modules refer to each other
            gc.collect()
            self._groups.close()

    def _state_optimizer(self) -> DistributedAdamW | None:
        return self._stage.optimizer

    def _state_parts(self, method: str) -> MegatronState:
        self._stage.offloaded.require_all(method)
        topology, seed = self._groups.topology, self._groups.seed
        return MegatronState(self._stage, topology, self._config, head=self._head, seed=seed)

    def _score(self, batch: TensorDict, request: OutputRequest, kinds: Mapping[str, TokenColumn]) -> TensorDict:
        self._stage.offloaded.require_weights("scoring")
        sequences, micro_batches = self._agreed_micro_batches(batch, request, 1.0, needs_rows=False)

        def compute(micro_batch: MicroBatch, hidden: torch.Tensor) -> tuple[MicroBatch, dict[str, torch.Tensor]]:
            return micro_batch, self._stage.decoder.outputs(hidden, micro_batch, request)

        results = run_forward(self._stage.decoder, micro_batches, compute, window=self._window, device=self._device)
        columns = {}
        for name, kind in kinds.items():
            column = sequences.jagged([(micro_batch, outputs[name]) for micro_batch, outputs in results], *kind)
            self._send_from_last_stage(column.values())
            columns[name] = column
        return TensorDict(columns, batch_size=batch.batch_size)

    def _send_from_last_stage(self, values: torch.Tensor) -> None:
        """Fills a host tensor of every stage with the last one's."""
        if self._groups.pp.size() > 1:
            sent = values.to(self._device)
            dist.broadcast(sent, src=self._groups.last_stage_rank, group=self._groups.pp)
            values.copy_(sent)

    def _from_last_stage(self, value: Any) -> Any:
        """A small object of the last stage, on every stage."""
        if self._groups.pp.size() == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self._groups.last_stage_rank, group=self._groups.pp, device=self._device)
        return box[0]

    def _agreed_micro_batches(
        self,
        batch: TensorDict,
        request: OutputRequest,
        denominator: float,
        *,
        needs_rows: bool,
        loss_fn: LossFunction | None = None,
    ) -> tuple[SequenceBatch, Sequence[MicroBatch]]:

        def prepare() -> SequenceBatch:
            _check.number("denominator", denominator)
            vocab_size = self._stage.decoder.real_vocab_size
            request.check(vocab_size)
            sequences = SequenceBatch(batch, vocab_size, candidates=request.candidates)
            sequences.sharing = self._sharing
            return sequences

        agreed = agree_on_micro_batches(
            prepare,
            self._config.micro_batch_tokens,
            self._world,
            self._device,
            needs_rows=needs_rows,
            replicas=self._groups.replicas,
            arguments={
                "temperature": request.temperature,
                "entropy": request.entropy,
                "candidates": request.candidates,
                "top_k": request.top_k,
                "denominator": denominator,
                "loss_fn": loss_fn,
            },
        )
        return agreed.sequences, agreed.micro_batches

    def _prepare_step(self, method: str) -> DistributedAdamW:
        optimizer = require_trainable(self._stage.optimizer, method)
        self._stage.offloaded.require_all(method)
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
        """Adds this rank's gradients; `loss` is computed on the last pipeline stage."""
        if is_first:
            self._stage.module.zero_grad_buffer()

        def compute_loss(micro_batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
            outputs = self._stage.decoder.outputs(hidden, micro_batch, request)
            return loss.of(micro_batch, outputs) / denominator

        run_backward(self._stage.module, micro_batches, compute_loss, window=self._window, device=self._device)

    def _shared(self, loss: StepLoss) -> tuple[float, Metrics, HybridFlowError | None]:
        shared: tuple[float, Metrics, HybridFlowError | None] = self._from_last_stage(
            (loss.total, loss.metrics, loss.error)
        )
        return shared

    def _measure(self, loss: float, failed: bool) -> tuple[float, float, bool]:
        optimizer = require_trainable(self._stage.optimizer, "a step")
        (total,) = self.sum_over_data([loss])
        (failures,) = sum_over_group([float(failed)], self._world, self._device)  # those of tensor parallelism too
        self._stage.sum_gradients()
        return total, optimizer.take_gradients(), failures > 0

    def _require_head(self, head: Head, method: str) -> None:
        if self._head != head:
            raise BackendError(
                f"{method} needs a model built with head={show(head)}, this one has head={show(self._head)}"
            )
