"""Nodes: what else a draft might have said, judged in the target's pass beside its tokens.

A node at place n follows the first n drafted tokens, like the drafted token there, or another node.
Where the drafted token is rejected and the node comes instead, the round commits the target's own
token behind it, too, or goes on along a node that is that. Second choices, *leaves*, have no nodes
behind them; those of a tree were drafted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from forerun.arrays import sample
from forerun.drafters.base import Proposal
from forerun.engine.judging import Judgements, RowVerdict
from forerun.engine.lengths import Lengths
from forerun.engine.row import Row
from forerun.engine.sampling import Sampler
from forerun.lazy import torch
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
    """Put nodes of trees, or second choices, beside drafted tokens, where policies say so and the
    context has room."""
    pairs = list(zip(proposal.tokens, able, strict=True))
    trees = {i: tree.beside(proposal.tokens[i]) for i, tree in proposal.trees.items()}
    drafted = [len(own) if takes or i in trees else 0 for i, (own, takes) in enumerate(pairs)]
    chosen = lengths.nodes(drafted, {i: chances for i, (_, chances) in trees.items()})
    for i, own in enumerate(chosen):
        room = rows[i].limit - len(rows[i].context) - len(proposal.tokens[i])
        if i in trees:
            nodes = [trees[i][0][n] for n in own]
        else:
            seconds = ((n, _second(proposal, rows[i], i, n)) for n in own)
            nodes = [(n, token) for n, token in seconds if token is not None]
        if nodes[:room]:
            proposal.nodes[i] = nodes[:room]


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
    pieces: Sequence[Sequence[int]], wanted: Sequence[int], proposal: Proposal
) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Pieces with nodes behind them, how many logits are wanted then, and what tokens follow."""
    grown, counts = list(map(list, pieces)), list(wanted)
    parents: list[list[int]] = [[] for _ in pieces]
    for row, own in proposal.nodes.items():
        before = len(pieces[row]) - wanted[row]  # the token in front of the draft
        parents[row] = [-1] * len(pieces[row]) + [before + place for place, _ in own]
        grown[row] += [token for _, token in own]
        counts[row] += len(own)
    return grown, counts, parents


def follow(judged: Judgements, proposal: Proposal, best: Best, wanted: Sequence[int]) -> None:
    """Keep nodes that are the target's own token, where all are arg-maxes of what `best` is of."""
    rows = list(proposal.nodes)
    while kept := next_nodes(judged, proposal, rows):
        for row, n in kept.items():
            verdict, column = judged[row], wanted[row] + n
            assert isinstance(verdict, RowVerdict)
            if not best.sound[row][column]:
                rows.remove(row)
                continue
            verdict.path.append(n)
            verdict.following = best.tokens[row][column]


def follow_shaped(
    judged: Judgements, proposal: Proposal, rows: Sequence[Row], tails: Mapping[int, torch.Tensor],
    sampler: Sampler,
) -> None:  # fmt: skip
    """Keep nodes that come next: `tails` are per row `(nodes, V)` raw logits after each."""
    for i in proposal.nodes:
        verdict = judged.get(i)
        if isinstance(verdict, RowVerdict) and verdict.probs is not None and not rows[i].certain:
            _toss(verdict, proposal, rows[i], i)
    going = list(proposal.nodes)
    while kept := next_nodes(judged, proposal, going):
        other = next(tails[row][n] for row, n in kept.items())
        texts: list[list[int]] = [[] for _ in rows]
        for row, n in kept.items():
            verdict = judged[row]
            assert isinstance(verdict, RowVerdict)
            verdict.path.append(n)
            texts[row] = path_of(verdict, proposal, row)
        columns = [tails[row][kept[row]] if row in kept else other for row in range(len(rows))]
        shaped = sampler.process(torch.stack(columns).unsqueeze(1), rows, texts, None)
        best = best_of(shaped, NO_SIGNALS)
        going = list(kept)
        for row in kept:
            verdict = judged[row]
            assert isinstance(verdict, RowVerdict)
            if not best.sound[row][0]:
                verdict.path.pop()
                going.remove(row)
                continue
            verdict.following = best.tokens[row][0]
            if not rows[row].certain:
                probs = shaped[row, 0].softmax(-1)
                verdict.following = int(sample(probs, next(rows[row].coins)))


def _toss(verdict: RowVerdict, proposal: Proposal, row: Row, i: int) -> None:
    """Draw the token after the accepted ones anew, by way of the node there, if there is one."""
    own = dict(proposal.nodes[i])
    if verdict.following is None or verdict.accepted not in own:
        return
    token, coin, second = own[verdict.accepted], next(row.coins), next(row.coins)
    probs = torch.as_tensor(verdict.probs)
    drawn_from = _without_first(proposal, i, verdict.accepted).to(probs)
    chance, rest = second_draw(probs, drawn_from, token)
    kept = coin < chance
    verdict.following = token if kept else int(sample(rest, second))


def next_nodes(
    judged: Mapping[int, RowVerdict | Exception], proposal: Proposal, rows: Iterable[int]
) -> dict[int, int]:
    """Which node is the target's own token behind what is kept so far, of rows where one is."""
    out = {}
    for row in rows:
        if isinstance(verdict := judged.get(row), RowVerdict):
            first, own = len(proposal.tokens[row]) + 1, proposal.nodes[row]
            place = first + verdict.path[-1] if verdict.path else verdict.accepted
            if (node := (place, verdict.following)) in own:
                out[row] = own.index(node)
    return out


def path_of(verdict: RowVerdict, proposal: Proposal, row: int) -> list[int]:
    """The tokens of a row that are kept, drafted ones and nodes."""
    nodes = [proposal.nodes[row][n][1] for n in verdict.path]
    return [*proposal.tokens[row][: verdict.accepted], *nodes]
