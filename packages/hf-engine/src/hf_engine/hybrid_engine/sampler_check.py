"""Checks an engine whose memory cannot be read: some samples are scored again, to see that it uses the weights sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_engine.agreement import together
from hf_engine.backends.base import SamplingParams, TrainBackend
from hf_engine.backends.jagged import Ragged
from hf_engine.hybrid_engine.logprob_check import check_logprobs, find_coarsest
from hf_protocols.errors import BatchError, ReshardError
from hf_protocols.topology import Topology

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["SamplerCheck"]

_NUM_ROWS, _NUM_TOKENS = 4, 64
"""Samples of each rank, and first tokens of each response: some suffice to distinguish other weights from rounding."""


@dataclass(frozen=True)
class _Sample:
    prompt: torch.Tensor
    """Token ids [P]."""
    response: torch.Tensor
    """Token ids [T]."""
    logprobs: torch.Tensor
    """The sampler's, [T]."""
    is_sampled: torch.Tensor
    """bool [T]; False on tokens that the sampler was given, such as a tool's answer."""
    temperature: float


class SamplerCheck:
    """Keeps samples of this rank; when all ranks leave a block, the training backend scores them.

    An engine may have read the first weights from their files, so it is checked twice: at first, and after a change.

    Args:
        train: the training backend, on all ranks of the topology.
        topology: its ranks.
        dtypes: of the weights of both, by torch's names; `train` may compute in a coarser one.
    """

    def __init__(self, train: TrainBackend, topology: Topology, dtypes: Iterable[str]) -> None:
        self._train, self._topology = train, topology
        self._dtype = find_coarsest((train.compute_dtype, *dtypes))
        self._samples: list[_Sample] = []
        self._first = self._now = train.weight_changes
        self._last: int | None = None

    def begin(self) -> None:
        """Forgets samples of an earlier block; samples of this block belong to the current weights."""
        self._samples, self._now = [], self._train.weight_changes

    @property
    def is_pending(self) -> bool:
        """True if samples of these weights are to be scored; the same on all ranks."""
        return self._last is None or self._last == self._first < self._now

    def note(self, batch: TensorDict, responses: TensorDict, sampling: SamplingParams) -> None:
        """Keeps some of the responses to these prompts: the shortest prompts', of one call."""
        if self._samples or not len(responses) or not self.is_pending:
            return
        prompts = Ragged(batch["prompt_ids"])
        columns = [Ragged(responses[name]) for name in ("response_ids", "rollout_logprobs", "response_mask")]
        per_prompt = len(responses) // len(batch)
        for row in prompts.lengths.argsort(stable=True)[:_NUM_ROWS].tolist():
            tokens, scores, mask = (_first_of(column, row * per_prompt, _NUM_TOKENS) for column in columns)
            self._samples.append(_Sample(_first_of(prompts, row), tokens, scores, mask.bool(), sampling.temperature))

    def check(self) -> None:
        """Scores the samples of all ranks, if any has some. Collective over the ranks of the topology.

        Raises:
            ReshardError: on all ranks, where the training weights do not explain the samples of one.
        """
        if not self.is_pending:
            return
        gathered: list[list[_Sample]] = [[]] * dist.get_world_size()
        dist.all_gather_object(gathered, self._samples)
        if self._train.weight_changes == self._now and any(gathered):
            self._score(gathered)

    def _score(self, gathered: Sequence[list[_Sample]]) -> None:
        try:
            check = self._score_again(self._rows_of_this_rank(gathered))
        except BatchError:  # on all ranks: even the shortest prompts are too long to be trained on
            return
        with together("nothing was trained on these samples", error=ReshardError):
            check()
        self._last = self._now

    def _rows_of_this_rank(self, gathered: Sequence[list[_Sample]]) -> list[_Sample]:
        """Ranks that train on the same rows score the same samples; one without any scores others', to be in step."""
        (first, *_) = (samples for samples in gathered if samples)
        data_ranks = [self._topology.coordinate(rank).dp for rank in range(len(gathered))]
        own = data_ranks[dist.get_rank()]
        rows = [one for rank, samples in zip(data_ranks, gathered, strict=True) if rank == own for one in samples]
        return [one for one in rows if one.temperature == first[0].temperature] or first

    def _score_again(self, samples: Sequence[_Sample]) -> Callable[[], object]:
        """Scores samples, and returns a function that compares the scores with the sampler's. Collective."""
        from tensordict import TensorDict

        columns = {"prompt_ids": _jagged([one.prompt for one in samples])}
        columns["response_ids"] = _jagged([one.response for one in samples])
        batch = TensorDict(columns, batch_size=[len(samples)])
        temperature, sampled = samples[0].temperature, torch.cat([one.logprobs[one.is_sampled] for one in samples])
        found = self._train.compute_logprobs(batch, temperature=temperature)["logprobs"].values().cpu()
        found = found[torch.cat([one.is_sampled for one in samples])]
        return partial(check_logprobs, sampled, found, dtype=self._dtype, temperature=temperature)


def _first_of(column: Ragged, row: int, most: int | None = None) -> torch.Tensor:
    """Returns a copy: a view would be sent with its whole storage."""
    start, length = int(column.starts[row]), int(column.lengths[row])
    return column.values[start : start + length][:most].cpu().clone()


def _jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    nested: torch.Tensor = torch.nested.nested_tensor(list(rows), layout=torch.jagged)
    return nested
