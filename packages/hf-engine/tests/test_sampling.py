from __future__ import annotations

import pytest
import torch

from hf_engine import SamplingParams
from hf_engine.rollout.sampling import draw_seeds, draw_uniforms, sample_tokens
from hf_protocols import ConfigError


def test_uniforms_depend_on_seed_step_row_sample_and_position():
    sampling = SamplingParams(max_new_tokens=4, n=3, seed=1, step=2)
    uniforms = draw_uniforms(torch.tensor([5, 9, 5]), sampling)
    assert uniforms.shape == (9, 4)
    assert torch.equal(uniforms[:3], uniforms[6:])
    assert torch.equal(draw_uniforms(torch.tensor([9]), sampling), uniforms[3:6])
    shorter = SamplingParams(max_new_tokens=2, n=1, seed=1, step=2)
    assert torch.equal(draw_uniforms(torch.tensor([9]), shorter), uniforms[3:4, :2])
    for changes in ({"seed": 2}, {"step": 3}, {"seed": -1}, {"seed": 2**70}):
        other = SamplingParams(**({"max_new_tokens": 4, "n": 3, "seed": 1, "step": 2} | changes))
        assert not (draw_uniforms(torch.tensor([5, 9, 5]), other) == uniforms).any()


def test_uniforms_are_uniform_and_uncorrelated():
    uniforms = draw_uniforms(torch.arange(2000), SamplingParams(max_new_tokens=10, n=4))
    assert (uniforms >= 0).all()
    assert (uniforms < 1).all()
    histogram = torch.histc(uniforms.float(), bins=20, min=0, max=1) / uniforms.numel()
    assert (histogram - 0.05).abs().max() < 0.003
    by_sample = torch.corrcoef(uniforms.view(2000, 4, 10)[:, :, 0].T) - torch.eye(4)
    by_position = torch.corrcoef(uniforms[::4].T) - torch.eye(10)
    assert max(by_sample.abs().max(), by_position.abs().max()) < 0.09


def probabilities_of(logits, **changes):
    """Integrates the sampler over an even grid of uniform numbers."""
    num_points = 20_000
    grid = (torch.arange(num_points, dtype=torch.float64) + 0.5) / num_points
    sampling = SamplingParams(max_new_tokens=1, **changes)
    drawn = sample_tokens(logits.expand(num_points, -1), grid, sampling)
    return drawn.bincount(minlength=len(logits)).double() / num_points


LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15]))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.05, 0.4, 0.1, 0.3, 0.15]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 50}, [0.05, 0.4, 0.1, 0.3, 0.15]),
        ({"top_p": 0.6}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.71}, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
        ({"top_p": 0.01}, [0, 1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"greedy": True}, [0, 1, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_by_the_inverse_distribution_function(changes, expected):
    found = probabilities_of(LOGITS, **changes)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=2e-4, rtol=0)


def test_equal_tokens_are_truncated_in_order_of_their_ids():
    assert probabilities_of(torch.zeros(4), top_k=2).tolist() == [0.5, 0.5, 0, 0]
    assert probabilities_of(torch.zeros(4), top_p=0.5).tolist() == [0.5, 0.5, 0, 0]


def test_forbidden_tokens_are_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for uniform in (0.0, 0.5, 1 - 2.0**-53):
        drawn = sample_tokens(logits, torch.tensor([uniform], dtype=torch.float64), SamplingParams(max_new_tokens=1))
        assert int(drawn) in (1, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"min_new_tokens": 9}, "min_new_tokens=9"),
        ({"temperature": 0.0}, "greedy=True takes the most likely"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
        ({"temperature": 1e-300}, "temperature=1e-300 is below 1e-06.* Use greedy=True"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": 10**400}, r"temperature=10+\.\.\. must be a finite number"),
        ({"n": 1.5}, "n=1.5"),
        ({"stop_strings": "abc"}, "stop_strings='abc'"),
        ({"stop_strings": ("abc", "")}, "has an empty string"),
        ({"stop_strings": ("abc\ud83d",)}, "unpaired surrogate"),
        ({"stop_token_ids": 3}, "stop_token_ids=3"),
        ({"stop_token_ids": ("3",)}, "stop_token_ids='3'"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"greedy": "no"}, "greedy='no'"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -1}, "top_k=-1"),
        ({"n": 0}, "n=0"),
        ({"n": 2, "greedy": True}, "all samples would be equal"),
    ],
)
def test_values_out_of_range_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**({"max_new_tokens": 8} | changes))


def test_nonfinite_logits_still_give_a_token_of_the_vocabulary():
    logits = torch.full((3, 5), float("nan"))
    uniforms = torch.tensor([0.0, 0.5, 0.999], dtype=torch.float64)
    tokens = sample_tokens(logits, uniforms, SamplingParams(max_new_tokens=1))
    assert bool(((tokens >= 0) & (tokens < 5)).all())


def test_seeds_depend_on_seed_step_row_and_sample_only():
    sampling = SamplingParams(max_new_tokens=4, min_new_tokens=2, n=3, seed=1, step=2)
    seeds = draw_seeds(torch.tensor([5, 9, 5]), sampling)
    assert seeds.shape == (9,) and seeds.dtype == torch.int64
    assert torch.equal(seeds[:3], seeds[6:]) and len(set(seeds.tolist())) == 6
    longer = SamplingParams(max_new_tokens=9, n=3, seed=1, step=2)
    assert torch.equal(draw_seeds(torch.tensor([9]), longer), seeds[3:6])
    for changes in ({"seed": 2}, {"step": 3}):
        other = SamplingParams(**({"max_new_tokens": 4, "n": 3, "seed": 1, "step": 2} | changes))
        assert not (draw_seeds(torch.tensor([5, 9, 5]), other) == seeds).any()
    many = draw_seeds(torch.arange(20_000), SamplingParams(max_new_tokens=1))
    assert int(many.min()) >= 0 and 2**30 < int(many.max()) < 2**31 and len(set(many.tolist())) > 19_990
