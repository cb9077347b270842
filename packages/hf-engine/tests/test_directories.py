"""Model directories: other people's files, damaged ones, and different paths, in writing and reading."""

from __future__ import annotations

import os
import re
import shutil

import pytest
import torch
import torch.distributed as dist

from hf_engine import TrainConfig, load_train_backend
from hf_engine.resharding.boxes import Box
from hf_engine.resharding.execute import as_parts
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_engine.testing._cases import build_batch
from hf_engine.training import directories
from hf_engine.training.directories import write_directory
from hf_engine.training.fsdp import _backend as fsdp
from hf_engine.training.megatron._files import HuggingFaceFiles
from hf_protocols import BackendError, ParallelSpec, Topology

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def negative_logprobs(outputs, micro_batch):
    return -(outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}


def write_over_others_files(model, folder):
    """By a path that was meant otherwise: the files that are there stay, on both ranks one error says which."""
    os.chdir(folder / "work")
    backend = build_on_two(model)
    for directory, reason in (
        ("", "directory=''. Use the path"),
        (".", "is the working directory or above it"),
        ("..", "is the working directory or above it"),
        ("/", "/ is the working directory or above it"),
        (folder / "notes", "holds other files than a model's, such as 'notes.txt'"),
        (folder / "nested", "holds other files than a model's, such as '.git'"),
        (folder / "thesis", "holds other files than a model's, such as 'thesis.txt'"),
        (folder / "adapters", "holds other files than a model's, such as 'cat.safetensors'"),
        (folder / "folders", "holds other files than a model's, such as 'model.safetensors'"),
        (folder / "notes" / "notes.txt", "is a file. Use a directory"),
    ):
        with pytest.raises(BackendError, match=re.escape(reason)):
            backend.export_hf(directory)
    for directory in ("model", folder / "empty", folder / "link"):
        for _ in range(2):
            backend.export_hf(directory)
    backend.close()


def build_on_two(model):
    topology = Topology(ParallelSpec(dp_size=2))
    return load_train_backend("fsdp").build(model, topology=topology, config=TrainConfig(learning_rate=1e-2))


def test_nobody_elses_files_are_replaced(tmp_path):
    files = ["work/train.py", "notes/notes.txt", "nested/config.json", "nested/.git/HEAD", "thesis/config.json"]
    files += ["thesis/thesis.txt", "adapters/cat.safetensors", "folders/model.safetensors/thesis.txt"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    with LocalRanks(2, timeout_s=30) as ranks:
        ranks.run(write_over_others_files, write_tiny_model(tmp_path / "model", **SIZES), tmp_path)
    assert all((tmp_path / name).read_text() == "mine" for name in files)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "linked" / "config.json").is_file()
    left = ["adapters", "empty", "folders", "link", "linked", "model", "nested", "notes", "thesis", "work"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def write_beside_a_tokenizer(model, folder):
    """It stays; what cannot be written, and files that come meanwhile, leave the earlier model as it was."""
    backend, target = build_on_two(model), folder / "export"
    backend.export_hf(target)
    dist.barrier()
    tokenizer, notes = target / "tokenizer.json", target / "notes.txt"
    if dist.get_rank() == 0:
        tokenizer.write_text("mine")
    backend.export_hf(target)
    assert tokenizer.read_text() == "mine"
    before = (target / "model.safetensors").read_bytes()
    backend.train_step(build_batch(4, vocab_size=64), negative_logprobs, 10.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directories, "_replace", fail_to_rename(folder))
        with pytest.raises(BackendError, match=r"rank 0 refused: .*no room"):
            backend.export_hf(target)
    for write in (backend.export_hf, backend.save_state):
        with pytest.raises(BackendError, match=r"different directories \(rank 0 '.*own-0', rank 1 '.*own-1'\)"):
            write(folder / f"own-{dist.get_rank()}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "save_causal_lm", lambda *_, **__: notes.write_text("mine"))
        with pytest.raises(BackendError, match=r"such as 'notes\.txt', which would be lost"):
            backend.export_hf(target)
    assert notes.read_text() == "mine" and (target / "model.safetensors").read_bytes() == before
    dist.barrier()  # the first rank clears up after the others know
    assert [path.name for path in folder.iterdir()] == ["export"]
    backend.close()


def fail_to_rename(folder):
    replace = directories._replace

    def renaming(*paths):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(directories.os, "rename", refuse_filling)
            replace(*paths)

    def refuse_filling(old, new, rename=os.rename):
        if old.name.endswith(".filling"):
            raise OSError("no room")
        rename(old, new)

    return renaming


def test_a_tokenizer_and_an_earlier_model_stay(tmp_path):
    (tmp_path / "written").mkdir()
    with LocalRanks(2, timeout_s=30) as ranks:
        ranks.run(write_beside_a_tokenizer, write_tiny_model(tmp_path / "model", **SIZES), tmp_path / "written")


def write_model(directory, content, meanwhile=bool):
    def write(path):
        (path / "model.safetensors").write_text(content)
        meanwhile()

    write_directory(directory, write, dist.group.WORLD)


def crash_after_renames(number, directory, content):
    """As if the process had ended: nothing is renamed or removed any more."""
    renamed = []

    def rename(old, new, rename=os.rename):
        stop()
        rename(old, new)
        renamed.append(new)

    def remove(path, rmtree=shutil.rmtree, **options):
        stop()
        rmtree(path, **options)

    def stop():
        if len(renamed) == number:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directories.os, "rename", rename)
        patch.setattr(directories.shutil, "rmtree", remove)
        with pytest.raises(KeyboardInterrupt):
            write_model(directory, content)
    return directory.with_name(f".{directory.name}.replaced"), directory.with_name(f".{directory.name}.filling")


def read(directory):
    return {path.name: path.read_text() for path in directory.iterdir()}


def write_after_a_crash_between_renames(target, meanwhile):
    """The earlier model is back, whether the next write succeeds or not, and its tokenizer stays."""
    write_model(target, "earlier")
    (target / "tokenizer.json").write_text("mine")
    earlier = read(target)
    replaced, filling = crash_after_renames(1, target, "lost")
    assert (
        not target.exists() and read(replaced) == earlier and read(filling) == earlier | {"model.safetensors": "lost"}
    )
    if meanwhile != "nothing":  # as a script does before it starts a run again
        target.mkdir()
    if meanwhile == "tokenizer":
        (target / "tokenizer.json").write_text("newer")
        earlier["tokenizer.json"] = "newer"
        (target / "config.json").write_text("mine")
        with pytest.raises(BackendError, match=r"holds 'config.json' and no weights, and an earlier model lies in "):
            write_model(target, "newer")
        (target / "config.json").unlink()
    (replaced / "notes.txt").write_text("mine")
    with pytest.raises(BackendError, match=r"\.replaced holds other files .* such as 'notes.txt', which would be lost"):
        write_model(target, "newer")
    (replaced / "notes.txt").unlink()
    with pytest.raises(BackendError, match="cannot be read"):
        write_model(target, "newer", fail_to_read)
    assert read(target) == earlier and not replaced.exists() and not filling.exists()
    crash_after_renames(1, target, "lost")
    write_model(target, "newer")
    assert read(target) == earlier | {"model.safetensors": "newer"}
    assert not replaced.exists() and not filling.exists()


@pytest.mark.parametrize("meanwhile", ["nothing", "directory", "tokenizer"])
def test_a_crash_between_the_renames_loses_no_model(ranks1, tmp_path, meanwhile):
    ranks1.run(write_after_a_crash_between_renames, tmp_path / "export", meanwhile)


def write_after_a_crash_behind_renames(target):
    """Checks that the replaced directory is a leftover, unless somebody put files there."""
    write_model(target, "earlier")
    replaced, _ = crash_after_renames(2, target, "newer")
    (replaced / "notes.txt").write_text("mine")
    with pytest.raises(BackendError, match=r"\.replaced holds other files .* such as 'notes.txt', which would be lost"):
        write_model(target, "newest")
    (replaced / "notes.txt").unlink()
    with pytest.raises(BackendError, match="not empty"):
        write_model(target, "newest", lambda: write_notes(replaced))
    assert read(target) == {"model.safetensors": "newer"} and read(replaced) == {"notes.txt": "mine"}
    shutil.rmtree(replaced)
    write_model(target, "newest")
    assert read(target) == {"model.safetensors": "newest"} and not replaced.exists()
    # What is removed must never be taken for a model that was aside.
    _, filling = crash_after_renames(3, target, "last")
    assert read(filling) == {"model.safetensors": "newest"} and not replaced.exists()
    shutil.rmtree(target)
    with pytest.raises(BackendError, match="cannot be read"):
        write_model(target, "newer", fail_to_read)
    assert not target.exists() and not filling.exists()


def write_notes(directory):
    directory.mkdir()
    (directory / "notes.txt").write_text("mine")


def test_a_crash_behind_the_renames_leaves_what_may_go(ranks1, tmp_path):
    ranks1.run(write_after_a_crash_behind_renames, tmp_path / "export")


def write_over_what_was_filled(target):
    """Halves that writers leave may go, on any other file the directory stays as it is."""
    filling = target.with_name(f".{target.name}.filling")
    filling.mkdir()
    for name in ("notes.txt", "model.safetensors", ".tmpsBybLt", "part-00000.safetensors"):
        (filling / name).write_text("half")
    with pytest.raises(BackendError, match=r"\.filling holds other files .* such as 'notes.txt', which would be lost"):
        write_model(target, "newer")
    assert len(read(filling)) == 4 and not target.exists()
    (filling / "notes.txt").unlink()
    write_model(target, "newer")
    assert read(target) == {"model.safetensors": "newer"} and not filling.exists()


def test_what_a_crash_left_half_may_go_and_nothing_else(ranks1, tmp_path):
    ranks1.run(write_over_what_was_filled, tmp_path / "export")


def fail_to_read(*_):
    raise OSError("the disk cannot be read")


def load_a_model_that_fails_on_the_way(backend, sizes, models):
    """One parameter is there already: the weights count as changed, unlike those of a model that is refused."""
    topology = Topology(ParallelSpec.parse(sizes))
    train = load_train_backend(backend).build(models["mine"], topology=topology, config=TrainConfig(learning_rate=1e-2))
    changes = train.weight_changes
    with pytest.raises(BackendError, match="holds another model"):
        train.load_hf(models["wide"])
    assert train.weight_changes == changes
    before = {name: [part.clone() for part in parts] for name, parts in as_parts(train.local_weights()).items()}
    owner, name = {"fsdp": (Box, "slices_in"), "megatron": (HuggingFaceFiles, "read")}[backend]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail_the_second_time(getattr(owner, name)))
        with pytest.raises((BackendError, OSError), match="cannot be read"):
            train.load_hf(models["other"])
    parts = as_parts(train.local_weights())
    assert any(
        not torch.equal(part, old) for name in before for part, old in zip(parts[name], before[name], strict=True)
    )
    assert train.weight_changes == changes + 1, "the next generation() sends what there is now"
    train.load_hf(models["other"])
    assert train.weight_changes == changes + 2
    train.close()


def fail_the_second_time(method):
    calls = []

    def failing(*arguments):
        calls.append(arguments)
        return method(*arguments) if len(calls) == 1 else fail_to_read()

    return failing


@pytest.mark.parametrize(("backend", "sizes"), [("fsdp", "1-1-2"), ("megatron", "1-2-1")])
def test_a_load_that_fails_half_way_counts_as_a_weight_change(ranks2, tmp_path, backend, sizes):
    models = {
        "mine": write_tiny_model(tmp_path / "mine", **SIZES),
        "other": write_tiny_model(tmp_path / "other", seed=1, **SIZES),
        "wide": write_tiny_model(tmp_path / "wide", vocab_size=80, **SIZES),
    }
    ranks2.run(load_a_model_that_fails_on_the_way, backend, sizes, models)
