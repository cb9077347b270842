"""States of training backends: exact on any layout, each value once, and nothing damaged is ever read."""

from __future__ import annotations

import json
import math
import resource
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hf_engine import LoraConfig, StateFile, TrainConfig, list_written, load_train_backend
from hf_engine.resharding.execute import as_parts
from hf_engine.testing import gather_weights, write_tiny_family, write_tiny_model
from hf_engine.testing._cases import build_batch, select_rows
from hf_engine.testing._oracles import read_whole_state
from hf_engine.training.state import saving
from hf_protocols import ParallelSpec, StateError, Topology
from hf_protocols.standard import THREE_D

VOCAB_SIZE = 70
CONFIG = TrainConfig(learning_rate=1e-2, micro_batch_tokens=64, warmup_steps=1, schedule="cosine", total_steps=6)
ADAPTED = replace(CONFIG, lora=LoraConfig(rank=2, alpha=4.0))
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB_SIZE}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": write_tiny_model(folder / "tied", **SIZES),
        "other": write_tiny_model(folder / "other", seed=1, **SIZES),
        "wide": write_tiny_model(folder / "wide", **{**SIZES, "intermediate_size": 112}),
        "experts": write_tiny_model(folder / "experts", family="qwen3_moe", **SIZES),
    }


def build(backend, sizes, model, config=CONFIG, **options):
    pp_size, tp_size, dp_size = map(int, sizes.split("-"))
    topology = Topology(ParallelSpec(pp_size=pp_size, tp_size=tp_size, dp_size=dp_size))
    return load_train_backend(backend).build(model, topology=topology, config=config, **options), topology


def negative_logprobs(outputs, micro_batch):
    return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}


def step(backend, topology, loss=negative_logprobs):
    batch = build_batch(4, vocab_size=64)
    return backend.train_step(select_rows(batch, list(THREE_D.distribute(topology, 4)[dist.get_rank()])), loss, 10.0)


def noisy_logprobs(outputs, micro_batch):
    """A loss that uses torch's global generator."""
    noise = torch.rand_like(outputs["logprobs"])
    return -(outputs["logprobs"] * noise * micro_batch["response_mask"]).sum(), {}


LOSSES = {"plain": negative_logprobs, "noisy": noisy_logprobs}


def on_all_ranks(value):
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def save(backend_name, sizes, model, folder, loss="noisy"):
    """Two steps, a state, and two more steps."""
    backend, topology = build(backend_name, sizes, model)
    torch.manual_seed(10 + dist.get_rank())
    for _ in range(2):
        step(backend, topology, LOSSES[loss])
    backend.set_learning_rate(2e-2)
    backend.save_state(folder / "state", weight_version=4)
    saved = gather_weights(backend, topology)
    backend.export_hf(folder / "export", dtype="float32")
    files = [file for each in on_all_ranks(backend.finish_state()) for file in each]
    for _ in range(2):
        step(backend, topology, LOSSES[loss])
    onwards = gather_weights(backend, topology)
    backend.close()
    return files, saved, onwards


def load(backend_name, sizes, model, folder, files, loss="noisy"):
    """The weights there and after two more steps, with a draw of every rank's generator in between."""
    backend, topology = build(backend_name, sizes, model, seed=3)
    loaded = backend.load_state(folder / "state", files=files)
    saved = gather_weights(backend, topology)
    state = torch.get_rng_state()
    draws = [float(each) for each in on_all_ranks(torch.rand(1))]
    torch.set_rng_state(state)
    rates = [step(backend, topology, LOSSES[loss])["learning_rate"][0] for _ in range(2)]
    onwards = gather_weights(backend, topology)
    backend.close()
    return loaded, saved, onwards, draws, rates


def differing(one, other, tolerance=0.0):
    assert one.keys() == other.keys()
    return [name for name in one if float((one[name] - other[name]).abs().max()) > tolerance]


@pytest.mark.parametrize(("backend", "sizes"), [("fsdp", "1-1-2"), ("megatron", "1-2-1")])
def test_a_run_goes_on_bit_by_bit(ranks2, models, tmp_path, backend, sizes):
    """Random numbers of each rank, a new learning rate and its schedule included; files are what safetensors reads."""
    files, saved, onwards = ranks2.run(save, backend, sizes, models["tied"], tmp_path)[0]
    (loaded, again, continued, _, rates), _ = ranks2.run(load, backend, sizes, models["tied"], tmp_path, files)
    assert (loaded.notice, loaded.optimizer_steps, loaded.weight_version) == (None, 2, 4)
    assert differing(again, saved) == [] and differing(continued, onwards) == []
    assert rates == pytest.approx([1e-2 * (1 + math.cos(math.pi * done / 5)) for done in (1, 2)])
    lists = {"files-00000.json", "files-00001.json"}
    assert {path.name for path in (tmp_path / "state").iterdir()} == {file.path for file in files} | lists
    assert list_written(tmp_path / "state", 2) == tuple(files)
    (tmp_path / "state" / "files-00001.json").unlink()
    assert list_written(tmp_path / "state", 2) is None
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert differing(read_whole_state(tmp_path / "state")["weights"], exported) == []


@pytest.mark.parametrize(
    ("written", "read"),
    [(("fsdp", "1-1-2"), ("megatron", "2-1-1")), (("megatron", "1-2-1"), ("fsdp", "1-1-2"))],
)
def test_experts_move_between_backends(ranks2, models, tmp_path, written, read):
    """Weights and moments are the same bits in the other backend and its layout; further steps are as of the first."""
    files, saved, onwards = ranks2.run(save, *written, models["experts"], tmp_path, "plain")[0]
    found = ranks2.run(load, *read, models["experts"], tmp_path, files, "plain")[0]
    loaded, again, continued, *_ = found
    assert differing(again, saved) == [] and differing(continued, onwards, tolerance=1e-3) == []
    assert f"by 2 of {read[0]}" in loaded.notice and "(seed 0, optimizer step 2, rank)" in loaded.notice
    ranks2.run(save_again, *read, models["experts"], tmp_path)
    first, second = (read_whole_state(tmp_path / name) for name in ("state", "again"))
    assert all(differing(first[kind], second[kind]) == [] for kind in ("weights", "exp_avg", "exp_avg_sq"))


def save_again(backend_name, sizes, model, folder):
    backend, _ = build(backend_name, sizes, model)
    backend.load_state(folder / "state")
    backend.save_state(folder / "again")
    backend.close()


def test_another_rank_count_derives_random_numbers(ranks1, ranks2, models, tmp_path):
    files, saved, _ = ranks1.run(save, "fsdp", "1-1-1", models["tied"], tmp_path)[0]
    found = [ranks2.run(load, "fsdp", "1-1-2", models["tied"], tmp_path, files)[0] for _ in range(2)]
    assert all(differing(each[1], saved) == [] for each in found)
    first, second = (each[3] for each in found)
    assert first == second and len({*first}) == 2, "the same in every load, another on every rank"


def use_torch_s_own(model, folder):
    """Moments in files by torch's state dict, and steps of a plain optimizer that goes on from them."""
    backend, topology = build("fsdp", "1-1-1", model)
    for _ in range(2):
        step(backend, topology)
    backend.save_state(folder / "state")
    states = backend._optimizer.adamw.state_dict()["state"]
    names = list(backend.weight_layout().shapes)
    whole = read_whole_state(folder / "state")
    steps = {float(states[index]["step"]) for index in range(len(names))}
    moved = [
        (kind, name)
        for index, name in enumerate(names)
        for kind in ("exp_avg", "exp_avg_sq")
        if not torch.equal(whole[kind][name], states[index][kind])
    ]
    backend.close()
    return len(names), steps, moved


def test_moments_are_torch_s_own(ranks1, models, tmp_path):
    ((num_names, steps, differing_moments),) = ranks1.run(use_torch_s_own, models["tied"], tmp_path)
    assert num_names > 0 and steps == {2.0}
    assert differing_moments == []


def adapt(model, other, folder):
    """Adapters alone are stored; they load on another number of ranks, and with their own base only."""
    world = dist.get_world_size()
    backend, topology = build("fsdp", f"1-1-{world}", model, ADAPTED)
    if world == 2:
        step(backend, topology)
        backend.save_state(folder / "state")
    else:
        backend.load_state(folder / "state")
    weights = gather_weights(backend, topology)
    changes = backend.weight_changes
    for kind, path, config, reason in (
        ("fsdp", other, ADAPTED, "belongs to another base model"),
        ("fsdp", model, CONFIG, "has adapters and this model none"),
        ("fsdp", model, replace(ADAPTED, lora=LoraConfig(rank=2, alpha=8.0)), r"belongs to adapters with alpha=4.0"),
    ):
        strange, _ = build(kind, f"1-1-{world}", path, config)
        with pytest.raises(StateError, match=rf"state.json does not fit: the state {reason}"):
            strange.load_state(folder / "state")
        assert strange.weight_changes == 0 and backend.weight_changes == changes
    return weights


def test_adapters_load_without_their_base(ranks1, ranks2, models, tmp_path):
    saved = ranks2.run(adapt, models["tied"], models["other"], tmp_path)[0]
    loaded = ranks1.run(adapt, models["tied"], models["other"], tmp_path)[0]
    assert differing(loaded, saved) == []
    names = read_whole_state(tmp_path / "state")["weights"]
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)


def rewrite_json(**changes):
    def change(directory):
        path = directory / "state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def break_random_numbers(directory):
    described = json.loads((directory / "state.json").read_text())
    del described["ranks"][1]["random"]["torch"]
    (directory / "state.json").write_text(json.dumps(described))


def flip(name, place):
    def change(directory):
        raw = bytearray((directory / name).read_bytes())
        raw[place] ^= 1
        (directory / name).write_bytes(raw)

    return change


def resave(name, **changes):
    def change(directory):
        tensors = load_file(directory / name)
        save_file(
            {key: changes.get(key.rpartition(".")[2], lambda t: t)(t) for key, t in tensors.items()}, directory / name
        )

    return change


FIRST, SECOND = "weights-00000.safetensors", "exp_avg-00001.safetensors"
DAMAGES = {
    "missing": (lambda d: (d / SECOND).unlink(), f"{SECOND} does not exist", f"{SECOND} does not exist"),
    "truncated": (
        lambda d: (d / FIRST).write_bytes((d / FIRST).read_bytes()[:-9]),
        f"{FIRST} has",
        f"{FIRST} cannot be",
    ),
    "flipped bit": (flip(FIRST, -1), f"{FIRST} is damaged: its SHA-256 is", None),
    "flipped header": (flip(FIRST, 9), f"{FIRST} is damaged: its SHA-256 is", f"{FIRST} cannot be read"),
    "no description": (lambda d: (d / "state.json").unlink(), "state.json does not exist", "state.json does not exist"),
    "older schema": (
        rewrite_json(schema=0),
        "state.json has",
        "state.json has schema 0, this version of hf-engine reads",
    ),
    "no JSON": (lambda d: (d / "state.json").write_text("{"), "state.json has", "state.json is not valid JSON"),
    "strange JSON": (rewrite_json(ranks=[{}, {}]), "state.json has", "state.json is damaged: KeyError"),
    "lost boxes": (rewrite_json(world_size=3), "state.json has", "state.json is damaged: ValueError: world_size is 3"),
    "random numbers": (break_random_numbers, "state.json has", "state.json is damaged in its random numbers: KeyError"),
    "bfloat16": (resave(FIRST, weight=lambda t: t.bfloat16()), f"{FIRST} has", f"{FIRST} has .* as BF16 of shape"),
}


def refuse_damage(model, wide, folder):
    """Every damage is an error on both ranks that names the file; no weight has changed."""
    backend, topology = build("fsdp", "1-1-2", model)
    step(backend, topology)
    backend.save_state(folder / "good")
    files = [file for each in on_all_ranks(backend.finish_state()) for file in each]
    before = {name: parts[0].clone() for name, parts in as_parts(backend.local_weights()).items()}
    changes, generator = backend.weight_changes, torch.get_rng_state()
    for number, (damage, listed, plain) in enumerate(DAMAGES.values()):
        directory = folder / str(number)
        if dist.get_rank() == 0:
            directory.mkdir()
            for path in (folder / "good").iterdir():
                (directory / path.name).write_bytes(path.read_bytes())
            damage(directory)
        dist.barrier()
        for given, reason in ((files, listed), (None, plain)):
            if reason is not None:
                with pytest.raises(StateError, match=rf"{reason}"):
                    backend.load_state(directory, files=given)
    unlisted = [file for file in files if file.path != SECOND]
    for given, reason in (
        (unlisted, rf"files: {SECOND} .* is not listed"),
        (files[1:] + files[1:], "is listed twice"),
        ("state.json", "Use what finish_state"),
        ([file for file in files if file.path != "state.json"], "state.json .* is not listed"),
    ):
        with pytest.raises(StateError, match=reason):
            backend.load_state(folder / "good", files=given)
    with pytest.raises(StateError, match=r"good is not empty, it holds .* Save to a new directory"):
        backend.save_state(folder / "good")
    other, _ = build("fsdp", "1-1-2", wide)
    with pytest.raises(StateError, match=r"state.json is of another model: 6 parameters differ, such as .*down_proj"):
        other.load_state(folder / "good", files=files)
    critic, _ = build("fsdp", "1-1-2", model, head="value")
    with pytest.raises(StateError, match="is of a model with head 'lm', this one has head 'value'"):
        critic.load_state(folder / "good")
    assert backend.weight_changes == changes and torch.equal(torch.get_rng_state(), generator)
    weights = as_parts(backend.local_weights())
    changed = [name for name, parts in weights.items() if not torch.equal(parts[0], before[name])]
    backend.load_state(folder / "good", files=files)
    return len(weights), changed


def test_damage_is_named_before_a_weight_changes(ranks2, models, tmp_path):
    for num_weights, changed in ranks2.run(refuse_damage, models["tied"], models["wide"], tmp_path):
        assert num_weights > 0 and changed == []


def save_and_finish(backend, directory, background):
    backend.save_state(directory, background=background)
    return backend.finish_state()


def fail_to_write(model, folder):
    """A file system that refuses, as a full disk does: typed, on both ranks, nothing left behind, and no hang.

    Returns the files of a save that follows, and what the failed ones left behind on all ranks.
    """
    left = []
    backend, topology = build("fsdp", "1-1-2", model)
    with pytest.raises(StateError, match=r"finish_state\(\) before save_state\(\)"):
        backend.finish_state()
    with pytest.raises(StateError, match="cannot be written"):
        backend.save_state("/sys/state")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for background in (False, True):
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, hard))
        try:
            with pytest.raises(StateError, match=r"exp_avg-00001\.safetensors cannot be written"):
                save_and_finish(backend, folder / f"full-{background}", background)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        dist.barrier()  # both have failed
        left += [path.name for path in (folder / f"full-{background}").iterdir()]
        dist.barrier()  # both have looked
        if background:
            with pytest.raises(StateError, match=r"full-True: rank 1 could not write its files. Call finish_state"):
                list_written(folder / "full-True", 2)
    backend.save_state(folder / "full-False")
    backend.save_state(folder / "good", background=True)
    with pytest.raises(StateError, match=r"good is still being written. Call finish_state\(\) first"):
        backend.save_state(folder / "more")
    step(backend, topology)  # while it is being written
    assert not (folder / "more").exists()
    files = backend.finish_state()
    assert files == backend.finish_state()
    return {file.path for file in files}, left


def test_a_full_disk_is_an_error_on_every_rank(ranks2, models, tmp_path):
    for rank, (written, left) in enumerate(ranks2.run(fail_to_write, models["tied"], tmp_path)):
        assert f"weights-0000{rank}.safetensors" in written
        assert left == ["files-00001.failed"]  # of the save in the background


def finish_before_the_files(model, directory):
    """Files that come after a deadline are not lost: another call returns them."""
    backend, _ = build("fsdp", "1-1-2", model)
    written, write = threading.Event(), saving.write_tensors
    try:
        saving.write_tensors = lambda path, tensors: write(path, tensors) if written.wait(60) else None
        backend.save_state(directory, background=True)
        for timeout_s, reason in ((0.01, "was not written within 0.01 s. Raise timeout_s"), (1e300, "timeout_s=1e")):
            with pytest.raises(StateError, match=reason):
                backend.finish_state(timeout_s)
        written.set()
        files = on_all_ranks(backend.finish_state())
    finally:
        written.set()
        saving.write_tensors = write
    backend.load_state(directory, files=[file for each in files for file in each])
    return [len(each) for each in files]


def test_a_deadline_that_passes_loses_no_file(ranks2, models, tmp_path):
    assert ranks2.run(finish_before_the_files, models["tied"], tmp_path / "state") == [[4, 3]] * 2


def keep_buffers_and_heads(family, folder):
    """A routing bias comes back in its own dtype, and a head that scores."""
    backend, _ = build("fsdp", "1-1-1", folder / "model", head="score")
    for name, buffer in backend.buffers().items():
        buffer.add_(1.0)
        assert buffer.dtype == torch.float32, name
    weights = {name: tensor.clone() for name, tensor in backend.local_weights().items()}
    backend.save_state(folder / "state")
    again, _ = build("fsdp", "1-1-1", folder / "model", head="score", seed=5)
    again.load_state(folder / "state")
    assert all(torch.equal(buffer, backend.buffers()[name]) for name, buffer in again.buffers().items())
    assert differing(dict(again.local_weights()), weights) == []
    assert "score.weight" in read_whole_state(folder / "state")["weights"]
    return sorted(backend.buffers())


def test_buffers_and_a_score_head_come_back(ranks1, tmp_path):
    write_tiny_family(tmp_path / "model", "deepseek_v3")
    (names,) = ranks1.run(keep_buffers_and_heads, "deepseek_v3", tmp_path)
    assert names == ["model.layers.1.mlp.gate.e_score_correction_bias"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "../x"}, "path='../x' is not a path inside"),
        ({"path": "/etc/x"}, "path='/etc/x' is not a path inside"),
        ({"path": ""}, "path='' is not a path inside"),
        ({"bytes": -1}, "bytes of 'a'=-1"),
        ({"sha256": "0" * 63}, "is not 64 hexadecimal digits"),
    ],
)
def test_a_file_that_leaves_the_state_is_refused(changes, message):
    with pytest.raises(StateError, match=message):
        StateFile(**{"path": "a", "bytes": 1, "sha256": "0" * 64, **changes})


def test_training_state_never_unpickles():
    source = Path(load_train_backend.__code__.co_filename).parents[1] / "training"
    texts = [path.read_text() for path in source.rglob("*.py")]
    assert len(texts) >= 8 and not any(
        "pickle" in text.replace("unpickled", "") or "torch.load" in text for text in texts
    )
