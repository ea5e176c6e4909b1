"""Training of heads over the target's states, through as many steps as a draft has; those of
EAGLE-3 are written as `speculators` lays them out.

They learn the target's distribution over their own vocabulary and the target's best token, at the
places of what the target wrote; steps after the first read the head's own outputs, as in use.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from forerun.runtime.base import Rows
from forerun.runtime.drafts import About, Tensors, rounded
from forerun.runtime.eagle import EagleHead, HeadForm, StateHead, rms
from forerun.runtime.eagle3 import Eagle3Head, save_head
from forerun.runtime.head_file import HEAD
from forerun.runtime.layers import LayerAccess
from forerun.runtime.packing import dense
from forerun.runtime.states import check_depths
from forerun.training.fit import Document, Own, StatesTraining, cut, padded
from forerun.training.muon import Muon, product_type
from forerun.training.settings import TrainingSettings

STEPS = 3
MOST_TOKENS = 8192
"""That a head says unless told otherwise, and at most a third of its target's: the projection onto
them is a large part of a step."""
WEIGHT = 0.8
"""Of a step's loss, over that of the step before."""
LEARNED = 0.5
"""Share of the places at which the second and later steps are learned."""
SOFT = 0.7
"""Share of the loss towards the target's distribution; the rest is towards its best token."""
ROWS = 4
"""Texts that run together."""
MATRIX_RATE = 0.02
"""Peak learning rate of the matrices, by Muon; the settings' is that of the table and the norms."""

FLAGS = frozenset({"fc_norm", "norm_before_residual"})
"""The variant: what the layer reads and adds to keeps its size, within a draft, too."""
SAMPLE = 256
"""Texts that a linear map is fitted to, and"""
RIDGE = 1e-3
"""what is added to the squares of what it reads, in their mean."""
MATCH = 12.0
"""Logit at which a head that copies begins to see a token that was read before, and"""
MIXED = 0.5
"""size of what says the token read in a fused state, of all of that, at its beginning."""
Text = tuple[torch.Tensor, torch.Tensor]
"""`(n,)` ids and `(n, ...)` states."""


class HeadTrainer(StatesTraining):
    """A head over states in training."""

    head: StateHead

    def __init__(
        self, target: Rows, settings: TrainingSettings, texts: Sequence[Document] = ()
    ) -> None:
        super().__init__(target, settings, texts)
        assert self.vocabulary is not None
        self._said = self._access.unembedding_of(self.vocabulary)
        self._noted: dict[int, tuple[Document, torch.Tensor, torch.Tensor]] = {}
        """By the identity of a text, which is kept beside so that it stays one: log-sums of the
        target's exponentials and its best tokens, `(positions,)` each."""

    def _spread(self, layers: int) -> set[int]:
        """Depths that are read unless others are asked for, of so many layers."""
        return {max(1, layers // 3), max(1, 2 * layers // 3), layers}

    def _read(self, layers: int) -> Sequence[int]:
        depths = check_depths(self.settings.layers or sorted(self._spread(layers)), layers)
        wanted = sorted({*depths, layers})
        self._columns = [wanted.index(depth) for depth in depths]
        return depths

    def _tokens(self, texts: Sequence[Document]) -> torch.Tensor | None:
        vocab, asked = len(self._access.unembedding), self.settings.vocab
        most = min(vocab // 3, MOST_TOKENS) if asked is None else asked or vocab
        return cut(texts, min(most, vocab), self._access)

    def _known(self, texts: Sequence[Document]) -> list[torch.Tensor]:
        """Per text `(n, depths × H)` states that the head reads."""
        return [own[:, self._columns].flatten(1).float() for own in self._states.of(texts)]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return optimizers(self.own, self.settings.lr or 0.0)

    def _rate(self, share: float) -> float:
        """Up, level for a third, and down in a line."""
        return min(1.0, 30 * share, max(0.05, 1 - (share - 0.3) / 0.7))

    def train(self, texts: Sequence[Document]) -> Iterator[dict[str, Any]]:
        """Steps to the end of the settings; what stands before an answer is learned from, too,
        since every step reads it."""
        return super().train([text._replace(start=0) for text in texts])

    def _losses(self, texts: Sequence[Document], rng: random.Random) -> Iterator[torch.Tensor]:
        count = sum(text.positions for text in texts)
        for part in self._batches(texts):
            outputs, goals, _ = self._both(part)
            total = outputs[0].new_zeros(())
            for step, x in enumerate(outputs):
                share = LEARNED if step else 1.0
                learned = torch.rand(len(x), device=x.device) < share
                with self._products():
                    logits = self.head.logits(x[learned])
                loss = loss_of(logits, goals[learned])
                total = total + WEIGHT**step * loss / (share * count)
            yield total

    def _batches(self, texts: Sequence[Document]) -> Iterator[Sequence[Document]]:
        """By length, few together: a text is padded to the longest beside it."""
        ordered = sorted(texts, key=lambda text: len(text.ids))
        for first in range(0, len(ordered), ROWS):
            yield ordered[first : first + ROWS]

    def _both(
        self, texts: Sequence[Document]
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Outputs `(n, D)` of each step where it counts, and what `goals_of` says of there."""
        ids = padded([text.ids for text in texts], 0)[0].to(self.target.device)
        assert self.vocabulary is not None
        if self.head.reads == len(self.vocabulary):
            ids = self._index[ids]
            ids = torch.where(ids < 0, len(self.vocabulary), ids)
        known_of_all = torch.nn.utils.rnn.pad_sequence(self._known(texts), batch_first=True)
        with self._products():
            outputs = unrolled(self.head, ids, known_of_all, len(self.depths))
        counts = self._scored(texts)
        goals, best = self._goals(texts)
        return [x[counts] for x in outputs], goals, best

    @torch.no_grad()
    def _goals(self, texts: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor]:
        """What `goals_of` says. A row over the target's whole vocabulary is several times a step
        of the head: what is needed of it is noted when a text comes first."""
        for text in (text for text in texts if id(text) not in self._noted):
            own = self._access.logits(self._scored_states([text])[:, -1]).float()
            self._noted[id(text)] = text, own.logsumexp(-1), own.argmax(-1)
        _, sums, tops = zip(*(self._noted[id(text)] for text in texts), strict=True)
        logits = self._access.logits(self._scored_states(texts)[:, -1], self._said)
        return goals_of(logits, torch.cat(sums), self._index[torch.cat(tops)])

    def _products(self) -> torch.autocast:
        """In training, the head's matrices multiply in bfloat16 where there are instructions for
        it; the target's states and what is measured are of full precision."""
        device = self.target.device.type
        dtype = product_type(device)
        fast = dtype != torch.float32 and torch.is_grad_enabled()
        return torch.autocast(device, dtype, enabled=fast)

    def _form(self) -> dict[str, Any]:
        return {"depths": list(self.depths)}

    def _right(self, texts: Sequence[Document]) -> torch.Tensor:
        outputs, _, best = self._both(texts)
        return torch.stack([self.head.logits(x).argmax(-1) == best for x in outputs], -1)

    def _measured(self, parts: Sequence[tuple[Sequence[Document], torch.Tensor]]) -> dict[str, Any]:
        """As of any draft; and "tokens_per_round" of rounds one after the other (1 + kept), over
        all texts and "by_family", which is what counts: misses come in runs."""
        rounds: dict[str, list[int]] = {}
        for texts, hits in parts:
            counts = [text.positions for text in texts]
            for text, right in zip(texts, hits.split(counts), strict=True):
                count = rounds.setdefault(text.family, [0, 0])
                count[0] += rounds_of(right)
                count[1] += len(right)
        pace = {name: round(n / max(r, 1), 3) for name, (r, n) in sorted(rounds.items())}
        every = [sum(column) for column in zip(*rounds.values(), strict=True)]
        out = super()._measured(parts) | {"tokens_per_round": round(every[1] / every[0], 3)}
        return out | ({"by_family": pace} if len(pace) > 1 else {})


class EagleTrainer(HeadTrainer):
    """The head behind the drafter `eagle` in training."""

    def _begun(self, tokens: torch.Tensor | None, texts: Sequence[Document]) -> Own:
        assert tokens is not None
        assert self.settings.width is not None
        self.head = begun(self._access, self.settings.width, tokens, len(self.depths))
        return dict(self.head.named_parameters())

    def _tensors(self) -> Tensors:
        return rounded(self.own)


class Eagle3Trainer(HeadTrainer):
    """A head of EAGLE-3 in training."""

    head: Eagle3Head

    def _spread(self, layers: int) -> set[int]:
        """One near the beginning, too: it says which token was read, by which places are found."""
        return {min(2, layers), max(1, layers // 2), layers}

    @torch.no_grad()
    def _begun(self, tokens: torch.Tensor | None, texts: Sequence[Document]) -> Own:
        assert tokens is not None
        table = dense(self._access.model.get_input_embeddings().weight).detach()
        self.head = begun3(self._access, table, tokens, len(self.depths))
        read = [
            (torch.tensor(text.ids, device=table.device), known)
            for part in self._batches(texts[:SAMPLE])
            for text, known in zip(part, self._known(part), strict=True)
        ]
        depths, copying = len(self.depths), None
        if self.head.form.heads > 1:
            copying = begin_copying(self.head, read, depths)
        begin_linear(
            self.head, [(ids[1:], self.head.fused(own, depths)) for ids, own in read], copying
        )
        return dict(self.head.named_parameters())

    def _write(self, folder: Path, about: About) -> None:
        assert self.vocabulary is not None
        trained = {"target": about.target, **about.trained}
        save_head(folder, self.head, self.vocabulary, self.depths, trained)


def optimizers(own: Own, rate: float) -> list[torch.optim.Optimizer]:
    """Of a head's parameters: Muon for matrices, AdamW at `rate` for tables and norms."""
    tables = ("embedding.weight", "unembedding.weight")
    matrices = [p for name, p in own.items() if p.dim() == 2 and name not in tables]
    others = [p for name, p in own.items() if p.dim() == 1 or name in tables]
    return [
        Muon(matrices, lr=MATRIX_RATE, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def unrolled(
    head: StateHead, ids: torch.Tensor, states: torch.Tensor, depths: int, steps: int = STEPS
) -> list[torch.Tensor]:
    """`(n, tokens, D)` outputs of each step, at every place at once, from `(n, tokens)` ids in the
    head's vocabulary and `(n, tokens, depths × H)` states of the target.

    At place i, step s (from 0) has read the target's states up to place i − s − 1 and its own
    outputs of the steps before from there on, as the s-th token of a draft does.
    """
    places = torch.arange(head.first, ids.shape[1], device=ids.device)
    before = _shifted(head.fused(states, depths))[:, head.first :]
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        step = len(keys)
        keys.append(k)
        values.append(v)
        if step == 0:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # The draft's own keys stand at the last places, one of each step.
        ago = places[:, None] - places
        seen = torch.cat([ago >= step, *(ago == step - r for r in range(1, step + 1))], 1)
        return F.scaled_dot_product_attention(
            q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=seen
        )

    out = []
    for _ in range(steps):
        x = head.layer(ids[:, head.first :], before, places[None], attend)
        out.append(F.pad(x, (0, 0, head.first, 0)))
        before = _shifted(x)
    return out


def goals_of(
    logits: torch.Tensor, sums: torch.Tensor, best: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a head is to say where the target says `(n, V)` logits of the head's vocabulary, `(n,)`
    log-sums of its exponentials over all of its own, and `(n,)` places of its best tokens in the
    head's, −1 for one outside: `(n, V)` shares, which sum to 1 less those outside, and `best`."""
    goals = SOFT * (logits.float() - sums[:, None]).exp()
    hard = (1 - SOFT) * (best >= 0).to(goals.dtype)
    return goals.scatter_add_(1, best.clamp(min=0)[:, None], hard[:, None]), best


def loss_of(logits: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, nats, of `(n, V)` logits to goals, summed over places."""
    return -(goals * logits.float().log_softmax(-1)).sum()


def rounds_of(right: torch.Tensor) -> int:
    """Rounds over the places of a text; `(places, steps)` whether each step is right there."""
    place, count, table = 0, 0, right.tolist()
    while place < len(table):
        kept = 0
        while kept < len(table[0]) and place < len(table) and table[place][kept]:
            kept, place = kept + 1, place + 1
        count, place = count + 1, place + 1
    return count


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """By a token, with zeros first."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


@torch.no_grad()
def begun(access: LayerAccess, width: int, tokens: torch.Tensor, depths: int) -> EagleHead:
    """A head whose table is the target's own, turned into its main directions, as what it reads of
    the last depth is; the rest is small and random."""
    hidden, device = access.width, tokens.device
    head = EagleHead(width, 11 * width // 4, len(tokens), depths * hidden).to(device)
    own = access.unembedding[tokens].float()
    main = torch.linalg.svd(own, full_matrices=False).Vh[:width]
    basis = F.pad(main, (0, 0, 0, width - len(main)))
    table = own @ basis.T
    table = table * (0.6 / table.norm(dim=1).mean())
    head.embedding.weight.copy_(torch.cat([table, table.mean(0, keepdim=True)]))
    parts = {"qkv": 0.7, "gate_up": 0.7, "out": 0.3, "down": 0.3, "input": 0.3, "fuse": 0.5}
    spread_out(head, parts)
    head.input.weight += 0.4 * torch.eye(width, device=device).repeat(1, 2)
    head.fuse.weight[:, -hidden:] = basis @ normed_identity(access)
    return head


def spread_out(head: StateHead, parts: Mapping[str, float]) -> None:
    """Draw matrices at random: standard deviations, times the square root of what each reads."""
    for name, spread in parts.items():
        weight = getattr(head, name).weight
        torch.nn.init.normal_(weight, std=spread * weight.shape[1] ** -0.5)


def normed_identity(access: LayerAccess) -> torch.Tensor:
    """`(H, H)` the final norm's weights, which states of depth L have not met, as a diagonal."""
    like, hidden = access.unembedding, access.width
    scale = access.norm(torch.eye(hidden, dtype=like.dtype, device=like.device) * hidden**0.5)
    return (scale.float() * hidden**-0.5).diag().diag()


@torch.no_grad()
def begun3(
    access: LayerAccess, table: torch.Tensor, tokens: torch.Tensor, depths: int
) -> Eagle3Head:
    """A head of EAGLE-3 that says what the target's last states do, but for what is small and
    random; its embeddings are `table` `(V', H)`, its vocabulary `tokens` `(V,)`."""
    hidden = access.width
    width = gcd(hidden, HEAD)
    rates = tuple(1e4 ** (-2 * i / width) for i in range(width // 2))
    form = HeadForm(hidden, 8 * hidden // 3, hidden // width, hidden // width, width, rates=rates)
    head = Eagle3Head(form, FLAGS, table, len(tokens), depths * hidden).to(tokens.device)
    head.unembedding.weight.copy_(access.unembedding[tokens])
    spread_out(head, {"qkv": 0.7, "gate_up": 0.7, "out": 0.3, "down": 0.3, "fuse": 0.2})
    head.fuse.weight[:, -hidden:] += normed_identity(access)
    return head


@torch.no_grad()
def begin_copying(head: Eagle3Head, texts: Sequence[Text], depths: int) -> Text:
    """Queries and keys `(width of a head, 2 D)` that see the places behind earlier occurrences of
    the token just read, from states `(n, depths × H)`: keys are what a state says of the token
    that was read with it, which fused states are made to say.

    Tokens are compared in random directions, by the half of a head's numbers that hardly turn with
    distance.
    """
    width, size = head.width, head.form.head_width
    tokens = torch.cat([head.attention_norm(F.embedding(ids, head.table).float())
                        for ids, _ in texts])  # fmt: skip
    half = size // 2
    still = [*range(half // 2, half), *range(half + half // 2, size)]
    directions = torch.linalg.qr(torch.randn(width, width)).Q[: len(still)].to(tokens)
    directions /= (tokens @ directions.T).square().mean().sqrt()
    codes = tokens @ directions.T
    states = torch.cat([own for _, own in texts])
    normed = rms(states.unflatten(-1, (depths, -1)), head.form.eps).flatten(-2)
    of_states, fused = _closest(normed, codes), head.fused(states, depths)
    share = MIXED * (fused.square().mean() / (normed @ of_states).square().mean()).sqrt()
    room = torch.linalg.qr(torch.randn(width, width)).Q[:, : len(still)].to(tokens)
    head.fuse.weight += share * (len(still) / width) ** -0.5 * room @ of_states.T
    known = rms(head.fused(states, depths), head.form.eps)
    of_fused = _closest(known, codes)
    logit = ((known @ of_fused) * codes).sum(-1).mean() * size**-0.5
    sharp = (MATCH / logit.clamp(min=1e-3)).sqrt()
    query, key = 0.02 * torch.randn(2, size, 2 * width).to(tokens) * sharp * directions.std()
    query[still, :width] += sharp * directions
    key[still, width:] += sharp * of_fused.T
    return query, key


@torch.no_grad()
def begin_linear(head: Eagle3Head, texts: Sequence[Text], copying: Text | None = None) -> None:
    """Let a head of `begun3` begin as the linear map that comes closest to the target's next state,
    by least squares over texts: of each `(n − 1,)` ids from the second on, and `(n, D)` states,
    fused. It is of a token and the state before it, and of what the last attention head sees by
    `copying`, if it is there.

    Other queries and keys are both the token's embedding, turned, so that a place attends to
    itself; values and what follows them are two factors of the map.
    """
    width, size = head.width, head.form.head_width
    own = [head.entered(ids, states[:-1])[1] for ids, states in texts]
    read, parts = torch.cat(own), [torch.cat(own)]
    if copying is not None:
        parts.append(torch.cat([seen_by(head, read, *copying) for read in own]))
    goal, before = torch.cat([states[1:] for _, states in texts]), read[:, width:]
    linear = _closest(torch.cat(parts, 1), head.state_norm(goal) - before)
    ranks = [size * (head.form.heads - len(parts) + 1), size][: len(parts)]
    pieces = zip(parts, linear.split(2 * width), ranks, strict=True)
    outs, values = zip(*(_factors(*piece) for piece in pieces), strict=True)
    turned = F.pad(torch.linalg.qr(torch.randn(width, width)).Q.to(read), (0, width))[: ranks[0]]
    query, key = copying or (read[:0], read[:0])
    head.out.weight.copy_(torch.cat(outs, 1))
    head.qkv.weight.copy_(torch.cat([turned, query, turned, key, *values]))
    made = [part @ (out @ value).T for part, out, value in zip(parts, outs, values, strict=True)]
    guess = rms(before + sum(made))
    head.norm.weight.fill_(float((guess * goal).sum() / guess.square().sum()))


def seen_by(
    head: Eagle3Head, read: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """`(n, 2 D)` means of what the layer reads of a text from its second token on, as an attention
    head with these queries and keys weighs them."""
    both = torch.stack([read @ query.T, read @ key.T])[None]
    places = torch.arange(1, len(read) + 1, device=read.device)[None]
    queries, keys = head.turned(both, places)[0]
    return F.scaled_dot_product_attention(queries[None], keys[None], read[None], is_causal=True)[0]


def _closest(read: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    squares = read.T @ read
    squares.diagonal().add_(RIDGE * squares.diagonal().mean())
    return torch.linalg.solve(squares, read.T @ goal)


def _factors(
    read: torch.Tensor, linear: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(b, rank)` and `(rank, a)`, whose product says most nearly what an `(a, b)` map says of
    `(n, a)` numbers."""
    squares, axes = torch.linalg.eigh(read.T @ read / len(read))
    spread = squares.clamp(min=1e-6 * float(squares[-1])).sqrt()[:, None]
    left, sizes, right = torch.linalg.svd(spread * (axes.T @ linear), full_matrices=False)
    values = (axes @ (left / spread))[:, :rank].T
    lengths = values.norm(dim=1)
    share = (sizes[:rank] / lengths).sqrt()
    return (right[:rank] * (share * lengths)[:, None]).T, values * share[:, None]
