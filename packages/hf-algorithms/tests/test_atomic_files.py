"""Folders that are replaced without a moment of absence."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from hf_algorithms import atomic_files
from hf_algorithms.atomic_files import (
    describe_refusal,
    find_part,
    link_folder,
    replace_folder,
    write_text,
    writing_lines,
)


def make(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "weights").write_text(text)
    return folder


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_takes_the_place_of_another(tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchanges:
        monkeypatch.setattr(atomic_files, "_exchange", lambda one, other: False)
    for text in ("first", "second"):
        replace_folder(make(tmp_path / ".part", text), tmp_path / "model")
        assert (tmp_path / "model" / "weights").read_text() == text
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_reader_always_finds_a_whole_folder(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "0")
    if not atomic_files._exchange(make(tmp_path / "other", "1"), model):
        pytest.skip("this file system cannot exchange names")
    absent: list[str] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            if not (model / "weights").exists():
                absent.append("now")

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(50):
        part = tmp_path / ".part"
        replace_folder(make(part, str(number)), model)
    ended.set()
    reader.join()
    assert not absent


def test_the_reason_of_a_folder_is_that_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

    monkeypatch.setattr(atomic_files, "_link_weights", refuse)
    make(tmp_path / "a", "text")
    with pytest.raises(shutil.Error) as caught:
        link_folder(tmp_path / "a", tmp_path / "b")
    assert caught.value.strerror is None
    assert describe_refusal(caught.value) == os.strerror(errno.ENOSPC)
    assert describe_refusal(PermissionError(errno.EACCES, "denied")) == "denied"


def test_the_error_of_a_write_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left") as caught:
        write_text(tmp_path / "a.json", "text")
    assert caught.value.filename == str(tmp_path / "a.json")
    with pytest.raises(OSError, match="No space left") as caught, writing_lines(tmp_path / "b.jsonl") as write:
        write(["text"])
    assert caught.value.filename == str(find_part(tmp_path / "b.jsonl"))
