"""Our side of `conformance_trl.py` and `conformance_verl.py`: recipes' parts, random batches, comparisons, the page.

The peers run in environments of their own, where our packages are on the path: nothing here imports a peer.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peer_environments import ROOT, make_environment

from hf_algorithms.config import parse_config
from hf_algorithms.losses import PolicyLoss, ValueLoss
from hf_algorithms.recipes import RECIPES, StepContext

ABSOLUTE = 1e-6
SEEDS = range(20)
STATED = {
    "trl": {
        "online_dpo with equal scores": "TRL prefers the first of two responses with equal scores; here the pair is "
        "skipped and counted",
        "gspo with a KL term": "TRL weighs the KL term of each token by the ratio of the whole sequence; here it is "
        "the token's own ratio",
        "gmpo with an empty row": "TRL takes the mean over all rows; a row without a trained token does not count here",
        "grpo's loss type with an empty row": "TRL takes the mean over all rows; a row without a trained token does "
        "not count here",
    },
    "verl": {
        "gmpo with an empty row": "verl takes the mean over all rows; a row without a trained token does not count "
        "here",
        "dr_grpo in another width": "verl divides by the width of the padded batch unless `loss_scale_factor` is set; "
        "ours is `rollout.max_new_tokens`, independent of the longest row",
        "grpo corrected by sequence_mask": "verl divides by the tokens of kept responses alone, which inflates them; "
        "here the denominator stays",
        "k3 above 10": "verl cuts the value of k3 at 10, where its gradient ends",
    },
}
"""Cases of each peer that differ, and why."""

Columns = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Estimator and losses that a recipe's step passes to its workers."""

    estimator: Callable[[Columns], dict[str, torch.Tensor]]
    policy_loss: PolicyLoss
    value_loss: ValueLoss | None

    def aggregate(
        self, logprobs: torch.Tensor, columns: Columns, *, loss: PolicyLoss | ValueLoss | None = None
    ) -> torch.Tensor:
        """The loss of one optimizer step as an engine forms it: the sum over the count."""
        loss = loss or self.policy_loss
        name = "values" if isinstance(loss, ValueLoss) else "logprobs"
        return loss({name: logprobs}, columns)[0] / loss.count(columns)


@dataclass(frozen=True)
class _Sampling:
    n: int
    max_new_tokens: int
    temperature: float = 1.0
    step: int = 0
    seed: int = 0
    greedy: bool = False


class _Batch:
    """Stands for every future; it has rows and no values."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def repeat(self, times: int) -> _Batch:
        return _Batch(self.num_rows * times)

    def rows(self, index: Sequence[int]) -> _Batch:
        return _Batch(len(index))

    def __getattr__(self, name: str) -> Callable[..., _Batch]:
        return lambda *args, **kwargs: self


class _Roles:
    """Takes down the first estimator and loss that each method is given."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def __getattr__(self, role: str) -> Any:
        def call(method: str) -> Callable[..., _Batch]:
            def record(batch: _Batch, *args: Any, **kwargs: Any) -> _Batch:
                if method != "generate_sequences" and args:
                    self.seen.setdefault(method, args[0])
                return batch

            return record

        class Group:
            spec = SimpleNamespace(worker=SimpleNamespace(compute_reward=lambda self, batch: batch))

            def __getattr__(self, method: str) -> Callable[..., _Batch]:
                return call(method)

        return Group()


def build_parts(algorithm: str, conventions: str, *, max_new_tokens: int = 16, **keys: Any) -> Parts:
    """Runs the recipe's step over roles that only take down what they are given."""
    section = {"name": algorithm, "conventions": conventions, **keys}
    config = parse_config({"data": {"train": "rows.jsonl"}, "algorithm": section})
    roles, batch = _Roles(), _Batch(4)
    context = StepContext(
        sampling=_Sampling(n=2, max_new_tokens=max_new_tokens),
        iteration=0,
        state={},
        more_prompts=lambda num_prompts: batch,
        pretrain_rows=lambda num_rows: batch,
        count_prompts_left=lambda: 0,
    )
    RECIPES[algorithm].step(roles, batch, config.algorithm, context)
    return Parts(
        estimator=roles.seen["compute_advantages"],
        policy_loss=roles.seen["update_actor"],
        value_loss=roles.seen.get("update_critic"),
    )


def draw_batch(seed: int, *, groups: int = 4, samples: int = 4, width: int = 11, holes: bool = True) -> dict[str, Any]:
    """Random ragged rows in float64, [B, T] and [B]: groups of `samples` rows one after the other.

    Ratios leave every clip on both sides. One group's scores are all equal. With `holes` some tokens inside a response
    are observations. Every row has a trained token, its last one, and where the mask is False values are arbitrary.
    """
    random = torch.Generator().manual_seed(seed)
    rows = groups * samples

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=random, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (rows,), generator=random)
    lengths[seed % rows] = width
    at = torch.arange(width)
    mask = at < lengths[:, None]
    if holes:
        observed = torch.rand(rows, width, generator=random) < 0.2
        mask &= ~observed | (at == lengths[:, None] - 1)
    scores = normal(rows)
    scores[:samples] = scores[0]
    old = -normal(rows, width).abs() - 0.01
    group_id = torch.arange(groups).repeat_interleave(samples)
    return {
        "response_mask": mask,
        "lengths": lengths,
        "scores": scores,
        "baseline_scores": normal(rows),
        "group_id": group_id,
        "finish_reason": (lengths == width).long(),
        "old_logprobs": old,
        "rollout_logprobs": old + normal(rows, width, scale=0.1),
        "ref_logprobs": old + normal(rows, width, scale=0.3),
        "logprobs": old + normal(rows, width, scale=0.5),
        "values": normal(rows, width),
        "new_values": normal(rows, width),
    }


def place_scores(batch: Mapping[str, Any]) -> torch.Tensor:
    """The scores at the last trained token of each row, [B, T]."""
    mask = batch["response_mask"]
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(is_last, batch["scores"][:, None], 0.0)


@dataclass
class Comparison:
    """The largest differences of a run, by case: `algorithm/quantity`."""

    largest: dict[str, float] = field(default_factory=dict)

    def compare(self, case: str, ours: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Takes down the largest difference, absolute, or relative to the peer's where that is above 1."""
        ours, theirs = ours.detach().double(), theirs.detach().double()
        difference = (ours - theirs).abs() / theirs.abs().clamp(min=1.0)
        found = float((difference if mask is None else difference[mask]).max())
        if not found >= 0:
            found = float("inf")
        self.largest[case] = max(self.largest.get(case, 0.0), found)

    def compare_losses(
        self,
        case: str,
        ours: Callable[[torch.Tensor], torch.Tensor],
        theirs: Callable[[torch.Tensor], torch.Tensor],
        at: torch.Tensor,
        mask: torch.Tensor,
    ) -> None:
        """Compares two losses of the same numbers, and their gradients on trained tokens."""
        results = []
        for loss in (ours, theirs):
            given = at.clone().requires_grad_()
            value = loss(given)
            (gradient,) = torch.autograd.grad(value, given)
            results.append((value, gradient))
        self.compare(f"{case}/loss", results[0][0], results[1][0])
        # A gradient is as small as the batch is large: by its own largest entry.
        size = float(results[1][1][mask].abs().max()) or 1.0
        self.compare(f"{case}/gradient", results[0][1] / size, results[1][1] / size, mask)


def run_in_environment(program: Path, name: str, installs: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Makes the environment of a peer where it is missing, runs `program --inside` in it, returns what it printed."""
    python = make_environment(name, installs)
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [str(python), str(program), "--inside"], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def answer(comparison: Comparison, versions: Mapping[str, str]) -> None:
    """Prints what the program outside reads: one line of JSON."""
    print(json.dumps({"largest": comparison.largest, "versions": dict(versions)}))


def find_failures(largest: Mapping[str, float], differences: Mapping[str, str]) -> list[str]:
    """Cases that should agree and do not, and cases that are said to differ and do not."""
    worst: dict[str, float] = {}
    for name, value in largest.items():
        case = name.rpartition("/")[0]
        worst[case] = max(worst.get(case, 0.0), value)
    failures = [f"{case}: is said to differ and was not compared" for case in differences if case not in worst]
    for case, value in worst.items():
        if case in differences and value <= ABSOLUTE:
            failures.append(f"{case}: is said to differ, and differs by {value:.1e} only")
        if case not in differences and not value <= ABSOLUTE:
            failures.append(f"{case}: differs by {value:.1e}, more than {ABSOLUTE}")
    return failures


def namespace(**values: Any) -> SimpleNamespace:
    """An object with these attributes."""
    return SimpleNamespace(**values)
