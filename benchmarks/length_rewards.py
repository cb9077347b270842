"""A reward and a cost by which the responses of an untrained model differ; ranks import them, and little with them."""

from __future__ import annotations


def response_length(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    """Characters of a response, in fifths."""
    return [len(response) / 5 for response in responses]


def holds_a_one(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    """0.8 for a response with a 1, else -0.2."""
    return [float("1" in response) - 0.2 for response in responses]
