"""transformers' logits processors and stopping criteria, asked as `generate` asks them."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation import logits_process as processes
from transformers.generation import stopping_criteria as criteria_of

from forerun.errors import SettingError

TEMPERING: tuple[tuple[type[Any], str], ...] = (
    (processes.TemperatureLogitsWarper, "temperature"),
    (processes.TopKLogitsWarper, "top_k"),
    (processes.TopPLogitsWarper, "top_p"),
    (processes.MinPLogitsWarper, "min_p"),
)
"""What the engine does itself, in its order, if nothing of another kind follows."""
OWN = ("transformers.generation.logits_process", "transformers.generation.stopping_criteria")
"""Modules whose classes keep no state and look at no other row,"""
PLACED = (
    processes.PrefixConstrainedLogitsProcessor,
    processes.EncoderRepetitionPenaltyLogitsProcessor,
    processes.EncoderNoRepeatNGramLogitsProcessor,
    processes.RepetitionPenaltyLogitsProcessor,
    processes.SynthIDTextWatermarkLogitsProcessor,
)
"""but for these, which know a row by its place in the batch."""


class RowCallbacks:
    """A row's processors that are no settings of `Sampling`, and its stopping criteria but for
    length and end-of-text tokens, as `Sampling` takes them.

    They see its text as `generate` shows it: behind the `(rows, n)` padded prompts, in its place of
    the batch. What one of them raises is kept in `error`, and ends this row alone.
    """

    def __init__(
        self, processors: Sequence[Any], criteria: Sequence[Any], prompts: torch.Tensor, row: int
    ) -> None:
        asked = [*processors, *criteria]
        # A batch of one row stands for all where nobody knows places, or keeps state.
        alone = all(type(a).__module__ in OWN and not isinstance(a, PLACED) for a in asked)
        self._rows, self._place = (1, 0) if alone else (len(prompts), row)
        self._processors = processes.LogitsProcessorList(processors)
        self._criteria, self._prompt = criteria, prompts[row : row + 1]
        self.processor = self._process if processors else None
        self.stopping = self._ends if asked else None
        self.error: Exception | None = None

    def _shown(self, output: Sequence[int]) -> torch.Tensor:
        """`(rows, n + len(output))`, with the same text in every place."""
        tail = self._prompt.new_tensor([list(output)])
        return torch.cat([self._prompt, tail], 1).expand(self._rows, -1)

    def _process(self, output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if self.error is None:
            try:
                ids = self._shown(output)
                scores = logits.to(ids.device).expand(self._rows, -1).clone()
                return self._processors(ids, scores)[self._place]
            except Exception as error:  # of anybody's processor
                self.error = error
        return logits

    def _ends(self, output: Sequence[int]) -> bool:
        if self.error is None:
            try:
                ids = self._shown(output)
                # All are asked, always: they may count. One answer is for the whole batch.
                answers = [torch.as_tensor(ask(ids, None)).reshape(-1) for ask in self._criteria]
                return any(bool(a[self._place if len(a) > 1 else 0]) for a in answers)
            except Exception as error:
                self.error = error
        raise self.error


def settings_of(
    processors: Sequence[Any], padded: bool, samples: bool
) -> tuple[dict[str, Any], list[Any]]:
    """Which of the processors that `generate` prepared are settings of `Sampling`, for a row that
    is `padded` or not, and whose tokens are drawn or not; and the others, in their order. One that
    runs the model itself is refused."""
    rest = [p for p in processors if type(p) is not processes.LogitNormalization]
    for processor in rest:
        if isinstance(processor, processes.UnbatchedClassifierFreeGuidanceLogitsProcessor):
            raise SettingError(f"{type(processor).__name__} runs the model itself; leave it out")
    fields: dict[str, Any] = {"temperature": float(samples)}
    for kind, name in reversed(TEMPERING if samples else ()):
        plain = rest and type(rest[-1]) is kind and getattr(rest[-1], "min_tokens_to_keep", 1) == 1
        if plain and getattr(rest[-1], "filter_value", -torch.inf) == -torch.inf:
            fields[name] = getattr(rest.pop(), name)
    first = rest[0] if rest and not padded else None
    whole = getattr(first, "prompt_ignore_length", None) is None
    if type(first) is processes.RepetitionPenaltyLogitsProcessor and whole:
        fields["repetition_penalty"] = rest.pop(0).penalty
    return fields, rest


def criteria_by_row(criteria: Sequence[Any], rows: int) -> tuple[tuple[int, ...], list[list[Any]]]:
    """End-of-text tokens that the criteria name, and by row who else is asked whether its text
    ends, but for its length. Criteria may keep state of the rows of a batch, which here advance
    each at its own pace: every row has copies of its own."""
    native = criteria_of.MaxLengthCriteria, criteria_of.EosTokenCriteria
    named = [c.eos_token_id for c in criteria if isinstance(c, criteria_of.EosTokenCriteria)]
    ends = {int(i) for ids in named for i in torch.as_tensor(ids).reshape(-1)}
    own = [c for c in criteria if type(c) not in native]
    copied = rows > 1 and any(type(c).__module__ not in OWN for c in own)
    try:
        copies = [copy.deepcopy(own) if copied else own for _ in range(rows)]
    except Exception as error:
        what = f"stopping criteria that cannot be copied ({error}) serve one text at a time"
        raise SettingError(f"{what}; give one prompt") from error
    return tuple(sorted(ends)), copies
