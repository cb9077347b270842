"""Our side of `bench_end_to_end.py`: the program a user writes, `hf_algorithms.train` with a hook.

It reads commands from standard input, one line each, and answers on the descriptor that `answers` names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from conformance import Parts, build_parts
from end_to_end_workloads import (
    GOAL,
    SEED,
    VALUE_WEIGHT,
    WORKLOADS,
    Pacer,
    Race,
    draw_prompts,
    open_answers,
    score,
    score_copies,
)

from hf_algorithms.losses import PolicyLoss, ValueLoss
from hf_engine.backends.base import Head

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "conventions": "trl", "kl_coefficient": 0.0},
    "ppo": {"name": "ppo", "conventions": "trl", "old_logprobs": "sampled"},
}
_Update = tuple[str, float, Any, Any, PolicyLoss | ValueLoss]
"""A prefix of the names of parameters, the weight in the peer's loss, the backend, its batch, and its loss."""
_PHASES = {"train": "update", "logprobs": "logprobs", "generate": "generate", "score": "score", "sync": "sync"}
"""Names of the comparison, by those of `time/PHASE_s`."""


def main() -> None:
    """Serve one workload: the gate, segments of iterations, or a race."""
    options = json.loads(sys.argv[1])
    answer = open_answers(options["answers"])
    if options["gate"]:
        answer(_pass_gate(options))
    elif "seed" in options:
        _race(options, Race(answer))
    else:
        _pace(options, Pacer(answer, options["segments"]))


def _pace(options: dict[str, Any], pacer: Pacer) -> None:
    """Iterations in segments."""

    def follow(iteration: int, metrics: dict[str, float]) -> None:
        named = {name.removeprefix("time/").removesuffix("_s"): value for name, value in metrics.items()}
        pacer.end_iteration(
            {_PHASES.get(name, name): named[name] for name in (*_PHASES, "advantages") if name in named},
            tokens=metrics["response/tokens"],
            padding=metrics["batch/padding"],
        )

    iterations = sum(options["segments"]) + 1  # the last one, with its evaluation, is not reached
    prompts = draw_prompts(WORKLOADS[options["workload"]], options["num_prompts"])
    run = {"iterations": iterations, "eval_every": iterations, "seed": SEED}
    _train(options, prompts, prompts[:1], score, pacer.start, follow, run)


def _race(options: dict[str, Any], race: Race) -> None:
    """Iterations until the goal is reached."""

    def follow(iteration: int, metrics: dict[str, float]) -> None:
        found = metrics.get("eval/validation/score_copies")
        race.end_iteration(None if found is None else metrics["time/iteration_s"])
        if found is not None:
            race.judge(found)
        if race.is_over:
            sys.exit()

    prompts = draw_prompts(WORKLOADS[options["workload"]], options["num_prompts"])
    trained, held_out = prompts[: -GOAL.num_prompts], prompts[-GOAL.num_prompts :]
    run = {"iterations": GOAL.most, "eval_every": GOAL.every, "seed": options["seed"]}
    optimizer = {"actor_learning_rate": GOAL.learning_rate, "betas": list(GOAL.betas)}
    _train(options, trained, held_out, score_copies, race.start, follow, run, optimizer)
    race.give_up()


def _train(
    options: dict[str, Any],
    trained: list[str],
    held_out: list[str],
    reward: Callable[..., list[float]],
    begin: Callable[[], None],
    follow: Callable[[int, dict[str, float]], None],
    run: dict[str, Any],
    optimizer: Mapping[str, Any] | None = None,
) -> None:
    from hf_algorithms import train
    from hf_algorithms.run.summary import RunSummary

    workload = WORKLOADS[options["workload"]]
    rows, evaluated = ([{"prompt": prompt} for prompt in prompts] for prompts in (trained, held_out))
    note_start = RunSummary.note_start

    def start(summary: RunSummary, phases: Mapping[str, float]) -> None:
        note_start(summary, phases)
        begin()

    with mock.patch.object(RunSummary, "note_start", start):
        train(
            options["model"],
            {"train": rows, "validation": evaluated, "test": evaluated[:1]},
            reward,
            algorithm=ALGORITHMS[workload.algorithm] | {"mini_batches": 1, "epochs": 1},
            config={
                "run": {
                    **run,
                    "checkpoint_every": run["iterations"],
                    "executor": "in_process" if options["ranks"] == 1 else "ray",
                },
                "reward": {"metric": f"{Path(__file__).with_name('end_to_end_workloads.py')}:{reward.__name__}"},
                "warm_start": {"max_steps": 0},
                "optimizer": {
                    "actor_learning_rate": workload.learning_rate,
                    "critic_learning_rate": workload.learning_rate,
                    "warmup_steps": 0,
                    **(optimizer or {}),
                },
                "rollout": {
                    "backend": options["backend"],
                    "batch_size": workload.num_prompts,
                    "samples_per_prompt": workload.num_samples,
                    "max_new_tokens": workload.new_tokens,
                    "min_new_tokens": 0 if workload.is_ragged else workload.new_tokens,
                },
                "training": {"shard": "root"},
                "cluster": {"gpus_per_machine": options["ranks"]},
            },
            output_dir=Path(options["folder"]) / f"ours-{options['ranks']}-{options['threads']}",
            overwrite=True,
            on_metrics=follow,
        )


def _pass_gate(options: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of one update on the stored completions and rewards; writes the gradients.

    Its `summand` is the mean absolute advantage of a token: losses of GRPO are means of summands that cancel out.
    """
    import torch.distributed as dist
    from safetensors.torch import save_file

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    workload = WORKLOADS[options["workload"]]
    prompt_ids, columns = _read_batch(options)
    parts = build_parts(
        **{"algorithm" if key == "name" else key: value for key, value in ALGORITHMS[workload.algorithm].items()},
        max_new_tokens=workload.new_tokens,
        mini_batches=1,
    )
    updates = (
        _update_group(options, columns, parts)
        if workload.algorithm == "grpo"
        else _update_both(options, columns, parts)
    )
    loss, gradients = 0.0, {}
    for prefix, weight, backend, batch, loss_fn in updates:
        share, found = _update(backend, batch, loss_fn)
        loss += weight * share
        gradients |= {prefix + name: weight * each for name, each in found.items()}
    save_file(gradients, options["gradients"])
    summand = columns["advantages"].abs().sum() / columns["response_mask"].sum()
    return {"loss": loss, "summand": float(summand), "prompt_ids": prompt_ids}


def _read_batch(options: dict[str, Any]) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Token ids of each prompt, and the columns of the stored batch: jagged ids, and tensors [B, T] or [B]."""
    from transformers import AutoTokenizer

    from hf_algorithms.jagged import to_jagged

    stored = json.loads(Path(options["batch"]).read_text())
    prompts, samples = stored["prompts"], WORKLOADS[options["workload"]].num_samples
    prompt_ids = dict(zip(prompts, AutoTokenizer.from_pretrained(options["model"])(prompts)["input_ids"], strict=True))
    rows = [torch.tensor(ids) for group in stored["ids"] for ids in group]
    masks = [torch.ones(len(each), dtype=torch.bool) for each in rows]
    return prompt_ids, {
        "prompt_ids": to_jagged([torch.tensor(prompt_ids[each]) for each in prompts for _ in range(samples)]),
        "response_ids": to_jagged(rows),
        "response_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True),
        "scores": torch.tensor(stored["rewards"]).flatten(),
        "group_id": torch.arange(len(prompts)).repeat_interleave(samples),
        "finish_reason": torch.ones(len(rows), dtype=torch.int64),
    }


def _update_group(options: dict[str, Any], columns: dict[str, Any], parts: Parts) -> list[_Update]:
    """The update of GRPO."""
    columns["advantages"] = parts.estimator(columns)["advantages"].float() * columns["response_mask"]
    return [("", 1.0, _build(options, "lm"), _join(columns, "advantages"), parts.policy_loss)]


def _update_both(options: dict[str, Any], columns: dict[str, Any], parts: Parts) -> list[_Update]:
    """The updates of PPO's actor and critic, whose head is set as the peer's: at first it is zero."""
    from hf_algorithms.jagged import pad_rows

    actor, critic = _build(options, "lm"), _build(options, "value")
    head = critic._model.get_output_embeddings().weight.detach()
    head.copy_(torch.linspace(-1, 1, head.numel()).view(head.shape))
    batch = _join(columns)
    logprobs = pad_rows(actor.compute_logprobs(batch)["logprobs"])
    columns |= {f"{name}_logprobs": logprobs for name in ("old", "ref", "rollout")}
    columns["values"] = pad_rows(critic.compute_values(batch)["values"])
    columns["next_values"] = torch.full_like(columns["scores"], torch.nan)  # every response is as long as it may be
    columns |= parts.estimator(columns)
    assert parts.value_loss is not None
    return [
        ("policy.", 1.0, actor, _join(columns, *parts.policy_loss.reads), parts.policy_loss),
        ("value_model.", VALUE_WEIGHT, critic, _join(columns, "returns", "values"), parts.value_loss),
    ]


def _build(options: dict[str, Any], head: Head) -> Any:
    from hf_engine import TrainConfig, load_train_backend
    from hf_protocols import ParallelSpec, Topology

    config = TrainConfig(learning_rate=1e-5, shard="root")
    topology = Topology(ParallelSpec(), None)
    return load_train_backend("fsdp").build(options["model"], topology=topology, config=config, head=head)


def _join(columns: dict[str, Any], *names: str) -> Any:
    """A batch of the ids and these columns of tokens."""
    from tensordict import TensorDict

    from hf_algorithms.jagged import unpad_rows

    found = {name: columns[name] for name in ("prompt_ids", "response_ids")}
    for name in ("response_mask", *names):
        found[name] = unpad_rows(columns[name], columns["response_ids"])
    return TensorDict(found, batch_size=[len(columns["scores"])])


def _update(backend: Any, batch: Any, loss_fn: PolicyLoss | ValueLoss) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradient of every parameter."""
    total = 0.0

    def loss(outputs: Any, given: Any) -> Any:
        nonlocal total
        found = loss_fn(outputs, given)
        total += float(found[0].detach())
        return found

    count = float(loss_fn.count({str(name): column for name, column in batch.items()}))
    backend.forward_backward(batch, loss, count)
    names = list(backend.weight_layout().shapes)
    return total / count, dict(zip(names, backend._optimizer.gradients(), strict=True))


if __name__ == "__main__":
    main()
