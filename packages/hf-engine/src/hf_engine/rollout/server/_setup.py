"""Checks before a server is used: ranks, options and a model, and that the server has the same model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hf_engine.model_directory import ModelDirectory
from hf_engine.rollout.engine_rules import has_experts
from hf_engine.rollout.replica import require_ranks
from hf_engine.rollout.server._connection import ServerConnection
from hf_engine.rollout.server._dialect import Dialect
from hf_protocols.errors import BackendError
from hf_protocols.models import ModelShape
from hf_protocols.topology import GenerationSpec, Topology
from hf_protocols.validation import Checks, show

__all__ = ["check_model", "check_ranks", "check_urls", "choose_directory", "read_key"]

_check = Checks(BackendError)

_LOCAL = ("localhost", "127.0.0.1", "::1")


def check_ranks(topology: Topology, urls: Sequence[str]) -> None:
    """Refuses ranks that cannot ask these servers.

    Raises:
        BackendError: for another number of ranks, a generation layout other than 1-1, or no server for every rank.
    """
    generation = require_ranks("server", topology).generation
    assert generation is not None, "require_ranks has set it"
    if generation != GenerationSpec():
        raise BackendError(
            f"every rank asks a server for whole models: gen_pp_size={generation.gen_pp_size}, gen_tp_size="
            f"{generation.gen_tp_size} are not supported. Set both to 1, and start the server with the layout"
        )
    check_urls(urls, num_ranks=topology.world_size)


def check_urls(urls: Sequence[str], *, num_ranks: int | None = None) -> None:
    """Refuses what is not a list of texts, one for every rank at most; None: their number is not known yet.

    Raises:
        BackendError: with an example.
    """
    is_list = isinstance(urls, list | tuple) and all(isinstance(url, str) for url in urls)
    if not is_list or not 1 <= len(urls) <= (num_ranks or len(urls)):
        size = "1 or more" if num_ranks is None else f"1 to {num_ranks}"
        shown = "***" if "@" in str(urls) else show(urls)  # a user and a password may be before it
        raise BackendError(
            f"rollout.options.urls={shown}. Use a list of {size} URLs, one for every rank at most, such as "
            '["http://127.0.0.1:30000"]'
        )


def read_key(variable: str | None) -> str | None:
    """The API key in an environment variable.

    Raises:
        BackendError: if it is not set.
    """
    if variable is None:
        return None
    _check.kind("rollout.options.api_key_variable", variable, str, "the name of an environment variable")
    key = os.environ.get(variable)
    if not key:
        raise BackendError(f"rollout.options.api_key_variable={show(variable)}: this environment variable is not set")
    if not (key.isascii() and key.isprintable()):
        raise BackendError(
            f"the key in the environment variable {show(variable)} has characters that no request can carry"
        )
    return key


def choose_directory(given: str | Path | None, connection: ServerConnection) -> Path:
    """Returns the directory in which weights are left for the server.

    Raises:
        BackendError: if none was given for a server on another machine.
    """
    if given is not None:
        return Path(given).absolute()
    if connection.host not in _LOCAL:
        raise BackendError(
            f"the server at {connection.url} may be on another machine. Use rollout.options.weights_directory, which "
            "it and all ranks see under one path"
        )
    return Path(tempfile.gettempdir())


def _of(families: Sequence[str]) -> str:
    return f", those of {', '.join(families)} are not" if families else " on its CPU"


def check_model(server: Dialect, model: ModelDirectory, shape: ModelShape) -> None:
    """Refuses a server with another model than the one that is trained.

    Raises:
        BackendError: naming both.
    """
    directory, wanted = model.path, model.config.get("architectures") or ()
    found = server.facts.architectures
    if found and wanted and not set(found) & set(wanted):
        raise BackendError(
            f"{server.facts.name} has a {', '.join(found)}, {str(directory)!r} is a {', '.join(wanted)}. Start it with "
            "the model that is trained"
        )
    if not server.knows(shape.vocab_size - 1) or server.knows(shape.vocab_size):
        raise BackendError(
            f"{server.facts.name} has another vocabulary than {str(directory)!r}, of {shape.vocab_size} tokens. Start "
            "it with the model that is trained"
        )
    if server.facts.keeps_tied and shape.tie_embeddings:
        raise BackendError(
            f"{server.facts.name} runs on a CPU and {str(directory)!r} has tie_word_embeddings: there vLLM's output "
            "layer would keep the old weights without a word. Use a model without, or another server"
        )
    if fault := server.find_model_fault(model, shape):
        raise model.refusal(fault)
    right, family = server.facts.experts, model.config.get("model_type")
    if right is not None and family not in right and has_experts(shape):
        raise BackendError(
            f"{server.facts.name} does not take the weights of {str(directory)!r}: experts of "
            f"model_type={show(family)} would be wrong without an error{_of(right)}. Use a dense model, or another "
            "server"
        )
