"""Names near an unknown one, for "did you mean": one measure for every package."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

__all__ = ["describe_choices", "find_similar"]

_LEAST_SIMILARITY = 0.6


def find_similar(name: str, known: Iterable[str], *, most: int = 1) -> list[str]:
    """Returns names in `known` that `name` may misspell: first those that begin with it, then the most similar.

    A name is similar if difflib's ratio, ignoring case, is above 0.6; a hint below that misleads. Of two equally
    similar names, one with the same letters comes first. A part that all names share, such as a section, raises the
    ratio of any two names, so compare names without it.
    """
    lowered = name.lower()
    matcher = SequenceMatcher(b=lowered)
    found: list[tuple[bool, float, bool, str]] = []
    for candidate in dict.fromkeys(known):
        matcher.set_seq1(candidate.lower())
        # The first two are upper bounds of the third, and cheap.
        bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)
        if all(bound() > _LEAST_SIMILARITY for bound in bounds):
            is_swapped = sorted(candidate.lower()) == sorted(lowered)
            found.append((not candidate.lower().startswith(lowered), -matcher.ratio(), not is_swapped, candidate))
    return [candidate for *_, candidate in sorted(found)[:most]]


def describe_choices(name: str, known: Iterable[str]) -> str:
    """Returns the remedy for an unknown name: a question with up to three similar names, else all names."""
    names = list(known)
    near = find_similar(name, names, most=3)
    if not near:
        return f"Use one of {', '.join(names) or 'none'}"
    return f"Did you mean {', '.join(near[:-1])}{' or ' if near[1:] else ''}{near[-1]}?"
