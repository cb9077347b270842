from __future__ import annotations

import dataclasses
import html.parser
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_mapper import MapperConfig, build_page, explain_plan, map_dataflow
from hf_protocols import (
    MachinePlan,
    MappingPlan,
    ModelPlan,
    ModelShape,
    PlanError,
    PlanEstimates,
    PoolEstimate,
    PoolPlan,
    StageEstimate,
)

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class PageReader(html.parser.HTMLParser):
    """Collects a page's links, tags and texts, and checks that every open tag is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.marks: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.marks.append((tag, dict(attrs)))
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.marks.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


@pytest.fixture(scope="module")
def problem(paper_problem: Callable[..., Any]) -> MapperConfig:
    return MapperConfig(**paper_problem("ppo", "llama-2-7b", 128)._asdict())


@pytest.fixture(scope="module")
def plan(problem: MapperConfig) -> MappingPlan:
    return map_dataflow(problem.dataflow, problem.models, problem.cluster, problem.workload)


def test_it_loads_nothing_and_runs_no_script(plan: MappingPlan) -> None:
    page = build_page(plan)
    read = PageReader(page)
    assert read.loaded == []
    assert "url(" not in page
    assert "@import" not in page
    assert not any(tag in ("script", "link", "iframe", "img", "object") for tag, _ in read.marks)


def test_every_picture_has_a_text_alternative(plan: MappingPlan) -> None:
    pictures = [attributes for tag, attributes in PageReader(build_page(plan)).marks if tag == "svg"]
    assert pictures
    for attributes in pictures:
        assert attributes.get("aria-hidden") == "true" or (attributes["role"] == "img" and attributes["aria-label"])


def test_bars_add_up_to_the_iteration(plan: MappingPlan) -> None:
    """The bars of a pool cover its stages' times: what is not idle."""
    time = build_page(plan).split("<h2>Time</h2>")[1].split("<h2>Memory of every device</h2>")[0]
    charts = time.split("<h3>")[1:]
    placed = [pool for pool in plan.pools if pool.name in plan.estimates.pools]
    assert len(charts) == len(placed)
    for chart, pool in zip(charts, placed, strict=True):
        widths = [
            float(width) for width in re.findall(r'<g class="bar c\d"><rect x="[\d.]+%" width="([\d.]+)%"', chart)
        ]
        busy = sum(plan.estimates.pools[pool.name].stage_s) / plan.estimates.iteration_s
        assert sum(widths) == pytest.approx(100 * busy, abs=0.1 * len(widths))


def test_every_device_has_a_bar(plan: MappingPlan) -> None:
    """One track for each of the 128 devices, and one for the wide bar of each pool and each row of the chart."""
    memory = build_page(plan).split("<h2>Memory of every device</h2>")[1].split("<h2>Layouts</h2>")[0]
    placed = [pool for pool in plan.pools if pool.name in plan.estimates.pools]
    assert memory.count('class="track"') == sum(pool.num_slots for pool in placed) + len(placed) == 128 + len(placed)


def test_many_machines_are_counted_instead_of_drawn() -> None:
    pool = PoolPlan(name="actor", machines=(MachinePlan(gpu_kind="h100", slots=8),) * 1000)
    estimates = PlanEstimates(
        iteration_s=1.0,
        stages=(StageEstimate(calls=("actor.update_actor",), latency_s=1.0, waits_for="actor"),),
        pools={"actor": PoolEstimate(stage_s=(1.0,), memory_bytes=2**30, usable_bytes=2**31)},
        models={},
        idle_gpus=0,
    )
    plan = MappingPlan(pools=(pool,), models={"actor": ModelPlan(pool="actor", backend="fsdp")}, estimates=estimates)
    page = build_page(plan)
    assert "and 936 machines more, filled alike" in page
    assert len(page) < 200_000


def test_names_are_escaped(plan: MappingPlan) -> None:
    first = replace(plan.estimates.stages[0], calls=("<script>alert(1)</script>",))
    estimates = replace(plan.estimates, stages=(first, *plan.estimates.stages[1:]))
    page = build_page(replace(plan, estimates=estimates))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_a_plan_without_estimates_has_no_page() -> None:
    pool = PoolPlan(name="actor", machines=(MachinePlan(gpu_kind="cpu", slots=1),))
    with pytest.raises(PlanError, match="lacks estimates"):
        build_page(MappingPlan(pools=(pool,), models={"actor": ModelPlan(pool="actor", backend="fsdp")}))


def test_the_reasons_are_on_the_page(problem: MapperConfig) -> None:
    found = explain_plan(problem, robustness=False)
    text = PageReader(build_page(found.plan, found)).text
    for entry in found.alternatives:
        assert entry.reason in text
    assert found.bottleneck.resource in text


WIDTHS = (320, 390, 1280)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine. Install the package `chromium`")
def test_nothing_scrolls_sideways(paper_problem: Callable[..., Any], tiny: ModelShape, tmp_path: Path) -> None:
    """In frames of each width in headless Chromium; a page that is too wide is measured as such.

    The tolerances are those of the same roles with small models on two devices, which are found in no time.
    """
    problem = MapperConfig(**paper_problem("safe_rlhf_one_critic", "llama-2-7b", 16)._asdict())
    machine = dataclasses.replace(problem.cluster.machines[0], num_gpus=2, num_machines=1)
    small = explain_plan(
        dataclasses.replace(
            problem,
            models=dict.fromkeys(problem.models, dataclasses.replace(tiny, max_positions=2048)),
            cluster=dataclasses.replace(problem.cluster, machines=(machine,)),
        )
    )
    assert small.memory
    assert len(small.tolerances) > 3
    found = dataclasses.replace(
        explain_plan(problem, robustness=False), tolerances=small.tolerances, memory=small.memory
    )
    page, wide = build_page(found.plan, found), "<!doctype html><div style='width:2000px'>wide</div>"
    measured = _measure([(html, width) for html in (page, wide) for width in WIDTHS], tmp_path)
    for width, of_page, of_wide in zip(WIDTHS, measured[: len(WIDTHS)], measured[len(WIDTHS) :], strict=True):
        assert of_page <= width < of_wide


def _measure(frames: Sequence[tuple[str, int]], folder: Path) -> list[int]:
    """`scrollWidth` of each page in a frame of its width in pixels: a window's own least width is larger."""
    shell = (
        "<!doctype html><body><script>const found = [];"
        f"for (const [index, [page, width]] of {_quote(frames)}.entries()) {{"
        "const frame = document.createElement('iframe');"
        "frame.style = `width:${width}px;height:800px;border:0`;"
        "frame.srcdoc = page;"
        "frame.onload = () => { found[index] = frame.contentDocument.documentElement.scrollWidth;"
        "document.title = 'wide ' + Array.from(found, width => width ?? '').join(' '); };"
        "document.body.append(frame); }</script>"
    )
    path = folder / "shell.html"
    path.write_text(shell)
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    finished = subprocess.run(
        [*command, "--window-size=1400,900", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    measured = re.search(r"<title>wide ([\d ]+)</title>", finished.stdout)
    assert measured, finished.stdout[:500]
    return [int(width) for width in measured.group(1).split()]


def _quote(frames: Sequence[tuple[str, int]]) -> str:
    """The frames as a JavaScript array inside a script element."""
    import json

    return json.dumps(frames).replace("</", "<\\/")
