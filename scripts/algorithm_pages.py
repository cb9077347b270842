"""Write docs/algorithms from the recipes: a page for each, and the index; --check compares and exits with 1.

The dataflow is derived from the recipe, the keys are those of its configuration, the deviations are in its module's
docstring. The equations are in algorithm_equations.md next to this script, the paths to fixed points in
fixed_points.json, which fixed_points.py writes.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from hf_algorithms import derive_dataflow
from hf_algorithms.config import describe_keys
from hf_algorithms.recipes import RECIPES, Recipe
from hf_engine import SamplingParams
from hf_protocols import ModelCall
from hf_protocols.toml import format_toml_value

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "algorithms"
EQUATIONS = ROOT / "scripts" / "algorithm_equations.md"
PATHS = ROOT / "scripts" / "fixed_points.json"
CURVES = ROOT / "docs" / "assets" / "curves"
NOTE = "<!-- Written by scripts/algorithm_pages.py; edit the recipe, or scripts/algorithm_equations.md. -->\n\n"
PASSED_ON = {"response_mask", "weight_version", "finish_reason", "sample_id"}
"""Columns that go with responses; the picture leaves them out."""

INDEX = """# Algorithms

After this page you know which algorithms `[algorithm] name` takes, and what the pages of this section show.
`hybridflow algorithms` lists the names; `hybridflow config --algorithm NAME` prints a file to start from. Each
algorithm is one file of `hf_algorithms.recipes`: a configuration, roles and a `step`. Lines are the non-blank lines of
that file, its docstring included.

"""
SYMBOLS = """
## Which one to begin with

| what you have | begin with |
|---|---|
| answers or tests that a program checks, and several responses to a prompt | [`grpo`](grpo.md) |
| the same, and most groups score alike | [`dapo`](dapo.md), which draws other prompts in their place |
| the same, and responses grow longer without better scores | [`dr_grpo`](dr_grpo.md) |
| long responses, or a mixture of experts, where ratios of single tokens are noisy | [`gspo`](gspo.md) |
| a reward model, and memory for a critic | [`ppo`](ppo.md) |
| a reward model alone | [`rloo`](rloo.md), [`remax`](remax.md) or [`reinforce_pp`](reinforce_pp.md) |
| a reward, and a cost that must stay below a limit | [`safe_rlhf`](safe_rlhf.md) |
| a stronger model with the same tokenizer | [`distillation`](distillation.md) |
| two responses to a prompt, of which a scorer prefers one | [`online_dpo`](online_dpo.md) |

## Symbols

| in the equations | meaning |
|---|---|
| `r_i`, `m`, `s` | score of response i of a prompt; mean and standard deviation of the prompt's n scores |
| `L_i`, `T` | trained tokens of response i; its last trained token |
| `lp`, `lp_old`, `lp_ref` | log-prob of the token under the policy now, before the update, and under the reference |
| `rho` | exp(lp - lp_old), the ratio |
| `A`, `V`, `G` | advantage; value of the critic; return |
| `beta`, `k_t` | `kl_coefficient`; the KL estimate of token t (`kl_estimator`) |
| `sg` | stops the gradient |
| `B` | responses of one optimizer step |

Where a page gives no `batch`, losses are averaged over all trained tokens of the optimizer step. With
`kl_place = "loss"` the policy loss has the term `beta` times the KL estimate added; with `"reward"` the penalty is in
the token rewards. Corrections of the sampler (`correction`) multiply the policy's part of the loss. With
`entropy_coefficient` the loss is reduced by that times the entropy of the token's distribution, aggregated alike. The
metric `actor/entropy` is its mean over trained tokens, in nats; it costs below 1 % of an update in the
median on a CPU. Only `online_dpo`, which has no policy loss, does not report it.

## What an author touches

An algorithm of this repository is its recipe, its lines in `recipes/__init__.py`, a test, and a class where it needs an
estimator, a loss or a worker that is not there yet. An algorithm of your own is one file in your folder:
[Write an algorithm](../how-to/write-an-algorithm.md). [Lines of an algorithm](../reference/line-counts.md) counts
GRPO and Safe-RLHF, here and in public trainers.
"""


def write_pages() -> dict[str, str]:
    """The text of every page, by its file's name."""
    equations = read_equations()
    if set(equations) != set(RECIPES):
        raise SystemExit(f"{EQUATIONS.name} and RECIPES differ: {sorted(set(equations) ^ set(RECIPES))}")
    pages = {f"{name}.md": write_page(recipe, equations[name]) for name, recipe in RECIPES.items()}
    return {"index.md": write_index(), **pages}


def read_equations() -> dict[str, str]:
    """The sections of the file of equations, by name."""
    parts = re.split(r"^## (\w+)\n", EQUATIONS.read_text(), flags=re.MULTILINE)[1:]
    return {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}


def write_index() -> str:
    """The table of the family, and the symbols."""
    lines = ["| name | what it is | lines |\n|---|---|--:|\n"]
    for name, recipe in RECIPES.items():
        lines.append(f"| [`{name}`]({name}.md) | {recipe.summary} | {count_lines(find_module(recipe))} |\n")
    return NOTE + INDEX + "".join(lines) + SYMBOLS


def write_page(recipe: Recipe, equations: str) -> str:
    """The page of one algorithm."""
    module = find_module(recipe)
    intro, deviations = split_docstring(sys.modules[recipe.step.__module__].__doc__ or "")
    title = recipe.summary.partition(":")[0]
    if len(title) > 40:
        title = f"`{recipe.name}`"
    source = module.relative_to(ROOT).as_posix()
    return "\n".join(
        [
            f"{NOTE}# {title}",
            "",
            f"{intro}\n",
            f'```toml\n[algorithm]\nname = "{recipe.name}"\n```\n',
            *describe_needs(recipe),
            "## Dataflow\n",
            "With the defaults. A stage begins when what it reads is there; its calls may run at the same time.\n",
            f"```text\n{draw_dataflow(recipe)}```\n",
            "## Equations\n",
            f"{equations}\n",
            "[Symbols](index.md#symbols)\n",
            *describe_path(recipe.name, json.loads(PATHS.read_text())[recipe.name]),
            "## Keys of `[algorithm]`\n",
            "| key | default | meaning |\n|---|---|---|",
            *write_keys(recipe),
            "",
            "## Deviations\n",
            f"{deviations or 'None are known.'}\n",
            *describe_curve(recipe.name),
            f"The program is `{source}`.\n",
        ]
    )


def split_docstring(text: str) -> tuple[str, str]:
    """The docstring less its deviations, and the deviations."""
    kept: list[str] = []
    deviations: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        is_more = bool(deviations) and paragraph.startswith("- ")
        (deviations if is_more or paragraph.startswith("Deviation") else kept).append(paragraph)
    return "\n\n".join(kept), "\n\n".join(deviations)


def describe_curve(name: str) -> list[str]:
    """The picture of `make bench-learning`, if there is one of this algorithm."""
    if not (CURVES / f"{name}.svg").exists():
        return []
    return [
        "## Learning curve\n",
        f"![Curves of `{name}` over the iterations, one thin line a seed](../assets/curves/{name}.svg)\n",
        "[Learning curves](../reference/learning-curves.md) has the task, the settings and the mark.\n",
    ]


def describe_needs(recipe: Recipe) -> list[str]:
    """Keys that other sections must have."""
    config = recipe.config
    others = {"cost.function": " or `[cost.model]`"}
    needs = [f"- `{key}`{others.get(key, '')} must be given." for key in config.needs_keys]
    if config.most_samples is not None:
        needs.append(f"- `rollout.samples_per_prompt` is {config.most_samples}.")
    elif config.least_samples > 1:
        needs.append(f"- `rollout.samples_per_prompt` is at least {config.least_samples}.")
    return ["\n".join(needs) + "\n"] if needs else []


def draw_dataflow(recipe: Recipe) -> str:
    """The stages, with a line for each call: what it reads of earlier calls, and what it writes."""
    flow = derive_dataflow(
        recipe, recipe.config(name=recipe.name), SamplingParams(max_new_tokens=8, n=2), num_prompts=8
    )
    calls = [(number, call) for number, stage in enumerate(flow.stages(), 1) for call in stage]
    writer = {column: call for _, call in calls for column in call.writes}
    width = max(len(f"{call.role}.{call.method}") for _, call in calls)
    lines = []
    for number, stage in groupby(calls, lambda each: each[0]):
        lines.append(f"stage {number}\n")
        lines += (f"  {call.role + '.' + call.method:{width}}  {describe_columns(call, writer)}\n" for _, call in stage)
    return "".join(lines)


def describe_columns(call: ModelCall, writer: dict[str, ModelCall]) -> str:
    """The columns of a call that are of interest."""
    names = [name.removesuffix("?") for name in call.reads]
    reads = ["prompts"] if call.kind == "generation" else [name for name in names if name in writer]
    writes = [name for name in call.writes if not PASSED_ON & {name, name.rpartition("_")[0]}]
    return f"{', '.join(name for name in reads if name not in PASSED_ON)} -> {', '.join(writes) or 'new weights'}"


def describe_path(name: str, found: dict[str, Any]) -> list[str]:
    """The picture of a training on a bandit, and where it ends."""
    answers = len(found["reference"])
    keys = [f"`{key} = {format_toml_value(value)}`" for key, value in found["keys"].items()]
    rows = {"start": "reference", "closed form": "fixed_point", "trained: mean of the last quarter": "end"}
    text = [
        f"The recipe's own step trains a table of probabilities: one prompt, {answers} answers of one token, ",
        f"{found['responses']} responses an iteration, drawn without chance.\n",
        f"The rewards are {', '.join(map(str, found['rewards']))}. {found['note']}\n".replace(". \n", ".\n"),
        f"Keys other than the defaults: {', '.join(keys)}." if keys else "All keys are the defaults.",
    ]
    end = f"It ends at {found['formula']} (broken lines)."
    if "multiplier" in found:
        end += f"\nLambda ends at {found['multiplier_end']}; the closed form is {found['multiplier']}."
    return [
        "## Path to the fixed point\n",
        f"{''.join(text)}\n",
        f"![Probabilities by iteration](../assets/fixed-points/{name}.svg)\n",
        f"{end}\n",
        f"| | {' | '.join(f'answer {number + 1}' for number in range(answers))} |\n|---|{'--:|' * answers}",
        *(f"| {title} | {' | '.join(f'{value:.4f}' for value in found[key])} |" for title, key in rows.items()),
        "",
    ]


def write_keys(recipe: Recipe) -> list[str]:
    """A row of the table for each key."""
    rows = []
    for name, meaning in describe_keys(recipe.config).items():
        default = recipe.config.model_fields[name].default
        shown = "" if default is None else f"`{format_toml_value(default)}`"
        rows.append(f"| `{name}` | {shown} | {meaning.replace('|', chr(92) + '|')} |")
    return rows


def find_module(recipe: Recipe) -> Path:
    """The file of a recipe."""
    return Path(str(sys.modules[recipe.step.__module__].__file__)).resolve()


def count_lines(path: Path) -> int:
    """Its non-blank lines."""
    return sum(bool(line.strip()) for line in path.read_text().splitlines())


def main() -> None:
    """Write the pages, or compare them."""
    pages = write_pages()
    if sys.argv[1:] == ["--check"]:
        there = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
        sys.exit(0 if there == pages else "docs/algorithms differs: run scripts/algorithm_pages.py")
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
