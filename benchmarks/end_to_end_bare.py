"""A plain loop for `bench_end_to_end.py`: an iteration's forward and backward passes, with no trainer around them.

transformers' own model, ready token ids, random rewards. A prompt is computed once in generation, after which each
sample has a copy of its keys and values, and once in the update, whose rows are packed. Nothing is read, scored,
checked, moved or written, and the packing is not timed.

It also counts the iteration's floating-point operations, and measures how many a second the machine makes in one
product of the model's own sizes.

It reads commands from standard input, one line each, and answers on the descriptor that `answers` names.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from end_to_end_workloads import WORKLOADS, Pacer, Workload, draw_prompts, open_answers

_NUM_PRODUCTS = 5
"""After each iteration; the median counts."""


def main() -> None:
    """Serve one workload."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    torch.manual_seed(0)
    pacer = Pacer(open_answers(options["answers"]), options["segments"])
    loop = _PlainLoop(options, pacer)
    pacer.start()
    loop.count_operations()
    for _ in range(sum(options["segments"])):
        seconds = loop.iterate()
        phases = {**pacer.phases, "operations": loop.compute_operations_s()}
        pacer.end_iteration(phases, seconds)


class _PlainLoop:
    def __init__(self, options: dict[str, Any], pacer: Pacer) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._workload: Workload = WORKLOADS[options["workload"]]
        self._pacer = pacer
        tokenizer = AutoTokenizer.from_pretrained(options["model"])
        prompts = draw_prompts(self._workload, options["num_prompts"])
        self._prompts = [torch.tensor(ids) for ids in tokenizer(prompts)["input_ids"]]
        self._read = 0
        names = ("actor", "critic", "reference") if self._workload.algorithm == "ppo" else ("actor",)
        self._models = {
            name: AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32) for name in names
        }
        if "critic" in self._models:
            self._models["critic"].lm_head = torch.nn.Linear(self._workload.hidden_size, 1, bias=False)
        self._optimizers = {
            name: torch.optim.AdamW(model.parameters(), lr=self._workload.learning_rate, weight_decay=0.0, fused=True)
            for name, model in self._models.items()
            if name != "reference"
        }
        self._operations = 0.0

    def count_operations(self) -> None:
        """Counts those of one iteration, whose attention is products that the counter knows."""
        from torch.utils.flop_counter import FlopCounterMode

        for model in self._models.values():
            model.set_attn_implementation("eager")
        with FlopCounterMode(display=False) as counter:
            self.iterate()
        self._operations = float(counter.get_total_flops())
        for model in self._models.values():
            model.set_attn_implementation("sdpa")
        self._pacer.phases.clear()

    def compute_operations_s(self) -> float:
        """Seconds of an iteration's operations at the rate of one product: its tokens and the widest weight."""
        workload = self._workload
        tokens = workload.num_prompts * (max(workload.prompt_tokens) + workload.num_samples * (workload.new_tokens - 1))
        left = torch.randn(tokens, workload.hidden_size)
        right = torch.randn(workload.hidden_size, workload.intermediate_size)
        found = []
        for _ in range(_NUM_PRODUCTS):
            start_s = time.perf_counter()
            left @ right
            found.append(time.perf_counter() - start_s)
        rate = 2 * tokens * workload.hidden_size * workload.intermediate_size / statistics.median(found)
        return self._operations / rate

    def iterate(self) -> float:
        """Makes one: generation, the passes that only score, and the updates; returns their seconds."""
        with self._phase("generate"), torch.no_grad():
            prompts = self._prompts[self._read : self._read + self._workload.num_prompts]
            self._read = (self._read + self._workload.num_prompts) % len(self._prompts)
            ids, mask = _pad_left(prompts)
            responses = self._generate(ids, mask)
        lines = _pack(ids, mask, responses)
        if self._workload.algorithm == "ppo":
            with self._phase("logprobs"), torch.no_grad():
                self._score("reference", *lines)
                self._score("critic", *lines)
        with self._phase("update"):
            for name, optimizer in self._optimizers.items():
                found = self._score(name, *lines)
                (found * torch.randn_like(found)).mean().backward()
                torch.nn.utils.clip_grad_norm_(self._models[name].parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return sum(self._pacer.phases.values())

    def _generate(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns int64 [prompts, samples, tokens]."""
        from transformers import DynamicCache

        model, workload, num_prompts = self._models["actor"], self._workload, len(ids)
        cache = DynamicCache(config=model.config)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        found = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = found.logits[:, -1].repeat_interleave(workload.num_samples, 0)
        if workload.num_samples > 1:
            cache.batch_repeat_interleave(workload.num_samples)
        mask = mask.repeat_interleave(workload.num_samples, 0)
        positions = positions[:, -1:].repeat_interleave(workload.num_samples, 0)
        drawn: list[torch.Tensor] = []
        while True:
            drawn.append(torch.multinomial(logits.softmax(-1), 1))
            if len(drawn) == workload.new_tokens:
                return torch.cat(drawn, 1).unflatten(0, (num_prompts, workload.num_samples))
            mask = torch.nn.functional.pad(mask, (0, 1), value=True)
            positions = positions + 1
            found = model(
                input_ids=drawn[-1],
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            logits = found.logits[:, -1]

    def _score(
        self,
        name: str,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        columns: torch.Tensor,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        """Log-probs, or values, of all response tokens."""
        model = self._models[name]
        hidden = model.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        outputs = model.lm_head(hidden[:, columns].flatten(0, 1))
        if name == "critic":
            return outputs.squeeze(-1)
        return -torch.nn.functional.cross_entropy(outputs, labels, reduction="none")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self._pacer.phases[name] += time.perf_counter() - start_s


def _pad_left(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64 [prompts, P] and their mask, bool."""
    width = max(len(each) for each in prompts)
    lengths = torch.tensor([[len(each)] for each in prompts])
    ids = torch.stack([torch.nn.functional.pad(each, (width - len(each), 0), value=3) for each in prompts])
    return ids, torch.arange(width) >= width - lengths


def _pack(ids: torch.Tensor, mask: torch.Tensor, responses: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows of a prompt and the responses to it without their last tokens.

    Returns ids and positions int64 [prompts, L], a mask bool [prompts, 1, L, L], the columns whose logits are read, and
    the token that each predicts.
    """
    (num_prompts, width), (samples, tokens) = ids.shape, responses.shape[1:]
    steps = torch.arange(tokens - 1)
    lengths = mask.sum(1, keepdim=True)
    own = torch.arange(1, samples + 1).repeat_interleave(tokens - 1).expand(num_prompts, -1)
    branches = torch.cat([mask.long() - 1, own], 1)  # -1 for padding, 0 for the prompt
    placed = torch.cat([(mask.cumsum(1) - 1).clamp(min=0), lengths + steps.repeat(samples)], 1)
    keys, queries = branches[:, None, :], branches[:, :, None]
    length = branches.shape[1]
    sees = ((keys == 0) | (keys == queries)) & torch.ones(length, length, dtype=torch.bool).tril()
    firsts = width + torch.arange(samples)[:, None] * (tokens - 1)
    columns = torch.cat([torch.full((samples, 1), width - 1), firsts + steps], 1).flatten()
    rows = torch.cat([ids, responses[:, :, :-1].flatten(1)], 1)
    return rows, sees[:, None], placed, columns, responses.flatten()


if __name__ == "__main__":
    main()
