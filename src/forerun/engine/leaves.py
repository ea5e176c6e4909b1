"""Leaves: second choices of the draft, judged in the target's pass beside its tokens.

A leaf at place n follows the first n drafted tokens, like the drafted token there. Where that is
rejected and the leaf comes instead, the round commits the target's own token behind it, too.
"""

from collections.abc import Mapping, Sequence

import torch

from forerun.arrays import sample
from forerun.drafters.base import Proposal
from forerun.engine.judging import Judgements, RowVerdict
from forerun.engine.lengths import Lengths
from forerun.engine.row import Row
from forerun.engine.sampling import Sampler
from forerun.rules.base import second_draw
from forerun.runtime.base import Best, best_of

NO_SIGNALS: frozenset[str] = frozenset()


def takes_leaves(row: Row) -> bool:
    """Whether a request's rule takes second choices, and nothing else looks at its draft."""
    asked = row.request
    scored = asked.logprobs is not None or asked.keep_logits
    known_ahead = row.place is not None or row.prediction is not None
    return asked.rule.takes_leaves and asked.rule.has_bonus and not scored and not known_ahead


def grow(proposal: Proposal, rows: Sequence[Row], able: Sequence[bool], lengths: Lengths) -> None:
    """Put second choices beside drafted tokens, where governors say so and the context has room."""
    pairs = list(zip(proposal.tokens, able, strict=True))
    places = lengths.leaves([len(tokens) if takes else 0 for tokens, takes in pairs])
    for i, own in enumerate(places):
        room = rows[i].limit - len(rows[i].context) - len(proposal.tokens[i])
        leaves = [
            (n, token) for n in own if (token := _second(proposal, rows[i], i, n)) is not None
        ]
        if leaves[:room]:
            proposal.leaves[i] = leaves[:room]


def _second(proposal: Proposal, row: Row, i: int, place: int) -> int | None:
    """The draft's second choice: where coins decide, a draw without the first; None: no other."""
    if row.certain:
        second = proposal.shown[i][place].second
        return None if second is None else int(second)
    if proposal.probs is None or place >= proposal.probs.shape[1]:
        return None
    if not (probs := _without_first(proposal, i, place)).sum() > 0:
        return None
    return int(sample(probs, next(row.coins)))


def _without_first(proposal: Proposal, i: int, place: int) -> torch.Tensor:
    """`(V,)` what a second token of coins is drawn from."""
    assert proposal.probs is not None
    probs = torch.as_tensor(proposal.probs[i, place]).clone()
    probs[proposal.tokens[i][place]] = 0
    return probs / probs.sum()


def attached(
    pieces: Sequence[Sequence[int]],
    wanted: Sequence[int],
    leaves: Mapping[int, Sequence[tuple[int, int]]],
) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Pieces with leaves behind them, how many logits are wanted then, and what tokens follow."""
    grown, counts = list(map(list, pieces)), list(wanted)
    parents: list[list[int]] = [[] for _ in pieces]
    for row, own in leaves.items():
        before = len(pieces[row]) - wanted[row]  # the token in front of the draft
        parents[row] = [-1] * len(pieces[row]) + [before + place for place, _ in own]
        grown[row] += [token for _, token in own]
        counts[row] += len(own)
    return grown, counts, parents


def follow(judged: Judgements, proposal: Proposal, best: Best, wanted: Sequence[int]) -> None:
    """Keep leaves that are the target's own token, where all are arg-maxes of what `best` is of."""
    for row, n in kept_leaves(judged, proposal).items():
        verdict, column = judged[row], wanted[row] + n
        assert isinstance(verdict, RowVerdict)
        if best.sound[row][column]:
            verdict.leaf, verdict.following = n, best.tokens[row][column]


def follow_shaped(
    judged: Judgements, proposal: Proposal, rows: Sequence[Row], tails: Mapping[int, torch.Tensor],
    sampler: Sampler,
) -> None:  # fmt: skip
    """Keep leaves that come next: `tails` are per row `(leaves, V)` raw logits after each."""
    for i in proposal.leaves:
        verdict = judged.get(i)
        if isinstance(verdict, RowVerdict) and verdict.probs is not None and not rows[i].certain:
            _toss(verdict, proposal, rows[i], i)
    if not (kept := kept_leaves(judged, proposal)):
        return
    other = next(tails[row][n] for row, n in kept.items())
    texts: list[list[int]] = [[] for _ in rows]
    for row, n in kept.items():
        place, token = proposal.leaves[row][n]
        texts[row] = [*proposal.tokens[row][:place], token]
    columns = [tails[row][kept[row]] if row in kept else other for row in range(len(rows))]
    shaped = sampler.process(torch.stack(columns).unsqueeze(1), rows, texts, None)
    best = best_of(shaped, NO_SIGNALS)
    for row, n in kept.items():
        verdict = judged[row]
        assert isinstance(verdict, RowVerdict)
        if not best.sound[row][0]:
            continue
        verdict.leaf, verdict.following = n, best.tokens[row][0]
        if not rows[row].certain:
            probs = shaped[row, 0].softmax(-1)
            verdict.following = int(sample(probs, next(rows[row].coins)))


def _toss(verdict: RowVerdict, proposal: Proposal, row: Row, i: int) -> None:
    """Draw the token after the accepted ones anew, by way of the leaf there, if there is one."""
    own = dict(proposal.leaves[i])
    if verdict.following is None or verdict.accepted not in own:
        return
    token, coin, second = own[verdict.accepted], next(row.coins), next(row.coins)
    probs = torch.as_tensor(verdict.probs)
    drawn_from = _without_first(proposal, i, verdict.accepted).to(probs)
    chance, rest = second_draw(probs, drawn_from, token)
    kept = coin < chance
    verdict.following = token if kept else int(sample(rest, second))


def kept_leaves(judged: Mapping[int, RowVerdict | Exception], proposal: Proposal) -> dict[int, int]:
    """Per row which of its leaves is the target's own token."""
    decoded = {row: v for row, v in judged.items() if isinstance(v, RowVerdict)}
    next_ones = {row: (v.accepted, v.following) for row, v in decoded.items()}
    pairs = [(row, own, next_ones.get(row)) for row, own in proposal.leaves.items()]
    return {row: own.index(leaf) for row, own, leaf in pairs if leaf in own}
