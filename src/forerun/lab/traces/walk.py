"""Recording with any drafter: the live engine, drafting before every token and keeping nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forerun.arrays import softmax
from forerun.controllers.fixed import FixedLength
from forerun.drafters.base import Proposal
from forerun.engine import Request, Sampling
from forerun.engine.judging import Judgements, RowVerdict, raw_of
from forerun.engine.loop import Engine
from forerun.engine.sampling import Sampler
from forerun.errors import GenerationError
from forerun.lab.traces.trace import JUDGED, SIGNALS, compared
from forerun.model import Model
from forerun.rules.gumbel import Gumbel
from forerun.rules.odds import OVERLAPPED, Odds, nats
from forerun.runtime.base import Pieces
from forerun.types import Draft, Target

ALWAYS = frozenset(JUDGED) - {"top5_overlap", "target_rank"}
"""What is known of a token that was drafted without a distribution."""
DraftedRun = tuple[list[int], int, dict[str, Any]]
"""Its tokens, why it stopped, a value of `Stop`, and `(n,)` of `SIGNALS` and `JUDGED` by name."""


def judged_columns(
    sampler: Sampler,
    both: Sequence[torch.Tensor],
    tokens: torch.Tensor,
    best: torch.Tensor,
    ordered: torch.Tensor | None,
) -> dict[str, Any]:
    """`(rows, n)` of every one of `JUDGED`.

    Args:
        sampler: the rows' own, without noise.
        both: `(rows, n, V)` logits that it shaped, of the target and of the draft; of the target
            alone if the drafter has no distribution.
        tokens: `(rows, n)` drafted.
        best: `(rows, n)` the target's own.
        ordered: `(rows, n, V)` what the draft drew from, with its noise, if it has any.
    """
    target, draft = both[0], both[1] if len(both) > 1 else None
    drawn, greedy = None, sampler.certain
    if draft is not None and not sampler.all_certain:
        only = torch.full_like(draft, -torch.inf).scatter(-1, tokens.unsqueeze(-1), 0.0)
        drawn = torch.where(greedy.to(draft.device).view(-1, 1, 1), only, sampler.sharpen(draft))
    lengths = torch.full((len(tokens),), tokens.shape[1], device=tokens.device)
    odds = Odds(
        Draft(tokens, lengths, None if drawn is None else softmax(drawn), draft),
        Target(sampler.sharpen(target), greedy, target),
    )
    unknown = torch.full_like(odds.ratio, torch.nan)
    out = {
        "ratio": odds.ratio,
        "target_top1": odds.top.squeeze(-1),
        "target_entropy": nats(target),
        "gap": (odds.best_logit - odds.tokens.logits).squeeze(-1),
        "rank": odds.rank,
        "variation": 1 - odds.overlap,
        "top5_overlap": unknown,
        "target_rank": unknown,
    }
    if draft is not None and ordered is not None:
        at = ordered.gather(-1, best.unsqueeze(-1))
        out["target_rank"] = (ordered > at).sum(-1)
        out["top5_overlap"] = odds.shared(OVERLAPPED) / min(OVERLAPPED, target.shape[-1])
    exact = {n: v.float() if v.dtype == torch.bfloat16 else v for n, v in out.items()}
    return {name: values.cpu().numpy() for name, values in exact.items()}


@dataclass(frozen=True)
class FullDepth(FixedLength):
    """Drafts so many tokens in every round, and is shown everything."""

    def signals(self, certain: bool) -> frozenset[str]:
        return frozenset(SIGNALS)


@dataclass(frozen=True)
class GumbelWithDraft(Gumbel):
    """`gumbel` that has the draft's logits kept."""

    reads_draft = True


class Recorder(Engine):
    """Writes texts a token a round, and notes the run drafted before each."""

    def __init__(self, model: Model, rows: int) -> None:
        super().__init__(model.target, model.drafter, model.tokenizer, model.eos, rows)
        self.runs: dict[int, list[DraftedRun]] = {}
        """By request, in the order of its tokens, what was drafted before each."""

    def _judge(self, proposal: Proposal, pieces: Pieces, wanted: Sequence[int]) -> Judgements:
        """Note what was drafted; the target's own token is all that stands."""
        logits = self.target.feed(pieces, wanted)
        if not any(wanted):
            return {}
        self._tell(logits.argmax(-1).tolist(), pieces, wanted)
        rows, tokens = self._rows, proposal.tokens
        best = self._sampler.shape(logits, rows, tokens).argmax(-1)
        width = max(map(len, tokens))
        values: dict[str, Any] = {}
        if width:
            drafted = torch.tensor([[*t, *[0] * (width - len(t))] for t in tokens])
            coins = Sampler([row.sampling for row in rows], [row.eos for row in rows])
            both, ordered = [coins.shape(logits[:, :width], rows, tokens)], None
            if (raw := raw_of(proposal, width)) is not None:
                both.append(coins.shape(raw, rows, tokens))
                ordered = self._sampler.shape(raw, rows, tokens)
            drafted = drafted.to(logits.device)
            values = judged_columns(coins, both, drafted, best[:, :width], ordered)
        out = Judgements()
        for i, row in enumerate(rows):
            if not wanted[i]:
                continue
            count, shown = len(tokens[i]), proposal.shown[i]
            own: dict[str, Any] = {
                name: np.array([getattr(t, name) for t in shown] or [None] * count, dtype=float)
                for name in SIGNALS
            }
            own |= {name: values[name][i, :count] for name in JUDGED if count}
            self.runs[row.id].append((tokens[i], int(proposal.stopped_by[i] or 0), own))
            out[i] = RowVerdict(0, int(best[i, 0]), [0.0] * count)
        return out


def walked(
    model: Model, contexts: Sequence[Any], how: Sequence[Sampling], depth: int
) -> list[dict[str, Any]]:
    """Texts with their runs: of each the fields of its `Trace`, `(T,)` and `(T, K)`, K = `depth`;
    `contexts` are prompts and sources, as of `Model.context`, and `how` their settings, seeded."""
    recorder = Recorder(model, len(contexts))
    rule = GumbelWithDraft() if model.drafter.has_distribution else Gumbel()
    try:
        for (prompt, source), sampling in zip(contexts, how, strict=True):
            request = Request(prompt, sampling, FullDepth(depth), rule, source)
            recorder.runs[recorder.submit(request)] = []
        done = {event.request: event.completion for event in recorder.run() if event.completion}
    finally:
        recorder.clear()
    for completion in done.values():
        if completion.error is not None:
            raise GenerationError(completion.error, completion)
    return [_fields(done[number].tokens, own, depth) for number, own in recorder.runs.items()]


def _fields(text: Sequence[int], runs: Sequence[DraftedRun], depth: int) -> dict[str, Any]:
    size = len(text)

    def padded(name: str) -> Any:
        values = [own.get(name, np.empty(0)) for _, _, own in runs]
        known = name in ALWAYS or any(np.isfinite(own).any() for own in values)
        out = np.full((size, depth), 0.0 if known else np.nan)
        for row, own in zip(out, values, strict=True):
            row[: len(own)] = own
        return out

    stops = [stopped_by * (len(tokens) < depth) for tokens, stopped_by, _ in runs]
    return {
        **compared(text, [tokens for tokens, _, _ in runs], depth),
        "tokens": list(text),
        "stops": np.array(stops),
        "signals": {name: padded(name) for name in SIGNALS},
        "judged": {name: padded(name) for name in JUDGED},
    }
