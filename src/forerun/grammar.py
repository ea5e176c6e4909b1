"""Constraints on what a text may say: JSON schemas, regular expressions, choices, grammars.

Needs the extra `grammar` (llguidance). A constraint is a setting of sampling like any other:

    model = forerun.load()
    grammars = Grammars.of(model)
    model.generate(prompt, constraint=grammars.json({"type": "object"}))

Target and draft are restricted alike, so the text is exactly what plain decoding under the same
constraint writes, and tokens that leave no choice are drafted free of charge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import SettingError, optional, require

if TYPE_CHECKING:
    from forerun.model import Model


COMPACT: Any = {"whitespace_flexible": False}
"""JSON without free white space: small models run on in it, and it leaves less to be forced."""


ITEMS = 5000
"""Most parser items of one mask, a tenth of llguidance's own limit: an ambiguous grammar, whose
work grows with their square, ends after 20 ms and not after seconds of a locked interpreter."""


class Grammar:
    """A constraint, compiled, and a text's place in it: `requests.Constraint` and `Matcher`. Made
    by `Grammars`; one may serve any number of requests, each of which begins at a place of its own.
    """

    def __init__(self, matcher: Any, eos: Sequence[int]) -> None:
        self._matcher, self._eos = matcher, list(eos)

    def begin(self) -> Grammar:
        """At the beginning of a text."""
        return Grammar(self._matcher.deep_copy(), self._eos)

    def allowed(self) -> NDArray[np.bool_]:
        """Tokens that go on with the text."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(bits, bitorder="little").astype(np.bool_)
        mask[self._eos] = False
        return mask

    def complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())

    def advance(self, token: int) -> bool:
        """Follow a token; False, and stay, if it is not allowed."""
        done = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        return done

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        self._check()

    def forced(self) -> list[int]:
        """Tokens that must come next, as the tokenizer would write them."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return [token for token in tokens if token not in self._eos]

    def _check(self) -> None:
        if self._matcher.is_error():
            why = _line(self._matcher.get_error())
            raise SettingError(f"the constraint cannot be followed: {why}")


class Grammars:
    """Compiles constraints for one tokenizer.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        vocab_size: of the model.
        eos: token ids that end a text, at least one.

    Raises:
        MissingExtraError: llguidance is not installed.
        SettingError: this tokenizer cannot be used.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Sequence[int]) -> None:
        self._lib = optional("llguidance", "grammar")
        self._matcher = self._lib.LLMatcher
        self._eos = tuple(sorted(eos))
        require(bool(self._eos), "end-of-text ids", self._eos, "at least one, for a constraint")
        try:
            size = max(vocab_size, len(tokenizer))
            wrap = optional("llguidance.hf", "grammar").from_tokenizer
            self._tokenizer = wrap(tokenizer, size, list(self._eos))
        except Exception as error:
            raise SettingError(f"constraints need a fast tokenizer: {_line(error)}") from error

    @classmethod
    def of(cls, model: Model) -> Grammars:
        """For a model's own tokenizer."""
        return cls(model.tokenizer, model.target.vocab_size, sorted(model.eos))

    def json(self, schema: Mapping[str, Any] | str | None = None) -> Grammar:
        """JSON of a schema (a mapping, or JSON itself), without space around it; None: any object.
        `SettingError` if it is none, or uses what is not supported."""
        given = {"type": "object"} if schema is None else schema
        text = given if isinstance(given, str) else json.dumps(given)
        try:
            json.loads(text)
            grammar = self._matcher.grammar_from_json_schema(text, overrides=COMPACT)
        except (ValueError, RecursionError) as error:
            raise SettingError(f"the schema cannot be read: {_line(error)}") from error
        return self._compile("json", grammar)

    def regex(self, pattern: str) -> Grammar:
        """All of a regular expression (Rust's syntax); `SettingError` if it is none."""
        return self._compile("regex", self._matcher.grammar_from_regex(pattern))

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of some texts; `SettingError` if there are none."""
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise SettingError("a choice needs texts, none of them empty")
        lark = "start: " + " | ".join(json.dumps(text) for text in texts)
        return self._compile("choice", self._matcher.grammar_from_lark(lark))

    def lark(self, grammar: str) -> Grammar:
        """A grammar in llguidance's dialect of Lark, with a rule `start`; `SettingError` if it is
        none."""
        return self._compile("lark", self._matcher.grammar_from_lark(grammar))

    def _compile(self, kind: str, grammar: str) -> Grammar:
        limits = self._lib.LLParserLimits(step_max_items=ITEMS)
        matcher = self._matcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise SettingError(f"the {kind} constraint is wrong: {_line(matcher.get_error())}")
        return Grammar(matcher, self._eos)


def _line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
