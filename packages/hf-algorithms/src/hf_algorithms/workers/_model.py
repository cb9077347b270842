"""A model on a training backend: what trained and frozen ones share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from math import inf
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from hf_controller import Worker, WorkerContext
from hf_engine import SupportsAdapters, TrainConfig, load_train_backend
from hf_protocols import ONE_TO_ALL, register

if TYPE_CHECKING:
    from hf_algorithms.workers._setup import RoleSetup
    from hf_engine import LoadedState, StateFile, TrainBackend
    from hf_engine.model_directory import ExportDtype

__all__ = ["SEQUENCE", "Metrics", "ModelWorker", "on_device"]

Method = TypeVar("Method", bound=Callable[..., Any])

Metrics = dict[str, tuple[float, float]]

SEQUENCE = ("prompt_ids", "response_ids", "response_mask")
"""Columns that every forward pass reads."""


def on_device(method: Method) -> Method:
    """Decorates a worker's method that needs its model: an offloaded model is on its device while the method runs."""

    @wraps(method)
    def call(self: ModelWorker, *args: Any, **kwargs: Any) -> Any:
        self._train.reload()
        try:
            return method(self, *args, **kwargs)
        finally:
            self._rest()

    return cast("Method", call)


class ModelWorker(Worker):
    """One rank of a model on a training backend.

    Args:
        model: directory or hub name that transformers loads.
        backend: name of a `hf_engine.train_backends` entry point.
        training: optimizer, micro-batches, sharding.
        offload: weights and optimizer rest in host memory between calls.
    """

    head: Literal["lm", "value", "score"] = "lm"
    trainable = True
    learning_rate_key = "actor_learning_rate"
    """Key of `[optimizer]` that holds the learning rate of such a role."""

    @classmethod
    def configure(cls, setup: RoleSetup) -> dict[str, Any]:
        """Returns the constructor's arguments for a role of a run."""
        config, overrides = setup.config, setup.config.role(setup.role)
        return {
            "model": setup.model.path,
            "backend": setup.placed.backend,
            "offload": setup.placed.offload,
            "training": TrainConfig(
                learning_rate=overrides.learning_rate or getattr(config.optimizer, cls.learning_rate_key),
                betas=config.optimizer.betas,
                weight_decay=config.optimizer.weight_decay,
                max_grad_norm=config.optimizer.max_grad_norm,
                warmup_steps=config.optimizer.warmup_steps,
                micro_batch_tokens=setup.placed.micro_batch_tokens,
                schedule=config.training.learning_rate_schedule,
                total_steps=config.count_updates(),
                dtype=overrides.dtype or config.training.dtype,
                activation_checkpointing=config.training.activation_checkpointing,
                compile=config.training.compile,
                attn_implementation=config.training.attn_implementation,
                shared_prompts=config.training.shared_prompts,
                shard=config.training.shard,
                lora=setup.lora if cls.trainable else None,
                on_nonfinite="skip" if config.training.on_nonfinite == "skip" else "stop",
                explode_above=config.training.explode_above or inf,
            ),
        }

    def __init__(
        self, context: WorkerContext, *, model: str, backend: str, training: TrainConfig, offload: bool = False
    ) -> None:
        super().__init__(context)
        self._offload = offload
        self._train: TrainBackend = load_train_backend(backend).build(
            model,
            topology=context.topology,
            config=training,
            head=self.head,
            trainable=self.trainable,
            seed=context.seed,
        )
        self._rest()

    @register(protocol=ONE_TO_ALL, returns="object")
    @on_device
    def load_model(self, directory: str) -> None:
        """Replaces the weights by those of a Hugging Face directory; optimizer and learning rate start again."""
        self._train.load_hf(directory)

    @register(protocol=ONE_TO_ALL, returns="object")
    @on_device
    def export_adapter(self, directory: str, *, base: str) -> None:
        """Writes the adapters of `[model.lora]` in peft's format; see `SupportsAdapters.export_adapter`."""
        assert isinstance(self._train, SupportsAdapters), "of a run with [model.lora]"
        self._train.export_adapter(directory, base=base)

    @register(protocol=ONE_TO_ALL, returns="object")
    @on_device
    def export_model(self, directory: str, *, dtype: ExportDtype = "source") -> None:
        """Writes the weights as a Hugging Face directory, atomically, from rank 0; see `TrainBackend.export_hf`."""
        self._train.export_hf(directory, dtype=dtype)

    @register(protocol=ONE_TO_ALL, returns="object")
    @on_device
    def save_state(self, path: str, *, background: bool = False) -> None:
        """Writes weights, optimizer and random numbers to a new directory; see `TrainBackend.save_state`."""
        self._train.save_state(path, background=background, weight_version=self._weight_version())

    @register(protocol=ONE_TO_ALL, returns="object")
    def finish_state(self) -> tuple[StateFile, ...]:
        """Waits for what `save_state` writes; this rank's files and digests. See `TrainBackend.finish_state`."""
        return self._train.finish_state()  # on Ray, the deadline of the call is shorter than that of the process group

    @register(protocol=ONE_TO_ALL, returns="object")
    @on_device
    def load_state(self, path: str, *, files: Sequence[StateFile] | None = None) -> LoadedState:
        """Continues from a state of `save_state`, under any layout; see `TrainBackend.load_state`.

        Args:
            path: of the directory.
            files: of all ranks, as `finish_state` returned them: digests are verified first.
        """
        return self._train.load_state(path, files=files)

    def _weight_version(self) -> int:
        """The version that the last samples carry; 0 where nothing is generated."""
        return 0

    @classmethod
    def one_layout_per_process(cls, kwargs: Mapping[str, Any]) -> bool:
        """True if a process can hold one layout of the backend's library only; imports the library."""
        return "backend" in kwargs and load_train_backend(kwargs["backend"]).one_layout_per_process

    def close(self) -> None:
        """Frees the backend."""
        self._train.close()

    def _may_keep(self, keep_graph: bool) -> bool:
        """Returns `keep_graph`, unless the model is offloaded after the call, which would drop what it kept."""
        return keep_graph and not self._offload

    def _rest(self) -> None:
        if self._offload:
            self._train.offload(weights=True)
