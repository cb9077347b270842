"""Small tokenizers that write chats as well-known families do: their markers, their begin, their end of a turn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from hf_algorithms.data import train_bpe_tokenizer

__all__ = ["STYLES", "ChatStyle", "build_chat_tokenizer"]

_TEXTS = ["What is 12 + 30? It is 42.", "Answer briefly. Which number comes after seven? Eight comes after seven."] * 9


@dataclass(frozen=True)
class ChatStyle:
    """Chat format of a family.

    Attributes:
        template: in Jinja.
        end_of_turn: token after an assistant's content.
        markers: further tokens of the template.
        begin: put before every text by the tokenizer; empty for none.
        eos: the tokenizer's `eos_token`.
        pad: the tokenizer's `pad_token`; None without one.
    """

    template: str
    end_of_turn: str
    markers: tuple[str, ...] = ()
    begin: str = ""
    eos: str = "<eos>"
    pad: str | None = "<pad>"


STYLES = {
    "chatml": ChatStyle(
        template=(
            "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n"
            "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
        ),
        end_of_turn="<|im_end|>",
        markers=("<|im_start|>",),
        eos="<|im_end|>",
    ),
    "llama3": ChatStyle(
        template=(
            "{{ bos_token }}{% for turn in messages %}<|head|>{{ turn.role }}<|/head|>\n\n"
            "{{ turn.content | trim }}<|eot|>{% endfor %}"
            "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
        ),
        end_of_turn="<|eot|>",
        markers=("<|head|>", "<|/head|>", "<|begin|>"),
        begin="<|begin|>",
        pad=None,
    ),
    "gemma": ChatStyle(
        template=(
            "{{ bos_token }}{% for turn in messages %}"
            "{% if turn.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
            "<turn>{{ 'model' if turn.role == 'assistant' else turn.role }}\n{{ turn.content | trim }}</turn>\n"
            "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
        ),
        end_of_turn="</turn>",
        markers=("<turn>", "<bos>"),
        begin="<bos>",
    ),
    "phi3": ChatStyle(
        template=(
            "{% for turn in messages %}<|{{ turn.role }}|>\n{{ turn.content }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
        ),
        end_of_turn="<|end|>",
        markers=("<|user|>", "<|assistant|>", "<|system|>"),
        pad="<eos>",
    ),
}
"""By the name of a family's style. The end of a turn is the EOS of `chatml` only."""


def build_chat_tokenizer(
    directory: Path, style: str, *, end_is_special: bool = True, appends_eos: bool = False, **changes: Any
) -> PreTrainedTokenizerBase:
    """Writes a tokenizer to `directory`.

    Args:
        directory: where to write.
        style: key of `STYLES`.
        end_is_special: whether the end of a turn is a special token, which decoding skips.
        appends_eos: whether the tokenizer ends texts with its EOS.
        **changes: attributes of the saved tokenizer, such as `pad_token=None`.
    """
    chosen = STYLES[style]
    tokenizer: Any = train_bpe_tokenizer(_TEXTS, vocab_size=300, directory=directory)
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in chosen.markers])
    tokenizer.add_tokens([AddedToken(chosen.end_of_turn, special=end_is_special, normalized=False)])
    if chosen.begin:
        tokenizer.bos_token = chosen.begin
    tokenizer.eos_token, tokenizer.pad_token = chosen.eos, chosen.pad
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    before, after = (f"{chosen.begin} " if chosen.begin else "", f" {tokenizer.eos_token}" if appends_eos else "")
    tokens = [each for each in (chosen.begin, tokenizer.eos_token if appends_eos else "") if each]
    if tokens:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{before}$A{after}",
            special_tokens=[(each, tokenizer.convert_tokens_to_ids(each)) for each in tokens],
        )
    tokenizer.chat_template = chosen.template
    tokenizer.save_pretrained(directory)
    return tokenizer
