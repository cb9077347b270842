"""Write docs/reference/data-formats.md by reading one row of each convention; --check compares and exits with 1.

Every line of the page's tables is what `hf_algorithms.data` finds in a file of that convention.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hf_algorithms.data import open_rows, read_records
from hf_protocols.errors import DataError

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "data-formats.md"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
TURN = {"role": "assistant", "content": "4"}

CONVENTIONS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "2 + 2?", "answer": 4},
    "GSM8K, verifiers": {"question": "2 + 2?", "answer": "4", "info": {"level": 1}},
    "TRL, prompts": {"prompt": CHAT, "solution": "4", "source": "made up"},
    "TRL, messages": {"messages": [*CHAT, TURN]},
    "TRL, prompt and completion": {"prompt": CHAT, "completion": [TURN]},
    "TRL, preferences": {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
    "TRL, preferences of chats without a prompt": {
        "chosen": [*CHAT, TURN],
        "rejected": [*CHAT, {**TURN, "content": "5"}],
    },
    "verl": {
        "data_source": "openai/gsm8k",
        "prompt": CHAT,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0},
    },
    "SkyRL": {
        "data_source": "openai/gsm8k",
        "prompt": CHAT,
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": "4"},
    },
    "Alpaca, where `input` is always empty": {"instruction": "2 + 2?", "input": "", "output": "4"},
    "OpenRLHF": {"input": "2 + 2?", "label": "4"},
    "OpenRLHF, supervised": {"input": "2 + 2?", "output": "4"},
    "slime": {"prompt": "2 + 2?", "label": "4", "metadata": {"level": 1}},
    "NuminaMath": {"problem": "2 + 2?", "solution": "4"},
    "Safe-RLHF": {
        "prompt": "2 + 2?",
        "response_0": "4",
        "response_1": "5",
        "better_response_id": 0,
        "safer_response_id": 0,
        "is_response_0_safe": True,
        "is_response_1_safe": True,
    },
    "text for pretraining": {"text": "2 + 2 = 4"},
}
"""A row of each convention."""

AMBIGUOUS: dict[str, dict[str, Any]] = {
    "two prompts": {"prompt": "2 + 2?", "messages": CHAT},
    "two questions": {"instruction": "Add.", "input": "2 + 2"},
    "two answers": {"prompt": "2 + 2?", "answer": "4", "solution": "2 + 2 = 4"},
    "two ground truths": {"prompt": "2 + 2?", "label": "4", "reward_model": {"ground_truth": "4"}},
    "no prompt": {"answer": "4"},
    "ShareGPT": {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
}
"""Rows that are refused."""

FORMATS = """# Data formats

After this page you know which files `data.train` and its neighbours take, and which of your columns a run uses.
`hybridflow data check FILE` prints the same for your own file, and `hybridflow data check --config CONFIG` for the
files of a run.

| format | recognised by | a row is |
|---|---|---|
| JSONL | an object in the first line | a line; lines without content may end the file |
| JSON | a list of objects, or an object whose only key, `data`, holds one | an object |
| CSV | the name `*.csv` or `*.tsv`; separated by `,`, `;` or tabs | a record; an empty value is absent |
| gzip | the name `*.jsonl.gz`, `*.json.gz`, `*.csv.gz` or `*.tsv.gz` | as in the file that is packed |
| Parquet | its first bytes, under any name | a row |
| `datasets` | a directory that `save_to_disk` wrote; the folder of a split | a row |
| hub | a name `OWNER/NAME` or `OWNER/NAME:SPLIT` where no such path exists; `train` by default | a row |

- A pattern such as `data/*.parquet` is all files that match, in the order of their names.
- Of `data.train = [{path = "a.jsonl", weight = 3}, {path = "b.parquet", weight = 1}]` every four draws take three
  prompts from `a.jsonl`. Each source has shuffled epochs of its own. Without weights the files are one set.
- In an epoch each row comes once. The order depends on `run.seed` and the iteration only, so a resumed run reads what
  it would have read.
- Preference pairs take the same lists, with the same meaning of weights.
- Files are read by row: a file may be larger than memory. Of Parquet a row group must fit into memory. A packed file is
  unpacked into the folder for temporary files (`TMPDIR`) as long as the run lasts.
- gzip under another name and other packed files are refused with one line, as are repeated keys, numbers outside the
  range of a float, and characters that are half a pair in a prompt or an answer. `NaN` is refused in a prompt or an
  answer alone.
- `datasets` directories and hub names need `pip install 'hf-algorithms[datasets]'`.

## Columns

Columns are found by their names in the first 100 rows, and the mapping is printed when a run starts.
`data.prompt_field` and `data.answer_field` name others; `reward_model.ground_truth` leads into an object.
Where a row has several such names, `prompt` and `messages` come before the other names of a prompt, and `completion`
and `output` after the other names of an answer, or before them where the answers are learned. Two of one rank are an
error that names both. A column without text in these rows is left out where another one has text; text in a later row
of it is an error.

- A prompt is a text, a number or a list of messages. The content of a message is a text or a list of parts that are
  all text, which are joined. A chat in `messages` that ends with an assistant's message is
  a prompt whose answer is that message, unless a column has the answer.
- The answer is optional. A number keeps its spelling, a message gives its content, lists and objects become JSON.
- A verifier does not score responses to a row without an answer. A run without any answer for it is refused.
- All other columns travel to the reward, and so does the answer's own column unless its name is `answer`.
- Models read text only. A run and `hybridflow data check` mention columns such as `images`, which no model gets.

"""


TEXTS = """## Texts in blocks

Texts of `data.pretraining` are split into blocks of at most `data.block_tokens` tokens: 512, or as many as fit into the
model's context and `training.micro_batch_tokens`.

- All texts follow one another in the order of the files: what the tokenizer puts before a text, the text, its EOS.
- A long text fills several blocks, short ones share a block. The last block is as short as what remains.
- A block begins with what begins a text and with the token before its first one. So each token and each EOS is learned
  exactly once. What the tokenizer puts before a text is read, and not learned.
- In an epoch each block comes once, in an order that depends on `run.seed` only, across the iterations of a run.

Token ids are kept in the folder for temporary files, not in memory. Prompts with answers in `data.pretraining` stay
rows; their answers are cut to `rollout.max_new_tokens`, which the run says."""


def main() -> int:
    """Write the page, or compare it."""
    page = write_page()
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text() != page)
    PAGE.write_text(page)
    return 0


def write_page() -> str:
    """The page as it should be."""
    lines = [
        FORMATS + "| convention | kind of rows | prompt | answer | other columns |\n|---|---|---|---|---|",
        *(f"| {name} | {_describe(record)} |" for name, record in CONVENTIONS.items()),
        "",
        "Preferences train reward models; a run of PPO takes their prompts. Pairs of texts need one. Pairs of chats",
        "may leave it out: the messages with which both sides begin are the prompt. Texts are for `data.pretraining`.",
        "",
        TEXTS,
        "",
        "## What is refused",
        "",
        "| row | message |",
        "|---|---|",
        *(f"| `{json.dumps(record)}` | {_refuse(record)} |" for record in AMBIGUOUS.values()),
    ]
    return "\n".join(lines) + "\n"


def _describe(record: dict[str, Any]) -> str:
    with _written(record) as path:
        columns = open_rows([(path, None)], promptless=("texts", "preferences")).files[0].columns
        assert [dict(each) for _, each in read_records(path)] == [record]
    fields = [f"`{name}`" if name else "" for name in (columns.prompt, columns.answer)]
    return " | ".join([columns.kind, *fields, ", ".join(f"`{name}`" for name in columns.others)])


def _refuse(record: dict[str, Any]) -> str:
    with _written(record) as path:
        try:
            open_rows([(path, None)])
        except DataError as error:
            return str(error).replace(path, "rows.jsonl")
    raise AssertionError(f"{record} was read")


@contextmanager
def _written(record: dict[str, Any]) -> Iterator[str]:
    """A file with one record, as long as the block lasts."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text(json.dumps(record) + "\n")
        yield str(path)


if __name__ == "__main__":
    sys.exit(main())
