"""Updates that fail are recorded as their rank received them, and run again from their files alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from hf_algorithms import cli
from hf_algorithms.jagged import to_jagged
from hf_algorithms.losses import Aggregation, Clip, PolicyLoss, ValueLoss
from hf_algorithms.replay import Recorder, build_recording_worker, describe_recorded, drop_states
from hf_algorithms.replay.batches import read_batch, write_batch
from hf_algorithms.replay.bundle import find_bundle
from hf_algorithms.replay.values import ReplayError, decode_value, encode_value
from hf_algorithms.workers import CriticWorker
from hf_controller import InProcessExecutor, ResourcePool, WorkerGroup, WorkerSpec
from hf_engine import TrainConfig
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_batch
from hf_protocols import HybridFlowError, NonFiniteLossError, ParallelSpec, Topology

VOCAB_SIZE = 64


@dataclass(frozen=True)
class RaisingLoss:
    """A loss of a user's own, which may raise."""

    raises: bool = False

    def __call__(self, outputs: Any, micro_batch: Any) -> Any:
        if self.raises:
            raise KeyError("no such column")
        return outputs["values"].sum(), {}


class _EndOfProcess(BaseException):
    pass


@dataclass(frozen=True)
class FatalLoss:
    """A loss that ends its call as the end of a process does, handled by nobody; it notes what is on disk before."""

    folder: str
    ends: bool = True

    def __call__(self, outputs: Any, micro_batch: Any) -> Any:
        Path(self.folder, "seen").write_text(str(list(Path(self.folder).glob("replay/*/*/*/call.json"))))
        if self.ends:
            raise _EndOfProcess
        return outputs["values"].sum(), {}


def own_function(outputs: Any, micro_batch: Any) -> Any:
    return outputs["values"].sum(), {}


@pytest.mark.parametrize(
    "value",
    [
        {"rate": 0.5, "name": "a", "none": None, "parts": [1, (2.0, True)], "bound": inf},
        PolicyLoss(surrogate=Clip(low=0.1, high=0.3), aggregation=Aggregation(mode="constant", constant=7.0)),
        TrainConfig(learning_rate=1e-3, betas=(0.5, 0.9)),
        RaisingLoss(raises=True),
        own_function,
    ],
)
def test_arguments_come_back_from_json(value: Any) -> None:
    assert decode_value(json.loads(json.dumps(encode_value(value), allow_nan=False)), "it") == value


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (encode_value(lambda outputs, batch: None), "it: an object of function was not recorded"),
        ({"dataclass": "os:system", "fields": {}}, "it: os:system is not a dataclass"),
        ({"function": "no_such_module:f"}, "it: no_such_module:f is not there"),
        ({"pickle": ""}, "it: is not a recorded value"),
    ],
)
def test_what_cannot_come_back_is_named(body: Any, message: str) -> None:
    with pytest.raises(ReplayError) as raised:
        decode_value(body, "it")
    assert str(raised.value).startswith(message)


def test_batches_come_back_from_their_files(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    columns = {
        "ids": to_jagged([torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)]),
        "top": to_jagged([torch.ones(1, 3), torch.zeros(2, 3)]),
        "mask": torch.tensor([True, False]),
        "one": shared[:2],
        "other": shared[1:3],
    }
    write_batch(tmp_path / "batch.safetensors", TensorDict(columns, batch_size=[2]))
    found = read_batch(tmp_path / "batch.safetensors")
    assert set(found.keys()) == set(columns) and found.batch_size == torch.Size([2])
    for name, column in columns.items():
        read = found[name]
        assert read.dtype == column.dtype and read.is_nested == column.is_nested
        assert all(torch.equal(a, b) for a, b in zip(read.unbind(), column.unbind(), strict=True)), name
    (tmp_path / "batch.safetensors").write_bytes(b"\0" * 9)
    with pytest.raises(ReplayError, match=r"batch.safetensors: cannot be read"):
        read_batch(tmp_path / "batch.safetensors")


@pytest.fixture
def executor() -> Iterator[InProcessExecutor]:
    with InProcessExecutor() as made:
        yield made


def build_critic(
    executor: InProcessExecutor, run: Path, model: str, *, failed: Collection[int] = (), **training: Any
) -> WorkerGroup:
    kwargs = {"model": model, "backend": "fsdp", "training": TrainConfig(learning_rate=1e-2, **training)}
    recorder = kwargs["recorder"] = Recorder(run=str(run), kwargs=dict(kwargs))
    worker = build_recording_worker(CriticWorker, recorder, failed) if failed else CriticWorker
    spec = WorkerSpec(worker=worker, topology=Topology(ParallelSpec()), kwargs=kwargs)
    return executor.build_groups(ResourcePool([1], device="cpu", name="all"), {"critic": spec})["critic"]


def build_rows() -> TensorDict:
    batch = build_batch(4, vocab_size=VOCAB_SIZE)
    batch["values"], batch["returns"] = batch["targets"], batch["targets"]
    return batch


def test_an_update_that_fails_leaves_its_call(executor: InProcessExecutor, tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "model", vocab_size=VOCAB_SIZE))
    critic = build_critic(executor, tmp_path / "run", model, explode_above=1e-9)
    critic.save_state(str(tmp_path / "waiting"), background=True).result()
    with executor.trace.label(iteration=3), pytest.raises(NonFiniteLossError, match="explode_above") as raised:
        critic.update_critic(build_rows(), ValueLoss()).result()
    run = tmp_path / "run"
    assert any(f"replay {run} --iteration 3 --role critic --rank 0" in note for note in raised.value.__notes__)
    ((file, *_),) = critic.finish_state().result()
    assert (tmp_path / "waiting" / file.path).stat().st_size == file.bytes
    call = find_bundle(run, 3, "critic", 0)
    assert (call.method, call.world_size, call.state) == ("update_critic", 1, run / "replay/3/critic/state")
    assert call.read_arguments() == {"loss": ValueLoss()}
    assert call.read_worker()["training"] == TrainConfig(learning_rate=1e-2, explode_above=1e-9)
    rows, read = build_rows(), call.read_batches()["batch"]
    assert torch.equal(read["returns"].values(), rows["returns"].values())
    with pytest.raises(ReplayError, match=r"Recorded calls: iteration 3, role critic, rank 0$"):
        find_bundle(run, 4, "critic", 0)
    again = run.rename(tmp_path / "moved")
    assert find_bundle(again, 3, "critic", 0).read_worker()["model"] == model


def test_only_the_first_update_that_is_left_out_is_recorded(executor: InProcessExecutor, tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "model", vocab_size=VOCAB_SIZE))
    critic = build_critic(executor, tmp_path / "run", model, explode_above=1e-9, on_nonfinite="skip")
    for iteration in (1, 2):
        with executor.trace.label(iteration=iteration):
            metrics = critic.update_critic(build_rows(), ValueLoss()).result()
        assert metrics == {"critic/skipped_nonfinite": 1.0}
    assert [path.name for path in (tmp_path / "run/replay").iterdir()] == ["1"]
    with executor.trace.label(iteration=5), pytest.raises(HybridFlowError, match="no such column"):
        critic.update_critic(build_rows(), RaisingLoss(raises=True)).result()
    assert find_bundle(tmp_path / "run", 5, "critic", 0).read_arguments() == {"loss": RaisingLoss(raises=True)}


def test_a_call_under_way_is_on_disk_after_a_failure(executor: InProcessExecutor, tmp_path: Path) -> None:
    """In an iteration that failed before, and in no other; a call that ends well leaves nothing."""
    model = str(write_tiny_model(tmp_path / "model", vocab_size=VOCAB_SIZE))
    run = tmp_path / "run"
    run.mkdir()
    critic = build_critic(executor, run, model, failed=[3])
    with executor.trace.label(iteration=3), pytest.raises(_EndOfProcess):
        critic.update_critic(build_rows(), FatalLoss(folder=str(run)))
    assert describe_recorded(run, 3) == (
        f"replay/3 holds the calls that had not ended: hybridflow replay {run} --iteration 3 with --role critic "
        "--rank 0 runs one again"
    )
    call = find_bundle(run, 3, "critic", 0)
    assert call.read_arguments() == {"loss": FatalLoss(folder=str(run))}
    assert call.state is not None
    ids = call.read_batches()["batch"]["response_ids"].values()
    assert torch.equal(ids, build_rows()["response_ids"].values())
    seen = []
    for iteration in (2, 3):
        with executor.trace.label(iteration=iteration):
            critic.update_critic(build_rows(), FatalLoss(folder=str(run), ends=False)).result()
        seen.append((run / "seen").read_text())
    assert len(set(seen)) == 1  # of the process that ended: it stays until the call is made again
    assert describe_recorded(run, 3) is None
    with executor.trace.label(iteration=2):
        critic.update_critic(build_rows(), FatalLoss(folder=str(run), ends=False)).result()
    assert (run / "seen").read_text() == "[]"
    drop_states(run, 3)
    assert list((run / "replay").glob("*/*")) == []


def test_the_command_refuses_what_was_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was started, so the exit code is that of a refusal."""
    words = ["hybridflow", "replay", str(tmp_path), "--iteration", "1", "--role", "actor"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"Error: {tmp_path}: no call of iteration 1, role 'actor', rank 0 is recorded. Recorded calls: none. Name the "
        "run.output_dir of a run in which a call failed\n"
    )
