"""Meanings of metrics: every name that the code reports has one, and no name has one that nothing reports."""

from __future__ import annotations

import ast
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_algorithms
import hf_engine
from hf_algorithms.losses import GAP_BOUND, VALUE_MOMENTS
from hf_algorithms.recipes import RECIPES
from hf_algorithms.report import METRIC_MEANINGS, describe_metric, write_report
from tabular_roles import FrozenPolicy, TableCritic, TablePolicy, TableReward, TableRun

ALGORITHMS, ENGINE = (Path(package.__file__ or "").parent for package in (hf_algorithms, hf_engine))
REPORTING = ("advantages", "losses", "workers", "recipes", "run", "checkpoints")
NAMES = [name for meanings in METRIC_MEANINGS.values() for name in meanings]
WHOLE_NAME = re.compile("[a-z_]+(/[a-z_0-9X]+)+")


def read_text(node: ast.expr) -> str | None:
    """A string, with an X in place of what is filled in; None for another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return None


def find_reported_names() -> Iterator[str]:
    """Keys of dictionaries, and names that are assigned to, in the code that reports metrics."""
    files = [path for folder in REPORTING for path in (ALGORITHMS / folder).glob("*.py")]
    for path in [*files, *(ENGINE / "training").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            keys = [node.slice] if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) else []
            keys += node.keys if isinstance(node, ast.Dict) else []
            keys += [node.key] if isinstance(node, ast.DictComp) else []
            for text in filter(None, (read_text(key) for key in keys if key is not None)):
                if WHOLE_NAME.fullmatch(text):
                    yield text


def test_every_name_in_the_code_has_a_meaning() -> None:
    found = set(find_reported_names())
    assert {"response/tokens", "batch/padding", "perf/samples_per_s", "checkpoint/share", "kl/X"} <= found
    assert sorted(name for name in found if not describe_metric(re.sub("X$", "k1", name))) == []


def test_every_meaning_is_of_a_name_in_the_code() -> None:
    sources = [path.read_text() for root in (ALGORITHMS, ENGINE) for path in root.rglob("*.py")]
    text = "\n".join(source for source in sources if "METRIC_MEANINGS: Mapping" not in source)
    ends = {name: re.sub("[A-Z]+", "", name.rsplit("/", 1)[1]) for name in NAMES}
    assert [name for name, end in ends.items() if end not in text] == []


@pytest.mark.parametrize("name", ["ppo", "grpo", "dppo_tv"])
def test_what_a_step_reports_has_a_meaning(name: str) -> None:
    tables = {"actor": TablePolicy, "reference": FrozenPolicy}
    workers = {role: (worker, {"table": [[0.0, 1.0]]}) for role, worker in tables.items()}
    workers |= {"reward": (TableReward, {"table": [[1.0, 0.0]]})}
    workers |= {"critic": (TableCritic, {})} if name == "ppo" else {}
    run = TableRun(recipe=RECIPES[name], algorithm={}, workers=workers, iterations=1, samples=16)
    reported = run.train().metrics[0]
    known = [name for name in reported if describe_metric(name)]
    moments = [f"critic/{moment}" for moment in VALUE_MOMENTS] if name == "ppo" else []
    assert len(known) > 10 and sorted(reported) == sorted([*known, *moments])


def test_the_nearest_meaning_is_taken() -> None:
    meanings = {name: meaning for found in METRIC_MEANINGS.values() for name, meaning in found.items()}
    assert describe_metric("time/iteration_s") == meanings["time/iteration_s"]
    assert describe_metric("time/sync_s") == meanings["time/PHASE_s"]
    assert describe_metric("eval/validation/loss") == meanings["eval/validation/loss"]
    assert describe_metric("eval/validation/exact_match") == meanings["eval/validation/METRIC"]
    assert describe_metric("eval/often/exact_match/pass@4") == meanings["eval/SET/METRIC/pass@K"]
    assert describe_metric("reward/solved/failed") == meanings["reward/NAME/failed"]


@pytest.mark.parametrize("name", ["style/score", "iteration", "actor/entropy/further", "", "kl/k9"])
def test_a_name_of_ones_own_has_no_meaning(name: str) -> None:
    assert describe_metric(name) == ""


def test_the_bound_of_gaps_is_the_one_that_counts() -> None:
    meanings = [describe_metric(f"{place}_gap_share") for place in ("rollout/logprob", "actor/sampler")]
    assert [meaning for meaning in meanings if not meaning.endswith(f"is above {GAP_BOUND}")] == []


def test_the_report_shows_the_meaning_at_the_name(tmp_path: Path) -> None:
    rows = [{"iteration": iteration, "kl/k3": 0.5, "style/score": 1.0} for iteration in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page = write_report(tmp_path).read_text()
    assert f'<figcaption title="{html.escape(describe_metric("kl/k3"))}">' in page
    assert page.count("<figcaption>") == 1  # that of the name that has no meaning
