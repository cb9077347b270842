"""Our side of `bench_end_to_end.py`: the program a user writes, `hf_algorithms.train` with a hook.

It reads commands from standard input, one line each, and answers on the descriptor that `answers` names.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from conformance import build_parts
from end_to_end_workloads import WORKLOADS, Pacer, draw_prompts, open_answers, score

ALGORITHM = {"name": "grpo", "conventions": "trl", "kl_coefficient": 0.0}
_PHASES = {"train": "update", "logprobs": "logprobs", "generate": "generate", "score": "score", "sync": "sync"}
"""Names of the comparison, by those of `time/PHASE_s`."""


def main() -> None:
    """Serve one workload: the gate, or segments of iterations."""
    options = json.loads(sys.argv[1])
    answer = open_answers(options["answers"])
    if options["gate"]:
        answer(_pass_gate(options))
    else:
        _train(options, Pacer(answer, options["segments"]))


def _train(options: dict[str, Any], pacer: Pacer) -> None:
    from hf_algorithms import train

    workload = WORKLOADS[options["workload"]]
    # Evaluations at the start and at the end, which are not timed, compare with an answer.
    rows = [{"prompt": prompt, "answer": "0"} for prompt in draw_prompts(workload, options["num_prompts"])]
    iterations = sum(options["segments"])

    def follow(iteration: int, metrics: dict[str, float]) -> None:
        named = {name.removeprefix("time/").removesuffix("_s"): value for name, value in metrics.items()}
        pacer.end_iteration(
            {_PHASES.get(name, name): named[name] for name in (*_PHASES, "advantages") if name in named}
        )

    train(
        options["model"],
        {"train": rows, "validation": rows[:1], "test": rows[:1]},
        score,
        algorithm=ALGORITHM,
        config={
            "run": {
                "iterations": iterations,
                "eval_every": iterations,
                "checkpoint_every": iterations,
                "executor": "in_process" if options["ranks"] == 1 else "ray",
            },
            "warm_start": {"max_steps": 0},
            "optimizer": {"actor_learning_rate": 1e-5, "warmup_steps": 0},
            "rollout": {
                "backend": options["backend"],
                "batch_size": workload.num_prompts,
                "samples_per_prompt": workload.num_samples,
                "max_new_tokens": workload.new_tokens,
                "min_new_tokens": 0 if workload.end_weight else workload.new_tokens,
            },
            "training": {"shard": "root"},
            "cluster": {"gpus_per_machine": options["ranks"]},
        },
        output_dir=Path(options["folder"]) / f"ours-{options['ranks']}-{options['threads']}",
        overwrite=True,
        on_metrics=follow,
    )


def _pass_gate(options: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of one update on the stored completions and rewards; writes the gradients."""
    import torch.distributed as dist
    from safetensors.torch import save_file
    from tensordict import TensorDict
    from transformers import AutoTokenizer

    from hf_algorithms.jagged import to_jagged, unpad_rows
    from hf_engine import TrainConfig, load_train_backend
    from hf_protocols import ParallelSpec, Topology

    stored = json.loads(Path(options["batch"]).read_text())
    workload = WORKLOADS[options["workload"]]
    prompt_ids = dict(
        zip(
            stored["prompts"],
            AutoTokenizer.from_pretrained(options["model"])(stored["prompts"])["input_ids"],
            strict=True,
        )
    )
    rows = [torch.tensor(ids) for group in stored["ids"] for ids in group]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(each), dtype=torch.bool) for each in rows], batch_first=True)
    parts = build_parts(
        **{"algorithm" if key == "name" else key: value for key, value in ALGORITHM.items()},
        max_new_tokens=workload.new_tokens,
        mini_batches=1,
    )
    columns = {
        "scores": torch.tensor(stored["rewards"]).flatten(),
        "group_id": torch.arange(len(stored["prompts"])).repeat_interleave(workload.num_samples),
        "response_mask": mask,
        "finish_reason": torch.ones(len(rows), dtype=torch.int64),
    }
    columns["advantages"] = parts.estimator(columns)["advantages"].float() * mask
    response_ids = to_jagged(rows)
    batch = TensorDict(
        {
            "prompt_ids": to_jagged(
                [torch.tensor(prompt_ids[each]) for each in stored["prompts"] for _ in range(workload.num_samples)]
            ),
            "response_ids": response_ids,
            "response_mask": unpad_rows(mask, response_ids),
            "advantages": unpad_rows(columns["advantages"], response_ids),
        },
        batch_size=[len(rows)],
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    backend = load_train_backend("fsdp").build(
        options["model"], topology=Topology(ParallelSpec(), None), config=TrainConfig(learning_rate=1e-5, shard="root")
    )
    total = 0.0

    def loss(outputs: Any, given: Any) -> Any:
        nonlocal total
        found = parts.policy_loss(outputs, given)
        total += float(found[0].detach())
        return found

    count = float(parts.policy_loss.count({str(name): column for name, column in batch.items()}))
    backend.forward_backward(batch, loss, count)
    names = list(backend.weight_layout().shapes)
    save_file(dict(zip(names, backend._optimizer.gradients(), strict=True)), options["gradients"])
    return {"loss": total / count, "prompt_ids": prompt_ids}


if __name__ == "__main__":
    main()
