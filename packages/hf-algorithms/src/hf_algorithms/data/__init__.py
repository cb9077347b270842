"""Rows of any format, the example data sets, tokenizers, and batches of token ids.

What lives here: readers and writers of rows, formats of chats, and the order in which rows are drawn.
What must not: models, losses and rewards. Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

from hf_algorithms.data._addition import ExampleFiles, write_addition_data
from hf_algorithms.data._answers import AnswerDataset, LearnedBlocks
from hf_algorithms.data._batches import PromptDataset, TooLong
from hf_algorithms.data._columns import ColumnMapping, Kind
from hf_algorithms.data._file_rows import FileRows
from hf_algorithms.data._gsm8k import write_gsm8k_data, write_gsm8k_preferences, write_gsm8k_steps
from hf_algorithms.data._order import RowOrder, select_rows
from hf_algorithms.data._pair_rows import PairRowsDataset
from hf_algorithms.data._preferences import PreferenceDataset, PreferenceRow, load_preferences, open_preferences
from hf_algorithms.data._report import (
    BlocksReport,
    DataReport,
    FileReport,
    FirstRow,
    LengthReport,
    RoomReport,
    TooLongReport,
    describe_data,
)
from hf_algorithms.data._rows import (
    Message,
    PromptRows,
    Row,
    RowFile,
    load_rows,
    locate_row,
    open_rows,
    read_records,
    write_rows,
)
from hf_algorithms.data._sequences import SequenceEncoder, cut_to
from hf_algorithms.data._text_blocks import TextBlocks, choose_block_tokens
from hf_algorithms.data._tokenizers import (
    build_character_tokenizer,
    load_tokenizer,
    read_tokenizer_files,
    train_bpe_tokenizer,
)
from hf_algorithms.data._turn_tokens import (
    NamedToken,
    TurnTokens,
    count_spare_logits,
    describe_turns,
    read_template,
)
from hf_algorithms.data._turns import TurnFormat, decode_responses

__all__ = [
    "AnswerDataset",
    "BlocksReport",
    "ColumnMapping",
    "DataReport",
    "ExampleFiles",
    "FileReport",
    "FileRows",
    "FirstRow",
    "Kind",
    "LearnedBlocks",
    "LengthReport",
    "Message",
    "NamedToken",
    "PairRowsDataset",
    "PreferenceDataset",
    "PreferenceRow",
    "PromptDataset",
    "PromptRows",
    "RoomReport",
    "Row",
    "RowFile",
    "RowOrder",
    "SequenceEncoder",
    "TextBlocks",
    "TooLong",
    "TooLongReport",
    "TurnFormat",
    "TurnTokens",
    "build_character_tokenizer",
    "choose_block_tokens",
    "count_spare_logits",
    "cut_to",
    "decode_responses",
    "describe_data",
    "describe_turns",
    "load_preferences",
    "load_rows",
    "load_tokenizer",
    "locate_row",
    "open_preferences",
    "open_rows",
    "read_records",
    "read_template",
    "read_tokenizer_files",
    "select_rows",
    "train_bpe_tokenizer",
    "write_addition_data",
    "write_gsm8k_data",
    "write_gsm8k_preferences",
    "write_gsm8k_steps",
    "write_rows",
]
