"""One rank's pipeline stage: the module, its distributed optimizer, and its weights under Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from hf_engine.agreement import together
from hf_engine.backends.base import Head, TrainConfig
from hf_engine.model_directory import SCORE_HEADS, VALUE_HEAD, check_model_directory, read_model_directory
from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.resharding.model_layouts import megatron_layout
from hf_engine.resharding.tensor_parallel import split_layers
from hf_engine.training.directories import check_directory
from hf_engine.training.megatron._config import MegatronModelConfig, build_transformer_config
from hf_engine.training.megatron._core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    quiet,
)
from hf_engine.training.megatron._files import HuggingFaceFiles
from hf_engine.training.megatron._model import Decoder, build_decoder
from hf_engine.training.megatron._names import HEAD_NAME, NamedPiece, ParameterNames
from hf_engine.training.megatron._optimizer import DistributedAdamW
from hf_engine.training.megatron._parallel import ParallelGroups
from hf_engine.training.offload import OffloadedMemory
from hf_engine.training.state.parts import WEIGHTS
from hf_protocols.errors import BackendError
from hf_protocols.validation import show

__all__ = ["PipelineStage"]


class PipelineStage:
    """This rank's part of the model.

    Args:
        model: the whole model's configuration.
        groups: the process groups.
        config: precision and optimizer.
        head: see `TrainBackend.build`.
        trainable: whether there are gradients and an optimizer.
        device: where the weights live.
    """

    def __init__(
        self,
        model: MegatronModelConfig,
        groups: ParallelGroups,
        config: TrainConfig,
        *,
        head: Head,
        trainable: bool,
        device: torch.device,
    ) -> None:
        train = groups.topology.train
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self._model = model
        self._groups = groups
        self._head: Literal["lm", "value"] = "value" if head == "value" else "lm"
        first_layer = split_layers(model.shape.num_layers, train.pp_size)[groups.at.pp].start
        self._names = ParameterNames(shape=model.shape, train=train, at=groups.at, first_layer=first_layer)
        transformer = build_transformer_config(model, train, config, self.dtype)
        self.decoder: Decoder = build_decoder(model, transformer, groups, head, device)
        self.module: Any = self.decoder
        """The module that the schedules run: the decoder, wrapped where it is trained."""
        self.optimizer: DistributedAdamW | None = None
        self.offloaded = OffloadedMemory(lambda: self.parameters.values())
        self.decoder.requires_grad_(trainable)
        if trainable:
            transformer.finalize_model_grads_func = _leave_unsummed
            ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
            self.module = DistributedDataParallel(transformer, ddp, self.decoder)
            self.optimizer = DistributedAdamW(self.module, config, self.dtype)

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """By megatron-core's names."""
        return dict(self.decoder.named_parameters())

    def pieces(self, parameter: str, tensor: torch.Tensor) -> Iterator[NamedPiece]:
        """See `ParameterNames.pieces`."""
        return self._names.pieces(parameter, tensor)

    def local_weights(self) -> dict[str, list[torch.Tensor]]:
        """Views of the live weights by Hugging Face name, one per box of the layout."""
        return {name: [piece.view for piece in pieces] for name, pieces in self._pieces_by_name().items()}

    @cached_property
    def layout(self) -> WeightLayout:
        """The boxes of every rank."""
        dtype = str(self.dtype).removeprefix("torch.")
        layout = megatron_layout(self._model.shape, self._groups.topology, dtype=dtype, head=self._head)
        own = {name: tuple(piece.box for piece in pieces) for name, pieces in self._pieces_by_name().items()}
        assert own == layout.boxes_of(self._groups.rank), "the layout is not that of megatron-core's parameters"
        return layout

    def sum_gradients(self) -> None:
        """Adds the gradients of all calls of a step over ranks; losses were divided by global denominators before.

        Collective. Call it once a step only: afterwards the buffers hold sums and parts.
        """
        with quiet():
            finalize_model_grads([self.module], None)

    def offload(self, *, weights: bool, keeps_gradients: bool = False) -> int:
        """Gives up gradients, moments and masters, and the weights if asked; the bytes freed on the device.

        Args:
            weights: the weights too.
            keeps_gradients: they come back as they were, and otherwise as zeros.
        """
        storages = {parameter.untyped_storage()._cdata for parameter in self.parameters.values()}
        gradients, states = [], []
        if self.optimizer is not None:
            gradients = [b.grad_data for b in (*self.module.buffers, *self.module.expert_parallel_buffers)]
            states = [t for t in self.optimizer.state_tensors() if t.untyped_storage()._cdata not in storages]
        if keeps_gradients:
            states, gradients = [*states, *gradients], []
        return self.offloaded.give_up(states=states, zeros=gradients, weights=weights)

    def stored_name(self, name: str) -> str:
        """Returns a parameter's name in a Hugging Face directory."""
        return VALUE_HEAD if self._head == "value" and name == HEAD_NAME else name

    def _name_in(self, files: HuggingFaceFiles, name: str) -> str | None:
        """The name of a parameter in these files; None for a value head that they lack."""
        stored = self.stored_name(name)
        return next((each for each in SCORE_HEADS if each in files), None) if stored == VALUE_HEAD else stored

    def open_hf(self, directory: str | Path) -> HuggingFaceFiles:
        """The files of a directory of this model. Collective over all ranks.

        Raises:
            BackendError: on every rank, for a directory that is missing or holds another model.
        """
        with together("nothing was loaded"):
            return self._open_hf(directory)

    @torch.no_grad()
    def load_hf(self, files: HuggingFaceFiles) -> None:
        """Reads this rank's boxes; the optimizer starts again. Collective over all ranks.

        Raises:
            BackendError: on every rank, if files fail on the way.
        """

        def read(name: str, box: Box) -> torch.Tensor | None:
            stored = self._name_in(files, name)
            return None if stored is None else files.read(stored, box)

        with together("nothing was loaded"):
            for parameter, live in self.parameters.items():
                self.assign(live, self._assembled(parameter, live, read))
        if self.optimizer is not None:
            self.optimizer.restart()

    def _open_hf(self, directory: str | Path) -> HuggingFaceFiles:
        check_directory(directory)
        model = read_model_directory(Path(directory))
        other = MegatronModelConfig.of(model).shape
        check_model_directory(model, head=self._head)
        files = HuggingFaceFiles(model)
        named = {self._name_in(files, name): shape for name, shape in self.layout.shapes.items()}
        wanted = {name: shape for name, shape in named.items() if name is not None}
        if self._head == "lm" and other.tie_embeddings != self._model.shape.tie_embeddings:
            raise BackendError(
                f"{directory} holds another model: 1 parameters differ, such as {show(HEAD_NAME)}; "
                f"tie_word_embeddings is {self._model.shape.tie_embeddings} here and {other.tie_embeddings} there"
            )
        files.check_shapes(wanted)
        return files

    def assign(self, live: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Sets a parameter, and this rank's part of its master, from a tensor of its shape."""
        live.detach().copy_(value)
        if self.optimizer is not None:
            shard = self.optimizer.shard(live)
            shard.tensors["master"].copy_(value.reshape(-1)[shard.start : shard.stop])

    def whole(self, live: torch.nn.Parameter, kind: str) -> torch.Tensor:
        """A tensor of the parameter's shape, gathered from the optimizers of all replicas. Collective over them.

        Args:
            live: one of `parameters`.
            kind: `weights` in the masters' precision, `exp_avg` or `exp_avg_sq`.
        """
        if self.optimizer is None or (kind == WEIGHTS and live.dtype == torch.float32):
            return live.detach()
        shard = self.optimizer.shard(live)
        whole = torch.zeros_like(live, dtype=torch.float32)
        whole.view(-1)[shard.start : shard.stop] = shard.tensors["master" if kind == WEIGHTS else kind]
        is_expert = not getattr(live, "allreduce", True)
        # Every element has one owner: the sum is a copy.
        dist.all_reduce(whole, group=self._groups.expert_dp if is_expert else self._groups.dp)
        return whole

    def _assembled(
        self, parameter: str, live: torch.nn.Parameter, read: Callable[[str, Box], torch.Tensor | None]
    ) -> torch.Tensor:
        """A tensor of the parameter's shape from its boxes; what has no box is zero, what is not stored stays."""
        value = torch.zeros_like(live, dtype=torch.float32 if self.optimizer is not None else live.dtype)
        for piece, present in zip(self.pieces(parameter, value), self.pieces(parameter, live.detach()), strict=True):
            stored = read(piece.name, piece.box)
            piece.view.copy_(present.view if stored is None else stored)
        return value

    def _pieces_by_name(self) -> dict[str, list[NamedPiece]]:
        found: dict[str, list[NamedPiece]] = {}
        for parameter, live in self.parameters.items():
            for piece in self.pieces(parameter, live.detach()):
                found.setdefault(piece.name, []).append(piece)
        return found


def _leave_unsummed(model: list[Any], num_tokens: torch.Tensor | None, **options: Any) -> None:
    """Replaces the sum at the end of a schedule: another call of the same step may still add to the gradients."""
