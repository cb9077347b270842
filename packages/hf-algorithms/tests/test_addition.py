from __future__ import annotations

from hf_algorithms.data import load_rows, write_addition_data


def _pairs(path):
    pairs = []
    for row in load_rows(path):
        a, b = map(int, row.prompt.removesuffix("=").split("+"))
        assert row.prompt == f"{a}+{b}="
        assert row.answer == str(a + b)
        pairs.append((a, b))
    return pairs


def test_splits_share_no_unordered_pair_and_cover_all(tmp_path):
    files = write_addition_data(tmp_path, seed=0)
    train, validation, test = (_pairs(path) for path in (files.train, files.validation, files.test))
    assert (len(validation), len(test)) == (300, 500)
    unordered = [{frozenset(pair) for pair in split} for split in (train, validation, test)]
    assert [len(pairs) for pairs in unordered] == [4250, 300, 500]
    assert len(set().union(*unordered)) == 5050
    assert len(set(train)) == len(train)
    assert {(b, a) for a, b in train} == set(train)
    # Both orientations are held out, not the sorted one only.
    assert 100 < sum(a > b for a, b in test) < 400
    assert {value for pair in train for value in pair} == set(range(100))


def test_a_seed_decides_every_byte(tmp_path):
    once, again, other = (write_addition_data(tmp_path / str(i), seed=seed) for i, seed in enumerate([3, 3, 4]))
    for split in ("train", "validation", "test"):
        first, second, third = (getattr(files, split).read_bytes() for files in (once, again, other))
        assert first == second != third
