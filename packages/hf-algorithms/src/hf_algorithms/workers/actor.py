"""The actor: the policy that generates and is trained, and the probe that the sampler sees its adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hf_algorithms.jagged import pad_rows
from hf_algorithms.models.sampler_adapters import takes_adapters
from hf_algorithms.replay import Recorder, record_call
from hf_algorithms.workers._model import SEQUENCE, Metrics, on_device
from hf_algorithms.workers._prompts import ALL_TO_REPLICAS, PromptReader, split_prompts
from hf_algorithms.workers.policy import PolicyWorker
from hf_engine import (
    LOGPROB_BOUNDS,
    HybridEngine,
    SamplingParams,
    SupportsAdapters,
    SupportsWeightBuffers,
    check_logprobs,
    find_coarsest,
    load_rollout_backend,
    measure_logprob_gap,
)
from hf_protocols import ONE_TO_ALL, THREE_D, THREE_D_ALL_MICRO_DP, register
from hf_protocols.errors import ReshardError

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from hf_algorithms.losses import Loss
    from hf_algorithms.workers._prompts import Prompt
    from hf_algorithms.workers._setup import RoleSetup
    from hf_controller import WorkerContext
    from hf_engine import (
        LoadedState,
        StateFile,
        TrainBackend,
        TrainConfig,
    )

__all__ = ["ActorWorker", "probe_adapters"]


class ActorWorker(PolicyWorker):
    """One rank of the policy: a training backend and a generation backend joined by a hybrid engine.

    Args:
        rollout: name of a `hf_engine.rollout_backends` entry point.
        rollout_options: more of what its `build` takes, such as the size of the KV cache.
        bucket_bytes: bound on the buffers in which weights travel to it; None: the engine's own.
        verify_transfers: as in `HybridEngine`.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        model: str,
        backend: str,
        training: TrainConfig,
        rollout: str,
        rollout_options: Mapping[str, Any] = MappingProxyType({}),
        bucket_bytes: int | None = None,
        verify_transfers: bool = False,
        offload: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(context, model=model, backend=backend, training=training, offload=offload, recorder=recorder)
        build = load_rollout_backend(rollout).build
        generator = build(model, topology=context.topology, seed=context.seed, **rollout_options)
        self._train.reload()  # the engine looks at the weights
        bound: dict[str, Any] = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
        self._engine = HybridEngine(
            self._train, generator, context.topology, verify_transfers=verify_transfers, **bound
        )
        self._rest()
        # The dtype whose bounds apply to an engine with weights that cannot be read.
        self._dtype = find_coarsest(
            (self._train.compute_dtype, self._engine.plan.source.dtype, self._engine.plan.target.dtype)
        )
        self._judged_dtype = None if isinstance(generator, SupportsWeightBuffers) else self._dtype
        self._sampled: tuple[int, float] | None = None
        self._directory, self._num_draws = model, 0
        self._prompts: PromptReader | None = None

    @classmethod
    def configure(cls, setup: RoleSetup) -> dict[str, Any]:
        """Returns the constructor's arguments for a role of a run."""
        rollout = setup.config.rollout
        takes = takes_adapters(setup.config, setup.model.path)
        return super().configure(setup) | {
            "rollout": rollout.backend,
            "rollout_options": {**rollout.options, **({"lora": setup.lora} if takes else {})},
            "bucket_bytes": rollout.bucket_bytes,
            "verify_transfers": rollout.verify_transfers,
        }

    @register(
        protocol=THREE_D_ALL_MICRO_DP,
        rows="times",
        reads=("row_id", "prompt_ids", "prompt_id?"),
        writes=("response_ids", "response_mask", "rollout_logprobs", "finish_reason", "weight_version", "sample_id"),
        kind="generation",
    )
    @on_device
    def generate_sequences(self, batch: TensorDict, sampling: SamplingParams) -> TensorDict:
        """Draws `sampling.n` responses to every prompt from the current weights.

        Returns:
            B * n rows, the n samples of a prompt one after another. `sample_id` int64 [B * n, 4] names each: epoch,
            row, number among the n, attempt.
        """
        responses = self._draw(batch, sampling)
        responses["sample_id"] = _number_samples(batch, sampling.n)
        return responses

    @register(
        protocol=ALL_TO_REPLICAS,
        rows="unknown",
        writes=("row_id", "prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "finish_reason", "text"),
        kind="generation",
    )
    @on_device
    def sample(self, prompts: Sequence[Prompt], sampling: SamplingParams | Mapping[str, Any]) -> TensorDict:
        """Draws responses to prompts as users have them, from the current weights.

        Args:
            prompts: texts, lists of chat messages, or lists of token ids. A text is tokenized as it is, a chat rendered
                by the model's chat template.
            sampling: values by name: `max_new_tokens`, and any of `min_new_tokens, temperature, top_p, top_k, seed, n,
                stop`. A temperature of 0 takes the likeliest tokens. The same seed draws the same responses; without
                one every call draws others.

        Returns:
            n rows for each prompt, one after another: `row_id` int64 [B], the prompt's number; `prompt_ids` and
            `response_ids`, jagged [B, T], the token that ended a response included; `response_mask`;
            `rollout_logprobs`; `finish_reason` (0 stop, 1 length); `text`, jagged bytes, see `decode_text`.

        Raises:
            ConfigError: for a key or value of `sampling` that is not known.
            DataError: for something else than prompts, or a chat that the template refuses.
            BackendError: for a prompt that does not fit the model with `max_new_tokens`.
        """
        if self._prompts is None:
            self._prompts = PromptReader(self._directory)
        drawn = self._prompts.build_sampling(sampling, seed=self.context.seed, step=self._num_draws)
        self._num_draws += 1
        batch, num_kept = split_prompts(self._prompts.encode(prompts), self.context)
        found = self._draw(batch, drawn)
        return self._prompts.join(batch, found, num_samples=drawn.n, num_kept=num_kept)

    def _draw(self, batch: TensorDict, sampling: SamplingParams) -> TensorDict:
        with ExitStack() as stack:
            with self.context.span("reshard", kind="transition"):
                stack.enter_context(self._engine.generation())
            with self.context.span("generate", kind="generation"):
                responses = self._engine.generate(batch, sampling)
        self._sampled = (self._train.weight_changes, sampling.temperature)
        return responses

    @register(
        protocol=THREE_D,
        reads=(*SEQUENCE, "rollout_logprobs?", "weight_version?"),
        writes=("old_logprobs",),
        kind="inference",
    )
    @on_device
    def compute_logprobs(self, batch: TensorDict, *, temperature: float = 1.0, keep_graph: bool = False) -> TensorDict:
        """`old_logprobs` of the response tokens, jagged [B, T], under the current weights.

        Log-probs that are not finite are refused here, before they reach the critic. If the engine's memory cannot be
        read, samples of the current weights prove, in every iteration, from which weights it generates: see
        `hf_engine.check_logprobs`. (The first samples were checked by the `HybridEngine`.)

        `keep_graph` is that of `PolicyWorker.compute_logprobs`.
        """
        found = self._compute_logprobs(batch, temperature, keep_graph=keep_graph)
        if "rollout_logprobs" in batch:
            self._judge(batch["rollout_logprobs"], found["old_logprobs"], batch, temperature)
        return found

    @register(
        protocol=THREE_D,
        returns="metrics",
        reads=(*SEQUENCE, "weight_version?"),
        kind="training",
    )
    @on_device
    @record_call
    def update_actor(
        self,
        batch: TensorDict,
        loss: Loss,
        *,
        temperature: float = 1.0,
        pretrain_weight: float = 0.0,
    ) -> Metrics:
        """One optimizer step on `loss`, which names the columns it reads.

        Rows of `hold_pretraining` are learned in the same step: `pretrain_weight` times the mean of -log-prob over all
        their trained tokens is added to the loss (Ouyang et al. 2022, eq. 2), with logits divided by `temperature` too.

        Without a trained token on any rank the weights stay, and `ROLE/skipped_steps` is reported.
        """
        return self._update(batch, loss, temperature=temperature, pretrain_weight=pretrain_weight)

    @register(protocol=THREE_D, returns="object", reads=SEQUENCE)
    def hold_pretraining(self, batch: TensorDict) -> None:
        """Keeps this rank's rows for the next `update_actor`, which learns them in its step and drops them."""
        self.pretraining = batch

    @register(protocol=ONE_TO_ALL, returns="object")
    def load_state(self, path: str, *, files: Sequence[StateFile] | None = None) -> LoadedState:
        """Continues from a state of `save_state`, whose weight version new samples carry on; see `ModelWorker`."""
        loaded = super().load_state(path, files=files)
        self._engine.weight_version = loaded.weight_version
        return loaded

    @register(protocol=ONE_TO_ALL, returns="object")
    def set_learning_rate(self, learning_rate: float, *, constant: bool = False) -> None:
        """Uses `learning_rate` from the next step on; a `constant` one has no schedule until a model is loaded."""
        self._train.set_learning_rate(learning_rate, **({"constant": True} if constant else {}))

    @register(protocol=THREE_D_ALL_MICRO_DP, reads=("row_id", "prompt_ids"), returns="object")
    @on_device
    def probe_adapters(self, batch: TensorDict, sampling: SamplingParams) -> None:
        """Proves that generation sees the adapters of `[model.lora]`; see `probe_adapters`."""
        assert isinstance(self._train, SupportsAdapters), "of a run with [model.lora]"
        probe_adapters(self._train, self._engine, batch, sampling, dtype=self._dtype)

    @register(protocol=ONE_TO_ALL, returns="object")
    def describe_transition(self) -> dict[str, Any]:
        """Weight version, seconds and bytes received of this rank's last transition."""
        return {"weight_version": self._engine.weight_version, "last_transition": self._engine.last_transition}

    def _weight_version(self) -> int:
        return self._engine.weight_version

    def close(self) -> None:
        """Frees both backends."""
        self._engine.close()

    def _judge(self, sampled: torch.Tensor, recomputed: torch.Tensor, batch: TensorDict, temperature: float) -> None:
        """Compares log-probs of the batch's responses, if they are samples of the current weights."""
        if (
            self._judged_dtype
            and "weight_version" in batch
            and self._sampled == (self._train.weight_changes, temperature)
            and bool((batch["weight_version"] == self._engine.weight_version).all())
        ):
            is_trained = pad_rows(batch["response_mask"]).bool()
            # Observation tokens were not sampled.
            columns = [pad_rows(each)[is_trained] for each in (sampled, recomputed)]
            check_logprobs(*columns, dtype=self._judged_dtype, temperature=temperature)


def _number_samples(prompts: TensorDict, samples_per_prompt: int) -> torch.Tensor:
    """`sample_id` of every sample; without a `prompt_id` epoch and attempt are 0."""
    import torch

    if "prompt_id" in prompts:
        epoch, row, attempt = prompts["prompt_id"].unbind(1)
    else:
        row = prompts["row_id"]
        epoch = attempt = torch.zeros_like(row)
    number = torch.arange(samples_per_prompt).repeat(len(row))
    columns = [each.repeat_interleave(samples_per_prompt) for each in (epoch, row, attempt)]
    return torch.stack([columns[0], columns[1], number, columns[2]], dim=1)


_PROBE_TOKENS = 16
_FIRST_STD, _LARGEST_STD, _STD_FACTOR = 1e-3, 100.0, 4.0
_PROBE_MARGIN = 4.0
"""Multiple of the bound by which the adapters must move the base's log-probs, so that the two are distinguishable."""


def probe_adapters(
    train: SupportsAdapters, engine: HybridEngine, batch: TensorDict, sampling: SamplingParams, *, dtype: str
) -> None:
    """Sets every `B` to small random values, generates, compares, and brings every bit of `B` back.

    The values grow until the trainer's log-probs differ from the base's by more than the bound. Then the sampler's
    log-probs must differ from the trainer's by no more than the bound. Collective over the ranks of the engine.

    Args:
        train: the training backend.
        engine: that brings its weights to the sampler.
        batch: prompts of this rank.
        sampling: of the run.
        dtype: whose bounds count, by torch's name.

    Raises:
        ReshardError: on all ranks, for samples of other weights, or adapters that change nothing.
    """
    bound = LOGPROB_BOUNDS[dtype][0] / min(1.0, sampling.temperature)
    few = replace(sampling, n=1, min_new_tokens=0, max_new_tokens=min(sampling.max_new_tokens, _PROBE_TOKENS))
    std = _FIRST_STD
    while std < _LARGEST_STD:
        with train.perturbed_adapters(seed=sampling.seed, std=std):
            with engine.generation():
                responses = engine.generate(batch, few)
            moved, missed = _measure_adapters(train, engine, batch, responses, few.temperature)
        if missed > bound:
            raise ReshardError(
                f"the adapters of [model.lora] do not reach generation: with B set at random, the sampler's log-probs "
                f"differ from the trainer's by {missed:.3g} nats on average (bound {bound:g}, {dtype}), and the "
                f"trainer's from the base's by {moved:.3g}. Use another rollout.backend, or report this one"
            )
        if moved > _PROBE_MARGIN * bound:
            return
        std *= _STD_FACTOR
    raise ReshardError(
        f"the adapters of [model.lora] change nothing: with B drawn with deviation {std / _STD_FACTOR:g}, log-probs "
        f"differ from the base's by {moved:.3g} nats on average. Choose other model.lora.targets"
    )


def _measure_adapters(
    train: SupportsAdapters, engine: HybridEngine, batch: TensorDict, responses: TensorDict, temperature: float
) -> tuple[float, float]:
    """Mean |difference| of the trainer's log-probs to the base's, and to the sampler's, over all ranks."""
    rows = batch.select("prompt_ids")
    rows["response_ids"] = responses["response_ids"]
    trained = _score_rows(train, rows, temperature)
    with train.adapters_off():
        base = _score_rows(train, rows, temperature)
    gaps = [measure_logprob_gap(each, trained) for each in (base, responses["rollout_logprobs"])]
    tokens = engine.sum_over_ranks(gaps[0].num_tokens)
    moved, missed = (engine.sum_over_ranks(gap.mean * gap.num_tokens) / max(1.0, tokens) for gap in gaps)
    return moved, missed


def _score_rows(train: SupportsAdapters, rows: TensorDict, temperature: float) -> torch.Tensor:
    backend: TrainBackend = train  # type: ignore[assignment] # it is one, with adapters
    found: torch.Tensor = backend.compute_logprobs(rows, temperature=temperature)["logprobs"]
    return found
