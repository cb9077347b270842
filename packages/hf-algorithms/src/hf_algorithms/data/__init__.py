"""Questions and answers: JSONL files, the addition data set, tokenizers, and batches of them.

Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

from hf_algorithms.data._addition import AdditionFiles, write_addition_data
from hf_algorithms.data._batches import PromptDataset, select_rows
from hf_algorithms.data._jsonl import Message, Row, load_rows, read_records, write_rows
from hf_algorithms.data._tokenizers import build_character_tokenizer, load_tokenizer, train_bpe_tokenizer

__all__ = [
    "AdditionFiles",
    "Message",
    "PromptDataset",
    "Row",
    "build_character_tokenizer",
    "load_rows",
    "load_tokenizer",
    "read_records",
    "select_rows",
    "train_bpe_tokenizer",
    "write_addition_data",
    "write_rows",
]
