"""TRL's PPO for `bench_end_to_end.py`, which shipped last in 1.12.0; runs in an environment of its own.

It reads commands from standard input, one line each, and answers on the descriptor that `answers` names. The trainer
scores with a reward model; here a function of the texts stands for it, as on our side.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from end_to_end_workloads import VALUE_WEIGHT, WORKLOADS, Pacer, draw_prompts, open_answers, score, start_ranks

_MODULE = "trl.experimental.ppo.ppo_trainer"


class _Rewards(torch.nn.Module):
    """Stands where the trainer wants a reward model."""


class _GradientsKnownError(Exception):
    """Ends the gate where the gradients are known."""


def main() -> None:
    """Serve one workload: the gate, or segments of iterations."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    is_first = start_ranks(options["ranks"])
    answer = open_answers(options["answers"] if is_first else None)
    joins = {"join": torch.distributed.barrier} if options["ranks"] > 1 else {}
    if options["gate"]:
        answer(_pass_gate(options))
    else:
        _train(options, Pacer(answer, options["segments"], reads=is_first, **joins))


def _build_trainer(options: Mapping[str, Any], prompts: list[str], max_steps: int, **more: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    workload = WORKLOADS[options["workload"]]
    tokenizer = AutoTokenizer.from_pretrained(options["model"], padding_side="left")
    config = PPOConfig(
        output_dir=str(Path(options["folder"]) / "trl-ppo"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=workload.num_rows // options["ranks"],
        local_rollout_forward_batch_size=workload.num_rows // options["ranks"],
        total_episodes=workload.num_rows * max_steps,
        num_ppo_epochs=1,
        num_mini_batches=1,
        num_sample_generations=0,
        response_length=workload.new_tokens,
        temperature=1.0 - 1e-7,  # the loop adds as much
        kl_coef=0.05,
        vf_coef=VALUE_WEIGHT,
        learning_rate=workload.learning_rate,
        lr_scheduler_type="constant",
    )
    critic = AutoModelForSequenceClassification.from_pretrained(options["model"], num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        critic.score.weight.copy_(torch.linspace(-1, 1, critic.score.weight.numel()).view_as(critic.score.weight))
    rows = Dataset.from_dict({"input_ids": tokenizer(prompts)["input_ids"]})
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32),
        ref_model=None,
        reward_model=_Rewards(),
        value_model=critic,
        train_dataset=rows,
        eval_dataset=rows.select(range(workload.num_rows)),
        **more,
    )


def _train(options: dict[str, Any], pacer: Pacer) -> None:
    from transformers import TrainerCallback
    from trl.experimental.ppo import ppo_trainer

    phases, update_start_s = pacer.phases, [0.0]

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        start_s = time.perf_counter()
        found = call(*arguments)
        phases[name] += time.perf_counter() - start_s
        return found

    generation, forward, get_reward = ppo_trainer.batch_generation, ppo_trainer.forward, ppo_trainer.get_reward

    def pass_forward(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return timed("logprobs", forward, *arguments)
        update_start_s[0] = time.perf_counter()
        return forward(*arguments)

    def find_scores(ids: torch.Tensor, width: int) -> tuple[None, torch.Tensor, None]:
        texts = trainer.processing_class.batch_decode(ids[:, width:], skip_special_tokens=True)
        return None, torch.tensor(score(texts)), None

    def reward(model: Any, ids: torch.Tensor, pad: int, width: int) -> Any:
        if isinstance(model, _Rewards):
            return timed("score", find_scores, ids, width)
        return timed("logprobs", get_reward, model, ids, pad, width)

    class PacedPpo(TrainerCallback):
        """Follows the trainer's steps."""

        def on_log(self, *_: Any, **__: Any) -> None:
            phases["update"] += time.perf_counter() - update_start_s[0]

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            pacer.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            pacer.end_iteration()

    prompts = draw_prompts(WORKLOADS[options["workload"]], options["num_prompts"])
    trainer = _build_trainer(options, prompts, sum(options["segments"]), callbacks=[PacedPpo()])
    replaced = {
        "batch_generation": lambda *arguments: timed("generate", generation, *arguments),
        "forward": pass_forward,
        "get_reward": reward,
    }
    with mock.patch.multiple(_MODULE, **replaced):
        trainer.train()


def _pass_gate(options: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of one update on the stored completions and rewards; writes the gradients."""
    from safetensors.torch import save_file
    from trl.experimental.ppo import ppo_trainer

    stored = json.loads(Path(options["batch"]).read_text())
    trainer = _build_trainer(options, stored["prompts"], 1)
    pad, tokenizer = trainer.processing_class.pad_token_id, trainer.processing_class
    prompt_ids = dict(zip(stored["prompts"], tokenizer(stored["prompts"])["input_ids"], strict=True))
    rows = {tuple(ids): row for row, ids in enumerate(prompt_ids.values())}
    found: dict[str, Any] = {"prompt_ids": prompt_ids}
    get_reward = ppo_trainer.get_reward

    def row_of(ids: torch.Tensor) -> int:
        return rows[tuple(ids[ids != pad].tolist())]

    def give_stored(model: Any, queries: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor([stored["ids"][row_of(query)][0] for query in queries])
        joined = torch.cat([queries, ids], 1)
        width = queries.shape[1]
        return joined, ppo_trainer.forward(model, joined, pad).logits[:, width - 1 : -1]

    def look_up(model: Any, ids: torch.Tensor, pad_id: int, width: int) -> Any:
        if isinstance(model, _Rewards):
            return None, torch.tensor([stored["rewards"][row_of(each[:width])][0] for each in ids]), None
        return get_reward(model, ids, pad_id, width)

    def keep(loss: torch.Tensor) -> None:
        loss.backward()
        found["loss"] = float(loss.detach())
        gradients = {}
        for name, each in trainer.model.named_parameters():
            # Of the critic's own head, which transformers keeps and the trainer does not use, there is none.
            if each.grad is not None:
                gradients[name.replace("value_model.score.", "value_model.lm_head.")] = each.grad.clone()
        save_file(gradients, options["gradients"])
        raise _GradientsKnownError

    trainer.accelerator.backward = keep
    replaced = {"batch_generation": give_stored, "get_reward": look_up}
    with mock.patch.multiple(_MODULE, **replaced), suppress(_GradientsKnownError):
        trainer.train()
    return found


if __name__ == "__main__":
    main()
