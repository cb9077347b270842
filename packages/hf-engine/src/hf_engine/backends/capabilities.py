"""Optional capabilities of backends: one small Protocol each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from hf_engine.backends.base import Head, SamplingParams
    from hf_engine.backends.lora_config import LoraConfig
    from hf_engine.model_directory import ModelDirectory
    from hf_protocols.models import ModelShape
    from hf_protocols.topology import ParallelSpec

__all__ = [
    "SupportsAdapterCheck",
    "SupportsAdapterUpdates",
    "SupportsAdapters",
    "SupportsBufferLoading",
    "SupportsBuffers",
    "SupportsEngineSampling",
    "SupportsLayoutCheck",
    "SupportsModelCheck",
    "SupportsOptionCheck",
    "SupportsPadding",
    "SupportsPromptCheck",
    "SupportsReplicas",
    "SupportsRowCheck",
    "SupportsScores",
    "SupportsShardLoading",
    "SupportsUnmergedAdapters",
    "SupportsWeightAdoption",
    "SupportsWeightBuffers",
]


@runtime_checkable
class SupportsWeightBuffers(Protocol):
    """A rollout backend whose weights can be written in place."""

    def weight_buffers(self) -> Mapping[str, torch.Tensor]:
        """This rank's tensors by Hugging Face name, one per box of `weight_layout()`.

        Their storages are resizable, hold nothing else, and are empty between `release` and `resume`: a transition
        takes and frees them one by one. Tensors may share one, as stacked experts do; it is there while any of them is.
        """
        ...


@runtime_checkable
class SupportsWeightAdoption(Protocol):
    """A rollout backend with weight buffers that can compute with training tensors: equal ones are lent to it."""

    def adopt_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Uses these tensors in the place of those that it has under these names, without a copy.

        Args:
            weights: by Hugging Face name, in the shape, dtype, strides and on the device of `weight_buffers()`. They
                are read only; the next call takes them back and passes the backend's own tensors. Tensors that share a
                storage in `weight_buffers()` share one here too, at the same places, and are passed in one call.
        """
        ...


@runtime_checkable
class SupportsShardLoading(Protocol):
    """A rollout backend that keeps its weights itself, packed for its kernels or in another place, fed with shards.

    One update is `begin_weights()`, `load_shards(...)` until every parameter of this rank was there, and
    `commit_weights(version)`. After an update that was begun and not committed, nothing can be generated until another
    update is committed.
    """

    @property
    def engine_bytes(self) -> int:
        """Bytes of weights and KV cache that the engine holds now on this rank."""
        ...

    @property
    def staging_bytes(self) -> int:
        """The most bytes that this rank's shards occupy on their way through an update, on the device, the host or in
        files, in addition to the tensors that `load_shards` is given.
        """
        ...

    def begin_weights(self) -> None:
        """Starts an update; drops what an unfinished one left behind."""
        ...

    def load_shards(self, shards: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Takes this rank's boxes of some whole parameters.

        Args:
            shards: by Hugging Face name, one tensor per box, in the order of `weight_layout()`. They are handed over:
                nothing else writes to them, and the engine drops its references when the update is committed at the
                latest.

        Raises:
            ReshardError: for a name that is not a parameter of this rank or came before, or tensors that are not the
                layout's boxes.
            BackendError: outside an update.
        """
        ...


@runtime_checkable
class SupportsBuffers(Protocol):
    """A training or rollout backend whose model has persistent state that no optimizer step changes.

    Routing biases and tables of token ids are such state. Every rank holds all of it, and a transition copies it.
    """

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Live tensors by Hugging Face name, each in a dtype of its own, outside of `weight_layout()`; empty for most
        models.
        """
        ...


@runtime_checkable
class SupportsBufferLoading(Protocol):
    """A rollout backend that keeps its weights itself and takes the training model's buffers with them."""

    def load_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Takes all buffers of a `SupportsBuffers` backend, between `begin_weights` and `commit_weights`.

        Args:
            buffers: by Hugging Face name, each whole and in a dtype of its own; all ranks give the same.

        Raises:
            BackendError: outside an update.
        """
        ...


@runtime_checkable
class SupportsPadding(Protocol):
    """A training backend with memory next to its weights that only computation needs."""

    def padding(self) -> Sequence[torch.Tensor]:
        """Tensors whose storages hold neither weights nor other needed data, as FSDP2 has for a rank without rows.

        Their storages are resizable and stay the same. A transition that moves the weights frees them, and brings them
        back filled with zeros.
        """
        ...


@runtime_checkable
class SupportsReplicas(Protocol):
    """A rollout backend whose replicas have several ranks, which its engine connects by itself."""

    def replica_ranks(self) -> tuple[int, ...]:
        """The ranks that hold one model together with this one, in tensor-parallel order, as the engine says."""
        ...


@runtime_checkable
class SupportsEngineSampling(Protocol):
    """A rollout backend whose engine draws with its own numbers, from a seed for every sample.

    Its samples are not those of other backends. It reports what such an engine reports, and refuses settings that give
    log-probs of another distribution than the full one at the temperature.
    """

    def find_unsupported(self, sampling: SamplingParams) -> str | None:
        """Returns why `generate` refuses this sampling, with the setting to change; None if it does not refuse.

        It never refuses the full distribution at temperature 1, nor `greedy` there.
        """
        ...


@runtime_checkable
class SupportsLayoutCheck(Protocol):
    """A training backend that knows from its class alone which layouts of a model it does not run."""

    @classmethod
    def check_layout(cls, sizes: ParallelSpec, shape: ModelShape) -> None:
        """Refuses sizes that `build` refuses on any machine.

        Args:
            sizes: of the layout.
            shape: of the model.

        Raises:
            BackendError: naming the sizes and what is wanted.
        """
        ...


@runtime_checkable
class SupportsOptionCheck(Protocol):
    """A rollout backend that knows from its class alone which options `build` refuses on every machine.

    Runs are planned on other machines, and an earlier run's files are removed before ranks start: both ask this first.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuses values of options that are wrong wherever the ranks run, by the rules of `build`.

        Args:
            options: arguments of `build` other than model, topology and seed, of the kinds that it takes. Options
                that are left out have `build`'s defaults.

        Raises:
            BackendError: naming the option, what was given and what is wanted.
        """
        ...


@runtime_checkable
class SupportsModelCheck(Protocol):
    """A backend that knows from its class and a model's files alone which models `build` refuses.

    The controller asks before anything starts, in addition to `check_model_directory`, which holds for every backend.
    """

    @classmethod
    def check_model(cls, model: ModelDirectory, *, on_cpu: bool, options: Mapping[str, Any] | None = None) -> None:
        """Refuses a model by its files, by the rules of `build`, without loading weights or starting an engine.

        Args:
            model: as it was read.
            on_cpu: whether ranks run on host processors.
            options: further arguments of `build`; None: its defaults.

        Raises:
            BackendError: naming what the backend does not run, and what to choose.
        """
        ...


@runtime_checkable
class SupportsScores(Protocol):
    """A training backend that builds models with `head="score"`, which return one number for a sequence."""

    def compute_scores(self, batch: TensorDict) -> TensorDict:
        """Column `scores`, float32 [B]: the number of each prompt with its response.

        With the column `rejected_ids`, a second response to each prompt, it is [B, 2]. `train_step` gives its loss
        function the same `scores`, and the dense columns of the batch.

        Args:
            batch: `prompt_ids` and `response_ids`, jagged.
        """
        ...


@runtime_checkable
class SupportsRowCheck(Protocol):
    """A rollout backend that knows from its class alone which rows its options have no room for."""

    @classmethod
    def check_row(cls, options: Mapping[str, Any], shape: ModelShape, *, tokens: int, samples: int) -> None:
        """Refuses a row that `generate` refuses on any machine.

        Args:
            options: as `SupportsOptionCheck` has them.
            shape: of the model.
            tokens: of the longest prompt and `max_new_tokens`.
            samples: of each prompt.

        Raises:
            BackendError: naming the option and what is needed.
        """
        ...


@runtime_checkable
class SupportsPromptCheck(Protocol):
    """A rollout backend that knows from a model's files which prompts it does not generate from."""

    @classmethod
    def check_prompts(cls, model: ModelDirectory, lengths: Sequence[int], *, max_new_tokens: int) -> None:
        """Refuses prompts that `generate` refuses for their length, and that fit the model's positions.

        Args:
            model: whose configuration is read.
            lengths: tokens of each prompt.
            max_new_tokens: of a response.

        Raises:
            BackendError: naming the row by its place in `lengths`.
        """
        ...


@runtime_checkable
class SupportsAdapterCheck(Protocol):
    """A training backend that trains low-rank adapters, and knows from its class which ones a model has no place for.

    Its `build` takes a `TrainConfig` with `lora` and answers with a backend that is `SupportsAdapters`.
    """

    @classmethod
    def check_adapters(cls, model: ModelDirectory, lora: LoraConfig, *, head: Head) -> None:
        """Refuses targets that the model lacks, without loading weights.

        Args:
            model: as it was read.
            lora: as `build` would have it.
            head: of the model.

        Raises:
            BackendError: naming the target, with the nearest names.
        """
        ...


@runtime_checkable
class SupportsAdapters(Protocol):
    """A training backend whose model has a frozen base and trains low-rank adapters.

    `export_hf`, and by default `weight_layout` and `local_weights`, describe the merged model. The base is never
    changed: merged weights are computed from it each time.
    """

    @property
    def lora(self) -> LoraConfig:
        """Settings of the adapters."""
        ...

    def keep_adapters_apart(self, apart: bool) -> None:
        """Has `weight_layout` and `local_weights` show the base and, next to it, the adapters as parameters of their
        own: `LAYER.lora_A.weight` [rank, in] and `LAYER.lora_B.weight` [out, rank] of the layer `LAYER`.
        """
        ...

    def adapters_off(self) -> AbstractContextManager[None]:
        """Inside, `compute_logprobs` is the base's."""
        ...

    @property
    def base_changes(self) -> int:
        """Grows whenever the base is written, alike on all ranks. Until it grows, an engine needs only the adapters."""
        ...

    def perturbed_adapters(self, *, seed: int, std: float) -> AbstractContextManager[None]:
        """Inside the block, every `B` is normal noise of this standard deviation, alike on all ranks. Afterwards the
        adapters are restored bit for bit. `weight_changes` grows at both ends of the block.
        """
        ...

    def export_adapter(self, directory: str | Path, *, base: str) -> None:
        """Writes `adapter_config.json` and `adapter_model.safetensors`, as peft reads them, like `export_hf`.

        Args:
            directory: where to write.
            base: directory or hub name of the base, which peft loads.

        Raises:
            BackendError: for a value head on a language model, for which peft has no format.
        """
        ...


@runtime_checkable
class SupportsUnmergedAdapters(Protocol):
    """A rollout backend whose `build` takes `lora`, and whose layout then has the adapters separately, unmerged."""

    @classmethod
    def find_adapter_refusal(
        cls, model: ModelDirectory, lora: LoraConfig, options: Mapping[str, Any], *, on_cpu: bool
    ) -> str | None:
        """Says why `build` refuses these adapters, so that merged weights are sent; None if it takes them.

        Args:
            model: as it was read.
            lora: of the training backend.
            options: as `SupportsOptionCheck` has them.
            on_cpu: True if ranks run on host processors.
        """
        ...

    def held_adapters(self) -> LoraConfig | None:
        """Settings of its adapters; None: without adapters."""
        ...


@runtime_checkable
class SupportsAdapterUpdates(Protocol):
    """A rollout backend that is fed with shards and can take new adapters on the base that it has."""

    def begin_adapters(self) -> None:
        """Starts an update of the adapters alone, instead of `begin_weights`.

        `load_shards` and `commit_weights` follow as they do for an update of everything. The base stays as it was
        committed; prompts' keys and values are dropped.

        Raises:
            BackendError: without adapters, or after an update of the base that was not committed.
        """
        ...
