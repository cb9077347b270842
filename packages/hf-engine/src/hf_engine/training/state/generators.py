"""The states of a process's global random number generators, as JSON."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_protocols.errors import StateError

__all__ = ["capture_generators", "derive_generators", "fits_generators", "parse_generators"]

_PYTHON_WORDS = 625


def capture_generators(device: torch.device) -> dict[str, Any]:
    """Python's, torch's, numpy's where it is loaded, and the device's."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": {"version": version, "words": _encode(struct.pack(f"<{len(words)}I", *words)), "gauss": gauss},
        "torch": _encode(torch.get_rng_state().numpy().tobytes()),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = {
            "kind": str(kind),
            "keys": _encode(keys.astype("<u4").tobytes()),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        }
    if device.type == "cuda":
        states["cuda"] = _encode(torch.cuda.get_rng_state(device).numpy().tobytes())
    return states


def fits_generators(states: Mapping[str, Any], device: torch.device) -> bool:
    """True for the states of a rank with a device of the same kind."""
    return ("cuda" in states) == (device.type == "cuda")


def parse_generators(states: Mapping[str, Any], device: torch.device) -> Callable[[], None]:
    """Returns a function that sets the states that `capture_generators` returned.

    Raises:
        StateError: for something else.
    """
    try:
        setters = [_python(states["python"]), _torch(states["torch"])]
        if "numpy" in states:
            setters.append(_numpy(states["numpy"]))
        if "cuda" in states:
            cuda = _bytes(states["cuda"])
            setters.append(lambda: torch.cuda.set_rng_state(cuda, device))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, struct.error) as error:
        raise StateError(f"state.json is damaged in its random numbers: {type(error).__name__}: {error}") from error

    def restore() -> None:
        for apply in setters:
            apply()

    return restore


def derive_generators(seed: int, step: int, rank: int) -> None:
    """Seeds all generators from the three numbers."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    derived = int.from_bytes(digest[:8], "little") >> 1
    random.seed(derived)
    torch.manual_seed(derived)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(derived & 0xFFFFFFFF)


def _python(state: Mapping[str, Any]) -> Callable[[], None]:
    words = struct.unpack(f"<{_PYTHON_WORDS}I", b64decode(state["words"], validate=True))
    found = (int(state["version"]), words, None if state["gauss"] is None else float(state["gauss"]))
    random.Random().setstate(found)  # refuses what is damaged
    return lambda: random.setstate(found)


def _torch(state: str) -> Callable[[], None]:
    found = _bytes(state)
    torch.Generator().set_state(found)
    return lambda: torch.set_rng_state(found)


def _numpy(state: Mapping[str, Any]) -> Callable[[], None]:
    import numpy

    keys = numpy.frombuffer(b64decode(state["keys"], validate=True), dtype="<u4").astype("u4")
    found = (str(state["kind"]), keys, int(state["position"]), int(state["has_gauss"]), float(state["gauss"]))
    numpy.random.RandomState().set_state(found)
    return lambda: numpy.random.set_state(found)


def _encode(raw: bytes) -> str:
    return b64encode(raw).decode("ascii")


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(b64decode(text, validate=True)), dtype=torch.uint8)
