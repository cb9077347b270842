"""TRL's side of `bench_end_to_end.py`; runs in an environment of its own and imports nothing of ours.

It reads commands from standard input, one JSON object a line, and answers on the descriptor that `--answers` names.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from end_to_end_workloads import (
    GOAL,
    WORKLOADS,
    Pacer,
    Race,
    Workload,
    draw_prompts,
    open_answers,
    score,
    score_copies,
    start_ranks,
)


def main() -> None:
    """Serve one workload: the gate, segments of iterations, or a race."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    is_first = start_ranks(options["ranks"])
    answer = open_answers(options["answers"] if is_first else None)
    joins = {"join": torch.distributed.barrier} if options["ranks"] > 1 else {}
    if options["gate"]:
        answer(_pass_gate(options))
        return
    if "seed" in options:
        _race(options, Race(answer))
        return
    pacer = Pacer(answer, options["segments"], reads=is_first, **joins)
    prompts = draw_prompts(WORKLOADS[options["workload"]], options["num_prompts"])
    drawn = [prompts[row] for rows in json.loads(Path(options["order"]).read_text()) for row in rows]
    max_steps, config = sum(options["segments"]), {"shuffle_dataset": False}
    trainer = _build_trainer(options, drawn, max_steps=max_steps, reward=score, pacer=pacer, config=config)
    trainer.train()


def _build_trainer(
    options: dict[str, Any], prompts: list[str], *, max_steps: int, reward: Any, pacer: Pacer | None, **more: Any
) -> Any:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    workload = WORKLOADS[options["workload"]]
    config = _build_config(options, workload, max_steps, more.pop("config", {}))

    class Timed(GRPOTrainer):
        """The trainer, with the seconds of its parts."""

        def _generate(self, given: list[str]) -> Any:
            found = timed("generate", super()._generate, given)
            if pacer:
                share = workload.num_prompts // self.accelerator.num_processes
                first = share * self.accelerator.process_index
                expected = list(islice(left, workload.num_prompts))[first : first + share]
                assert given[:: workload.num_samples] == expected, "the trainer reads other prompts than ours"
                mean_tokens = torch.tensor(sum(map(len, found[1])) / len(found[1]))
                # Where every response is as long as it may be, no rank need ask.
                self.mean_tokens = float(
                    self.accelerator.reduce(mean_tokens, "mean") if workload.is_ragged else mean_tokens
                )
            return found

        def _calculate_rewards(self, *arguments: Any) -> Any:
            return timed("score", super()._calculate_rewards, *arguments)

        def training_step(self, *arguments: Any) -> Any:
            before = sum(phases.values())
            start_s = time.perf_counter()
            found = super().training_step(*arguments)
            phases["update"] += time.perf_counter() - start_s - (sum(phases.values()) - before)
            return found

        def _prepare_inputs(self, *arguments: Any) -> Any:
            before = sum(phases.values())
            start_s = time.perf_counter()
            found = super()._prepare_inputs(*arguments)
            phases["advantages"] += time.perf_counter() - start_s - (sum(phases.values()) - before)
            return found

    phases: dict[str, float] = pacer.phases if pacer else defaultdict(float)

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        start_s = time.perf_counter()
        found = call(*arguments)
        phases[name] += time.perf_counter() - start_s
        return found

    class PacedGrpo(TrainerCallback):
        """Follows the trainer's steps."""

        def __init__(self, pacer: Pacer) -> None:
            self._pacer = pacer

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.start_s = time.perf_counter()

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._pacer.start()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            phases["update"] += time.perf_counter() - self.start_s

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self._pacer.end_iteration(tokens=trainer.mean_tokens)

    left = iter(prompts)
    trainer = Timed(
        model=options["model"],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        reward_funcs=reward,
        callbacks=[PacedGrpo(pacer)] if pacer else [],
        **more,
    )
    return trainer


def _build_config(options: dict[str, Any], workload: Workload, max_steps: int, changes: dict[str, Any]) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(Path(options["folder"]) / "trl"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        max_steps=max_steps,
        per_device_train_batch_size=workload.num_rows // options["ranks"],
        num_generations=workload.num_samples,
        max_completion_length=workload.new_tokens,
        generation_kwargs={} if workload.is_ragged else {"min_new_tokens": workload.new_tokens},
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        **{
            "learning_rate": workload.learning_rate,
            "lr_scheduler_type": "constant",
            "beta": 0.0,
            "max_grad_norm": 1.0,
            **changes,
        },
    )


def _race(options: dict[str, Any], race: Race) -> None:
    """Iterations until the goal is reached."""
    from transformers import TrainerCallback

    prompts = draw_prompts(WORKLOADS[options["workload"]], options["num_prompts"])
    trained, held_out = prompts[: -GOAL.num_prompts], prompts[-GOAL.num_prompts :]
    betas = dict(zip(("adam_beta1", "adam_beta2"), GOAL.betas, strict=True))
    config = {"learning_rate": GOAL.learning_rate, "seed": options["seed"], **betas}
    trainer = _build_trainer(options, trained, max_steps=GOAL.most, reward=score_copies, pacer=None, config=config)
    tokenizer = trainer.processing_class

    @torch.no_grad()
    def evaluate() -> float:
        given = tokenizer(held_out, padding=True, padding_side="left", return_tensors="pt")
        tokens = WORKLOADS[options["workload"]].new_tokens
        found = trainer.model.generate(**given, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens)
        texts = tokenizer.batch_decode(found[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
        values = score_copies(held_out, texts)
        return sum(values) / len(values)

    class Judged(TrainerCallback):
        """Evaluates every now and then, and ends the training at the goal."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            race.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
            race.end_iteration()
            if state.global_step % GOAL.every == 0:
                race.judge(evaluate())
            control.should_training_stop |= race.is_over

    trainer.add_callback(Judged())
    trainer.train()
    race.give_up()


def _pass_gate(options: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of one update on the stored completions and rewards; writes the gradients."""
    from safetensors.torch import save_file
    from transformers import TrainerCallback

    stored = json.loads(Path(options["batch"]).read_text())
    waiting = {
        prompt: [list(ids) for ids in each] for prompt, each in zip(stored["prompts"], stored["ids"], strict=True)
    }
    rewards = {
        tuple(ids): value
        for group, values in zip(stored["ids"], stored["rewards"], strict=True)
        for ids, value in zip(group, values, strict=True)
    }
    found: dict[str, Any] = {}

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        found["prompt_ids"] = dict(zip(prompts, prompt_ids, strict=True))
        return {"prompt_ids": prompt_ids, "completion_ids": [waiting[each].pop() for each in prompts], "logprobs": None}

    def look_up(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [rewards[tuple(ids)] for ids in completion_ids]

    class Keep(TrainerCallback):
        """Writes the gradients before the optimizer uses them."""

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            grads = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
            save_file(grads, options["gradients"])

    config = {"learning_rate": 0.0, "max_grad_norm": 1e9}
    hooks = {"rollout_func": rollout, "config": config}
    trainer = _build_trainer(options, stored["prompts"], max_steps=1, reward=look_up, pacer=None, **hooks)
    trainer.add_callback(Keep())
    found["loss"] = trainer.train().training_loss
    return found


if __name__ == "__main__":
    main()
