"""Rows of any format, the example data sets, tokenizers, and batches of token ids.

Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

from hf_algorithms.data._addition import AdditionFiles, write_addition_data
from hf_algorithms.data._batches import PromptDataset, TooLong
from hf_algorithms.data._columns import ColumnMapping
from hf_algorithms.data._order import RowOrder, select_rows
from hf_algorithms.data._rows import (
    Message,
    Row,
    RowFile,
    Rows,
    load_rows,
    locate_row,
    open_rows,
    read_records,
    write_rows,
)
from hf_algorithms.data._tokenizers import build_character_tokenizer, load_tokenizer, train_bpe_tokenizer

__all__ = [
    "AdditionFiles",
    "ColumnMapping",
    "Message",
    "PromptDataset",
    "Row",
    "RowFile",
    "RowOrder",
    "Rows",
    "TooLong",
    "build_character_tokenizer",
    "load_rows",
    "load_tokenizer",
    "locate_row",
    "open_rows",
    "read_records",
    "select_rows",
    "train_bpe_tokenizer",
    "write_addition_data",
    "write_rows",
]
