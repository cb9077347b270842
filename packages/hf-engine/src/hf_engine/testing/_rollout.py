"""The laws of a rollout backend, checked against whole forward passes of a plain torch module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hf_engine.backends.base import (
    RolloutBackend,
    SamplingParams,
)
from hf_engine.backends.capabilities import (
    SupportsEngineSampling,
    SupportsReplicas,
    SupportsShardLoading,
    SupportsWeightAdoption,
    SupportsWeightBuffers,
)
from hf_engine.models.conversions import read_file_names
from hf_engine.models.stacked_experts import tensors_in_files
from hf_engine.resharding.boxes import Box
from hf_engine.testing._cases import build_prompts, greedy_response, reference_outputs, rows_of, select_rows
from hf_protocols.errors import BackendError, ReshardError
from hf_protocols.topology import Topology

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["check_rollout_backend"]


def check_rollout_backend(
    build: Callable[[], RolloutBackend],
    reference: torch.nn.Module,
    *,
    vocab_size: int,
    max_positions: int,
    topology: Topology | None = None,
    num_rows: int = 6,
    tolerance: float = 1e-4,
) -> None:
    """Checks one backend on one topology. Called on every rank.

    The laws:

    - Greedy tokens are those of `reference`, with ragged prompts, before and after the weights change several times.
    - Reported log-probs are those of the full distribution at the temperature, for every truncation of the draw.
    - Equal seeds give equal samples, row by row, however rows are spread. Another seed, step or sample index gives
      others.
    - Stop tokens and strings end a response and are kept. Minimum and maximum lengths hold.
    - A prompt that leaves room for one token is taken, a longer one refused. No prompts have no responses.
    - What a backend of `SupportsEngineSampling` says that it cannot draw is refused.
    - Memory that was released is taken again.
    - Weights that are missing, unknown or mis-shaped are refused. Tensors that are adopted are used where they are.
    - The engine's replicas are the topology's. The global random generator is left alone.

    Args:
        build: builds the backend with the reference's weights, of a model by `write_tiny_model`, or with its
            tokenizer: token 17 is "w17", and words are joined by spaces.
        reference: a module with `reference(input_ids=[1, L], use_cache=False).logits`, float32, on the CPU, without
            an end-of-sequence token. It is not changed.
        vocab_size: token ids of the test prompts stay below it.
        max_positions: positions of the model.
        topology: the backend's, to compare replicas that an engine forms by itself.
        num_rows: prompts.
        tolerance: largest absolute difference of a log-prob.

    Raises:
        AssertionError: naming the law and the difference.
    """
    state = torch.get_rng_state()
    backend = build()
    laws = _RolloutLaws(backend, reference, build_prompts(num_rows, vocab_size=vocab_size), tolerance)
    laws.check_greedy("as built")
    assert torch.equal(state, torch.get_rng_state()), "the backend drew from the global random generator or seeded it"
    if topology is not None and isinstance(backend, SupportsReplicas):
        (expected,) = (group for group in topology.groups("gen_tp") if dist.get_rank() in group)
        found = backend.replica_ranks()
        assert found == expected, f"rank {dist.get_rank()} generates with {found}, the topology says {expected}"
    for temperature, top_k, top_p in ((1.0, 0, 1.0), (0.6, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.7), (0.6, 1, 1.0)):
        laws.check_sampling(SamplingParams(max_new_tokens=5, temperature=temperature, top_k=top_k, top_p=top_p, n=3))
    laws.check_sampling(SamplingParams(max_new_tokens=5, temperature=0.6, greedy=True))
    laws.check_seeds()
    laws.check_lengths()
    laws.check_stop_strings()
    laws.check_long_prompt(max_positions)
    laws.check_no_rows()
    laws.check_weight_update()


class _RolloutLaws:
    def __init__(
        self, backend: RolloutBackend, reference: torch.nn.Module, prompts: TensorDict, tolerance: float
    ) -> None:
        self._backend = backend
        self._reference = reference
        self._prompts = prompts
        self._tolerance = tolerance

    def check_greedy(self, when: str) -> None:
        stop = int(greedy_response(self._reference, rows_of(self._prompts["prompt_ids"])[0], 3, frozenset())[2])
        for stops in ((), (stop,)):
            sampling = SamplingParams(max_new_tokens=8, greedy=True, stop_token_ids=stops)
            batch = self._backend.generate(self._prompts, sampling)
            for prompt, found in zip(rows_of(self._prompts["prompt_ids"]), rows_of(batch["response_ids"]), strict=True):
                wanted = greedy_response(self._reference, prompt, 8, frozenset(stops))
                assert torch.equal(found, wanted), f"greedy tokens {when} with stops {stops}: {found} is not {wanted}"
            self._check_columns(batch, sampling)
            self._check_logprobs(batch, sampling, when)

    def check_sampling(self, sampling: SamplingParams) -> None:
        if self._is_refused(sampling):
            return
        batch = self._backend.generate(self._prompts, sampling)
        self._check_columns(batch, sampling)
        self._check_logprobs(batch, sampling, "of samples")

    def check_seeds(self) -> None:
        sampling = SamplingParams(max_new_tokens=6, n=2, seed=5, step=1)
        batch = self._backend.generate(self._prompts, sampling)
        ids = rows_of(batch["response_ids"])
        assert _equal(ids, self._generate(self._prompts, sampling)), "equal seeds gave different samples"
        for other in (replace(sampling, seed=6), replace(sampling, step=2)):
            assert not _equal(ids, self._generate(self._prompts, other)), f"{other} gave the samples of {sampling}"
        assert not _equal(ids[::2], ids[1::2]), "two samples of a prompt are always equal"
        order = list(reversed(range(len(self._prompts))))
        alone = [self._generate(select_rows(self._prompts, [row]), sampling) for row in order]
        spread = [sample for row in reversed(alone) for sample in row]
        assert _equal(ids, spread), "samples depend on how rows are spread over replicas"

    def check_lengths(self) -> None:
        every_token = tuple(range(int(self._prompts["prompt_ids"].values().max()) + 1))
        sampling = SamplingParams(
            max_new_tokens=5, min_new_tokens=3, stop_token_ids=every_token[: len(every_token) // 2]
        )
        if self._is_refused(sampling):
            return
        batch = self._backend.generate(self._prompts, sampling)
        self._check_columns(batch, sampling)
        self._check_logprobs(batch, sampling, "under a minimum length")
        lengths = [len(row) for row in rows_of(batch["response_ids"])]
        assert min(lengths) >= sampling.min_new_tokens, f"responses of {lengths} tokens with {sampling}"

    def check_stop_strings(self) -> None:
        """Two tokens in a row end a response, as text of `write_tiny_model`'s tokenizer; the second one is kept.

        Under a minimum length they end it if the second one comes after it.
        """
        greedy = SamplingParams(max_new_tokens=8, greedy=True)
        whole = [ids.tolist() for ids in self._generate(self._prompts, greedy)]
        first, second = whole[0][2:4]
        for least in (0, 4):
            sampling = replace(greedy, min_new_tokens=least, stop_strings=(f"w{first} w{second}",))
            if self._is_refused(sampling):
                continue
            batch = self._backend.generate(self._prompts, sampling)
            reasons = batch["finish_reason"].tolist()
            assert least or 0 in reasons, "no response ended at the stop string"
            for ids, found, reason in zip(whole, rows_of(batch["response_ids"]), reasons, strict=True):
                ends = [end for end in range(2, len(ids) + 1) if end > least and ids[end - 2 : end] == [first, second]]
                wanted = ids[: ends[0]] if ends else ids
                assert found.tolist() == wanted, f"{found.tolist()} instead of {wanted} with {sampling}"
                assert reason == (0 if ends else 1), f"finish reason {reason} of {found.tolist()}"

    def check_no_rows(self) -> None:
        batch = self._backend.generate(self._prompts[:0], SamplingParams(max_new_tokens=2, n=2))
        assert len(batch) == 0, f"{len(batch)} responses to no prompts"
        some = self._backend.generate(self._prompts, SamplingParams(max_new_tokens=2))
        found, wanted = _dtypes_of(batch), _dtypes_of(some)
        assert found == wanted, f"without prompts the columns are {found}, with prompts {wanted}"

    def check_long_prompt(self, max_positions: int) -> None:
        room = max_positions - max(len(row) for row in rows_of(self._prompts["prompt_ids"]))
        refusal = ""
        try:
            self._backend.generate(self._prompts, SamplingParams(max_new_tokens=room + 1))
        except BackendError as error:
            refusal = str(error)
        assert refusal, "a prompt that does not fit the model with max_new_tokens was not refused"
        assert str(max_positions) in refusal, f"the refusal does not name the {max_positions} positions: {refusal}"
        longest = torch.cat(rows_of(self._prompts["prompt_ids"]) * max_positions)[: max_positions - 1]
        prompts = select_rows(self._prompts, [0]).set(
            "prompt_ids", torch.nested.as_nested_tensor([longest], layout=torch.jagged)
        )
        (found,) = self._generate(prompts, SamplingParams(max_new_tokens=1, greedy=True))
        wanted = greedy_response(self._reference, longest, 1, frozenset())
        assert torch.equal(found, wanted), f"after {len(longest)} tokens of {max_positions}: {found} is not {wanted}"

    def check_weight_update(self) -> None:
        """Halved weights and then the old ones, after the memory was given back and taken again."""
        if isinstance(self._backend, SupportsWeightBuffers):
            self._check_released_weights()
        elif isinstance(self._backend, SupportsShardLoading):
            self._check_released_cache(self._backend)
            self._check_bad_syncs(self._backend)
        else:
            return
        for version, scale in ((7, 0.5), (9, 2.0)):
            with torch.no_grad():
                for parameter in self._reference.parameters():
                    parameter.mul_(scale)
            self._send(version)
            self.check_greedy(f"after the update to version {version}")
            stamps = self._backend.generate(self._prompts, SamplingParams(max_new_tokens=1))["weight_version"]
            assert stamps.tolist() == [version] * len(stamps), f"samples of {version} are stamped {stamps.tolist()}"
        if isinstance(self._backend, SupportsWeightAdoption):
            self._check_adopted(self._backend)
        versions: tuple[Any, ...] = ("x", -1, 1.5, None, 10**30)
        for wrong in versions:
            self._check_error(partial(self._backend.commit_weights, wrong), f"version {wrong!r}", BackendError)

    def _check_released_weights(self) -> None:
        assert self._backend.release() > 0, "weights in buffers were released and freed nothing"
        self._backend.resume()
        self._check_refused("released weights that nobody sent again were used")

    def _check_adopted(self, backend: Any) -> None:
        """Somebody else's tensors while its own are empty, and its own again."""
        own, shards = backend.weight_buffers(), self._shards()
        kept = {name: tensor.clone() for name, tensor in own.items()}
        sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in own.items()}
        rooms: dict[int, torch.Tensor] = {}
        lent = {}
        for name, tensor in own.items():
            room = rooms.setdefault(tensor.untyped_storage()._cdata, tensor.new_empty(sizes[name] // tensor.itemsize))
            lent[name] = room.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(shards[name][0])
        backend.adopt_weights(lent)
        copied = [name for name, used in backend.weight_buffers().items() if used.data_ptr() != lent[name].data_ptr()]
        assert not copied, f"the backend does not use the tensors that it was given as {copied}"
        for tensor in own.values():
            tensor.untyped_storage().resize_(0)
        self.check_greedy("with adopted weights")
        for name, tensor in own.items():
            if not tensor.untyped_storage().nbytes():
                tensor.untyped_storage().resize_(sizes[name])
            tensor.copy_(kept[name])
        name, tensor = next(iter(own.items()))
        wrong: tuple[Any, ...] = (
            {"no.such.weight": tensor},
            {name: tensor[1:]},
            {name: tensor.bfloat16()},
            {name: None},
        )
        for each in wrong:
            self._check_error(partial(backend.adopt_weights, each), "a tensor unlike the backend's own")
        backend.adopt_weights(own)
        self.check_greedy("with its own weights after others were adopted")

    def _check_released_cache(self, backend: SupportsShardLoading) -> None:
        before = backend.engine_bytes
        freed = self._backend.release()
        assert backend.engine_bytes == before - freed, (
            f"{freed} bytes released, of {before} {backend.engine_bytes} left"
        )
        self._backend.resume()
        assert backend.engine_bytes == before, "resume took other memory than release had given back"
        self.check_greedy("after release and resume")

    def _check_bad_syncs(self, backend: SupportsShardLoading) -> None:
        shards = self._shards()
        name, parts = next(iter(shards.items()))
        backend.begin_weights()
        self._check_error(lambda: backend.load_shards({"no.such.weight": parts}), "an unknown parameter")
        for wrong in ([part.flatten()[1:] for part in parts], [*parts, *parts], []):
            self._check_error(partial(backend.load_shards, {name: wrong}), f"{name} as {len(wrong)} boxes")
        no_shards: tuple[Any, ...] = (None, parts[0], {name: parts[0]}, {name: None})
        for nothing in no_shards:
            self._check_error(partial(backend.load_shards, nothing), f"a {type(nothing).__name__} without lists")
        backend.load_shards({name: parts})
        self._check_error(lambda: backend.load_shards({name: parts}), f"{name} a second time")
        self._check_error(lambda: self._backend.commit_weights(5), "an update without all parameters")
        self._check_refused("weights of which some did not arrive were used")

    def _check_error(self, action: Callable[[], None], what: str, kind: type[Exception] = ReshardError) -> None:
        try:
            action()
        except kind:
            return
        raise AssertionError(f"{what} was not refused")

    def _is_refused(self, sampling: SamplingParams) -> bool:
        """Returns True if the backend says that its engine cannot draw so; then it must not."""
        if not isinstance(self._backend, SupportsEngineSampling) or self._backend.find_unsupported(sampling) is None:
            return False
        self._check_refused(f"{sampling} was drawn, which the backend says that it cannot", sampling)
        return True

    def _check_refused(self, otherwise: str, sampling: SamplingParams | None = None) -> None:
        try:
            self._generate(self._prompts, sampling or SamplingParams(max_new_tokens=1))
        except BackendError:
            return
        raise AssertionError(otherwise)

    def _shards(self) -> dict[str, list[torch.Tensor]]:
        """This rank's boxes of the reference's parameters."""
        parameters = {name: parameter.detach() for name, parameter in self._reference.named_parameters()}
        full = tensors_in_files(read_file_names(self._reference), parameters)
        return {
            name: [full[name][box.slices_in(Box.whole(full[name].shape))].clone() for box in boxes]
            for name, boxes in self._backend.weight_layout().boxes_of(dist.get_rank()).items()
        }

    def _send(self, version: int) -> None:
        """Writes the reference's weights into the buffers, or hands them over three parameters at a time."""
        shards = self._shards()
        if isinstance(self._backend, SupportsWeightBuffers):
            for name, buffer in self._backend.weight_buffers().items():
                buffer.copy_(shards[name][0])
        elif isinstance(self._backend, SupportsShardLoading):
            self._backend.begin_weights()
            names = list(shards)
            for start in range(0, len(names), 3):
                self._backend.load_shards({name: shards.pop(name) for name in names[start : start + 3]})
        self._backend.commit_weights(version)

    def _check_logprobs(self, batch: TensorDict, sampling: SamplingParams, when: str) -> None:
        columns = (rows_of(batch[name]) for name in ("response_ids", "rollout_logprobs"))
        prompts = [row for row in rows_of(self._prompts["prompt_ids"]) for _ in range(sampling.n)]
        for prompt, response, logprobs in zip(prompts, *columns, strict=True):
            with torch.no_grad():
                logits = reference_outputs(self._reference, prompt, response) / sampling.temperature
            off = float((logits.log_softmax(-1).gather(-1, response[:, None])[:, 0] - logprobs).abs().max())
            assert off <= self._tolerance, f"log-probs {when} are {off} off with {sampling}"
            if sampling.greedy:
                continue
            ranks = (logits > logits.gather(-1, response[:, None])).sum(-1)
            assert not sampling.top_k or int(ranks.max()) < sampling.top_k, f"a token outside top-k with {sampling}"
            above = logits.softmax(-1).masked_fill(logits <= logits.gather(-1, response[:, None]), 0.0).sum(-1)
            assert float(above.max()) < sampling.top_p + 1e-5, f"a token outside top-p with {sampling}"

    def _generate(self, prompts: TensorDict, sampling: SamplingParams) -> list[torch.Tensor]:
        return rows_of(self._backend.generate(prompts, sampling)["response_ids"])

    def _check_columns(self, batch: TensorDict, sampling: SamplingParams) -> None:
        assert len(batch) == len(self._prompts) * sampling.n, f"{len(batch)} rows for {len(self._prompts)} prompts"
        names = ("response_ids", "response_mask", "rollout_logprobs", "finish_reason")
        stops = set(sampling.stop_token_ids)
        for ids, mask, logprobs, reason in zip(*(batch[name].unbind() for name in names), strict=True):
            assert len(ids) == len(mask) == len(logprobs), "columns are not aligned"
            assert bool(mask.all()), "response_mask is False on a generated token"
            stopped = int(ids[-1]) in stops and len(ids) > sampling.min_new_tokens
            assert not set(ids[:-1].tolist()[sampling.min_new_tokens :]) & set(sampling.stop_token_ids), (
                "ran past a stop"
            )
            assert int(reason) == (0 if stopped else 1), f"finish reason {int(reason)} of {ids} with {sampling}"
            assert stopped or len(ids) == sampling.max_new_tokens, f"{ids} ended without a reason with {sampling}"


def _equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _dtypes_of(batch: TensorDict) -> dict[str, list[torch.dtype]]:
    """The dtypes of each column, and of the offsets of a jagged one."""
    columns: dict[str, Any] = {str(name): column for name, column in batch.items()}
    return {
        name: [column.dtype, *([column.offsets().dtype] if column.is_nested else [])]
        for name, column in columns.items()
    }
