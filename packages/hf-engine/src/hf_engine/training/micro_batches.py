"""Micro-batches: rows of similar length together under a token budget, padded for the model and for the loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import torch

from hf_engine.backends.jagged import Places, Ragged, read_candidates, read_ids, require_columns, to_jagged
from hf_engine.models.rope import NO_ROPE_LIMITS, RopeLimits
from hf_engine.resharding.digest import compute_digest
from hf_engine.training.shared_prompts import PackedRow, PackedRowPlanner, PromptSharing
from hf_protocols.errors import BatchError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "MicroBatch",
    "PackedMicroBatch",
    "SequenceBatch",
    "find_enough_tokens",
    "measure_work",
    "plan_micro_batches",
]

_TOKENS_A_THREAD = 1024
"""Measured with models of 0.1 to 11 million weights."""
_MOST_CUTS = 2
"""Batches whose micro-batches a process keeps: token ids, masks and positions. Critic, reference and actor pass over
the same rows one after another."""
_MOST_CUT_TOKENS = 1 << 20
"""Of a batch whose micro-batches are kept, some 50 bytes each. For larger ones, building takes little of a pass."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Padded inputs of one forward pass: prompts end, and responses start, at the same column in every row.

    The last column may be left out: nothing is predicted from it.
    """

    rows: torch.Tensor
    """int64 [b], rows of the batch; empty for a dummy, whose result is thrown away."""
    input_ids: torch.Tensor
    """int64 [b, P + T] or [b, P + T - 1], prompts padded on the left, responses on the right."""
    attention_mask: torch.Tensor
    """bool, of the shape of `input_ids`."""
    prompt_width: int
    """P, columns before the responses; of packed rows the tokens of the longest prompt."""
    response_ids: torch.Tensor
    """int64 [b, T], padded on the right."""
    response_mask: torch.Tensor
    """bool [b, T], True on response tokens and False on their padding, independent of `response_mask`."""
    candidate_ids: torch.Tensor | None = None
    """int64 [b, T, k], further tokens whose log-probs are requested; None in a dummy."""

    @property
    def position_ids(self) -> torch.Tensor:
        """int64, of the shape of `input_ids`, counted from each row's first real token."""
        return (self.attention_mask.cumsum(-1) - 1).clamp(min=0)

    @property
    def predicting_positions(self) -> torch.Tensor:
        """int64 [n], of the flattened `input_ids`: whose logits predict the response tokens, row by row."""
        rows, columns = self.response_mask.nonzero(as_tuple=True)
        return rows * self.input_ids.shape[1] + self.prompt_width - 1 + columns

    @property
    def num_saved(self) -> int:
        """Tokens of prompts and responses that are not computed: here those of a last column that was left out."""
        is_whole = self.input_ids.shape[1] == self.prompt_width + self.response_mask.shape[1]
        return 0 if is_whole else int(self.response_mask[:, -1].sum())

    @classmethod
    def dummy(cls) -> MicroBatch:
        """One token after one token: keeps a short rank in step with the collectives of the others."""
        ones = torch.ones(1, 2, dtype=torch.bool)
        return cls(
            rows=torch.empty(0, dtype=torch.int64),
            input_ids=torch.zeros(1, 2, dtype=torch.int64),
            attention_mask=ones,
            prompt_width=1,
            response_ids=torch.zeros(1, 1, dtype=torch.int64),
            response_mask=ones[:, 1:],
        )


@dataclass(frozen=True, kw_only=True)
class PackedMicroBatch(MicroBatch):
    """Packed rows of one forward pass. Each is a sequence of prompts, every prompt followed by its responses, and then
    padding.

    Each of its b `rows` is one response: the masks and ids of responses have b rows, the inputs fewer. The last token
    of a response is not among the inputs, because nothing is predicted from it.
    """

    segments: torch.Tensor
    """int64 [p, L], a number for each prompt and each response of a packed row, -1 for padding."""
    prompts: torch.Tensor
    """int64 [p, L], the number of the token's prompt; -1 for padding."""
    positions: torch.Tensor
    """int64 [p, L], as in separate rows: a prompt begins at 0, its responses at the prompt's length; 0 for padding."""
    starts: torch.Tensor
    """int64 [b, 2], of the flattened inputs: the last token of a response's prompt, and its own first token."""

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 [p, L]."""
        return self.positions

    @property
    def predicting_positions(self) -> torch.Tensor:
        """int64 [n], of the flattened `input_ids`: a first token is predicted by the last one of its prompt."""
        rows, columns = self.response_mask.nonzero(as_tuple=True)
        prompt_ends, starts = self.starts[rows].unbind(1)
        return torch.where(columns == 0, prompt_ends, starts + columns - 1)

    @property
    def num_saved(self) -> int:
        """Compared with separate rows: the prompt again for each response after the first, and all last tokens."""
        ends = self.starts[:, 0]
        prompts: list[int] = (self.positions.flatten()[ends] + 1).tolist()
        once = dict(zip(ends.tolist(), prompts, strict=True))
        return sum(prompts) - sum(once.values()) + int(self.response_mask.any(1).sum())


class SequenceBatch:
    """A batch of prompts and responses, split into micro-batches.

    Args:
        batch: has the columns `prompt_ids` and `response_ids`; `response_mask` is False on response tokens that a loss
            leaves out, such as a tool's answer, and absent where it counts all of them.
        vocab_size: of the model that they are for.
        candidates: whether micro-batches have the column `candidate_ids`, [B, tokens, k].

    Raises:
        BatchError: for a missing column, one that does not hold token ids of the model, row by row, or a mask that is
            not aligned with the responses.
    """

    sharing: PromptSharing | None = None
    """Costs by which rows are packed; None: every row is padded, and computed whole."""
    pair_memory: float = 0.0
    """Memory of two tokens of a padded row, as a share of a token's; see `plan_micro_batches`."""
    rope_limits = NO_ROPE_LIMITS
    """Lengths at which the model's frequencies change: each row has those that it has alone."""

    def __init__(self, batch: TensorDict, vocab_size: int | None = None, *, candidates: bool = False) -> None:
        require_columns(batch, ("prompt_ids", "response_ids"))
        self._batch = batch
        self._prompts = read_ids(batch, "prompt_ids", vocab_size)
        self._responses = read_ids(batch, "response_ids", vocab_size)
        if "response_mask" in batch:
            _check_mask(batch["response_mask"], self._responses.lengths)
        self._candidates = read_candidates(batch, self._responses.lengths) if candidates else None

    def micro_batches(self, max_tokens: int, enough_tokens: int | None = None) -> list[MicroBatch]:
        """Every row in one micro-batch of at most `max_tokens` tokens, padding included.

        Models that pass over the same rows one after another share the result: do not write to it.

        Args:
            max_tokens: bound on a micro-batch.
            enough_tokens: bound on a micro-batch with two rows or more; see `find_enough_tokens`.

        Raises:
            BatchError: for an empty prompt, or a row above the token budget or the longest of `rope_limits`.
        """
        if empty := (self._prompts.lengths == 0).nonzero().flatten().tolist():
            raise BatchError(f"the prompts of rows {empty} are empty; a first token has nothing to be predicted from")
        self.rope_limits.check_rows((self._prompts.lengths + self._responses.lengths).tolist())
        found = self._cut(max_tokens, enough_tokens)
        candidates = self._candidates
        if candidates is None:
            return found
        padded = [candidates.pad_right(each.rows, each.response_mask.shape[1])[0].long() for each in found]
        return [replace(each, candidate_ids=ids) for each, ids in zip(found, padded, strict=True)]

    def _cut(self, max_tokens: int, enough_tokens: int | None) -> list[MicroBatch]:
        """The micro-batches without candidates, or those of an earlier batch with the same tokens."""
        tokens = self.list_tokens()
        settings = (max_tokens, enough_tokens, self.pair_memory, self.rope_limits, self.sharing)
        for cut in tuple(_CUTS):
            if cut.settings == settings and all(map(_is_same, tokens, cut.tokens)):
                return list(cut.micro_batches)
        found = _plan(
            self._prompts.lengths.tolist(),
            self._responses.lengths.tolist(),
            () if self.sharing is None else self._groups,
            max_tokens,
            enough_tokens,
            self.pair_memory,
            self.rope_limits,
            self.sharing,
        )
        with torch.inference_mode(False):  # a pass with gradients, which keeps token ids, may be next
            made: list[MicroBatch] = [self._pack(each) for each in found.packed]
            made += [self._pad(torch.tensor(rows)) for rows in found.padded]
            if sum(each.numel() for each in tokens) <= _MOST_CUT_TOKENS:
                _CUTS.append(_KeptCut([each.clone() for each in tokens], settings, made))
        return list(made)

    def list_tokens(self) -> list[torch.Tensor]:
        """Lengths [B] and ids [tokens] of the prompts, and then of the responses, on the host.

        Batches with equal ones have equal micro-batches.
        """
        return [part for each in (self._prompts, self._responses) for part in (each.lengths, each.packed)]

    @property
    def num_shared(self) -> int:
        """Rows whose prompt an earlier row has, too."""
        return len(self._prompts.lengths) - len(self._groups)

    def digest(self) -> int:
        """32 bits that are the same for the same rows, however their memory lies."""
        facts = []
        for name, column in self._batch.items():
            if not isinstance(column, torch.Tensor):
                continue
            ragged = Ragged(column) if column.layout == torch.jagged else None
            parts = [column] if ragged is None else [ragged.lengths, ragged.packed]
            facts.append((name, [(part.dtype, tuple(part.shape), compute_digest(part)) for part in parts]))
        return crc32(repr(sorted(facts)).encode())

    def check_columns(self) -> None:
        """Refuses columns that no loss can read, before ranks act together.

        Raises:
            BatchError: for a column that is not a tensor, or nested in another layout than the jagged one.
        """
        for name, column in self._batch.items():
            what = f"a {type(column).__name__}"
            if isinstance(column, torch.Tensor):
                if not column.is_nested or column.layout == torch.jagged:
                    continue
                what = f"nested in layout {column.layout}"
            raise BatchError(
                f"the column {show(name)} is {what}: a loss reads dense tensors and jagged ones "
                "(torch.nested.nested_tensor(rows, layout=torch.jagged)). Leave it out, or give one of these"
            )

    def padded_columns(self, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Returns the columns that a loss reads: jagged ones padded with zeros on the right, dense ones as they are.

        `response_mask` is True on the response tokens that count: the batch's own mask, or all of them.

        Args:
            micro_batch: rows of this batch, which passed `check_columns`.
        """
        columns: dict[str, torch.Tensor] = {}
        places: dict[tuple[int, int], Places] = {}
        read: list[Ragged] = []  # keeps their tensors, and so the keys of `places`
        for name, column in self._batch.items():
            assert isinstance(column, torch.Tensor), "check_columns refuses others"
            if column.is_nested:
                ragged = Ragged(column)
                read.append(ragged)
                if ragged.alignment not in places:
                    width = max(1, int(ragged.lengths[micro_batch.rows].max()))
                    places[ragged.alignment] = ragged.places_right(micro_batch.rows, width)
                columns[name] = ragged.gather(places[ragged.alignment])
            else:
                columns[name] = column[micro_batch.rows]
        # A loss may write into its mask, which other passes on these rows must not see.
        mask = columns.get("response_mask", micro_batch.response_mask.clone())
        return columns | {"response_mask": mask.bool()}

    def jagged(
        self,
        parts: Sequence[tuple[MicroBatch, torch.Tensor]],
        token_shape: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Puts per-token results [b, T, *token_shape] of all micro-batches in one column, as `response_ids` is."""
        flat = torch.zeros(int(self._responses.lengths.sum()), *token_shape, dtype=dtype)
        offsets = self._responses.offsets
        for micro_batch, result in parts:
            if not len(micro_batch.rows):
                continue
            index = offsets[micro_batch.rows, None] + torch.arange(result.shape[1])
            flat[index[micro_batch.response_mask]] = result.cpu()[micro_batch.response_mask]
        return to_jagged(flat, offsets)

    @cached_property
    def _groups(self) -> list[list[int]]:
        """Rows with equal prompts together, in the order of their first ones."""
        groups: dict[bytes, list[int]] = {}
        values = self._prompts.values.numpy()
        for row, (start, length) in enumerate(self._prompts.bounds):
            groups.setdefault(values[start : start + length].tobytes(), []).append(row)
        return list(groups.values())

    @cached_property
    def _num_read(self) -> list[int]:
        """Of each packed response, tokens from which another one is predicted."""
        return _count_read(self._responses.lengths.tolist())

    @cached_property
    def _tokens(self) -> torch.Tensor:
        """Values of the prompts, and then of the responses."""
        return torch.cat([self._prompts.values.long(), self._responses.values.long()])

    def _pad(self, rows: torch.Tensor) -> MicroBatch:
        prompts, responses = self._prompts, self._responses
        prompt_ids, prompt_mask = prompts.pad_left(rows, int(prompts.lengths[rows].max()))
        response_ids, response_mask = responses.pad_right(rows, max(1, int(responses.lengths[rows].max())))
        # Where packed rows, which lack it, compute the same, rows apart do without the last column, too.
        read = response_mask.shape[1] - (self.sharing is not None)
        return MicroBatch(
            rows=rows,
            input_ids=torch.cat([prompt_ids, response_ids[:, :read]], dim=1),
            attention_mask=torch.cat([prompt_mask, response_mask[:, :read]], dim=1),
            prompt_width=prompt_ids.shape[1],
            response_ids=response_ids.long(),
            response_mask=response_mask,
        )

    def _pack(self, packed: Sequence[PackedRow]) -> PackedMicroBatch:
        rows = torch.tensor([row for packs in packed for pack in packs for row in pack])
        prompts, responses = self._prompts, self._responses
        response_ids, response_mask = responses.pad_right(rows, max(1, int(responses.lengths[rows].max())))
        read = self._num_read
        lengths = [
            sum(prompts.bounds[pack[0]][1] + sum(read[row] for row in pack) for pack in packs) for packs in packed
        ]
        width = max(lengths)
        parts: list[tuple[int, int, int, int, int]] = []  # begin, tokens, first position, number, prompt's number
        starts: list[tuple[int, int]] = []
        for index, (packs, length) in enumerate(zip(packed, lengths, strict=True)):
            column, number = index * width, 0
            for pack in packs:
                begin, tokens = prompts.bounds[pack[0]]
                parts.append((begin, tokens, 0, number, number))
                column += tokens
                prompt, prompt_end = number, column - 1
                for row in pack:
                    number += 1
                    begin = len(prompts.values) + responses.bounds[row][0]
                    parts.append((begin, read[row], tokens, number, prompt))
                    starts.append((prompt_end, column))
                    column += read[row]
                number += 1
            parts.append((0, width - length, 0, -1, -1))
        of_parts = torch.tensor(parts)
        counts = of_parts[:, 1]
        of_tokens = of_parts.repeat_interleave(counts, 0)
        within = torch.arange(len(of_tokens)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        begins, _, firsts, segments, owners = of_tokens.unbind(1)
        is_token = segments >= 0
        ids = self._tokens[(begins + within) * is_token] * is_token
        shape = len(packed), width
        return PackedMicroBatch(
            rows=rows,
            input_ids=ids.view(shape),
            attention_mask=is_token.view(shape),
            response_mask=response_mask,
            segments=segments.reshape(shape).contiguous(),
            prompts=owners.reshape(shape).contiguous(),
            positions=((firsts + within) * is_token).view(shape),
            prompt_width=max(prompts.bounds[pack[0]][1] for packs in packed for pack in packs),
            response_ids=response_ids.long(),
            starts=torch.tensor(starts),
        )


class _KeptCut(NamedTuple):
    """A batch's micro-batches, and what they were made of."""

    tokens: Sequence[torch.Tensor]
    """As `SequenceBatch.list_tokens` has them: copies, as the batch's memory may be written again."""
    settings: tuple[object, ...]
    micro_batches: Sequence[MicroBatch]


_CUTS: deque[_KeptCut] = deque(maxlen=_MOST_CUTS)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _check_mask(column: object, lengths: torch.Tensor) -> None:
    """A mask that is not one value for each response token would hide the wrong ones."""
    if not isinstance(column, torch.Tensor) or not column.is_nested or column.layout != torch.jagged:
        what = f"a {type(column).__name__}"
        if isinstance(column, torch.Tensor) and not column.is_nested:
            what = f"of shape {tuple(column.shape)}"
        raise BatchError(f"the column 'response_mask' is {what}. Give it jagged, one value for each response token")
    given = Ragged(column).lengths
    if differing := (given != lengths).nonzero().flatten().tolist():
        row = differing[0]
        raise BatchError(
            f"row {row} of 'response_mask' has {int(given[row])} values for {int(lengths[row])} response tokens. Use "
            "one value for each response token"
        )


def measure_work(micro_batches: Sequence[MicroBatch]) -> dict[str, tuple[float, float]]:
    """Shares of padding in what is computed, and of saved tokens in what whole rows apart have, as metrics."""
    real = [each for each in micro_batches if len(each.rows)]
    tokens = sum(int(each.attention_mask.sum()) for each in real)
    saved = sum(each.num_saved for each in real)
    computed = sum(each.input_ids.numel() for each in real)
    return {
        "batch/padding": (float(computed - tokens), float(computed)),
        "batch/shared": (float(saved), float(tokens + saved)),
    }


def find_enough_tokens(device: torch.device) -> int | None:
    """Tokens of a micro-batch above which a pass gets no faster and needs more memory: 1,024 for each thread of a CPU.

    A row, or a pack of responses to one prompt, may have more by itself. None for other devices, where
    `micro_batch_tokens` decides alone.
    """
    return _TOKENS_A_THREAD * torch.get_num_threads() if device.type == "cpu" else None


class _RowPlan(NamedTuple):
    """Micro-batches of packed rows, and those of padded rows."""

    packed: Sequence[Sequence[PackedRow]]
    padded: Sequence[Sequence[int]]


def _plan(
    prompts: Sequence[int],
    responses: Sequence[int],
    groups: Sequence[Sequence[int]],
    max_tokens: int,
    enough_tokens: int | None,
    pair_memory: float,
    rope_limits: RopeLimits,
    sharing: PromptSharing | None,
) -> _RowPlan:
    """Plans the micro-batches of a batch.

    Args:
        prompts: tokens of each row's prompt.
        responses: tokens of each row's response.
        groups: rows with equal prompts; not read without `sharing`.
        max_tokens: of a micro-batch.
        enough_tokens: see `find_enough_tokens`.
        pair_memory: see `plan_micro_batches`.
        rope_limits: see `plan_micro_batches`.
        sharing: costs by which rows are packed; None: all are padded.

    Raises:
        BatchError: as `plan_micro_batches` does.
    """
    plan = partial(
        plan_micro_batches,
        prompts,
        responses,
        max_tokens,
        enough_tokens=enough_tokens,
        pair_memory=pair_memory,
        rope_limits=rope_limits,
    )
    if sharing is None:
        return _RowPlan([], plan())
    planner = PackedRowPlanner(prompts, _count_read(responses), max_tokens, sharing, enough_tokens)
    packs, apart = planner.split(groups)
    fitting = [row for row in apart if planner.fits(row)]
    plain = plan(rows=sorted(set(apart).difference(fitting)))
    packed, padded = planner.join(packs, plan(rows=fitting))
    return _RowPlan(packed, [*plain, *padded])


def _count_read(lengths: Sequence[int]) -> list[int]:
    return [max(0, length - 1) for length in lengths]


def plan_micro_batches(
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_tokens: int,
    *,
    rows: Sequence[int] | None = None,
    enough_tokens: int | None = None,
    pair_memory: float = 0.0,
    rope_limits: RopeLimits = NO_ROPE_LIMITS,
) -> list[list[int]]:
    """Cuts rows into micro-batches of at most `max_tokens` tokens, padding included.

    A micro-batch of b rows costs b * (longest prompt + longest response): prompts are padded on the left and
    responses on the right. Rows are taken longest first; every row is in exactly one micro-batch.

    Where attention keeps its scores, each row of width w costs w + `pair_memory` * w * w. A row by itself may cost more
    than the bound, as long as its tokens are within it.

    Args:
        prompt_lengths: of every row.
        response_lengths: of every row.
        max_tokens: of a micro-batch.
        rows: which to cut; None: all.
        enough_tokens: bound on the tokens of a micro-batch with two rows or more, without scores; None: none.
        pair_memory: of attention's scores of two tokens, as a share of a token's.
        rope_limits: rows of different ranges are in different micro-batches.

    Raises:
        BatchError: for a row that is longer than the budget by itself.
    """
    lengths = list(zip(prompt_lengths, response_lengths, strict=True))
    order = sorted(
        range(len(lengths)) if rows is None else rows, key=lambda row: (-sum(lengths[row]), -lengths[row][0], row)
    )
    enough = max_tokens if enough_tokens is None else enough_tokens
    batches: list[list[int]] = []
    longest_prompt = longest_response = last_range = 0
    for row in order:
        prompt, response = lengths[row]
        if prompt + response > max_tokens:
            raise BatchError(
                f"row {row} has {prompt} prompt + {response} response = {prompt + response} tokens, above "
                f"micro_batch_tokens={max_tokens}. Raise micro_batch_tokens or shorten the row"
            )
        wider = max(longest_prompt, prompt) + max(longest_response, response)
        row_range = rope_limits.range_of(prompt + response)
        count = 1 + len(batches[-1]) if batches and row_range == last_range else 0
        if count and count * wider <= enough and count * (wider + pair_memory * wider**2) <= max_tokens:
            batches[-1].append(row)
            longest_prompt, longest_response = max(longest_prompt, prompt), max(longest_response, response)
        else:
            batches.append([row])
            longest_prompt, longest_response, last_range = prompt, response, row_range
    return batches
