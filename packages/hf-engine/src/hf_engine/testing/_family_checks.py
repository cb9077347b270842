"""The laws of the `fsdp` backend with `transformers` generation for one family, against transformers alone."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from hf_engine.backends.base import Head, SamplingParams, TrainBackend, TrainConfig
from hf_engine.backends.registry import load_rollout_backend, load_train_backend
from hf_engine.hybrid_engine.hybrid_engine import HybridEngine
from hf_engine.model_directory import VALUE_HEAD, read_model_directory
from hf_engine.testing._cases import build_batch, build_prompts, reference_outputs, rows_of
from hf_engine.testing._families import write_tiny_family
from hf_protocols.topology import GenerationSpec, ParallelSpec, Topology

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import TensorDict

__all__ = ["check_family"]

_VOCAB_SIZE = 64
_TOLERANCE = 1e-4
_CONFIG = TrainConfig(learning_rate=1e-2, eps=1e-3, max_grad_norm=0.5, micro_batch_tokens=48)
"""A larger eps keeps the rounding of gradients near zero small: those of biases that softmax does not see."""
_NUM_TOKENS = 10.0


def check_family(family: str, directory: str | Path, **config: Any) -> None:
    """Checks a tiny random model of one family in this process, which is a process group of one rank.

    The laws:

    - Log-probs of every token of the vocabulary at padded rows are those of transformers at rows alone, and so are
      those that generation reports.
    - An AdamW step ends at the weights of torch's.
    - transformers loads an export bit for bit, under the names of the source.
    - Weights and buffers of another directory, once loaded, are those that generation has, bit for bit.
    - Values are those of the same head on transformers' hidden states, also after a step and from an export.

    Args:
        family: a name in `TINY_FAMILIES` or `FURTHER_FAMILIES`.
        directory: an empty one.
        **config: further keys of `config.json`.

    Raises:
        AssertionError: naming the law and the difference.
    """
    path = Path(directory)
    model = write_tiny_family(path / "model", family, **config)
    other = _write_other(model, path / "other")
    batch, reference = build_batch(4, vocab_size=_VOCAB_SIZE), _load(model)
    train, rollout = _build(model, "lm"), load_rollout_backend("transformers").build(model, topology=_topology())
    _check_distributions(train, reference, batch)
    _check_samples(rollout, reference)
    _check_step(train, reference, batch)
    train.export_hf(path / "export")
    _check_export(train, path / "export", model)
    train.load_hf(other)
    engine = HybridEngine(train, rollout, _topology())
    with engine.generation():
        _check_equal(_state_of(rollout), _load(other), "generation after another directory was loaded")
    engine.close()
    _check_values(path, reference, batch)


def _topology() -> Topology:
    return Topology(ParallelSpec(), GenerationSpec())


def _build(model: Path, head: Head) -> TrainBackend:
    return load_train_backend("fsdp").build(model, topology=_topology(), config=_CONFIG, head=head)


def _load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    # The modules' own computation: a faster function leaves out what it has no argument for.
    found: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        trust_remote_code=False,
    )
    return found.eval()


def _rows(batch: TensorDict) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    return list(zip(*(rows_of(batch[name]) for name in ("prompt_ids", "response_ids", "targets")), strict=True))


def _check_distributions(train: TrainBackend, reference: Any, batch: TensorDict) -> None:
    scored = train.compute_logprobs(batch, top_k=_VOCAB_SIZE)
    ids, logprobs = rows_of(scored["top_ids"]), rows_of(scored["top_logprobs"])
    with torch.no_grad():
        for row, (prompt, response, _) in enumerate(_rows(batch)):
            expected = reference_outputs(reference, prompt, response).log_softmax(-1)
            _close(logprobs[row], expected.gather(-1, ids[row]), f"log-probs of row {row}")


def _check_samples(rollout: Any, reference: Any) -> None:
    prompts = build_prompts(3, vocab_size=_VOCAB_SIZE)
    found = rollout.generate(prompts, SamplingParams(max_new_tokens=6, n=2))
    responses, reported = rows_of(found["response_ids"]), rows_of(found["rollout_logprobs"])
    with torch.no_grad():
        for row, prompt in enumerate(rows_of(prompts["prompt_ids"])):
            for sample in (2 * row, 2 * row + 1):
                outputs = reference_outputs(reference, prompt, responses[sample])
                expected = outputs.log_softmax(-1).gather(-1, responses[sample][:, None])[:, 0]
                _close(reported[sample], expected, f"reported log-probs of sample {sample}")


def _check_step(train: TrainBackend, reference: Any, batch: TensorDict) -> None:
    def loss(outputs: Any, micro_batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return -(micro_batch["targets"] * outputs["logprobs"] * micro_batch["response_mask"]).sum(), {}

    def reference_loss(model: Any) -> torch.Tensor:
        total = torch.zeros(())
        for prompt, response, targets in _rows(batch):
            distribution = reference_outputs(model, prompt, response).log_softmax(-1)
            total = total - (targets * distribution.gather(-1, response[:, None])[:, 0]).sum()
        return total

    train.train_step(batch, loss, _NUM_TOKENS)
    expected = _step(deepcopy(reference), reference_loss)
    _check_near(_state_of(train), expected)


def _step(model: Any, compute_loss: Callable[[Any], torch.Tensor]) -> Any:
    """The model after one step of torch's AdamW."""
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=_CONFIG.learning_rate,
        betas=_CONFIG.betas,
        eps=_CONFIG.eps,
        weight_decay=_CONFIG.weight_decay,
    )
    torch.autograd.backward(compute_loss(model) / _NUM_TOKENS)
    torch.nn.utils.clip_grad_norm_(model.parameters(), _CONFIG.max_grad_norm or float("inf"))
    optimizer.step()
    return model


def _state_of(backend: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a backend of one rank, under the names of the modules."""
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in backend._model.state_dict().items()
    }


def _check_near(found: dict[str, torch.Tensor], model: Any) -> None:
    for name, tensor in model.state_dict().items():
        _close(found[name], tensor, f"{name} after a step")


def _check_equal(found: dict[str, torch.Tensor], model: Any, what: str) -> None:
    expected = model.state_dict()
    assert found.keys() == expected.keys(), f"{what}: other tensors {sorted(found.keys() ^ expected.keys())}"
    differing = [
        name for name in expected if found[name].dtype != expected[name].dtype or not found[name].equal(expected[name])
    ]
    assert not differing, f"{what}: {differing} differ"


def _check_export(train: Any, export: Path, source: Path) -> None:
    from transformers import AutoModelForCausalLM

    answer: Any = AutoModelForCausalLM.from_pretrained(
        export, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    loaded, report = answer
    lost = {kind: names for kind, names in report.items() if names}
    assert not lost, f"an export is loaded with {lost}"
    _check_equal(_state_of(train), loaded, "an export")
    files = [load_file(directory / "model.safetensors") for directory in (export, source)]
    kinds = [{name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} for tensors in files]
    assert kinds[0] == kinds[1], f"an export has other tensors than its source: {sorted({*kinds[0]} ^ {*kinds[1]})}"


def _check_values(path: Path, reference: Any, batch: TensorDict) -> None:
    """A critic by its files: the model without its head, and a value head."""
    seen: list[torch.Tensor] = []
    output = reference.get_output_embeddings()
    name = next(name for name, module in reference.named_modules() if module is output)
    critic = _write_critic(path / "model", path / "critic", name, output.weight.shape[1])
    head = load_file(critic / "model.safetensors")[VALUE_HEAD]
    backend = _build(critic, "value")
    values = rows_of(backend.compute_values(batch)["values"])
    handle = output.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    with torch.no_grad():
        for row, (prompt, response, _) in enumerate(_rows(batch)):
            reference_outputs(reference, prompt, response)
            expected = (seen.pop() @ head.T)[len(prompt) - 1 : -1, 0]
            _close(values[row], expected, f"values of row {row}")
    handle.remove()

    def loss(outputs: Any, micro_batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return ((outputs["values"] - micro_batch["targets"]).square() * micro_batch["response_mask"]).sum(), {}

    backend.train_step(batch, loss, _NUM_TOKENS)
    trained = backend.compute_values(batch)["values"].values()
    assert not trained.equal(torch.cat(values)), "a step left the values as they were"
    backend.export_hf(path / "critic export")
    checks: Any = load_train_backend("fsdp")
    for directory in (critic, path / "critic export"):
        checks.check_model(read_model_directory(directory), on_cpu=True)
    again = _build(path / "critic export", "value")
    _close(again.compute_values(batch)["values"].values(), trained, "values of an exported critic")
    for each in (backend, again):
        each.close()


def _write_other(model: Path, directory: Path) -> Path:
    """The same model with other numbers in every tensor of its files."""
    shutil.copytree(model, directory)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: tensor + 0.1 * torch.rand(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _write_critic(model: Path, directory: Path, head: str, hidden_size: int) -> Path:
    directory.mkdir()
    config = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{head}.")}
    kept[VALUE_HEAD] = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(2))
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    off = float((found - expected.detach()).abs().max())
    assert off <= _TOLERANCE, f"{what}: {off} off"
