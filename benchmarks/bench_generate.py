"""Generation with the embedded transformers backend against plain `model.generate` with the same batch.

Prompts of ragged lengths, several samples each, a model with an end-of-sequence token that untrained weights draw now
and then. Both draw from the full distribution at temperature 1, on one thread, keep keys and values, and pad on the
left; plain generate gets every prompt `n` times through `num_return_sequences`. They take turns in one run; figures are
samples a second, medians with the fastest and the slowest. The tokens differ, because the random numbers do: the number
of tokens that each drew is printed next to its time. Two workloads: samples that share a prompt (GRPO, RLOO) and one
sample a prompt (PPO).

Of the backend's time the share is printed that its products with weights take at the rate of these products alone: of
the prompts' tokens once, and of the drawn ones.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from generation_workload import MAX_NEW_TOKENS, WORKLOADS, draw_prompts, write_model
from measurement import record
from transformers import AutoModelForCausalLM

from hf_engine import SamplingParams, load_rollout_backend
from hf_engine.testing import LocalRanks
from hf_protocols import GenerationSpec, ParallelSpec, Topology

NUM_ROUNDS = 7
TARGETS = {"shared_prompts": 2.5, "one_sample": 1.3}
"""Times plain generate's samples a second."""


def main() -> int:
    """Measure; 1 if a target is missed."""
    with tempfile.TemporaryDirectory() as directory:
        write_model(directory)
        with LocalRanks(1, timeout_s=300) as ranks:
            ((found, shares),) = ranks.run(measure, directory, deadline_s=600)
    metrics: dict[str, tuple[float, str]] = {}
    medians: dict[str, float] = {}
    for name, runs in found.items():
        rates = [samples / seconds for samples, seconds, _ in runs]
        medians[name] = statistics.median(rates)
        tokens = sum(tokens for *_, tokens in runs) / len(runs)
        print(f"{name}: {medians[name]:.1f} samples/s ({min(rates):.1f} to {max(rates):.1f}), {tokens:.0f} tokens")
        for kind, rate in (("median", medians[name]), ("slowest", min(rates)), ("fastest", max(rates))):
            metrics[f"{name}_{kind}"] = (round(rate, 2), "samples/s")
        metrics[f"{name}_tokens"] = (round(tokens, 1), "tokens")
    for workload, share in shares.items():
        metrics[f"{workload}_products_share"] = (round(100 * share, 1), "%")
    for workload in WORKLOADS:
        ratio = medians[f"{workload}_backend"] / medians[f"{workload}_generate"]
        metrics[f"{workload}_speed_up"] = (round(ratio, 3), "times")
    record("generate", metrics)
    missed = 0
    for workload, wanted in TARGETS.items():
        ratio = metrics[f"{workload}_speed_up"][0]
        missed += ratio < wanted
        word = "MISSED " if ratio < wanted else "reached"
        share = metrics[f"{workload}_products_share"][0]
        print(f"{word} {workload}: {ratio:.2f} times plain generate (wanted >= {wanted}); products take {share} %")
    return int(bool(missed))


def measure(directory: str) -> tuple[dict[str, list[tuple[int, float, int]]], dict[str, float]]:
    """By system and workload: samples, seconds and tokens of every round but the first; and the shares of products."""
    torch.set_num_threads(1)
    plain = AutoModelForCausalLM.from_pretrained(directory).eval()
    topology = Topology(ParallelSpec(), GenerationSpec())
    backend = load_rollout_backend("transformers").build(directory, topology=topology)
    found: dict[str, list[tuple[int, float, int]]] = {}
    shares: dict[str, list[float]] = {}
    for workload, (num_prompts, n, longest) in WORKLOADS.items():
        for number in range(NUM_ROUNDS + 1):
            rows = draw_prompts(num_prompts, longest, seed=number)
            for system in ("backend", "generate"):
                start = time.perf_counter()
                tokens = _run_backend(backend, rows, n, number) if system == "backend" else _run_plain(plain, rows, n)
                seconds = time.perf_counter() - start
                if number:
                    found.setdefault(f"{workload}_{system}", []).append((num_prompts * n, seconds, tokens))
                if number and system == "backend":
                    passed = tokens + sum(map(len, rows))
                    shares.setdefault(workload, []).append(passed * _time_products(plain, num_prompts * n) / seconds)
    return found, {workload: statistics.median(each) for workload, each in shares.items()}


@torch.inference_mode()
def _time_products(model: Any, num_rows: int) -> float:
    """Seconds that the model's products with weights take for a token, of that many rows at once."""
    weights = [
        each for each in model.parameters() if each.dim() > 1 and each is not model.get_input_embeddings().weight
    ]
    rows = [torch.randn(num_rows, each.shape[1]) for each in weights]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for inputs, weight in zip(rows, weights, strict=True):
            torch.nn.functional.linear(inputs, weight)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / num_rows


def _run_backend(backend: Any, rows: list[torch.Tensor], n: int, step: int) -> int:
    from tensordict import TensorDict

    columns = {
        "prompt_ids": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "row_id": torch.arange(len(rows)),
    }
    sampling = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, n=n, step=step)
    batch = backend.generate(TensorDict(columns, batch_size=[len(rows)]), sampling)
    return int(batch["response_ids"].offsets()[-1])


@torch.no_grad()
def _run_plain(model: Any, rows: list[torch.Tensor], n: int) -> int:
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        max_new_tokens=MAX_NEW_TOKENS,
        num_return_sequences=n,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    responses = output.sequences[:, width:]
    # What a trainer needs of them, and the backend gives: the log-prob of every token.
    logits = torch.stack(output.logits, dim=1)
    logits.log_softmax(-1).gather(-1, responses[..., None])
    ended = (responses == model.config.eos_token_id).cumsum(-1)
    return int(((ended == 0) | ((ended == 1) & (responses == model.config.eos_token_id))).sum())


if __name__ == "__main__":
    sys.exit(main())
