"""Compares `algorithm.conventions = "trl"` with TRL 1.16.0: advantages, losses, gradients.

    conformance_trl.py            runs in environments of its own and writes results/conformance_trl.json
    conformance_trl.py --inside   is that run

TRL's trainers are subclassed: responses, rewards and log-probs are given, and what TRL makes of them is compared. Its
configurations keep their defaults. Only what selects an algorithm is set, and where the documentation names another
value for one (GSPO's clip, CISPO's bound), that.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import conformance_trl_dpo
import conformance_trl_ppo
import torch
from conformance import SEEDS, Comparison, answer, build_parts, draw_batch, namespace, run_in_environment

INSTALLS = (
    (
        *("torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0", "tokenizers==0.23.3"),
        *("trl==1.16.0", "pydantic", "tensordict"),
    ),
)
WIDTH = 11
GROUPS, SAMPLES = 4, 4
_LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "gmpo": {},
}
"""Options of `GRPOConfig` that select each algorithm."""


def main() -> int:
    """Run in the peer's environment, or start that run and write its result."""
    if "--inside" in sys.argv:
        return _run_inside()
    from conformance_page import publish

    program = Path(__file__).resolve()
    ppo = run_in_environment(program.with_name("conformance_trl_ppo.py"), "trl-ppo", conformance_trl_ppo.INSTALLS)
    found = run_in_environment(program, "trl", INSTALLS)
    return publish("trl", {key: ppo[key] | found[key] for key in found})


def _run_inside() -> int:
    from importlib.metadata import version

    # Lists of Python numbers become tensors of this type in TRL.
    torch.set_default_dtype(torch.float64)
    comparison = Comparison()
    for seed in SEEDS:
        for algorithm, options in _LOSSES.items():
            _compare(comparison, algorithm, algorithm, seed, **options)
        _compare_variants(comparison, seed)
        _compare_corrections(comparison, seed)
        conformance_trl_dpo.compare(comparison, seed)
        _compare_rloo(comparison, seed)
    answer(comparison, {name: version(name) for name in ("trl", "transformers", "accelerate", "torch")})
    return 0


def _compare_variants(comparison: Comparison, seed: int) -> None:
    """Other options of TRL's trainer, by explicit keys over the conventions."""
    loss_types = {
        "grpo": {"aggregation": "seq-mean-token-mean"},
        "bnpo": {},
        "dr_grpo": {"aggregation": "constant"},
    }
    for name, keys in loss_types.items():
        _compare(comparison, f"grpo, loss type {name}", "grpo", seed, keys=keys, loss_type=name)
    _compare(comparison, "grpo, scaled by the batch", "grpo", seed, keys={"std_over": "batch"}, scale_rewards="batch")
    _compare(comparison, "grpo, not scaled", "grpo", seed, keys={"std_over": "none"}, scale_rewards="none")
    _compare(comparison, "grpo, two-sided (delta)", "grpo", seed, keys={"dual_clip": 3.0}, delta=3.0)
    for name, keys in (("grpo", {}), ("cispo", {}), ("sapo", {}), ("gmpo", {})):
        options = _LOSSES[name]
        _compare(
            comparison, f"{name} with a KL term", name, seed, keys={"kl_coefficient": 0.3, **keys}, beta=0.3, **options
        )
    options = {"keys": {"kl_coefficient": 0.3, "kl_gradient": "value"}, "beta": 0.3, "use_bias_correction_kl": False}
    _compare(comparison, "grpo with a KL term, not corrected", "grpo", seed, **options)
    _compare(comparison, "gspo with a KL term", "gspo", seed, keys={"kl_coefficient": 0.3}, beta=0.3, **_LOSSES["gspo"])
    _compare(comparison, "gmpo with an empty row", "gmpo", seed, empties=True)
    options = {"keys": {"aggregation": "seq-mean-token-mean"}, "loss_type": "grpo"}
    _compare(comparison, "grpo's loss type with an empty row", "grpo", seed, empties=True, **options)


def _compare_corrections(comparison: Comparison, seed: int) -> None:
    """TRL's corrections between vLLM and its trainer, with bounds that this batch exceeds, and its default."""
    cases: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
        ("token_truncate", "tis", {"low": 0.9, "high": 1.1}, {"clip_min": 0.9, "clip_max": 1.1}),
        ("token_mask", "icepop", {"low": 0.9, "high": 1.1}, {"clip_min": 0.9, "clip_max": 1.1}),
        ("sequence_mask", "sequence_mask", {"high": 1.1}, {"clip_max": 1.1}),
    )
    for mode, kind, bounds, options in cases:
        keys = {"correction": kind, **{f"correction_{name}": value for name, value in bounds.items()}}
        asked = {f"vllm_importance_sampling_{name}": value for name, value in {"mode": mode, **options}.items()}
        _compare(comparison, f"grpo corrected by {mode}", "grpo", seed, keys=keys, from_vllm=True, **asked)
    keys = {"correction": "sequence_mask", "kl_coefficient": 0.3}
    _compare(comparison, "grpo corrected, with a KL term", "grpo", seed, keys=keys, from_vllm=True, beta=0.3)


def _compare(
    comparison: Comparison,
    case: str,
    algorithm: str,
    seed: int,
    *,
    keys: dict[str, Any] | None = None,
    empties: bool = False,
    from_vllm: bool = False,
    **options: Any,
) -> None:
    from trl import GRPOConfig, GRPOTrainer
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    trainer, config = (GMPOTrainer, GMPOConfig) if algorithm == "gmpo" else (GRPOTrainer, GRPOConfig)
    batch = draw_batch(seed, width=WIDTH, groups=GROUPS, samples=SAMPLES)
    if empties:
        batch["response_mask"] &= (torch.arange(GROUPS * SAMPLES) > 2)[:, None]
    batch["scores"][5] = float("nan")
    batch["scores"][8:11] = float("nan")
    peer = _build_peer(trainer, config, batch, **options)
    peer.use_vllm = from_vllm
    scored = peer._generate_and_score_completions([{"prompt": ""}] * len(batch["scores"]))
    mask = batch["response_mask"]
    parts = build_parts(algorithm, "trl", max_new_tokens=WIDTH + 3, mini_batches=2, **(keys or {}))
    ours = parts.estimator(batch)["advantages"]
    comparison.compare(f"{case}/advantages", ours, scored["advantages"][:, None].expand_as(ours), mask)
    if from_vllm:
        assert (scored["importance_sampling_ratio"] != 1).any()
    inputs = {**scored, "old_per_token_logps": batch["old_logprobs"], "ref_per_token_logps": batch["ref_logprobs"]}
    batch["advantages"] = ours
    comparison.compare_losses(
        case,
        lambda logprobs: parts.aggregate(logprobs, batch),
        lambda logprobs: peer.compute(logprobs, inputs),
        batch["logprobs"],
        mask,
    )


def _compare_rloo(comparison: Comparison, seed: int) -> None:
    from trl import RLOOConfig, RLOOTrainer

    for case, keys, options in (
        ("rloo", {}, {}),
        ("rloo without KL", {"kl_coefficient": 0.0}, {"beta": 0.0}),
    ):
        batch = draw_batch(seed, width=WIDTH, groups=GROUPS, samples=SAMPLES, holes=False)
        batch["scores"][5] = float("nan")
        # The ratio is a product: small steps, or all rows are clipped.
        batch["logprobs"] = batch["old_logprobs"] + 0.2 * (batch["logprobs"] - batch["old_logprobs"])
        peer = _build_peer(RLOOTrainer, RLOOConfig, batch, **options)
        inputs = peer._generate_and_score_completions([{"prompt": ""}] * len(batch["scores"]))
        mask = batch["response_mask"]
        parts = build_parts("rloo", "trl", mini_batches=2, **keys)
        ours = parts.estimator(batch)["advantages"]
        comparison.compare(f"{case}/advantages", ours, inputs["advantages"][:, None].expand_as(ours), mask)
        batch["advantages"] = ours
        comparison.compare_losses(
            case,
            lambda logprobs, parts=parts, batch=batch: parts.aggregate(logprobs, batch),
            lambda logprobs, peer=peer, inputs=inputs: peer.compute(logprobs, inputs),
            batch["logprobs"],
            mask,
        )


def _build_peer(trainer: type[Any], config: type[Any], batch: dict[str, Any], **options: Any) -> Any:
    """A trainer of TRL without a model: its responses, rewards and log-probs are those of `batch`."""
    from accelerate import Accelerator

    rows = len(batch["scores"])
    lengths = batch["lengths"].tolist()
    is_rloo = trainer.__name__ == "RLOOTrainer"

    class GrpoPeer(trainer):
        def __init__(self) -> None:
            folder = tempfile.gettempdir()
            self.args = config(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                report_to="none",
                per_device_train_batch_size=rows,
                num_generations=SAMPLES,
                max_completion_length=WIDTH + 3,
                **options,
            )
            self.accelerator = Accelerator(cpu=True)
            self.model = torch.nn.Module()
            self.model.is_gradient_checkpointing = False
            self.ref_model = torch.nn.Module()
            self._tokenizer = namespace(pad_token_id=0)
            self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
            self._logs = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
            self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)
            self.reward_funcs, self.reward_func_names = [None], ["scores"]
            self.reward_weights = torch.ones(1, dtype=torch.float64)
            self.epsilon_low = self.args.epsilon
            high = self.args.epsilon_high
            self.epsilon_high = self.args.epsilon if high is None else high
            for name in ("tools", "environments", "environment_factories", "images", "pad_to_multiple_of"):
                setattr(self, name, None)
            for name in ("aux_loss_enabled", "use_vllm", "_entropy_bonus_enabled", "_is_vlm", "log_multimodal"):
                setattr(self, name, False)
            self.current_gradient_accumulation_steps = 1
            self.given: torch.Tensor = batch["old_logprobs"]

        def __getattr__(self, name: str) -> Any:
            # What the trainer's constructor copies from its configuration.
            return getattr(self.__dict__["args"], name)

        def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
            ids, texts = [[1] * length for length in lengths], [""] * len(prompts)
            if is_rloo:
                return [[1]] * rows, ids, texts
            tool_mask = [
                [int(each) for each in row[:length]]
                for row, length in zip(batch["response_mask"].tolist(), lengths, strict=True)
            ]
            sampled = [row[:length] for row, length in zip(batch["rollout_logprobs"].tolist(), lengths, strict=True)]
            return [[1]] * rows, ids, tool_mask, texts, sampled, {}, None, None

        def _calculate_rewards(self, *arguments: Any) -> torch.Tensor:
            return batch["scores"][:, None].clone()

        def _get_per_token_logps_and_entropies(self, model: Any, *arguments: Any, **others: Any) -> tuple[Any, ...]:
            table = batch["ref_logprobs"] if model is self.ref_model else self.given
            return table, torch.zeros_like(table), None

        def compute(self, logprobs: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
            self.given = logprobs
            loss: torch.Tensor = self._compute_loss(self.model, inputs)
            return loss

    return GrpoPeer()


if __name__ == "__main__":
    sys.exit(main())
