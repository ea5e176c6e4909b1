"""What a translation model's text begins with: its start token, a language, words of one's own."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forerun.errors import SettingError, UnknownNameError

_CODE = re.compile(r"(?:__)?([a-z]{2,3}(?:_[A-Za-z]{2,4})?)(?:__)?")


@dataclass(frozen=True)
class DecoderOpening:
    """What stands before an encoder-decoder model's own tokens."""

    prompt: tuple[int, ...]  # of the decoder: start token, language, beginning of the text
    source: tuple[int, ...] = ()  # before every source, where models read the language there


def opening(
    start: Sequence[int],
    tokenizer: Any,
    language: str | None = None,
    text: str | Sequence[int] | None = None,
) -> DecoderOpening:
    """The opening a user asks for: the model's `Facts.start`, a language to write in, by the
    model's own code or its beginning ("de", "deu_Latn"), and what the text shall begin with;
    `SettingError` for a language that the tokenizer has no token for, or without a tokenizer."""
    if tokenizer is None and (language is not None or isinstance(text, str)):
        raise SettingError("a language or a decoder prompt needs a tokenizer; give token ids")
    prompt, source = list(start), []
    if language is not None:
        token, in_source = _language(tokenizer, language)
        if in_source:
            source = [token]
        else:
            prompt = [start[0], token]
    if isinstance(text, str):
        prompt += tokenizer(text_target=text, add_special_tokens=False)["input_ids"]
    elif text is not None:
        prompt += text
    return DecoderOpening(tuple(prompt), tuple(source))


def _language(tokenizer: Any, language: str) -> tuple[int, bool]:
    """The id of a language's token, and whether it belongs into the source."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if (token := vocabulary.get(f">>{language}<<")) is not None:  # Marian's of many languages
        return token, True
    codes = {
        match[1]: vocabulary[name]
        for name in tokenizer.all_special_tokens
        if (match := _CODE.fullmatch(name)) and name in vocabulary
    }
    for code, token in getattr(tokenizer, "lang_code_to_id", {}).items():
        codes.setdefault(code, token)
    if language in codes:
        return codes[language], False
    alike = [code for code in codes if code.startswith(f"{language}_")]
    if len(alike) == 1:
        return codes[alike[0]], False
    marked = [name[2:-2] for name in vocabulary if re.fullmatch(r">>\w+<<", name)]
    if not codes and not marked:
        raise SettingError(
            f"language {language!r}: this model's tokenizer has no tokens for languages; leave it "
            "out, or write in the prompt what is wanted, as T5 takes it"
        )
    raise UnknownNameError.among("language of this model", language, [*codes, *marked])
