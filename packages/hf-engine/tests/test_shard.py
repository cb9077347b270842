from __future__ import annotations

import pytest
import torch

from hf_engine.resharding.boxes import Box
from hf_engine.rollout.shard import ShardTensor
from hf_protocols import ReshardError

WHOLE = torch.arange(24.0).view(6, 4)


def shard(box):
    return ShardTensor("w", (6, 4), box, WHOLE[box.slices_in(Box.whole((6, 4)))])


def test_a_loader_finds_its_part_cut():
    part = shard(Box((3, 0), (3, 4)))
    assert part.shape == (6, 4) and part.dtype == torch.float32 and part.dim() == 2 and part.size(0) == 6
    assert not part.is_used
    assert torch.equal(part.narrow(0, 3, 3), WHOLE[3:])
    assert part.is_used
    columns = shard(Box((0, 2), (6, 2)))
    assert torch.equal(columns.narrow(-1, 2, 2), WHOLE[:, 2:])


@pytest.mark.parametrize(("dim", "start", "length"), [(0, 0, 3), (0, 2, 3), (0, 3, 2), (1, 0, 2), (0, 0, 6)])
def test_a_loader_that_wants_another_part_is_refused(dim, start, length):
    part = shard(Box((3, 0), (3, 4)))
    with pytest.raises(ReshardError, match=r"loader takes Box.* of 'w', the layout says Box\(offset=\(3, 0\)"):
        part.narrow(dim, start, length)
    assert not part.is_used


def test_a_whole_parameter_can_be_copied_and_a_part_cannot():
    target = torch.zeros(6, 4)
    part = shard(Box((3, 0), (3, 4)))
    with pytest.raises(ReshardError, match="on the whole of 'w', of which this rank holds a part"):
        target.copy_(part)
    whole = shard(Box.whole((6, 4)))
    target.copy_(whole)
    assert torch.equal(target, WHOLE)
    assert whole.is_used and not part.is_used
    assert torch.equal(shard(Box.whole((6, 4))).narrow(0, 0, 6), WHOLE)
    assert torch.equal(shard(Box.whole((6, 4))).to(torch.float64).view(4, 6)[0], WHOLE.flatten()[:6].double())


def test_a_rank_without_rows_is_given_none():
    part = shard(Box((6, 0), (0, 4)))
    assert part.narrow(0, 6, 0).shape == (0, 4)


def test_a_part_that_is_stacked_alone_is_the_same_part():
    """As vLLM loads an expert; of several matrices in one stack nothing is known."""
    part = shard(Box((3, 0), (3, 4)))
    (again,) = part.unsqueeze(0).unbind()
    assert part.unsqueeze(0).shape == (1, 6, 4) and again.shape == (6, 4)
    with pytest.raises(ReshardError, match="takes Box"):
        again.narrow(0, 0, 3)
    assert not part.is_used
    assert torch.equal(part.unsqueeze(0).narrow(1, 3, 3), WHOLE[None, 3:])
    assert torch.equal(again.narrow(0, 3, 3), WHOLE[3:])
    assert part.is_used and again.is_used
    for read in (lambda: part.unsqueeze(1), part.unbind):
        with pytest.raises(ReshardError, match="on the whole of 'w', of which this rank holds a part"):
            read()


def test_a_loader_may_join_whole_parameters():
    """As SGLang joins two projections of latent attention."""
    first, second = (shard(Box.whole((6, 4))) for _ in range(2))
    assert torch.equal(torch.cat([first, second]), torch.cat([WHOLE, WHOLE]))
    assert first.is_used and second.is_used
    with pytest.raises(ReshardError, match="on the whole of 'w', of which this rank holds a part"):
        torch.cat([first, shard(Box((3, 0), (3, 4)))])
