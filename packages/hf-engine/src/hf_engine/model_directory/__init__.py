"""The one reader of a model on disk: configuration, headers of the weights, and whether they are one model.

What lives here: headers, adapters, tokens that end a response, checks and export, for all that read or write a model.
What must not: weights themselves and transformers, which are in `models`, and what belongs to one backend.
"""

from __future__ import annotations

from hf_engine.model_directory._adapters import AdapterDirectory, find_base, is_adapter, read_adapter
from hf_engine.model_directory._borders import errors_of, one_line
from hf_engine.model_directory._checks import (
    SCORE_HEADS,
    VALUE_HEAD,
    check_end_tokens,
    check_head,
    check_model_directory,
    find_score_head,
    is_buffer,
)
from hf_engine.model_directory._directory import ModelDirectory, read_model_directory
from hf_engine.model_directory._end_tokens import check_end_of_sequence_ids, read_end_of_sequence_ids
from hf_engine.model_directory._export import ExportDtype, ExportSource, check_export_dtype, describe_export
from hf_engine.model_directory._headers import StoredTensor, read_header
from hf_engine.model_directory._paths import find_file, find_model, is_hub_name
from hf_engine.model_directory._weight_files import find_weight_files

__all__ = [
    "SCORE_HEADS",
    "VALUE_HEAD",
    "AdapterDirectory",
    "ExportDtype",
    "ExportSource",
    "ModelDirectory",
    "StoredTensor",
    "check_end_of_sequence_ids",
    "check_end_tokens",
    "check_export_dtype",
    "check_head",
    "check_model_directory",
    "describe_export",
    "errors_of",
    "find_base",
    "find_file",
    "find_model",
    "find_score_head",
    "find_weight_files",
    "is_adapter",
    "is_buffer",
    "is_hub_name",
    "one_line",
    "read_adapter",
    "read_end_of_sequence_ids",
    "read_header",
    "read_model_directory",
]
