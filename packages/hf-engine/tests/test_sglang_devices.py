"""Devices of SGLang's processes, where each rank sees its own alone, as on Ray, or all of its machine."""

from __future__ import annotations

import pytest
import torch

from hf_engine.rollout.sglang._library import build_environment, name_device


@pytest.mark.parametrize(
    ("visible", "devices", "names"),
    [
        (["3", "5"], [0, 0], ["3", "5"]),
        (["2, 4", "2, 4"], [0, 1], ["2", "4"]),
        (["GPU-a", "GPU-b"], [0, 0], ["GPU-a", "GPU-b"]),
        (["", ""], [0, 1], ["0", "1"]),
    ],
)
def test_an_engine_sees_the_devices_of_its_ranks(monkeypatch, tmp_path, visible, devices, names):
    found = []
    for shown, device in zip(visible, devices, strict=True):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        found.append(name_device(torch.device("cuda", device)))
    assert found == names
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    environment = build_environment(str(tmp_path), tp_size=2, devices=found)
    assert environment["CUDA_VISIBLE_DEVICES"] == ",".join(names)
