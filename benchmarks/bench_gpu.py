"""One CUDA device: the transition, updates and log-probs against a plain loop, and GRPO end to end.

    python benchmarks/bench_gpu.py                        # `make bench-gpu`: 8 minutes at most
    python benchmarks/bench_gpu.py --parts training grpo
    python benchmarks/bench_gpu.py --small                # the same work with tiny models, on any device

Each part is a process of its own with what is left of the minutes as its deadline. A part whose libraries are not
installed is left out and named, as is one that failed; the others count. `scripts/gpu_bundle.sh` packs all that a
machine without network needs.

- `transition`: a 7B bfloat16 model into generation buffers and back, against a copy (`gpu_transition.py`).
- `training`: a random model of 1.5B parameters in bfloat16 with float32 masters; updates and log-probs of `fsdp`, rows
  apart, against a plain transformers loop over the same micro-batches under autocast, and the gain of shared prompts.
  Before it is timed, the loop and the backend must report one loss and one gradient norm.
- `grpo`, `grpo_vllm`: iterations of `hf_algorithms.train` in process, with each of the two backends.
- `attention`: updates and log-probs of packed rows by FlexAttention, which skips pairs that do not see each other,
  against SDPA.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measurement import record

__all__ = ["LARGE", "SMALL", "Sizes", "find_missing", "run_part"]

NO_GPU = "make bench-gpu needs a CUDA device with 70 GB of memory, and torch finds none here"
MINUTES = 8.0
NUM_ROUNDS = 5
PARTS: Mapping[str, Sequence[str]] = {
    "transition": ("torch", "hf_engine"),
    "training": ("torch", "transformers", "tensordict", "hf_engine"),
    "grpo": ("torch", "transformers", "tensordict", "pydantic", "hf_algorithms"),
    "grpo_vllm": ("torch", "transformers", "tensordict", "pydantic", "hf_algorithms", "vllm"),
    "attention": ("torch", "transformers", "tensordict", "hf_engine"),
}
"""Modules that each part needs."""
TARGETS = {"move_over_copy": 0.8, "update_over_plain": 1.0, "logprobs_over_plain": 1.0}
"""Least ratios: of speeds, the other one's or the copy's is 1."""
_VERSIONS_OF = ("torch", "transformers", "tensordict", "vllm", "ray")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model and its work.

    Attributes:
        model: sizes of a Qwen2 configuration.
        preset: model of the transition.
        num_prompts, num_samples: of a batch; each prompt has as many responses.
        prompt_tokens, response_tokens: of a prompt; of the longest response, the shortest is half as long.
        micro_batch_tokens: of a forward pass.
        iterations: of GRPO; the first is not counted.
    """

    model: Mapping[str, Any]
    preset: str
    num_prompts: int
    num_samples: int
    prompt_tokens: int
    response_tokens: int
    micro_batch_tokens: int
    iterations: int


LARGE = Sizes(
    model={"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
           "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    preset="llama-2-7b", num_prompts=8, num_samples=8, prompt_tokens=512, response_tokens=256,
    micro_batch_tokens=16_384, iterations=4,
)  # fmt: skip
SMALL = Sizes(
    model={"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
           "num_key_value_heads": 1, "vocab_size": 128, "tie_word_embeddings": True},
    preset="", num_prompts=2, num_samples=4, prompt_tokens=16, response_tokens=8,
    micro_batch_tokens=256, iterations=2,
)  # fmt: skip

Metrics = dict[str, tuple[float, str]]


def measure_transition(sizes: Sizes) -> Metrics:
    """Speeds of a move and of its way back over that of a copy, and the peak over the plan's.

    Raises:
        AssertionError: if weights differ, or the peak passes the plan on a CUDA device.
    """
    import torch
    from gpu_transition import measure

    from hf_protocols import ModelShape

    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    shape = ModelShape.preset(sizes.preset) if sizes.preset else _tiny_shape()
    found = measure(shape, device)
    assert found["is_equal"], "weights differ after they came back"
    assert not is_gpu or found["peak_bytes"] <= found["planned_peak_bytes"], "the peak passes the plan"
    seconds = {name: statistics.median(found[name]) for name in ("copy", "move", "restore")}
    metrics: Metrics = {f"transition_{name}_s": (round(value, 5), "s") for name, value in seconds.items()}
    metrics["transition_bytes"] = (found["model_bytes"], "bytes")
    metrics["copy_bandwidth"] = (round(2 * found["model_bytes"] / seconds["copy"] / 1e9, 1), "GB/s")
    for name in ("move", "restore"):
        metrics[f"{name}_over_copy"] = (round(seconds["copy"] / seconds[name], 3), "times a copy's bandwidth")
    if is_gpu:
        metrics["transition_peak_over_plan"] = (round(found["peak_bytes"] / found["planned_peak_bytes"], 3), "ratio")
    return metrics


def measure_training(sizes: Sizes) -> Metrics:
    """Tokens a second of updates and log-probs, of the backend and of the plain loop, and what shared prompts gain.

    Raises:
        AssertionError: if the two report other losses or gradient norms.
    """
    import torch

    ways = {"plain": None, "apart": {"shared_prompts": False}, "shared": {"shared_prompts": True}}
    seconds, num_tokens = _time_training(sizes, ways)
    metrics: Metrics = {f"{name}_s": (round(value, 4), "s") for name, value in seconds.items()}
    for kind in ("update", "logprobs"):
        plain, apart, shared = (seconds[f"{kind}_{name}"] for name in ("plain", "apart", "shared"))
        metrics[f"{kind}_tokens"] = (round(num_tokens / apart, 1), "tokens/s")
        metrics[f"{kind}_over_plain"] = (round(plain / apart, 3), "times the plain loop's throughput")
        metrics[f"{kind}_shared_gain"] = (round(apart / shared, 3), "times rows apart")
    if torch.cuda.is_available():
        metrics["training_peak_bytes"] = (torch.cuda.max_memory_allocated(), "bytes")
    return metrics


def measure_attention(sizes: Sizes) -> Metrics:
    """Updates and log-probs of packed rows by FlexAttention, or on a host by "eager", and their gain over SDPA.

    Raises:
        AssertionError: if the two report other losses or gradient norms.
    """
    other = "flex_attention" if _device_name() == "cuda" else "eager"
    ways = {name: {"shared_prompts": True, "attn_implementation": name} for name in ("sdpa", other)}
    seconds, _ = _time_training(sizes, ways)
    metrics: Metrics = {f"{name}_s": (round(value, 4), "s") for name, value in seconds.items()}
    for kind in ("update", "logprobs"):
        gain = seconds[f"{kind}_sdpa"] / seconds[f"{kind}_{other}"]
        metrics[f"{kind}_{other}_gain"] = (round(gain, 3), "times SDPA")
    return metrics


def _time_training(sizes: Sizes, ways: Mapping[str, Mapping[str, Any] | None]) -> tuple[dict[str, float], float]:
    """Median seconds of an update and of log-probs, by way, and the tokens of a batch.

    Args:
        sizes: of the model and its work.
        ways: changes of the backend's settings by name; None: the plain loop.

    Raises:
        AssertionError: if a way reports another loss or gradient norm than the first one.
    """
    import torch.distributed as dist
    from plain_loop import PlainLoop

    from hf_engine import TrainConfig, load_train_backend
    from hf_protocols import ParallelSpec, Topology

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", sizes)
        dist.init_process_group(
            "nccl" if _device_name() == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
        batch = build_batch(sizes)
        num_tokens = float(batch["response_ids"].values().numel())
        config = TrainConfig(
            learning_rate=1e-6, micro_batch_tokens=sizes.micro_batch_tokens, dtype="bfloat16", shared_prompts=False,
            activation_checkpointing=True,
        )  # fmt: skip
        seconds: dict[str, float] = {}
        reports: dict[str, tuple[float, float]] = {}
        for name, changes in ways.items():
            # One after another: two models with their optimizers do not fit on every device.
            if changes is None:
                plain = PlainLoop(model, batch, config, num_tokens, device=_device_name())
                loop = Loop(plain.update, plain.logprobs)
                del plain
            else:
                own = replace(config, **changes)
                backend = load_train_backend("fsdp").build(model, topology=Topology(ParallelSpec()), config=own)
                loop = backend_loop(backend, batch, num_tokens)
                del backend
            reports[name] = loop.update()
            seconds |= {f"update_{name}": _median_s(loop.update), f"logprobs_{name}": _median_s(loop.logprobs)}
            del loop
            _free()
        dist.destroy_process_group()
    _check_reports(reports)
    return seconds, num_tokens + batch["prompt_ids"].values().numel()


def measure_grpo(sizes: Sizes, backend: str) -> Metrics:
    """Completions a second of `hf_algorithms.train` in process, and the seconds of each phase."""
    import logging

    from end_to_end_workloads import score

    from hf_algorithms import train

    logging.getLogger("transformers").setLevel(logging.ERROR)
    found: list[Mapping[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", sizes, has_tokenizer=True)
        prompts = [{"prompt": str(number + 1) * min(9, sizes.prompt_tokens), "answer": "0"} for number in range(9)]
        train(
            str(model),
            {"train": prompts, "validation": prompts[:1], "test": prompts[:1]},
            score,
            algorithm={"name": "grpo", "kl_coefficient": 0.0},
            config={
                "run": {"iterations": sizes.iterations, "eval_every": sizes.iterations, "executor": "in_process",
                        "checkpoint_every": 0},
                "warm_start": {"max_steps": 0},
                "optimizer": {"actor_learning_rate": 1e-6, "warmup_steps": 0},
                "rollout": {"backend": backend, "batch_size": sizes.num_prompts,
                            "samples_per_prompt": sizes.num_samples, "max_new_tokens": sizes.response_tokens,
                            "min_new_tokens": sizes.response_tokens},
                "training": {"dtype": "bfloat16", "micro_batch_tokens": sizes.micro_batch_tokens},
                "cluster": {"gpus_per_machine": 1, "gpu": find_kind()},
            },
            output_dir=Path(folder) / "run",
            on_metrics=lambda _, metrics: found.append(dict(metrics)),
        )  # fmt: skip
    timed = found[1:]
    metrics: Metrics = {}
    for name in sorted(set.intersection(*(set(each) for each in timed))):
        if name.startswith("time/"):
            metrics[f"grpo_{backend}_{name.removeprefix('time/')}"] = (
                round(statistics.median(each[name] for each in timed), 4),
                "s",
            )
    num_rows = sizes.num_prompts * sizes.num_samples
    iteration_s = statistics.median(each["time/iteration_s"] for each in timed)
    metrics[f"grpo_{backend}_completions"] = (round(num_rows / iteration_s, 2), "completions/s")
    return metrics


WORK: Mapping[str, Callable[[Sizes], Metrics]] = {
    "transition": measure_transition,
    "training": measure_training,
    "grpo": lambda sizes: measure_grpo(sizes, "transformers"),
    "grpo_vllm": lambda sizes: measure_grpo(sizes, "vllm"),
    "attention": measure_attention,
}


def find_kind() -> str:
    """The name in hf-mapper's catalogue of this machine's device; of a device that is not in it an H100's."""
    import torch

    from hf_mapper import known_gpus

    if not torch.cuda.is_available():
        return "cpu"
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name(0).lower())
    return next((name for name in known_gpus() if name.partition("-")[0] in words), "h100")


def write_model(folder: Path, sizes: Sizes, *, has_tokenizer: bool = False) -> Path:
    """Writes a random Qwen2 model, with a tokenizer of digits if that is asked for; returns the folder."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    special: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if has_tokenizer:
        from hf_algorithms.data import build_character_tokenizer

        tokenizer = build_character_tokenizer("0123456789", folder)
        special |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    positions = sizes.prompt_tokens + sizes.response_tokens
    config = Qwen2Config(**sizes.model, **special, max_position_embeddings=positions, dtype="bfloat16")
    torch.manual_seed(0)
    with torch.device(_device_name()):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    del model
    _free()
    return folder


def build_batch(sizes: Sizes) -> Any:
    """Prompts, each with several responses of random lengths, in jagged columns."""
    import torch
    from tensordict import TensorDict

    draw = torch.Generator().manual_seed(0)
    vocab = sizes.model["vocab_size"]
    prompts = [torch.randint(3, vocab, (sizes.prompt_tokens,), generator=draw) for _ in range(sizes.num_prompts)]
    num_rows = sizes.num_prompts * sizes.num_samples
    shortest = sizes.response_tokens // 2
    lengths = torch.randint(shortest, sizes.response_tokens + 1, (num_rows,), generator=draw).tolist()
    columns = {
        "prompt_ids": [each for each in prompts for _ in range(sizes.num_samples)],
        "response_ids": [torch.randint(3, vocab, (length,), generator=draw) for length in lengths],
    }
    jagged = {name: torch.nested.nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()}
    return TensorDict(jagged, batch_size=[num_rows])


@dataclass(frozen=True)
class Loop:
    """A system's work on one batch: `update` returns the loss, summed over tokens, and the gradient norm."""

    update: Callable[[], tuple[float, float]]
    logprobs: Callable[[], object]


def backend_loop(backend: Any, batch: Any, num_tokens: float) -> Loop:
    """An update and the log-probs of a training backend."""

    def loss_fn(outputs: Any, micro_batch: Any) -> Any:
        loss = -(outputs["logprobs"] * micro_batch["response_mask"]).sum()
        return loss, {"loss": (float(loss.detach()), num_tokens)}

    def update() -> tuple[float, float]:
        metrics = backend.train_step(batch, loss_fn, num_tokens)
        return metrics["loss"][0], metrics["grad_norm"][0]

    return Loop(update, lambda: backend.compute_logprobs(batch))


def _check_reports(reports: Mapping[str, tuple[float, float]]) -> None:
    (first, (loss, norm)), *others = reports.items()
    for name, (own_loss, own_norm) in others:
        assert abs(own_loss - loss) <= 0.01 * abs(loss), f"{name}: a loss of {own_loss}, of {first} it is {loss}"
        assert abs(own_norm - norm) <= 0.05 * norm, f"{name}: a gradient norm of {own_norm}, of {first} it is {norm}"


def _median_s(work: Callable[[], object]) -> float:
    import torch

    found = []
    for number in range(NUM_ROUNDS + 1):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if number:  # the first one warms up
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def _device_name() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _free() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _tiny_shape() -> Any:
    from hf_protocols import ModelShape

    return ModelShape(
        name="tiny", hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32,
        vocab_size=128,
    )  # fmt: skip


def find_missing(part: str) -> list[str]:
    """Modules that a part needs and that are not installed here."""
    return [name for name in PARTS[part] if find_spec(name) is None]


def run_part(part: str, *, small: bool, seconds: float) -> tuple[Metrics, str | None]:
    """Runs a part in a process of its own.

    Returns:
        Its metrics, none where modules are missing; and why it failed, or None.
    """
    missing = find_missing(part)
    if missing:
        print(f"{part}: not run, as modules are missing: {', '.join(missing)}", flush=True)
        return {}, None
    command = [sys.executable, __file__, "--part", part, *(["--small"] if small else [])]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {}, f"had not ended after {seconds:.0f} s"
    if ended.returncode:
        return {}, (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    found = json.loads(ended.stdout.splitlines()[-1])
    return {name: (value, unit) for name, (value, unit) in found.items()}, None


def main() -> int:
    """Measure and record; 2 without a GPU, 1 if a part failed or a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="these alone")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts")
    parser.add_argument("--small", action="store_true", help="tiny models, on any device; keeps no result")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        print("\n" + json.dumps(WORK[given.part](SMALL if given.small else LARGE)))
        return 0
    if not given.small and not _has_gpu():
        print(NO_GPU, file=sys.stderr)
        return 2
    ends_s = time.monotonic() + 60.0 * given.minutes
    found: Metrics = {}
    failed: list[str] = []
    for part in given.parts:
        metrics, error = run_part(part, small=given.small, seconds=max(1.0, ends_s - time.monotonic()))
        found |= metrics
        if error is not None:
            failed.append(part)
            print(f"{part}: FAILED: {error}", flush=True)
        for name, (value, unit) in metrics.items():
            print(f"{part}: {name} {value:g} {unit}", flush=True)
    targets = {} if given.small else TARGETS
    missed = [name for name, least in targets.items() if name in found and found[name][0] < least]
    for name, least in targets.items():
        if name in found:
            print(f"{'MISSED ' if name in missed else 'reached'} {name}: {found[name][0]:.3f} (wanted >= {least:g})")
    if not given.small:
        import torch

        record("gpu", found, device=torch.cuda.get_device_name(0), versions=_read_versions())
    return int(bool(failed or missed))


def _has_gpu() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _read_versions() -> dict[str, str]:
    """Versions of libraries that are installed; the others are absent."""
    names = {each.metadata["Name"] for each in metadata.distributions()}
    return {name: metadata.version(name) if name in names else "absent" for name in _VERSIONS_OF}


if __name__ == "__main__":
    sys.exit(main())
