"""Recording: the run the draft proposes from every position of the target's own texts.

The target writes its texts plainly. One pass of each model over a text then gives both
distributions at every true prefix, hence the draft's token there and whether the target keeps it.
A run drafted from position p is those very tokens, up to the first the target does not keep at
some m ≥ p; from there on it is off the text, and the same for every such p. So only the *tails*
after a miss are drafted, and read by the target, token by token, as rows of one batch that share
their text's cache. This holds for draft models; any other drafter is asked at every position by the
live engine (`walk`).

Of sampled texts a position is judged at most once in any run, so one coin a position serves every
controller, whose counts then have the live engine's distribution (docs/trace.md); under the rule
`gumbel` both models draw by the noise of a place, and counts are the live engine's own.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from forerun.checks import whole
from forerun.drafters.model import ModelDrafter, fitted
from forerun.drafters.none import NullDrafter
from forerun.engine import Completion, Sampling
from forerun.engine.constraint import split_stops
from forerun.engine.sampling import Noise, Sampler, stream
from forerun.errors import PromptError, require
from forerun.lab import provenance
from forerun.lab.traces.trace import JUDGED, SIGNALS, Trace, concatenate, text_trace
from forerun.lab.traces.walk import judged_columns, walked
from forerun.model import Model
from forerun.rules import RULES, AcceptanceRule, sample
from forerun.runtime.base import Rows
from forerun.signals import measure
from forerun.types import BoolArray, FloatArray, IntArray

ELEMENTS = 1 << 24  # most logits of one model held at once
JUDGES = RULES.make("gumbel"), RULES.make("standard")  # whose runs the text alone tells
TAILS = 128  # most tails drafted together


Position = tuple[int, int]  # a text of the batch and a position in it


@dataclass(frozen=True)
class Task:
    """One prompt to record."""

    family: str
    id: str
    tokens: list[int]
    sampling: Sampling


def record(model: Model, tasks: Sequence[Task], **how: Any) -> Trace:
    """Record every prompt; arguments and errors as of `parts`."""
    return deque(parts(model, tasks, **how), 1).pop()


def parts(
    model: Model,
    tasks: Sequence[Task],
    *,
    depth: int = 24,
    batch_size: int = 16,
    rule: str | AcceptanceRule = "gumbel",
    about: Mapping[str, Any] | None = None,
    interrupted: Callable[[int], None] = lambda texts: None,
) -> Iterator[Trace]:
    """Record batch by batch, in the order of the tasks: the trace of all so far, with its
    provenance, so that a caller may stop between.

    Interrupted, it goes on with what is written of the batch: with its complete texts the trace
    comes a last time.

    Args:
        model: a target and any drafter.
        tasks: the prompts. Each text and its coins depend on its own seed alone.
        depth: K ≥ 1, tokens drafted from each position.
        batch_size: prompts decoded together.
        rule: by which sampled texts are judged, `gumbel` or `standard`.
        about: what else the trace says of itself.
        interrupted: told how many texts are complete, before they are drafted for; a second
            interrupt drops them.

    Raises:
        SettingError: no drafter, one without a bonus token, another rule, coins for a drafter that
            is no draft model, or a setting out of range.
        KeyboardInterrupt: after the last trace.
        PromptError: no prompts, or a text that the draft's context cannot hold.
    """
    judge = RULES.make(rule)
    _check(model, tasks, depth, batch_size, judge)
    named = {"rule": RULES.text(judge), **(about or {}), **_provenance(model)}
    named |= {"sampling": _sampling(tasks), "depth": depth, "batch_size": batch_size}
    done, plain, total = list[Trace](), 0.0, 0.0
    for start in range(0, len(tasks), batch_size):
        batch, began = tasks[start : start + batch_size], time.perf_counter()
        texts, interrupt = _write(model, batch, depth, judge, batch_size)
        if interrupt is not None and not texts:
            raise interrupt
        plain += time.perf_counter() - began
        try:
            made = _traces(model, texts, depth) if interrupt is None else []
        except KeyboardInterrupt as error:
            interrupt = error
        if interrupt is not None:
            interrupted(len(texts))
            made = _traces(model, texts, depth)
        total += time.perf_counter() - began
        done = [concatenate([*done, *made])]
        named["complete"] = done[0].prompts == len(tasks)
        seconds = {"total": total, "plain": plain, "ratio": total / plain}
        named["seconds"] = {name: round(value, 3) for name, value in seconds.items()}
        yield replace(done[0], about=dict(named))
        if interrupt is not None:
            raise interrupt


def _check(
    model: Model, tasks: Sequence[Task], depth: int, batch_size: int, judge: AcceptanceRule
) -> None:
    """Errors as of `parts`."""
    whole("depth", depth, 1)
    whole("batch size", batch_size, 1)
    require(judge in JUDGES, "rule", RULES.text(judge), "'gumbel' or 'standard'")
    drafter = model.drafter
    require(not isinstance(drafter, NullDrafter), "draft", "none", "somebody who drafts")
    require(drafter.bonus, "bonus of the drafter", False, "on: a replay counts on that token")
    if not isinstance(drafter, ModelDrafter):
        require(judge.gumbel_max, "rule", RULES.text(judge), "'gumbel': coins need a draft model")
    if not tasks:
        raise PromptError("no prompts to record")
    for task in tasks:
        wanted = len(model.context(task.tokens)[0]) + _budget(model, task)
        if wanted > drafter.limit:
            raise PromptError(
                f"{task.family} {task.id}: prompt and output may have {wanted} tokens and the "
                f"draft's context holds {drafter.limit}; lower max_new_tokens"
            )


def _provenance(model: Model) -> dict[str, Any]:
    named = {"name": type(model.drafter).__name__, "sha256": None, "hashed": None}
    runs = {"blind": model.drafter.blind, "trees": model.target.executor.trees}
    return {**provenance.of(model, named), **runs}


def _sampling(tasks: Sequence[Task]) -> dict[str, Any]:
    """Settings that are not the default: a value, one per family, or the first and last."""
    out: dict[str, Any] = {}
    for f in fields(Sampling):
        values = [getattr(task.sampling, f.name) for task in tasks]
        plain = {} if f.name == "logit_bias" else f.default
        if all(value == plain for value in values):
            continue
        pairs = [(task.family, value) for task, value in zip(tasks, values, strict=True)]
        first = dict(reversed(pairs))  # each family's first
        if all(value == values[0] for value in values):
            out[f.name] = str(values[0]) if f.name == "logit_bias" else values[0]
        elif all(value == first[family] for family, value in pairs):
            out[f.name] = {family: first[family] for family, _ in pairs}
        else:
            out[f.name] = f"{values[0]} … {values[-1]}"
    return out


def _budget(model: Model, task: Task) -> int:
    """Most tokens the text may have: as many as allowed that fit the target's context."""
    return min(
        task.sampling.max_new_tokens, model.target.limit - len(model.context(task.tokens)[0])
    )


@dataclass
class _RecordedText:
    """A text as both models read it, and the penalties (`context` and `prompt` are for them)."""

    task: Task
    context: list[int]  # the prompt
    prompt: int  # its length
    tokens: list[int]  # the output, n tokens
    eos: frozenset[int]
    coins: FloatArray
    """`(n + 1, K + 1)`: per position one for the hit, one for the token after a miss, the tail's.
    Position n is the end of the text, where the target says nothing any more."""
    noise: Noise | None = None  # what is drawn by instead
    source: list[int] | None = None  # what an encoder reads


@dataclass
class _Draft:
    """The draft's tokens at the n + 1 positions of a text, and the target's verdict on them."""

    tokens: IntArray  # `(n + 1, K)` the draft's token, and its tail where it is not kept
    values: dict[str, FloatArray]  # `(n + 1, K)` likewise, by names of `SIGNALS` and `JUDGED`
    hit: BoolArray  # `(n + 1,)` whether the target keeps the draft's token
    accept: FloatArray  # `(n + 1,)` the probability that it does


def _traces(model: Model, texts: list[_RecordedText], depth: int) -> list[Trace]:
    """The texts with what is drafted at each of their positions."""
    if isinstance(model.drafter, ModelDrafter):
        drafts = _draft_texts(model.target, model.drafter, texts, depth)
        runs = [_runs(text, draft, depth) for text, draft in zip(texts, drafts, strict=True)]
    else:
        contexts = [(text.context, text.source) for text in texts]
        runs = walked(model, contexts, [text.task.sampling for text in texts], depth)
    made = []
    for text, own in zip(texts, runs, strict=True):
        names, counts = (text.task.family, text.task.id), (text.prompt, _budget(model, text.task))
        made.append(text_trace(names, counts, own.pop("tokens", text.tokens), own, text.eos))
    return made


def _write(
    model: Model, batch: Sequence[Task], depth: int, rule: AcceptanceRule, batch_size: int
) -> tuple[list[_RecordedText], KeyboardInterrupt | None]:
    """The texts that are complete, and what interrupted the others."""
    stream = model.stream(
        [task.tokens for task in batch],
        plain=True,
        rule=rule,
        sampling=[task.sampling for task in batch],
        batch_size=batch_size,
        first_token_soon=False,
    )
    done: dict[int, Completion] = {}
    interrupt = None
    with closing(stream):
        try:
            for event in stream:
                if event.completion is not None:
                    done[event.request] = event.completion
        except KeyboardInterrupt as error:
            interrupt = error
    texts = [_text(model, batch[i], own, depth, rule) for i, own in sorted(done.items())]
    return texts, interrupt


def _text(
    model: Model, task: Task, done: Completion, depth: int, rule: AcceptanceRule
) -> _RecordedText:
    sampling = task.sampling
    eos = model.eos if sampling.eos is None else frozenset(sampling.eos)
    prompt, source = model.context(task.tokens)
    # A stream of its own beside the one the text was sampled with.
    random = np.random.default_rng([stream(done.seed, prompt, source), 1])
    coins = random.random((len(done.tokens) + 1, depth + 1))
    stops = frozenset(split_stops(sampling.stop, model.tokenizer)[1])
    ends = stops | (frozenset() if sampling.ignore_eos else eos)
    noise = Noise.of(sampling, prompt, source, done.seed) if rule.gumbel_max else None
    task = replace(task, sampling=replace(sampling, seed=done.seed))
    return _RecordedText(task, prompt, len(prompt), done.tokens, ends, coins, noise, source)


@torch.inference_mode()
def _draft_texts(
    target: Rows, drafter: ModelDrafter, texts: list[_RecordedText], depth: int
) -> list[_Draft]:
    """Both models over the texts, then the tails."""
    rows = drafter.rows
    prompts, longest = [text.context for text in texts], max(len(t.tokens) for t in texts)
    sources = [text.source for text in texts if text.source is not None]
    try:
        target.read(prompts, longest + depth, sources or None)
        rows.read(prompts, longest + depth, drafter.readable(sources) or None)
        drafts = _heads(target, rows, texts, depth)
        _tails(target, rows, texts, drafts, depth)
    finally:
        target.keep([])
        rows.keep([])
    return drafts


def _heads(target: Rows, rows: Rows, texts: list[_RecordedText], depth: int) -> list[_Draft]:
    """The draft's token at every true prefix, and whether the target keeps it."""
    pieces = [[text.context[-1], *text.tokens] for text in texts]
    longest, vocab, device = max(map(len, pieces)), target.vocab_size, target.device
    width = max(1, ELEMENTS // (len(texts) * vocab))
    sampler, coins = _samplers(texts)
    outputs, certain = [text.tokens for text in texts], sampler.certain.to(device)
    records: list[list[dict[str, Any]]] = [[] for _ in texts]
    for start in range(0, longest, width):
        fed = [piece[start : start + width] for piece in pieces]
        both = target.feed(fed), fitted(rows.feed(fed), vocab)
        shaped = [sampler.shape(z, texts, outputs, start) for z in both]
        sharp = [sampler.sharpen(logits) for logits in shaped]
        truth = [[*text.tokens, -1][start : start + width] for text in texts]
        count, columns = [len(piece) for piece in fed], both[0].shape[1]
        best = torch.tensor([[*t, *[-1] * (columns - len(t))] for t in truth], device=device)
        drafted, verdicts = torch.zeros_like(best), []
        for r, (text, n) in enumerate(zip(texts, count, strict=True)):
            tossed = torch.from_numpy(text.coins[start : start + n, :2]).to(device)
            own, drawn, so_far = (values[r, :n] for values in (*sharp, best))
            verdicts.append(_judge(own, drawn, so_far, tossed, bool(certain[r])))
            drafted[r, :n] = verdicts[-1]["tokens"]
        noisy = coins is not sampler
        plain = [coins.shape(z, texts, outputs, start) for z in both] if noisy else shaped
        best = torch.where(best < 0, shaped[0].argmax(-1), best)
        judged = judged_columns(coins, plain, drafted, best, shaped[1])
        signals = measure(shaped[1], drafted, set(SIGNALS))
        values = judged | {name: value.cpu().numpy() for name, value in signals.items()}
        for r, verdict in enumerate(verdicts):
            part = {name: value[r, : count[r]] for name, value in values.items()}
            records[r].append(part | {name: v.cpu().numpy() for name, v in verdict.items()})
    return [_assembled(parts, depth) for parts in records]


def _samplers(texts: list[_RecordedText]) -> tuple[Sampler, Sampler]:
    """Of these texts, with their noise and without."""
    settings, eos = [t.task.sampling for t in texts], [t.eos for t in texts]
    noises = [t.noise for t in texts]
    sampler = Sampler(settings, eos, noises)
    return sampler, Sampler(settings, eos) if any(noises) else sampler


def _assembled(parts: list[dict[str, Any]], depth: int) -> _Draft:
    """The parts of one text put together, with room for tails."""
    flat = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    room = [(0, 0), (0, depth - 1)]
    deep = {name: np.pad(flat[name][:, None].astype(float), room) for name in (*SIGNALS, *JUDGED)}
    return _Draft(np.pad(flat["tokens"][:, None], room), deep, flat["hit"], flat["accept"])


def _judge(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    truth: torch.Tensor,
    coins: torch.Tensor,
    certain: bool,
) -> dict[str, torch.Tensor]:
    """The draft's tokens, hits and their probabilities by `(n, V)` processed logits, given the
    `(n,)` committed tokens, -1 beyond the text, and `(n, 2)` coins, or that both are `certain`."""
    if certain:
        best = draft_logits.argmax(-1)
        hit = best == truth
        return {"tokens": best, "hit": hit, "accept": hit.double()}
    target, draft = (z.softmax(-1, dtype=torch.float64) for z in (target_logits, draft_logits))
    inside, at = truth >= 0, truth.clamp(min=0).unsqueeze(-1)
    hit = inside & (coins[:, 0] < (draft.gather(-1, at) / target.gather(-1, at)).squeeze(-1))
    # On a miss draft < target at the committed token, so something is left elsewhere.
    residual = torch.where(inside.unsqueeze(-1), (draft - target).clamp(min=0), draft)
    tokens = torch.where(hit, truth, sample(residual, coins[:, 1]))
    at = tokens.unsqueeze(-1)
    ratio = (target.gather(-1, at) / draft.gather(-1, at)).squeeze(-1).clamp(max=1)
    return {"tokens": tokens, "hit": hit, "accept": ratio * inside}


def _tails(
    target: Rows, rows: Rows, texts: list[_RecordedText], drafts: list[_Draft], depth: int
) -> None:
    """Draft on where the target does not keep the draft's token; fills `drafts` in."""
    misses = [
        (r, m)
        for r, draft in enumerate(drafts)
        for m in np.flatnonzero(~draft.hit).tolist()
        # No run reaches beyond a text whose last token was missed.
        if m < len(draft.hit) - 1 or draft.hit[m - 1]
    ]
    for start in range(0, len(misses), TAILS):
        batch = misses[start : start + TAILS]
        for side in (target, rows):
            # Copying what is covered already is much cheaper than feeding it again.
            side.keep([*range(len(texts)), *(r for r, _ in batch)])
            for row, (r, m) in enumerate(batch, len(texts)):
                side.rollback(row, texts[r].prompt + m)
        _follow(target, rows, texts, drafts, batch, depth)
        for side in (target, rows):
            side.keep(range(len(texts)))


def _follow(
    target: Rows,
    rows: Rows,
    texts: list[_RecordedText],
    drafts: list[_Draft],
    misses: list[Position],
    depth: int,
) -> None:
    """Draft the tails, a step of all of them at a time, as far as the contexts go."""
    sampler, coins = _samplers([texts[r] for r, _ in misses])
    stems: Any = [
        replace(texts[r], context=[*texts[r].context, *texts[r].tokens[:m]]) for r, m in misses
    ]
    certain = sampler.certain.to(rows.device)
    ahead = [[int(drafts[r].tokens[m, 0])] for r, m in misses]
    limit = min(target.limit, rows.limit)
    for step in range(1, depth):
        on = [len(stem.context) + step <= limit for stem in stems]
        if not any(on):
            return
        fed = [own[-1:] if fits else [] for own, fits in zip(ahead, on, strict=True)]
        pieces = [*[[]] * len(texts), *fed]
        wanted = list(map(len, pieces))
        both = [side.feed(pieces, wanted)[len(texts) :] for side in (target, rows)]
        both[1] = fitted(both[1], target.vocab_size)
        shaped = [sampler.shape(z, stems, ahead, step) for z in both]
        processed = sampler.sharpen(shaped[1])[:, 0]
        tokens = processed.argmax(-1)
        if not sampler.all_certain:
            drawn = torch.tensor(
                [texts[r].coins[m, step + 1] for r, m in misses], dtype=torch.float64
            )
            drawn = sample(processed.softmax(-1), drawn.to(rows.device))
            tokens = torch.where(certain, tokens, drawn)
        plain = shaped if coins is sampler else [coins.shape(z, stems, ahead, step) for z in both]
        column = tokens.unsqueeze(1)
        values = judged_columns(coins, plain, column, shaped[0].argmax(-1), shaped[1])
        signals = measure(shaped[1], column, set(SIGNALS))
        values |= {name: value.cpu().numpy() for name, value in signals.items()}
        chosen = tokens.tolist()
        for i, (r, m) in enumerate(misses):
            if on[i]:
                ahead[i].append(chosen[i])
                drafts[r].tokens[m, step] = ahead[i][-1]
                for name, column_of in drafts[r].values.items():
                    column_of[m, step] = values[name][i, 0]


def _runs(text: _RecordedText, draft: _Draft, depth: int) -> dict[str, Any]:
    """The runs of one text, put together from its positions and its tails."""
    size = len(text.tokens)
    missed = np.flatnonzero(~draft.hit)  # the end of the text is one
    miss = missed[np.searchsorted(missed, np.arange(size))][:, None]
    start, step = np.arange(size)[:, None], np.arange(depth)
    on = start + step < miss
    row, column = np.where(on, start + step, miss), np.where(on, 0, start + step - miss)
    judged = start + step <= np.minimum(miss, size - 1)
    return {
        "draft_tokens": draft.tokens[row, column],
        "matches": np.minimum(miss - start, depth)[:, 0],
        "accept_prob": np.where(judged, draft.accept[row], 0.0),
        "lengths": np.full(size, depth),
        "stops": np.zeros(size, np.int64),
        "signals": {name: draft.values[name][row, column] for name in SIGNALS},
        "judged": {name: draft.values[name][row, column] for name in JUDGED},
    }
