"""Prompts, responses and ends of turns, compared with what transformers renders and generates."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from chat_tokenizers import STYLES, build_chat_tokenizer
from hf_algorithms.data import (
    NamedToken,
    TurnFormat,
    build_character_tokenizer,
    decode_responses,
    describe_turns,
    load_tokenizer,
    read_template,
)
from hf_protocols.errors import ConfigError, DataError

CHAT: tuple[dict[str, Any], ...] = ({"role": "user", "content": "What is 12 + 30?"},)
SYSTEM = {"role": "system", "content": "Answer briefly."}
ANSWER = "It is 42."


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Read back from the files, as a run reads them."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for style in STYLES:
        build_chat_tokenizer(folder / style, style)
    return {style: load_tokenizer(str(folder / style)) for style in STYLES}


def rendered(tokenizer, chat, **options):
    return tokenizer.apply_chat_template(list(chat), tokenize=True, return_dict=False, **options)


# ----------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("style", STYLES)
def test_chats_are_those_of_transformers(tokenizers, style):
    tokenizer = tokenizers[style]
    (ids,) = TurnFormat(tokenizer).encode_prompts([CHAT])
    assert ids == rendered(tokenizer, CHAT, add_generation_prompt=True)
    assert ids.count(tokenizer.bos_token_id) == (1 if STYLES[style].begin else 0)
    assert ids[-1] != tokenizer.eos_token_id


def test_long_and_open_chats_are_encoded_as_in_transformers(tokenizers):
    tokenizer = tokenizers["chatml"]
    long = (SYSTEM, *CHAT, {"role": "assistant", "content": ANSWER}, *CHAT)
    opened = (*CHAT, {"role": "assistant", "content": "It is"})
    ids = TurnFormat(tokenizer).encode_prompts([long, "12", opened])
    assert ids == [
        rendered(tokenizer, long, add_generation_prompt=True),
        tokenizer("12")["input_ids"],
        rendered(tokenizer, opened, continue_final_message=True),
    ]


@pytest.mark.parametrize("style", ["chatml", "llama3"])
def test_texts_end_without_an_eos_that_the_tokenizer_appends(tmp_path, style):
    tokenizer = build_chat_tokenizer(tmp_path, style, appends_eos=True)
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    assert tokenizer("12 + 30")["input_ids"][-1] == eos
    turns = TurnFormat(tokenizer)
    text, chat = turns.encode_prompts(["12 + 30", CHAT])
    assert text == tokenizer("12 + 30")["input_ids"][:-1]
    assert chat == rendered(tokenizer, CHAT, add_generation_prompt=True)
    assert (text + chat).count(bos) == (2 if style == "llama3" else 0)
    assert (text[-1], chat[-1]) != (eos, eos)


def test_texts_and_templates_that_write_the_begin_have_it_once(tokenizers):
    tokenizer = tokenizers["llama3"]
    bare = {"role": "user", "content": "12"}
    without = TurnFormat(tokenizer, template="{{ messages[0].content }}")
    assert without.encode_prompts([(bare,)]) == [tokenizer("12")["input_ids"]]
    plain = TurnFormat(tokenizer)
    wanted = tokenizer("12")["input_ids"]
    assert plain.encode_prompts(["12", "<|begin|>12", "<|begin|><|begin|>12"]) == [wanted] * 3


def test_system_prompts_and_options_reach_the_template(tokenizers):
    tokenizer = tokenizers["chatml"]
    turns = TurnFormat(tokenizer, system_prompt=SYSTEM["content"], options={"enable_thinking": False})
    wanted = rendered(tokenizer, (SYSTEM, *CHAT), add_generation_prompt=True, enable_thinking=False)
    assert turns.encode_prompts([CHAT, CHAT[0]["content"], (SYSTEM, *CHAT)]) == [wanted] * 3
    assert tokenizer.decode(wanted).endswith("<think>\n\n</think>\n\n")
    assert turns.as_chat("12") == (SYSTEM, {"role": "user", "content": "12"})
    assert TurnFormat(tokenizer).as_chat("12") is None


# ----------------------------------------------------------------------------------------------------- supervised rows


@pytest.mark.parametrize("style", STYLES)
def test_responses_follow_the_prompt_and_end_the_turn(tokenizers, style):
    tokenizer = tokenizers[style]
    turns = TurnFormat(tokenizer)
    (prompt,), (response,) = turns.encode_prompts([CHAT]), turns.encode_responses([CHAT], [ANSWER])
    whole = rendered(tokenizer, (*CHAT, {"role": "assistant", "content": ANSWER}))
    assert (prompt + response) == whole[: len(prompt + response)]
    assert tokenizer.decode(response) == ANSWER + STYLES[style].end_of_turn
    assert response[-1] == turns.end_of_turn_id == tokenizer.convert_tokens_to_ids(STYLES[style].end_of_turn)


def test_responses_follow_prompts_that_templates_rewrite(tokenizers):
    """A template may write less in a whole chat than at the end of a prompt, whose ids come first all the same."""
    tokenizer = tokenizers["chatml"]
    turns = TurnFormat(tokenizer, options={"enable_thinking": False})
    (prompt,), (response,) = turns.encode_prompts([CHAT]), turns.encode_responses([CHAT], [ANSWER])
    assert tokenizer.decode(prompt).endswith("</think>\n\n")
    assert response == [*tokenizer(ANSWER, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def test_responses_to_open_chats_and_texts_end_too(tokenizers):
    tokenizer = tokenizers["phi3"]
    turns = TurnFormat(tokenizer)
    opened = (*CHAT, {"role": "assistant", "content": "It"})
    found = turns.encode_responses([opened, "12 + 30 = "], [" is 42.", "42"])
    assert [tokenizer.decode(ids) for ids in found] == [" is 42.<|end|>", "42<eos>"]


def test_text_between_content_and_end_belongs_to_the_response(tokenizers):
    template = "{% for turn in messages %}[{{ turn.role }}] {{ turn.content }} {{ eos_token }}{% endfor %}"
    turns = TurnFormat(tokenizers["phi3"], template=template)
    assert turns.end_of_turn_id == tokenizers["phi3"].eos_token_id
    (response,) = turns.encode_responses([CHAT], [ANSWER])
    assert tokenizers["phi3"].decode(response) == f"[assistant] {ANSWER} <eos>"


# ------------------------------------------------------------------------------------------------------- ends of turns


@pytest.mark.parametrize("style", STYLES)
def test_responses_stop_at_every_end(tokenizers, style):
    tokenizer = tokenizers[style]
    end = tokenizer.convert_tokens_to_ids(STYLES[style].end_of_turn)
    assert TurnFormat(tokenizer).list_stop_ids([7, end]) == tuple(sorted({7, end, tokenizer.eos_token_id}))


@pytest.mark.parametrize(
    "template",
    [
        "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n\n{% endfor %}",
        "{% for turn in messages %}{% if turn.role == 'user' %}{{ turn.content }}{% endif %}{% endfor %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_templates_without_an_end_leave_the_eos(tokenizers, template):
    """A blank line after a turn must not become what ends a response."""
    tokenizer = tokenizers["llama3"]
    turns = TurnFormat(tokenizer, template=template)
    assert turns.end_of_turn_id is None
    assert turns.list_stop_ids() == (tokenizer.eos_token_id,)
    if "turn.role }}" in template:
        (response,) = turns.encode_responses([CHAT], [ANSWER])
        assert tokenizer.decode(response) == f"assistant: {ANSWER}{tokenizer.eos_token}"


def test_line_breaks_that_are_tokens_end_no_turn(tmp_path):
    """Some tokenizers list runs of line breaks among their added tokens."""
    tokenizer = build_chat_tokenizer(tmp_path, "gemma")
    tokenizer.add_tokens(["\n\n"])
    ends = {
        after: TurnFormat(tokenizer, template=f"{{{{ messages[-1].content }}}}{after}").end_of_turn_id
        for after in ("\n\n", "\n\n</turn>\n")
    }
    assert tokenizer("\n\n", add_special_tokens=False)["input_ids"] == [len(tokenizer) - 1]
    assert list(ends.values()) == [None, tokenizer.convert_tokens_to_ids("</turn>")]


def test_ends_are_described_with_who_states_them(tokenizers):
    tokenizer = tokenizers["phi3"]
    eos, end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>")
    found = describe_turns(TurnFormat(tokenizer), model_ids={"generation_config.json": [end, 2]}, num_logits=320)
    assert found.template == "tokenizer"
    assert found.begin == ()
    assert found.end_of_turn == NamedToken(token_id=end, text="<|end|>")
    assert {(each.token_id, each.text, each.stated_by) for each in found.stops} == {
        (eos, "<eos>", ("tokenizer",)),
        (end, "<|end|>", ("generation_config.json", "chat template")),
        (2, tokenizer.convert_ids_to_tokens(2), ("generation_config.json",)),
    }
    assert found.pad == NamedToken(token_id=eos, text="<eos>")
    assert found.num_spare_logits == 320 - len(tokenizer)
    llama = describe_turns(TurnFormat(tokenizers["llama3"], template=STYLES["gemma"].template))
    assert (llama.template, llama.pad, llama.num_spare_logits) == ("data.chat_template", None, 0)
    assert [each.text for each in llama.begin] == ["<|begin|>"]


@pytest.mark.parametrize("end_is_special", [True, False])
def test_texts_of_responses_have_no_end_of_turn(tmp_path, end_is_special):
    build_chat_tokenizer(tmp_path, "gemma", end_is_special=end_is_special)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    turns = TurnFormat(tokenizer)
    (response,) = turns.encode_responses([CHAT], [ANSWER])
    end = turns.end_of_turn_id
    assert end is not None and response[-1] == end
    assert tokenizer.added_tokens_decoder[end].special is end_is_special
    rows = [response, response[:-1], [*response[:-1], 10**6, end], [end], []]
    assert decode_responses(tokenizer, rows, stop_ids=turns.list_stop_ids()) == [ANSWER, ANSWER, ANSWER, "", ""]


# ------------------------------------------------------------------------------------------------------------ refusals


def test_chats_without_a_template_are_refused(tmp_path):
    tokenizer = build_character_tokenizer("12", tmp_path)
    turns = TurnFormat(tokenizer, label="model.path = 'own'")
    assert turns.encode_prompts(["1"]) == [[3]]
    with pytest.raises(
        DataError, match=r"^line 2: is a chat, and the tokenizer of model.path = 'own' has no chat templ"
    ):
        turns.encode_prompts(["1", CHAT], name_row=lambda row: f"line {row + 1}")
    for key, value in (("system_prompt", "1"), ("template_options", {"a": 1})):
        argument = {key.removeprefix("template_"): value}
        with pytest.raises(ConfigError, match=rf"^data.{key} is set, and the tokenizer of model.path = 'own' has no"):
            TurnFormat(tokenizer, label="model.path = 'own'", **argument)


def test_what_a_template_refuses_is_named_with_its_row(tokenizers):
    turns = TurnFormat(tokenizers["gemma"], system_prompt="Be brief.")
    with pytest.raises(
        DataError, match=r"^rows, line 1: the chat template refuses this chat: System role not supported"
    ):
        turns.encode_prompts([CHAT], name_row=lambda row: f"rows, line {row + 1}")


def test_templates_and_options_that_cannot_be_used_are_refused(tokenizers, tmp_path):
    tokenizer = tokenizers["chatml"]
    with pytest.raises(ConfigError, match=r"^data.chat_template is not valid Jinja: .*endfor"):
        TurnFormat(tokenizer, template="{% for turn in messages %}")
    for template in ("constant", "{{ messages[0]['role'] }}:"):
        with pytest.raises(ConfigError, match=r"^data.chat_template leaves out a user's message: every chat becomes '"):
            TurnFormat(tokenizer, template=template)
    with pytest.raises(ConfigError, match=r"data.template_options has add_generation_prompt, which is not a variable"):
        TurnFormat(tokenizer, options={"add_generation_prompt": False})
    misspelt = r"data.template_options has message, which the chat template does not read. Did you mean 'messages'\?"
    with pytest.raises(ConfigError, match=misspelt):
        TurnFormat(tokenizer, options={"message": 1})
    with pytest.raises(ConfigError, match=r"has zzz, which the chat template does not read. Remove it"):
        TurnFormat(tokenizer, options={"zzz": 1})
    with pytest.raises(ConfigError, match=r"data.template_options has messages, which is not a variable"):
        TurnFormat(tokenizer, options={"messages": []})
    with pytest.raises(ConfigError, match=r"data.chat_template = 'absent.jinja': cannot be read as a file \(No such"):
        read_template("absent.jinja")
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert read_template(str(tmp_path / "own.jinja")) == read_template("{{ messages }}") == "{{ messages }}"
