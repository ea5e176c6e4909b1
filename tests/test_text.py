"""The detokenizer, against decoding all tokens at once: every cut, three kinds of tokenizers."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forerun import Model
from forerun.drafters.model import ModelDrafter
from forerun.engine.text import HELD, UNREADABLE, Detokenizer, StopStrings, _Window, token_bytes
from forerun.testing import ScriptedModel

LETTERS = ["a", "b", "é", "你", "😀", "👩‍👩‍👧", "🇩🇪", "\u200d", "�", " ", "\n", "the "]  # fmt: skip
END = "<|end|>"


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    merges = [("ð", "Ł"), ("ðŁ", "ĺ"), ("Ġ", "t"), ("h", "e"), ("a", "ð"), ("Ģ", "b")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: a leading space is dropped, what is not in the vocabulary falls to bytes."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ("▁", "a", "b", "é", "t", "h", "e", "▁t", "he", "▁the"):
        vocab[piece] = len(vocab)
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return made


def metaspace() -> Tokenizer:
    """T5's kind: a piece is whole characters."""
    pieces = [
        "<unk>",
        "▁",
        "▁the",
        "a",
        "b",
        "é",
        "你",
        "😀",
        "👩",
        "\u200d",
        "👧",
        "�",
        "\n",
        "the",
    ]
    made = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


KINDS = {"byte-level": byte_level, "byte-fallback": byte_fallback, "metaspace": metaspace}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request) -> PreTrainedTokenizerFast:
    backend = KINDS[request.param]()
    backend.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=backend, name=request.param)


def whole(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    """The text of tokens, decoded at once."""
    backend = tokenizer.backend_tokenizer
    text = backend.decode(ids, skip_special_tokens=True)
    if backend.id_to_token(1) != "<0x00>":
        return text
    # Its decoder gives up a whole run of bytes for one that is broken; sentencepiece, whose format
    # it is, only the broken ones. Then its rule is followed here, byte by byte.
    out, run = "", b""
    for name in [*(backend.id_to_token(i) for i in ids if i != backend.token_to_id(END)), None]:
        if name is not None and name.startswith("<0x"):
            run += bytes.fromhex(name[3:5])
            continue
        while run:
            for n in (1, 2, 3, 4):
                try:
                    out, run = out + run[:n].decode(), run[n:]
                    break
                except UnicodeDecodeError:
                    pass
            else:
                out, run = out + "�", run[1:]
        out += (name or "").replace("▁", " ")
    out = out.removeprefix(" ")
    assert "�" in out or out == text
    return out


def check(tokenizer: PreTrainedTokenizerFast, ids: list[int], cut: int) -> None:
    """The prompt's text without an unfinished character, then all pieces: the whole text."""
    detokenizer = Detokenizer.of(tokenizer, ids[:cut])
    pieces = [detokenizer.push(token) for token in ids[cut:]]
    text, all_of_it = "".join(pieces) + detokenizer.flush(), whole(tokenizer, ids)
    assert all_of_it.endswith(text)
    shown = all_of_it.removesuffix(text) if text else all_of_it
    for upto, piece in enumerate(["", *pieces], start=cut):
        shown += piece
        so_far = whole(tokenizer, ids[:upto])
        assert so_far.startswith(shown)
        assert so_far[len(shown) :] in [UNREADABLE * n for n in range(HELD + 1)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(LETTERS), max_size=8).map("".join))
def test_every_cut_of_every_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    for cut in range(len(ids) + 1):
        check(tokenizer, ids, cut)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_cut_of_any_tokens(tokenizer, data):
    """Lone bytes, bytes of half a character beside whole ones, special tokens."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=10))
    for cut in range(len(ids) + 1):
        check(tokenizer, ids, cut)


def test_kinds_are_known_by_their_decoder(tokenizer):
    assert token_bytes(tokenizer) is not None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    assert token_bytes(tokenizer) is None


def test_a_character_in_parts_is_one_piece(tokenizer):
    """From a cut inside 😀 on, the completed character is the text of the last token."""
    ids = tokenizer.encode("a😀", add_special_tokens=False)
    for cut in range(len(ids)):
        detokenizer = Detokenizer.of(tokenizer, ids[:cut])
        assert [detokenizer.push(token) for token in ids[cut:]][-1].endswith("😀")


def test_a_stream_drafts_when_its_first_character_is_complete():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    ids = tokenizer.encode("🙂abcdefgh", add_special_tokens=False)
    says = torch.full((len(tokenizer), len(tokenizer)), -9.0)  # by the token before
    for before, after in pairwise([ids[-1], *ids]):
        says[before, after] = 9.0
    first = next(n for n in range(1, len(ids)) if tokenizer.decode(ids[:n]).strip(" �"))
    pair = [ScriptedModel(lambda text: says[text[-1]]) for _ in range(2)]
    model = Model(pair[0], ModelDrafter(pair[1], len(tokenizer)), tokenizer)
    how = {"controller": "fixed(3)", "max_new_tokens": len(ids) - 1, "ignore_eos": True}
    events = list(model.stream([ids[-1:]], **how))
    drafted = [event.round.drafted for event in events]
    assert drafted[:first] == [0] * first
    assert drafted[first] == 3
    assert "".join(p.text for e in events for p in e.pieces).strip().startswith("🙂")


def test_three_bytes_are_held_back_and_no_more():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    (first,) = tokenizer.convert_tokens_to_ids(["ð"])
    detokenizer = Detokenizer.of(tokenizer, [])
    assert [detokenizer.push(first) for _ in range(3)] == ["", "�", "�"]
    assert detokenizer.flush() == "�"


@pytest.mark.parametrize("way", [Detokenizer.of, _Window], ids=["bytes", "window"])
def test_20000_broken_bytes_take_less_than_a_second(way):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    broken = tokenizer.convert_tokens_to_ids(["ð", "ñ"])  # the beginnings of two characters
    detokenizer = way(tokenizer, [])
    began = time.process_time()
    shown = "".join(detokenizer.push(broken[i % 2]) for i in range(20_000)) + detokenizer.flush()
    assert time.process_time() - began < 1
    assert shown == "�" * 20_000


class ByteTokenizer:
    """One without a Rust tokenizer: its tokens are bytes, unfinished characters are left out."""

    def decode(self, tokens: list[int], **options: bool) -> str:
        return bytes(tokens).decode(errors=self.errors)

    def __init__(self, errors: str) -> None:
        self.errors = errors


@pytest.mark.parametrize("errors", ["replace", "ignore"])
def test_other_tokenizers_decode_a_window(errors):
    ids = list("aé你😀 b😀".encode())
    for cut in range(len(ids) + 1):
        if cut and ids[cut - 1] >= 0x80 and cut < len(ids) and ids[cut] < 0xC0 and ids[cut] >= 0x80:
            continue  # such a prompt's text is its own affair
        detokenizer = Detokenizer.of(ByteTokenizer(errors), ids[:cut])
        text = "".join(map(detokenizer.push, ids[cut:])) + detokenizer.flush()
        head = bytes(ids[:cut]).decode(errors="ignore")
        assert head + text == "aé你😀 b😀"


def test_the_stop_string_that_is_met_is_named():
    stops = StopStrings(("zzz", " there", "her"))
    assert stops.push(" the") == ""
    assert stops.push("re lived") == ""
    assert stops.met == " there"


def test_a_stop_string_completed_before_the_minimum_is_text():
    stops = StopStrings(("ab",))
    assert [stops.push(text, ends=False) for text in ("xa", "by", "a")] == ["x", "aby", ""]
    assert stops.push("b") == ""
    assert stops.met == "ab"
