"""transformers' logits processors and stopping criteria, asked as `generate` asks them."""

from __future__ import annotations

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
REFUSED = (processes.UnbatchedClassifierFreeGuidanceLogitsProcessor,)


class Shown:
    """A row's text as `generate` shows it: behind its padded prompt, in its place of the batch.

    Args:
        prompts: `(rows, n)` padded ids.
        row: which of them.
        asked: objects that will be shown it; if they all are transformers' own and know no places,
            a batch of one row stands for all.
    """

    def __init__(self, prompts: torch.Tensor, row: int, asked: Sequence[Any]) -> None:
        alone = all(type(a).__module__ in OWN and not isinstance(a, PLACED) for a in asked)
        self.place = 0 if alone else row
        self._prompt = prompts[row : row + 1]
        self._rows = 1 if alone else len(prompts)

    def ids(self, output: Sequence[int]) -> torch.Tensor:
        """`(rows, n + len(output))`, with the same text in every place."""
        tail = torch.tensor([list(output)], dtype=self._prompt.dtype, device=self._prompt.device)
        return torch.cat([self._prompt, tail], 1).expand(self._rows, -1)


class Processing:
    """A row's processors as `Sampling.processor`.

    Whatever one raises is kept in `error`, and ends the row by `Stopping`.
    """

    def __init__(self, processors: Sequence[Any], prompts: torch.Tensor, row: int) -> None:
        self._processors = processes.LogitsProcessorList(processors)
        self._shown = Shown(prompts, row, processors)
        self.error: Exception | None = None

    def __call__(self, output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if self.error is None:
            try:
                ids = self._shown.ids(output)
                scores = logits.to(ids.device).expand(len(ids), -1).clone()
                return self._processors(ids, scores)[self._shown.place]
            except Exception as error:  # of anybody's processor
                self.error = error
        return logits


class Stopping:
    """A row's stopping criteria as `Sampling.stopping`; scores are None."""

    def __init__(
        self, criteria: Sequence[Any], prompts: torch.Tensor, row: int, processing: Any
    ) -> None:
        self._criteria, self._shown = criteria, Shown(prompts, row, criteria)
        self._processing: Processing | None = processing
        self.error: Exception | None = None

    def __call__(self, output: Sequence[int]) -> bool:
        try:
            if self._processing is not None and self._processing.error is not None:
                raise self._processing.error
            ids = self._shown.ids(output) if self._criteria else None
            ended = False
            for criterion in self._criteria:  # all are asked, always: they may count
                ended |= self._ends(criterion(ids, None))
            return ended
        except Exception as error:
            self.error = error
            raise

    def _ends(self, answer: Any) -> bool:
        """A criterion's word on the row; on all of the batch, if it has but one."""
        answers = torch.as_tensor(answer).reshape(-1)
        return bool(answers[self._shown.place if len(answers) > 1 else 0])


def sampling_of(
    processors: Sequence[Any], prompts: torch.Tensor, row: int, ignored: int, samples: bool
) -> tuple[dict[str, Any], Processing | None]:
    """Which processors are settings of `Sampling`, and the others, in their order.

    Args:
        processors: as `generate` prepares them.
        prompts: `(rows, n)` padded ids.
        row: which of them.
        ignored: tokens of padding.
        samples: whether tokens are drawn.

    Raises:
        SettingError: a processor that runs the model itself.
    """
    rest = [p for p in processors if type(p) is not processes.LogitNormalization]
    for processor in rest:
        if isinstance(processor, REFUSED):
            raise SettingError(f"{type(processor).__name__} runs the model itself; leave it out")
    fields: dict[str, Any] = {"temperature": float(samples)}
    for kind, name in reversed(TEMPERING if samples else ()):
        plain = rest and type(rest[-1]) is kind and getattr(rest[-1], "min_tokens_to_keep", 1) == 1
        if plain and getattr(rest[-1], "filter_value", -torch.inf) == -torch.inf:
            fields[name] = getattr(rest.pop(), name)
    first = rest[0] if rest else None
    if type(first) is processes.RepetitionPenaltyLogitsProcessor and not ignored:
        skipped = getattr(first, "prompt_ignore_length", None)
        if skipped is None or not torch.as_tensor(skipped).any():
            fields["repetition_penalty"] = rest.pop(0).penalty
    return fields, Processing(rest, prompts, row) if rest else None


def stopping_of(
    criteria: Sequence[Any], prompts: torch.Tensor, processing: Sequence[Processing | None]
) -> list[Stopping | None]:
    """Per row who is asked whether its text ends, but for length and end-of-text tokens.

    Criteria may keep state of the rows of a batch, which here advance each at its own pace: every
    row has copies of its own.

    Raises:
        SettingError: a criterion that cannot be copied.
    """
    native = criteria_of.MaxLengthCriteria, criteria_of.EosTokenCriteria
    own = [c for c in criteria if type(c) not in native]
    shared = len(prompts) == 1 or all(type(c).__module__ in OWN for c in own)
    try:
        copies = [own if shared else copy.deepcopy(own) for _ in prompts]
    except Exception as error:
        raise SettingError(
            f"stopping criteria that cannot be copied ({error}) serve one text at a time; give "
            "one prompt"
        ) from error
    return [
        Stopping(asked, prompts, row, processed) if asked or processed else None
        for row, (asked, processed) in enumerate(zip(copies, processing, strict=True))
    ]


def ends_of(criteria: Sequence[Any]) -> tuple[int, ...]:
    """End-of-text tokens that the criteria name."""
    named = [c.eos_token_id for c in criteria if isinstance(c, criteria_of.EosTokenCriteria)]
    return tuple(sorted({int(i) for ids in named for i in torch.as_tensor(ids).reshape(-1)}))
