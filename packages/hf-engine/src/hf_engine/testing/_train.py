"""The laws of a training backend, checked against one process with plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hf_engine.backends.base import Head, LossFunction, Metrics, TrainBackend, TrainConfig
from hf_engine.model_directory import VALUE_HEAD
from hf_engine.models.conversions import read_file_names
from hf_engine.models.stacked_experts import tensors_in_files
from hf_engine.process_groups import local_device
from hf_engine.resharding.execute import execute_reshard
from hf_engine.resharding.layouts import replicated_layout
from hf_engine.resharding.plan import plan_reshard
from hf_engine.testing._cases import (
    add_candidates,
    build_batch,
    leave_tokens_out,
    reference_outputs,
    rows_of,
    select_rows,
)
from hf_engine.testing._oracles import read_whole_state, schedule_rates
from hf_protocols.errors import BackendError, NonFiniteLossError
from hf_protocols.metrics import merge_metrics
from hf_protocols.standard import THREE_D
from hf_protocols.topology import Topology

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_engine.training.state import StateFile

__all__ = ["check_train_backend", "gather_weights"]

_SMALLEST_EPS = 1e-6  # with less AdamW blows up the rounding of gradients near zero
_CONFIG = TrainConfig(
    learning_rate=3e-3,
    betas=(0.9, 0.95),
    eps=_SMALLEST_EPS,
    weight_decay=0.01,
    max_grad_norm=0.5,
    warmup_steps=2,
    schedule="cosine",
    total_steps=8,
    floor=0.1,
    micro_batch_tokens=64,
)
_NUM_STEPS = 5
_NUM_CANDIDATES = 3
_ENTROPY_WEIGHT, _CANDIDATE_WEIGHT = 0.3, 0.2
"""Of the terms of a loss that read more than the log-prob of the token itself."""


def check_train_backend(
    build: Callable[[TrainConfig], TrainBackend],
    reference: torch.nn.Module,
    *,
    topology: Topology,
    vocab_size: int,
    directory: Path,
    head: Head = "lm",
    config: TrainConfig = _CONFIG,
    num_rows: int = 5,
    tolerance: float = 1e-4,
) -> None:
    """Checks one backend on one topology. Called on every rank.

    The laws:

    - Log-probs (at two temperatures), entropies, the likeliest tokens or values are those of `reference`.
    - Five AdamW steps end at the parameters of the same steps in one process, under torch's schedulers, at any token
      budget. Their loss reads entropies and log-probs of candidates as well. They are whole, or `forward_backward` of
      two halves of the rows and `optim_step`. Before a whole one its rows are scored with `keep_graph`.
    - A step without gradients, or with those of a failed call, is refused.
    - A non-finite loss is refused on every rank and leaves the weights alone.
    - What was offloaded is refused, and comes back bit for bit.
    - A state and an export bring the same numbers back, a state the moments and the place in the schedule, too.

    Args:
        build: builds the backend afresh, with the reference's weights.
        reference: a module with `reference(input_ids=[1, L], use_cache=False).logits`, in float32, on the CPU, whose
            `named_parameters()` are the backend's, or a model of transformers that stacks their experts; for a value
            head its logits are [1, L, 1]. It is not changed.
        topology: the backend's.
        vocab_size: token ids of the test batches stay below it.
        directory: an empty one that all ranks share.
        head: what the backend is built with.
        config: optimizer and schedule; the token budget is varied. Its `eps` is at least 1e-6: with less, AdamW turns
            the rounding of a gradient near zero into a whole step, and the result depends on the processor.
        num_rows: rows of the global batch; not a multiple of dp_size is the harder case.
        tolerance: largest absolute difference of log-probs, values and parameters.

    Raises:
        AssertionError: naming the law and the difference.
        ValueError: for a smaller `eps`.
    """
    if config.eps < _SMALLEST_EPS:
        raise ValueError(
            f"config.eps={config.eps}: check_train_backend needs at least {_SMALLEST_EPS}, or AdamW turns the rounding "
            "of gradients into whole steps. Pass a TrainConfig with eps=1e-6"
        )
    batch = leave_tokens_out(build_batch(num_rows, vocab_size=vocab_size))
    batch = add_candidates(batch, _NUM_CANDIDATES, vocab_size=vocab_size)
    laws = _TrainLaws(reference, topology, head, config, tolerance, batch)
    backend = build(config)
    laws.check_scores(backend, "as built")
    laws.check_refusal(backend)
    laws.check_without_gradients(backend)
    trained, moments = laws.check_training(backend)
    laws.check_offloading(backend)
    laws.check_scores(backend, "after training", trained)
    laws.check_restoring(backend, directory, trained)
    laws.check_files(directory, trained, moments)
    backend.close()
    for micro_batch_tokens in (16, 10_000):
        other = build(replace(config, micro_batch_tokens=micro_batch_tokens))
        laws.check_training(other)
        other.close()


def gather_weights(backend: TrainBackend, topology: Topology) -> dict[str, torch.Tensor]:
    """Every parameter whole, on every rank. Collective."""
    layout = backend.weight_layout()
    target = replicated_layout(layout.shapes, range(topology.world_size), dtype=layout.dtype)
    full = {name: torch.empty(shape, dtype=getattr(torch, layout.dtype)) for name, shape in layout.shapes.items()}
    execute_reshard(plan_reshard(layout, target), backend.local_weights(), full, device=local_device())
    return full


class _TrainLaws:
    def __init__(
        self,
        reference: torch.nn.Module,
        topology: Topology,
        head: Head,
        config: TrainConfig,
        tolerance: float,
        batch: TensorDict,
    ) -> None:
        self._reference = reference
        self._topology = topology
        self._head = head
        self._config = config
        self._tolerance = tolerance
        self._batch = batch
        self._rows = list(THREE_D.distribute(topology, len(batch))[dist.get_rank()])
        self._local = select_rows(batch, self._rows)
        self._num_tokens = float(batch["response_mask"].values().sum())
        self._rates = schedule_rates(config, _NUM_STEPS + 1)

    def check_scores(self, backend: TrainBackend, when: str, reference: torch.nn.Module | None = None) -> None:
        reference = reference or self._reference
        if self._head == "value":
            scored = backend.compute_values(self._local)
            self._compare(scored["values"], [values[:, 0] for values, _ in self._expected(reference)], f"values {when}")
            return
        for temperature in (1.0, 0.7):
            scored = backend.compute_logprobs(self._local, temperature=temperature, entropy=True, top_k=_NUM_CANDIDATES)
            logits = [(row / temperature, ids) for row, ids in self._expected(reference)]
            logprobs = [row.log_softmax(-1).gather(-1, ids[:, None])[:, 0] for row, ids in logits]
            entropies = [torch.distributions.Categorical(logits=row).entropy() for row, _ in logits]  # type: ignore[no-untyped-call]
            self._compare(scored["logprobs"], logprobs, f"log-probs at temperature {temperature} {when}")
            self._compare(scored["entropy"], entropies, f"entropies at temperature {temperature} {when}")
            distributions = [row.log_softmax(-1) for row, _ in logits]
            likeliest = [row.topk(_NUM_CANDIDATES).values for row in distributions]
            self._compare(scored["top_logprobs"], likeliest, f"top log-probs at temperature {temperature} {when}")
            found = [row.gather(-1, ids) for row, ids in zip(distributions, rows_of(scored["top_ids"]), strict=True)]
            self._compare(scored["top_logprobs"], found, f"log-probs of top ids at temperature {temperature} {when}")

    def check_refusal(self, backend: TrainBackend) -> None:
        """One rank's loss is not a number: no rank may step."""
        before = gather_weights(backend, self._topology)

        def poisoned(outputs: TensorDict, micro_batch: TensorDict) -> tuple[torch.Tensor, Metrics]:
            loss, metrics = self._loss(outputs, micro_batch)
            return (loss * float("nan") if 0 in self._rows else loss), metrics

        refused = False
        try:
            self._step(backend, poisoned)
        except NonFiniteLossError:
            refused = True
        assert refused, "a loss that is not a number on one rank was not refused on every rank"
        assert backend.optimizer_steps == 0, "a refused step was counted"
        after = gather_weights(backend, self._topology)
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        assert not changed, f"a refused step changed {changed}"

    def check_without_gradients(self, backend: TrainBackend) -> None:
        """Nothing waits for a step at first, after a call that failed, and after a load."""
        failure = ValueError("a loss that fails")

        def failing(outputs: TensorDict, micro_batch: TensorDict) -> tuple[torch.Tensor, Metrics]:
            raise failure

        self._refused_step(backend, "before any forward_backward")
        self._accumulate(backend, self._local)
        try:
            self._accumulate(backend, self._local, failing)
        except (ValueError, BackendError):
            self._refused_step(backend, "after a forward_backward that failed")
        else:
            raise AssertionError("forward_backward did not raise what its loss function raised")

    def check_training(self, backend: TrainBackend) -> tuple[torch.nn.Module, dict[str, dict[str, torch.Tensor]]]:
        """Returns a reference that was trained alike, with the backend's own weights, and its moments by name."""
        reference = deepcopy(self._reference)
        optimizer = torch.optim.AdamW(
            reference.parameters(),
            lr=self._config.learning_rate,
            betas=self._config.betas,
            eps=self._config.eps,
            weight_decay=self._config.weight_decay,
        )
        for step, rate in enumerate(self._rates[:_NUM_STEPS], 1):
            expected_norm = self._reference_step(reference, optimizer, rate)
            if step % 2:
                self._score(backend, keep_graph=True)
            metrics = self._step(backend) if step % 2 else self._step_in_halves(backend)
            _close(metrics["grad_norm"], expected_norm, 1e-3 * expected_norm, f"gradient norm of step {step}")
            _close(metrics["learning_rate"], rate, 1e-12, f"learning rate of step {step}")
            counted = backend.sum_over_data([metrics["tokens"][0]])[0] if "tokens" in metrics else 0.0
            assert counted == self._num_tokens, (
                f"{counted} tokens reached the loss, {self._num_tokens} are in the batch"
            )
        assert backend.optimizer_steps == 5, f"{backend.optimizer_steps} optimizer steps after five"
        weights = gather_weights(backend, self._topology)
        expected = {name: parameter.detach() for name, parameter in reference.named_parameters()}
        for name, parameter in _in_files(reference, expected).items():
            difference = float((weights[name] - parameter).abs().max())
            assert difference <= self._tolerance, f"{name} is {difference} off after five AdamW steps"
            # Scores are compared under one set of weights: a small difference of weights may be a larger one of scores.
            parameter.copy_(weights[name])
        return reference, {
            kind: _in_files(reference, {name: optimizer.state[p][kind] for name, p in reference.named_parameters()})
            for kind in ("exp_avg", "exp_avg_sq")
        }

    def check_files(
        self, directory: Path, trained: torch.nn.Module, moments: dict[str, dict[str, torch.Tensor]]
    ) -> None:
        """Safetensors alone reads from a state what torch's own optimizer keeps, each element once."""
        weights = {name: parameter.detach() for name, parameter in trained.named_parameters()}
        expected = {"weights": _in_files(trained, weights), **moments}
        found = read_whole_state(directory / "state")
        assert found.keys() == expected.keys(), f"a state holds {sorted(found)}, not {sorted(expected)}"
        for kind, tensors in expected.items():
            for name, tensor in tensors.items():
                stored = found[kind].get(name, found[kind].get(VALUE_HEAD))
                assert stored is not None, f"{kind} of {name} are not in the state"
                # Weights are the backend's own bits, where they are not masters of coarser ones.
                bound = 1e-3 * float(tensor.abs().max()) + 1e-7 if kind != "weights" else self._tolerance
                off = float((stored - tensor).abs().max())
                assert off <= bound, f"{kind} of {name} in the state are {off} off"

    def check_offloading(self, backend: TrainBackend) -> None:
        before = gather_weights(backend, self._topology)
        for weights in (False, True):
            freed = backend.offload(weights=weights)
            assert freed >= 0, f"offload(weights={weights}) freed {freed} bytes"
            refusal = ""
            try:
                self._step(backend)
            except BackendError as error:
                refusal = str(error)
            assert "reload()" in refusal, f"a step while offloaded must be refused, and name reload(): {refusal!r}"
        backend.reload()
        after = gather_weights(backend, self._topology)
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        assert not changed, f"offload and reload changed {changed}"

    def check_restoring(self, backend: TrainBackend, directory: Path, trained: torch.nn.Module) -> None:
        """State and export, another step, and back."""
        backend.save_state(directory / "state", background=True, weight_version=3)
        backend.export_hf(directory / "export", dtype="float32")
        changes = backend.weight_changes
        self._step(backend)
        onwards = gather_weights(backend, self._topology)
        files = _on_all_ranks(backend.finish_state())
        self._score(backend, keep_graph=True)  # leftovers of scoring must not hide the load that follows
        loaded = backend.load_state(directory / "state", files=files)
        assert loaded.notice is None, f"the layout of the save is that of the load, but {loaded.notice}"
        assert loaded.weight_version == 3, f"weight version {loaded.weight_version} in a state saved with 3"
        assert backend.optimizer_steps == 5, f"{backend.optimizer_steps} optimizer steps in a state of five"
        assert backend.weight_changes == changes + 2, "a step and a load are two changes of the weights"
        self.check_scores(backend, "from the state", trained)
        metrics = self._step(backend)
        _close(metrics["learning_rate"], self._rates[_NUM_STEPS], 1e-12, "learning rate after the state")
        again = gather_weights(backend, self._topology)
        off = max(float((onwards[name] - again[name]).abs().max()) for name in onwards)
        assert off == 0, f"a step from the state ends {off} off: optimizer state was lost"
        self._score(backend)
        backend.set_learning_rate(10 * self._config.learning_rate)
        backend.load_hf(directory / "export")
        assert backend.optimizer_steps == 0, "load_hf starts the optimizer again"
        self.check_scores(backend, "from the export", trained)
        metrics = self._step(backend)
        _close(metrics["learning_rate"], self._rates[0], 1e-12, "learning rate of the first step after load_hf")

    def _expected(self, reference: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Reference outputs and response ids of this rank's rows."""
        pairs = zip(rows_of(self._local["prompt_ids"]), rows_of(self._local["response_ids"]), strict=True)
        with torch.no_grad():
            return [(reference_outputs(reference, prompt, response), response) for prompt, response in pairs]

    def _score(self, backend: TrainBackend, *, keep_graph: bool = False) -> None:
        compute = backend.compute_values if self._head == "value" else backend.compute_logprobs
        compute(self._local, keep_graph=keep_graph)

    def _step(self, backend: TrainBackend, loss: LossFunction | None = None) -> Metrics:
        more = self._head == "lm"
        return backend.train_step(self._local, loss or self._loss, self._num_tokens, entropy=more, candidates=more)

    def _accumulate(self, backend: TrainBackend, rows: TensorDict, loss: LossFunction | None = None) -> Metrics:
        more = self._head == "lm"
        return backend.forward_backward(rows, loss or self._loss, self._num_tokens, entropy=more, candidates=more)

    def _step_in_halves(self, backend: TrainBackend) -> Metrics:
        """The same step on every other row and then on the rest, with scores between, which change nothing."""
        parts = []
        for half in (0, 1):
            places = [place for place, row in enumerate(self._rows) if row % 2 == half]
            parts.append(self._accumulate(backend, select_rows(self._local, places)))
            self._score(backend)
        return merge_metrics(parts) | backend.optim_step()

    def _refused_step(self, backend: TrainBackend, when: str) -> None:
        steps, refusal = backend.optimizer_steps, ""
        try:
            backend.optim_step()
        except BackendError as error:
            refusal = str(error)
        assert "forward_backward" in refusal, (
            f"optim_step {when} must be refused, and name forward_backward: {refusal!r}"
        )
        assert backend.optimizer_steps == steps, f"optim_step {when} was counted"

    def _loss(self, outputs: TensorDict, micro_batch: TensorDict) -> tuple[torch.Tensor, Metrics]:
        """A policy-gradient-like loss on log-probs with more terms, a squared error on values."""
        mask, targets = micro_batch["response_mask"], micro_batch["targets"]
        if self._head == "value":
            per_token = (outputs["values"] - targets) ** 2
        else:
            per_token = _token_loss(targets, *(outputs[name] for name in ("logprobs", "entropy", "candidate_logprobs")))
        return per_token.masked_fill(~mask, 0.0).sum(), {"tokens": (float(mask.sum()), 1.0)}

    def _reference_step(self, reference: torch.nn.Module, optimizer: torch.optim.AdamW, rate: float) -> float:
        names = ("prompt_ids", "response_ids", "targets", "response_mask", "candidate_ids")
        loss = torch.zeros(())
        for prompt, response, targets, mask, candidates in zip(
            *(rows_of(self._batch[name]) for name in names), strict=True
        ):
            outputs = reference_outputs(reference, prompt, response)
            if self._head == "value":
                loss = loss + ((outputs[:, 0] - targets)[mask] ** 2).sum()
            else:
                distribution = outputs.log_softmax(-1)
                logprobs = distribution.gather(-1, response[:, None])[:, 0]
                entropy = -(distribution.exp() * distribution).sum(-1)
                per_token = _token_loss(targets, logprobs, entropy, distribution.gather(-1, candidates))
                loss = loss + per_token[mask].sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss / self._num_tokens)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), self._config.max_grad_norm)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        return float(norm)

    def _compare(self, column: Any, expected: list[torch.Tensor], what: str) -> None:
        found = rows_of(column)
        assert [len(row) for row in found] == [len(row) for row in expected], f"{what}: rows are not aligned"
        off = max(float((row - wanted).abs().max()) for row, wanted in zip(found, expected, strict=True))
        assert off <= self._tolerance, f"{what}: {off} off"


def _in_files(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors_in_files(read_file_names(model), tensors)


def _on_all_ranks(files: Sequence[StateFile]) -> list[StateFile]:
    gathered: list[Sequence[StateFile]] = [()] * dist.get_world_size()
    dist.all_gather_object(gathered, files)
    return [file for each in gathered for file in each]


def _token_loss(
    targets: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor, candidates: torch.Tensor
) -> torch.Tensor:
    """Each candidate has a weight of its own, so that none may stand for another."""
    weights = torch.arange(1, 1 + candidates.shape[-1], device=candidates.device)
    return (
        -targets * logprobs
        - _ENTROPY_WEIGHT * entropy
        + _CANDIDATE_WEIGHT * targets * (weights * candidates.exp()).sum(-1)
    )


def _close(pair: tuple[float, float], expected: float, tolerance: float, what: str) -> None:
    found = pair[0] / pair[1]
    assert abs(found - expected) <= tolerance, f"{what} is {found}, not {expected}"
