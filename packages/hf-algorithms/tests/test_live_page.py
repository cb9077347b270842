"""The page of running runs in headless Chromium, at the widths of a laptop and of a phone."""

from __future__ import annotations

import functools
import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine. Install the package `chromium`")
WAIT_MS = 60_000
"""Of the page: a loaded machine is slow, and nothing here depends on how slow."""


def _write_run(directory, seed):
    draw = random.Random(seed)
    (directory / "samples").mkdir(parents=True)
    (directory / "config.toml").write_text(f'[run]\nseed = {seed}\n[algorithm]\nname = "grpo"\n')
    names = ("reward/mean", "actor/policy_loss", "actor/entropy", "kl/k3", "response/truncated", "time/iteration_s")
    with (directory / "metrics.jsonl").open("w") as file:
        for i in range(1, 61):
            row = {"iteration": i, "perf/tokens_per_s": 50.0, **{name: draw.random() for name in names}}
            file.write(json.dumps(row) + "\n")
    for iteration in (20, 40):
        with (directory / "samples" / f"{iteration}.jsonl").open("w") as file:
            for number in range(12):
                row = {
                    "group": number // 4,
                    "prompt": "a_long_word_without_a_space_" * 20,
                    "response": "".join(f"word{n} " for n in range(30)),
                    "score": draw.random(),
                    "rewards": {"a_reward_with_quite_a_long_name": draw.random(), "format": 1.0},
                    "token_ids": list(range(30)),
                    "token_texts": [f"word{n} " for n in range(30)],
                    "rollout_logprobs": [-draw.random() for _ in range(30)],
                    "old_logprobs": [-draw.random() for _ in range(30)],
                    "response_mask": [n != 5 for n in range(30)],
                }
                file.write(json.dumps(row) + "\n")
    spans = [("actor.generate_sequences", 0, 60), ("actor.update_actor", 60, 40)]
    events = [
        {"ph": "X", "name": name, "pid": 1, "tid": 0, "ts": start, "dur": length, "args": {"iteration": 20}}
        for name, start, length in spans
    ]
    (directory / "trace.json").write_text(json.dumps({"traceEvents": events}))
    return directory


@pytest.fixture
def runs(tmp_path):
    return [_write_run(tmp_path / "first_run_with_a_rather_long_name", 1), _write_run(tmp_path / "second", 2)]


@pytest.fixture
def server(runs):
    """The command itself, on a free port; it ends by Ctrl-C with the code of an interrupt."""
    command = [str(Path(sys.executable).with_name("hybridflow")), "serve", *map(str, runs), "--port", "0"]
    # A shell's background job, as these tests may be, ignores Ctrl-C; a user's program does not.
    hear_ctrl_c = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c)
    try:
        line = process.stderr.readline()
        assert line.startswith("http://127.0.0.1:"), line + process.stderr.read()
        yield line.split()[0]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert (process.returncode, errors) == (130, "")


@pytest.fixture
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"], timeout=WAIT_MS)
        yield browser
        browser.close()


def test_the_page_fits_and_the_keyboard_works(server, browser, runs):
    complaints, foreign = [], []
    for width in (1300, 390):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: foreign.append(request.url))
        page.goto(server)
        _use_page(page)
        page.close()
    assert complaints == []
    assert all(address.startswith((server, "data:")) for address in foreign)
    page = browser.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(server)
    page.wait_for_selector("#curves polyline")
    _follow_changes(page, runs[0])


def _use_page(page):
    for part in ("health", "curves", "samples", "compare", "gantt"):
        page.wait_for_selector(f"#{part} > *")
    assert page.locator("#runs button").count() == 2
    _check_width(page)
    # a key moves through samples and tokens
    page.keyboard.press("p")
    page.wait_for_selector('#samples [data-iteration="20"]')
    page.keyboard.press("j")
    page.wait_for_selector("#sample .tok")
    first = page.evaluate("location.hash")
    page.keyboard.press("j")
    page.wait_for_function("first => location.hash !== first", arg=first)
    page.keyboard.press("c")
    page.wait_for_selector('#sample .colourings [aria-pressed="true"][data-key="colour-sampler"]')
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "token 1, 'word1 '" in page.inner_text(".token-line")
    _check_width(page)
    page.keyboard.press("Escape")
    page.wait_for_function("() => document.querySelector('#sample').children.length === 0")
    # a bar is a button
    page.locator(".bin").nth(0).press("Enter")
    page.wait_for_selector('.bin[aria-pressed="true"]')
    # the axis, the filter, a run less, and the list of keys
    page.keyboard.press("x")
    page.wait_for_selector('#axes [aria-pressed="true"][data-set="axis=tokens"]')
    page.keyboard.press("f")
    page.keyboard.type("entropy")
    page.wait_for_function("() => document.querySelectorAll('#curves figure').length === 1")
    page.keyboard.press("Escape")
    page.keyboard.press("2")
    page.wait_for_selector('#runs [data-key="run1"][aria-pressed="false"]')
    page.wait_for_function("() => document.querySelectorAll('#curves figure g').length === 1")
    page.keyboard.press("?")
    page.wait_for_selector("#keys[open]")
    _check_width(page)
    page.keyboard.press("Escape")
    page.wait_for_selector("#keys:not([open])", state="attached")


def _follow_changes(page, run):
    """A line that the run appends and the run's end come without a reload."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 61, "reward/mean": 123.0}) + "\n")
    page.wait_for_function("() => document.querySelector('#curves').textContent.includes('100')")
    page.wait_for_function("() => document.querySelector('#runs').textContent.includes('iteration 61')")
    shutil.rmtree(run)
    page.wait_for_function("() => document.querySelector('#runs').textContent.includes('deleted')")
    assert page.locator("#curves polyline").count() > 0


def _check_width(page):
    width, most = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert width <= most
