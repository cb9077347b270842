"""Commits on disk, what the program keeps, when a run commits, and which inputs it was started with."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_algorithms.checkpoints import CheckpointError, find_commits, find_last_commit
from hf_algorithms.checkpoints.commit import STEPS, CommittedFile, write_commit
from hf_algorithms.checkpoints.origin import InputFile, RunOrigin, describe_origin, read_origin, write_origin
from hf_algorithms.checkpoints.program import Program, load_generators, read_program, save_generators, write_program
from hf_algorithms.checkpoints.saver import BestCommits, Cadence
from hf_algorithms.config import parse_config
from hf_algorithms.run_directory import RunDirectory
from hf_protocols import ConfigError


def commit(run: Path, iteration: int) -> Path:
    folder = run / STEPS / str(iteration)
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "weights.safetensors").write_bytes(bytes(range(64)))
    (folder / "program.json").write_text("{}")
    write_commit(folder, iteration, [], ledger={"planned": 8}, versions={"torch": "2"})
    return folder


def flip_a_bit(folder: Path) -> None:
    path = folder / "actor" / "weights.safetensors"
    body = bytearray(path.read_bytes())
    body[7] ^= 1
    path.write_bytes(body)


def edit(key: str, value: object) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        body = json.loads((folder / "COMMIT").read_text())
        (folder / "COMMIT").write_text(json.dumps({**body, key: value}))

    return act


OTHER_BYTES = [{"path": "program.json", "bytes": "\udfff", "sha256": "0"}]
OUTSIDE = [{"path": "../../1/program.json", "bytes": 2, "sha256": "0"}]
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (flip_a_bit, r"actor/weights\.safetensors: its SHA-256 is not the one in .*COMMIT"),
    "truncated": (lambda f: (f / "program.json").write_text("{"), r"program\.json: has 1 bytes, .*COMMIT says 2"),
    "absent": (lambda f: (f / "program.json").unlink(), r"program\.json: No such file or directory, and .* lists it"),
    "older": (edit("schema", 0), r"COMMIT: its schema is 0, this release reads 1\. Resume with the release"),
    "outside": (edit("files", OUTSIDE), r"COMMIT: lists '\.\./\.\./1/program\.json', which is outside its folder"),
    "not JSON": (lambda f: (f / "COMMIT").write_bytes(b"\xff"), r"COMMIT: is not a commit"),
    "bytes as text": (edit("files", OTHER_BYTES), r"COMMIT: is not a commit"),
    "of another kind": (lambda f: (f / "COMMIT").write_text("[]"), r"COMMIT: is not a commit"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_commit_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    act, problem = DAMAGES[damage]
    commit(tmp_path, 9)
    act(commit(tmp_path, 10))
    found, (line,) = find_last_commit(tmp_path)
    assert found is not None and found.iteration == 9 and dict(found.ledger) == {"planned": 8}
    assert re.search(problem, line)


def test_without_a_good_commit_a_run_is_not_resumed(tmp_path: Path) -> None:
    assert find_last_commit(tmp_path) == (None, [])
    flip_a_bit(commit(tmp_path, 1))
    with pytest.raises(CheckpointError, match="no commit can be used"):
        find_last_commit(tmp_path)


def test_a_file_that_only_its_rank_sees_is_not_a_commit(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    elsewhere = CommittedFile(path="actor/state.json", bytes=2, sha256="0")
    with pytest.raises(CheckpointError, match=r"1/actor/state\.json: a rank wrote it, and it is not there"):
        write_commit(tmp_path / "1", 1, [elsewhere], ledger={}, versions={})
    assert not (tmp_path / "1" / "COMMIT").exists()


def test_a_step_without_commit_is_ignored(tmp_path: Path) -> None:
    commit(tmp_path, 2)
    (commit(tmp_path, 3) / "COMMIT").unlink()
    (tmp_path / STEPS / "notes").mkdir()
    assert find_commits(tmp_path) == [2]


def test_the_programs_state_comes_back_with_its_generators(tmp_path: Path) -> None:
    state = {"multiplier": {"value": 0.1, "costs": [1e-17, -0.0]}, "seen": 3}
    program = Program(
        iteration=2, state=state, summary={}, totals={"wall_s": 1.5}, ledger={}, data={"rows_drawn": 8},
        sizes={"metrics.jsonl": 3}, generators=save_generators(),
    )  # fmt: skip
    write_program(tmp_path, program)
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    found = read_program(tmp_path)
    assert found.state == state and found.sizes == program.sizes
    for name in ("../other/metrics.jsonl", "/etc/passwd", "a/../../b", ""):
        (tmp_path / "program.json").write_text(json.dumps({**asdict(program), "sizes": {name: 0}}))
        with pytest.raises(CheckpointError, match=r"program\.json: names .*, which is outside the run's directory"):
            read_program(tmp_path)
    load_generators(found.generators)
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == drawn


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, torch.ones(1), object()])
def test_a_state_that_json_would_change_is_refused(tmp_path: Path, value: object) -> None:
    program = Program(
        iteration=1, state={"mine": value}, summary={}, totals={}, ledger={}, data={}, generators={}, sizes={}
    )
    with pytest.raises(ConfigError, match=r"context\.state\['mine'\] = .* a checkpoint keeps numbers, texts"):
        write_program(tmp_path, program)


def test_a_run_commits_as_often_as_it_is_asked() -> None:
    now = [0.0]
    of_iterations, never, of_seconds, auto = (Cadence(every, lambda: now[0]) for every in (3, 0, "60s", "auto"))
    assert [each for each in range(1, 8) if of_iterations.is_due(each)] == [3, 6]
    assert of_iterations.is_due(7, is_last=True) and not never.is_due(7, is_last=True)
    now[0] = 59.0
    assert not of_seconds.is_due(1)
    now[0] = 60.0
    assert of_seconds.is_due(1)
    of_seconds.note_commit(1.0)
    assert not of_seconds.is_due(2)
    due = []
    now[0] = 0.0
    for iteration in range(1, 2001):
        now[0] += 1.0
        if auto.is_due(iteration):
            due.append(iteration)
            auto.note_commit(2.0)
            auto.note_wait(1.0)
            now[0] += 3.0
    assert due[0] == 20 and 30 < len(due) < 40
    assert auto.share <= 0.05


@pytest.mark.parametrize("lower_is_better", [False, True])
def test_the_commits_with_the_best_scores_are_kept(lower_is_better: bool) -> None:
    draw = random.Random(3)
    scores = [draw.choice([0.1, 0.2, 0.3, 0.4, float("nan"), None]) for _ in range(40)]
    best = BestCommits(3, lower_is_better=lower_is_better)
    for iteration, score in enumerate(scores, 1):
        was_better = best.is_better(score)
        assert best.add(iteration, score) == was_better == (iteration in best.iterations)
        known = [(each, i) for i, each in enumerate(scores[:iteration], 1) if each is not None and each == each]
        expected = sorted(known, key=lambda pair: (pair[0] if lower_is_better else -pair[0], pair[1]))[:3]
        assert best.iterations == [i for _, i in expected]
    again = BestCommits(3, lower_is_better=lower_is_better)
    again.restore(json.loads(json.dumps(best.scores)), [*best.iterations[1:], 99])
    assert again.iterations == best.iterations[1:]
    assert not BestCommits(0).is_better(1.0)


def test_a_run_knows_its_inputs_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "first"
    for folder in (tmp_path / "data", run / "data"):
        folder.mkdir(parents=True)
        (folder / "rows.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)
    data = {"train": "data/*.jsonl", "validation": "runs/first/data/rows.jsonl", "test": "owner/name-on-the-hub"}
    config = parse_config({"data": data, "model": {"tokenizer": "characters"}, "reward": {"function": "exact_match"}})
    origin = describe_origin(config, run, ["."])
    assert origin.sections["data"]["train"] == str(tmp_path / "data" / "*.jsonl")
    assert origin.sections["data"]["test"] == "owner/name-on-the-hub"
    assert origin.search_path == [str(tmp_path)]
    assert [each.path for each in origin.inputs] == [str(tmp_path / "data/rows.jsonl"), str(run / "data/rows.jsonl")]
    moved = origin.moved_to(tmp_path / "second")
    assert moved.sections["data"]["validation"] == str(tmp_path / "second" / "data" / "rows.jsonl")
    assert moved.find_changed() == [f"{tmp_path}/second/data/rows.jsonl: No such file or directory"]
    assert origin.find_changed() == []
    (tmp_path / "data" / "rows.jsonl").write_text('{"prompt": "b"}\n')
    assert origin.find_changed() == [f"{tmp_path}/data/rows.jsonl: it is not the file with which the run was started"]


def test_the_origin_reads_back(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.begin()
    origin = RunOrigin(
        directory=str(tmp_path), sections={"run": {"seed": 1}}, search_path=["/a"],
        inputs=[InputFile(path="/b", bytes=1, sha256="c")],
    )  # fmt: skip
    write_origin(directory, origin)
    assert read_origin(tmp_path) == origin
    for text in ("", "[]", '{"inputs": 3}'):
        (tmp_path / ".hybridflow-run").write_text(text)
        with pytest.raises(CheckpointError, match="does not say how the run was started"):
            read_origin(tmp_path)
