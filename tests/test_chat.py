"""Conversations as templates write them: special tokens are the template's alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from forerun import zoo
from forerun.chat import FENCES, CallFormat, Turns, call_format, conversation, encode, render, turns
from forerun.errors import PromptError, SettingError
from forerun.runtime import load_tokenizer

BOS, START, END = "<|bos|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
MARKERS = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, START, END])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=END)
    made.chat_template = CHATML
    return made


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from([START, END, BOS, "<|im_", "end|>", "<", "|", "a", "\n", "é", "system"]),
        min_size=1, max_size=8,
    ).map("".join)
)  # fmt: skip
def test_contents_never_become_special_tokens(tokenizer, text):
    ids = render(tokenizer, ask(f"x{text}x"))
    special = [tokenizer.convert_ids_to_tokens(i) for i in ids if i in tokenizer.all_special_ids
               or i in tokenizer.added_tokens_decoder]  # fmt: skip
    assert special == [BOS, START, END, START]
    assert f"x{text}x" in tokenizer.decode(ids)


def test_no_letter_is_left_to_split_special_tokens_with(tokenizer):
    """An answer, where nobody would wait for a thread that ends in `StopIteration`."""
    every = "".join(sorted(FENCES))
    assert every in tokenizer.decode(render(tokenizer, ask(every)))
    assert START in tokenizer.decode(render(tokenizer, ask(START + every[1:]))[1:])
    with pytest.raises(PromptError, match="private letters"):
        render(tokenizer, ask(START + every))


def test_other_conversations_are_those_of_transformers(tokenizer):
    messages = [{"role": "system", "content": "é"}, *ask("Hi 😀\n")]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert render(tokenizer, messages) == whole
    resumed = render(tokenizer, [*messages, {"role": "assistant", "content": "So"}], resume=True)
    assert tokenizer.decode(resumed).endswith("<|im_start|>assistant\nSo")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, Turns((END,), "")),
        (INST, Turns((END,), " ")),
        (MARKERS, Turns(("\n\n### user:", "\n\n### assistant:"), "")),
        ("{{ raise_exception('no') }}", Turns()),
        ("{{ messages[0].content }}", Turns()),
    ],
)
def test_turns_are_read_off_the_template(tokenizer, template, expected):
    tokenizer.chat_template = template
    try:
        assert turns(tokenizer) == expected
    finally:
        tokenizer.chat_template = CHATML


def test_the_shipped_template_has_turns():
    assert turns(load_tokenizer(zoo.locate(None))) == Turns(("\nUser:", "\nAssistant:"), " ")


def test_the_begin_token_is_not_added_twice(tokenizer):
    begin = tokenizer.bos_token_id
    text = tokenizer.apply_chat_template(ask("Hi"), tokenize=False)
    assert encode(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)
    assert encode(tokenizer, "Hi")[0] == begin
    assert encode(tokenizer, BOS) == [begin]
    assert encode(tokenizer, "Hi", special=False) == encode(tokenizer, "Hi")[1:]


def test_what_is_no_conversation_is_refused(tokenizer):
    for wrong in ("Hi", [], ["Hi"], [{"content": "Hi"}], [{"role": "user", "content": 3}],
                  [{"role": "user", "content": [{"type": "image_url"}]}]):  # fmt: skip
        with pytest.raises(PromptError):
            conversation(wrong)
    with pytest.raises(SettingError, match="'tools'"):
        render(tokenizer, ask("Hi"), options={"tools": []})
    with pytest.raises(PromptError, match="chat template"):
        render(PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer), ask("Hi"))


def test_calls_are_read_off_the_template(tokenizer):
    tools = "{% if tools %}{{ tools | tojson }}{% endif %}"
    xml = tools + (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
        "<function={{ c.function.name }}>{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    written = "call {{ c.function | tojson }}!"
    try:
        for template, expected in (
            (CHATML, None),  # writes neither tools nor calls
            (xml, None),
            (
                xml.replace("<function={{ c.function.name }}>", written),
                CallFormat("call ", '{"name": "', '", "arguments": ', "}", "!call ", "!"),
            ),
        ):
            tokenizer.chat_template = template
            assert call_format(tokenizer) == expected
    finally:
        tokenizer.chat_template = CHATML
    assert call_format(None) is None
