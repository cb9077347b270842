"""Protocols of training and rollout backends, and the values that cross them.

Batches are TensorDicts on the CPU with batch size [B]. Per-token columns are jagged [B, ragged] and aligned with
`response_ids`; only backends pad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias

from hf_engine.backends.sampling_params import SamplingParams
from hf_engine.backends.train_config import TrainConfig

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from hf_engine.model_directory import ExportDtype
    from hf_engine.resharding.execute import Weights
    from hf_engine.resharding.layouts import WeightLayout
    from hf_engine.training.state import LoadedState, StateFile
    from hf_protocols.topology import GenerationSpec, Topology

__all__ = ["Head", "LossFunction", "Metrics", "RolloutBackend", "SamplingParams", "TrainBackend", "TrainConfig"]

Head = Literal["lm", "value", "score"]
Metrics: TypeAlias = dict[str, tuple[float, float]]
"""(sum, count) by name; pairs of micro-batches and ranks are merged by `hf_protocols.merge_metrics`, then divided."""
LossFunction: TypeAlias = "Callable[[TensorDict, TensorDict], tuple[torch.Tensor, Metrics]]"
"""loss_fn(outputs, micro_batch) -> (loss_sum, metrics): see `TrainBackend.train_step`."""


class TrainBackend(Protocol):
    """A model that is trained and scored on the ranks of a topology. Every method is called on every rank."""

    one_layout_per_process: ClassVar[bool]
    """True if its library keeps the layout in globals, so that all models of a process have the same one."""

    @classmethod
    def build(
        cls,
        model: str | Path,
        *,
        topology: Topology,
        config: TrainConfig,
        head: Head = "lm",
        trainable: bool = True,
        seed: int = 0,
    ) -> TrainBackend:
        """Loads a model over the ranks of the default process group.

        Args:
            model: directory in Hugging Face format, or hub name.
            topology: ranks and layout; `BackendError` for a layout that the backend does not support.
            config: optimizer, micro-batches, precision.
            head: `"lm"` keeps the language-model head; `"value"` puts a zero `Linear(hidden, 1)` in its place;
                `"score"` is a sequence classifier with one label, of backends that are `SupportsScores`.
            trainable: False means no optimizer and no gradients (a reference model).
            seed: for everything that the backend initialises at random.

        Raises:
            BackendError: on every rank, if any rank cannot read the model. If torch's default device is not the host.
        """
        ...

    @property
    def compute_dtype(self) -> str:
        """The dtype of forward and backward passes, by torch's name; weights may be kept in another dtype."""
        ...

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps taken, those of a loaded state included."""
        ...

    @property
    def weight_changes(self) -> int:
        """Grows with every change of the weights: optimizer steps and loads."""
        ...

    def weight_layout(self) -> WeightLayout:
        """Returns the boxes of parameters that every rank holds."""
        ...

    def local_weights(self) -> Weights:
        """This rank's boxes, by Hugging Face name; views of the live weights, not copies.

        They are valid until something takes the weights' memory: `offload`, or a transition that moves them. Until they
        are back every method that needs weights refuses with a `BackendError`.
        """
        ...

    def compute_logprobs(
        self,
        batch: TensorDict,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        top_k: int = 0,
        keep_graph: bool = False,
    ) -> TensorDict:
        """Log-probs of the response tokens under the full distribution at `temperature`.

        Args:
            batch: columns `prompt_ids`, `response_ids`.
            temperature: divides the logits; give the sampler's.
            entropy: adds the entropy of every token's distribution, in nats.
            top_k: adds `top_ids` and `top_logprobs` of this many likeliest tokens, the likeliest first; 0: neither.
            keep_graph: says that an update on the same rows follows before the weights change. A backend may keep the
                forward pass for it, which then is not computed again. Results are the same. `fsdp` keeps the pass of a
                single micro-batch, of at most a quarter of `micro_batch_tokens`, until the next update or the next pass
                with `keep_graph`; a transition, an offload and other weights drop it.

        Returns:
            Columns `logprobs` (and `entropy`), jagged float32, aligned with `response_ids`. `top_ids` int64 and
            `top_logprobs` float32 are jagged [B, tokens, top_k], 12 top_k bytes for each response token.

        Raises:
            BackendError: for a `top_k` above the model's vocabulary.
        """
        ...

    def compute_values(self, batch: TensorDict, *, keep_graph: bool = False) -> TensorDict:
        """Column `values`, jagged float32: the value before each response token was drawn.

        Args:
            batch: as of `compute_logprobs`.
            keep_graph: as of `compute_logprobs`.
        """
        ...

    def train_step(
        self,
        batch: TensorDict,
        loss_fn: LossFunction,
        denominator: float,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        candidates: bool = False,
    ) -> Metrics:
        """One optimizer step on the loss `sum over all micro-batches and ranks of loss_sum / denominator`.

        It is `forward_backward` and `optim_step` in a row. The result does not depend on how rows are split into
        micro-batches or spread over ranks.

        Args:
            batch: this rank's rows: `prompt_ids`, `response_ids` and every column that `loss_fn` reads.
            loss_fn: `loss_fn(outputs, micro_batch) -> (loss_sum, metrics)`. Both are padded to [b, T] over the response
                tokens: outputs hold `logprobs` (and `entropy`), or `values` for a value head; the micro-batch holds
                every jagged column of the batch padded with 0 (False), dense columns as they are, and `response_mask`,
                bool: the batch's own, which may be False between tokens that count, else True on all response tokens.
                `loss_sum` is a tensor with one number. A metric is a pair `(sum, count)` of numbers, or of tensors with
                one number, under any name except those that the step adds.
            denominator: global, the same on every rank, such as the tokens that count on all ranks.
            temperature: divides the logits; give the sampler's.
            entropy: adds `entropy` [b, T] to the outputs, in nats; it costs a backward pass nothing unless a loss uses
                its gradient.
            candidates: adds `candidate_logprobs` [b, T, k] to the outputs, of the tokens in the batch's column
                `candidate_ids`, jagged [B, tokens, k]; a token outside of the vocabulary has -inf.

        Returns:
            This rank's metrics summed over micro-batches, and the metrics of `optim_step`. For a step that is left out,
            only the metrics of `optim_step`.

        Raises:
            BatchError: on every rank, if no rank has a row.
            NonFiniteLossError: as `optim_step` does.
            BackendError: on every rank, if `loss_fn` raises on any, or returns a loss without gradient or metrics of
                another kind (an error of HybridFlow is raised itself on its rank); no step is taken then. If another
                rank failed, died or did not come within the deadline of the process groups, which is that of the
                default group.
        """
        ...

    def forward_backward(
        self,
        batch: TensorDict,
        loss_fn: LossFunction,
        denominator: float,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        candidates: bool = False,
    ) -> Metrics:
        """Adds the gradients of a loss to those that wait for `optim_step`; arguments are those of `train_step`.

        Calls add up: two calls with the same denominator give the gradients of one call with both batches. Between
        calls a model may score, generate, be saved, offloaded and reloaded: the weights are still those of the last
        step. A load drops the gradients, which were of other weights.

        Returns:
            This rank's metrics summed over micro-batches.

        Raises:
            HybridFlowError: as `train_step` does. Any error drops the gradients of all calls since the last step.
        """
        ...

    def optim_step(self) -> Metrics:
        """Takes one optimizer step on the gradients that wait, and drops the gradients, also if the step is refused.

        Returns:
            `grad_norm` (before clipping) and `learning_rate`. With `on_nonfinite = "skip"` also `skipped_nonfinite`,
            which is 0. A step that is left out returns only `skipped_nonfinite`, which is 1.

        Raises:
            BackendError: if no gradients wait.
            NonFiniteLossError: on every rank, before the step, if the loss or the gradient norm is not finite, or above
                `explode_above`, and `on_nonfinite = "stop"`.
        """
        ...

    def set_learning_rate(self, learning_rate: float, *, constant: bool = False) -> None:
        """Uses another rate from the next step on; a `constant` one has no schedule until a model is loaded."""
        ...

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        """Adds each value over the data-parallel ranks; every rank gets the sums. As many values on every rank."""
        ...

    def load_hf(self, directory: str | Path) -> None:
        """Replaces the weights by those of a Hugging Face directory; optimizer and learning rate start again.

        A value head takes its own weights where the directory has them, and stays as it is where not.

        Raises:
            BackendError: on every rank, if any rank cannot read the directory, or it holds another model.
        """
        ...

    def export_hf(self, directory: str | Path, *, dtype: ExportDtype = "source") -> None:
        """Writes config and safetensors from rank 0, whole or not at all; replaces a model, no more.

        Args:
            directory: where to write.
            dtype: `source` keeps the dtype that each tensor has in the files from which the model was built, also
                where the trained weights are float32. Another one replaces the source's most frequent dtype.
        """
        ...

    def save_state(
        self, directory: str | Path, *, background: bool = False, weight_version: int = 0, apart: bool = False
    ) -> None:
        """Writes the state from which training can continue. Collective.

        The state has the weights as they are trained (for a model with adapters: the adapters, and the digest of their
        base), persistent buffers, the optimizer's moments, steps and learning rate, and each rank's random numbers.
        Tensors are safetensors under Hugging Face names, each element once over all ranks; all else is in `state.json`.

        Args:
            directory: new or empty, on a file system that all ranks share.
            background: returns when everything is copied to host memory, and writes in a thread. `finish_state` has to
                be called before the next save.
            weight_version: kept for the caller, who gets it back from `load_state`.
            apart: writes a separate state: a save that still runs in the background, and the result of `finish_state`,
                stay as they are. Cannot be combined with `background`.

        Raises:
            StateError: on every rank, for a directory that is not empty or differs between ranks, a save that was not
                finished, or a file system that refuses on any rank. The files of this save are removed then.
        """
        ...

    def finish_state(self, timeout_s: float | None = None) -> tuple[StateFile, ...]:
        """Waits until the files of the last `save_state` are on disk; returns this rank's with digests. Collective.

        Args:
            timeout_s: deadline; None: that of the process group.

        Raises:
            StateError: on every rank, if any could not write its files or passed the deadline (then the call can be
                repeated), or if nothing was saved.
        """
        ...

    def load_state(self, directory: str | Path, *, files: Sequence[StateFile] | None = None) -> LoadedState:
        """Continues from a state of `save_state`, on any number of ranks, in any layout, with any backend. Collective.

        Only the byte ranges that a rank holds are read, and nothing is unpickled. Hyperparameters stay those that the
        model was built with; a rate of `set_learning_rate` comes back. Random numbers are restored in the layout of
        the save. In another one they are derived from the seed, the optimizer step and the rank, and `notice` says so.

        Args:
            directory: of one state.
            files: of all ranks, from `finish_state`: their digests are verified before any of them is parsed.

        Raises:
            StateError: on every rank, naming the file that is missing, damaged, of another schema, or of another
                model. Nothing has changed then, unless a file fails while it is read.
        """
        ...

    def offload(self, *, weights: bool = False) -> int:
        """Moves what only training needs from the device to the host, so that something else fits on the device.

        This covers AdamW's moments, the float32 masters if they are not the weights themselves, and gradients that wait
        for `optim_step`. Scoring still works. On a CPU all of this is on the host already: nothing moves, and 0 is
        returned.

        Args:
            weights: the weights too; then nothing may read them, views from `local_weights` included. Views are
                valid again after `reload`.

        Returns:
            Bytes freed on this rank's device, counted in whole storages.

        Raises:
            BackendError: from later methods that need what is offloaded, on every device; it names `reload`.
        """
        ...

    def reload(self) -> None:
        """Restores everything that `offload` moved, bit for bit; does nothing if nothing is offloaded."""
        ...

    def close(self) -> None:
        """Frees the model; the process group stays the caller's."""
        ...


class RolloutBackend(Protocol):
    """A generation engine on the ranks of a topology. Every method is called on every rank."""

    largest_generation: ClassVar[GenerationSpec | None]
    """Largest sizes of a generation replica that the engine runs, for planners; None: any."""

    @classmethod
    def build(cls, model: str | Path, *, topology: Topology, seed: int = 0) -> RolloutBackend:
        """Starts the engine with the weights of a Hugging Face directory or hub name."""
        ...

    @property
    def weight_version(self) -> int:
        """The version last committed; 0 for the weights that the engine was built with."""
        ...

    def weight_layout(self) -> WeightLayout:
        """Returns the boxes of parameters that every rank holds in generation."""
        ...

    def commit_weights(self, version: int) -> None:
        """Declares the weights complete: the next samples carry this version; caches of older versions are dropped."""
        ...

    def generate(self, batch: TensorDict, sampling: SamplingParams) -> TensorDict:
        """Draws `sampling.n` responses to every prompt.

        Args:
            batch: columns `prompt_ids` (jagged int64) and `row_id` (int64 [B]).
            sampling: how to draw; it and the batch are alike on all ranks of a replica.

        Returns:
            B * n rows, the n samples of a prompt one after the other: `response_ids` (stop token included),
            `response_mask`, `rollout_logprobs` (jagged), `finish_reason` (0 stop, 1 length), `weight_version`.

        Raises:
            BackendError: for a prompt that does not fit the model with `max_new_tokens`, with row and numbers, more
                samples than the machine's memory holds, or weights that were released and not committed again.
            NonFiniteLossError: for logits that are not finite.
        """
        ...

    def release(self) -> int:
        """Frees what the engine can give back of its memory: KV cache, weights.

        Returns:
            Bytes freed; 0 where the engine can free nothing.
        """
        ...

    def resume(self) -> None:
        """Allocates the released memory again. Weights that can be written in place must be sent again before the next
        generation; an engine that loads shards has kept its weights.
        """
        ...

    def close(self) -> None:
        """Ends the engine."""
        ...
