"""What every drafter must do: a drafter is a line in the table."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.controllers import CONTROLLERS
from forerun.drafters import DRAFTERS, Drafter
from forerun.drafters.adadecode import AdaDecode
from forerun.drafters.base import Proposal
from forerun.drafters.block import BlockDrafter
from forerun.drafters.chain import ChainDrafter
from forerun.drafters.datastore import SORTED, Datastore
from forerun.drafters.eagle import EagleDrafter
from forerun.drafters.eagle3 import Eagle3
from forerun.drafters.kangaroo import KangarooDrafter
from forerun.drafters.lookahead import LookaheadDrafter
from forerun.drafters.lookup import LookupDrafter
from forerun.drafters.medusa import MedusaDrafter
from forerun.drafters.model import ModelDrafter
from forerun.drafters.mtp import MTP
from forerun.drafters.ngrams import NGrams
from forerun.drafters.none import NullDrafter
from forerun.drafters.rest import REST, RESTDrafter
from forerun.drafters.retokenized import RetokenizedDrafter, SharedTokensDrafter, TextDrafter
from forerun.drafters.specbound import SpecBound
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine import Engine, Request, Sampling
from forerun.errors import ModelError, SettingError
from forerun.rules import RULES
from forerun.runtime import Rows, torch_rows
from forerun.runtime.base import CHUNK
from forerun.runtime.eagle import EagleHead
from forerun.runtime.exits import Adapter, LayersExecutor
from forerun.runtime.grafts import graft
from forerun.runtime.heads import new_heads
from forerun.runtime.layers import LayerAccess
from forerun.testing import ScriptedModel
from forerun.types import Stop, Token
from marks import slow_but
from sourced import build as build_encoder_decoder
from test_engine import V, chaotic, noisy
from test_mtp import MtpModel, saved
from test_retokenized import DRAFT, STORY, TARGET, writes
from tiny import VOCAB, build, texts

SCRIPT = chaotic(3)
STORED = [[3, 4, 3, 4, 5, 1, 2], [6, 6, 6], [0, 1, 2, 3, 1, 2, 4, 1, 2, 4]]
TINY = build("llama", num_hidden_layers=4, scale=0.2)


@dataclass
class Case:
    """A target with a drafter of its own, both fresh."""

    target: Rows
    drafter: Drafter
    prompts: list[list[int]]
    sources: list[list[int]] | None = None
    """With an encoder."""

    def joining(self, rows: list[int]) -> dict[str, Any]:
        return {} if self.sources is None else {"sources": [self.sources[row] for row in rows]}


def scripted(drafter: Callable[[], Drafter]) -> Case:
    return Case(Rows(ScriptedModel(SCRIPT)), drafter(), [[0], [3, 4, 3, 4], [5, 1, 2], [6] * 9])


def of_its_own(drafter: Drafter) -> Case:
    """A target whose layers draft."""
    assert drafter.target is not None
    return Case(drafter.target, drafter, texts(1, 9, 4, 6))


def early_exits(spec: SpecBound | AdaDecode) -> Case:
    return of_its_own(spec.build(torch_rows(TINY), None))


def adapted() -> Case:
    rows = Rows(LayersExecutor(TINY, Adapter(LayerAccess(TINY), 2)))
    return of_its_own(KangarooDrafter(rows, threshold=0.2, most=3))


def heads_on_top() -> Case:
    """Heads that say what the target's own would say a token earlier: right now and then."""
    rows = torch_rows(TINY)
    return Case(
        rows, MedusaDrafter(rows, LayerAccess(TINY), new_heads(TINY, 3), 3), texts(1, 9, 4, 6)
    )


def on_states() -> Case:
    """A layer on the target's states, whose table is the target's: often right by chance."""
    rows = torch_rows(TINY)
    torch.manual_seed(4)
    head = EagleHead(64, 48, VOCAB, 64)
    tokens = torch.arange(VOCAB, dtype=torch.int32)
    states = rows.executor.tap([2, 4])
    return Case(rows, EagleDrafter(rows, states, head, tokens, ""),
                texts(1, 9, 4, 6))  # fmt: skip


def published() -> Case:
    """An untrained head in another's layout, which says less than half of the vocabulary."""
    rows = torch_rows(TINY)
    drafter = Eagle3(str(Path(__file__).parent / "data" / "eagle3" / "llama")).build(rows, None)
    return Case(rows, drafter, texts(1, 9, 4, 6))


KEPT = tempfile.TemporaryDirectory()


@cache
def with_a_layer() -> Any:
    """A target whose checkpoint brings a layer for multi-token prediction."""
    if MtpModel is None:
        pytest.skip("this transformers has no MtpModel")
    return saved(Path(KEPT.name), "qwen3_5", pytest.MonkeyPatch())


def brought() -> Case:
    rows = torch_rows(with_a_layer())
    return Case(rows, MTP().build(rows, None), texts(1, 9, 4, 6))


ENCODES = build_encoder_decoder("marian", decoder_layers=3)
SOURCES = [[5, 6, 7, 8], [9], [11, 12, 13, 14, 15, 16], [40, 3, 40]]


def on_the_encoder(kind: str, width: int) -> Case:
    """A draft decoder as it begins, near enough to the target to agree now and then."""
    target = torch_rows(ENCODES)
    torch.manual_seed(1)
    rows = Rows(target.executor.beside(graft(ENCODES, 2, width)))
    drafter = ModelDrafter(rows, 97) if kind == "shared" else BlockDrafter(rows, 97, width)
    prompts = [[96], [96, 5, 8], [96, 7], [96, 4, 9, 12]]
    return Case(target, drafter, prompts, SOURCES)


def hostile() -> NGrams:
    """A table that is sure of something else after every token."""
    table = NGrams()
    table.learn([token for i in range(V) for token in (i, (i + 3) % V)] * 40, 0)
    return table


def written_before() -> NGrams:
    return NGrams.build([(text, 1) for text in STORED], 100)


def chained(then: Callable[[], Case]) -> Case:
    """Counts of the text before another drafter, before another where they expect anything."""
    case = then()
    chain = ChainDrafter(SuffixDrafter(4, 0.01), case.drafter, 0.1)
    return Case(case.target, chain, [[*p, *p] for p in case.prompts])


def of_another_tokenizer(kind: type[RetokenizedDrafter]) -> Case:
    """A draft that tells another story, in other tokens."""
    draft = writes(DRAFT, STORY.replace("naïve", "native"))
    prompts = [TARGET.encode(STORY)[:n] for n in (5, 30, 12, 8)]
    target = writes(TARGET, STORY)
    return Case(target, kind(draft, target.vocab_size, TARGET, DRAFT), prompts)


CASES: dict[str, Callable[[], Case]] = {
    "model": lambda: scripted(lambda: ModelDrafter(ScriptedModel(noisy(SCRIPT, 4, 0.5)), V)),
    "model by text": lambda: of_another_tokenizer(TextDrafter),
    "model by tokens": lambda: of_another_tokenizer(SharedTokensDrafter),
    "lookup": lambda: scripted(lambda: LookupDrafter(3, 1)),
    "suffix": lambda: scripted(lambda: SuffixDrafter(4, 0.01)),
    "memory": lambda: scripted(lambda: SuffixDrafter(4, 0.01, [hostile(), written_before()])),
    "rest": lambda: scripted(lambda: RESTDrafter(Datastore.build(STORED), 8, 1, 3)),
    "lookahead": lambda: scripted(lambda: LookaheadDrafter(5, 3)),
    "medusa": heads_on_top,
    "chain": lambda: chained(CASES["model"]),
    "chain with eagle": lambda: chained(on_states),
    "chain with medusa": lambda: chained(heads_on_top),
    "eagle": on_states,
    "eagle3": published,
    "mtp": brought,
    "none": lambda: scripted(NullDrafter),
    "specbound": lambda: early_exits(SpecBound(exits="", threshold=0.1, depth=3, layers=1)),
    "adadecode": lambda: early_exits(AdaDecode(exits="", threshold=0.2)),
    "kangaroo": adapted,
    "shared": lambda: on_the_encoder("shared", 1),
    "block": lambda: on_the_encoder("block", 4),
}
CONTROLLED = ["fixed(3)", "gammatune+", "hf-threshold", "cm-asd", "cm-asd(two_pass=True)", "auto"]


def written(case: Case, controller: str, max_rows: int = 4, **how: Any) -> list[list[int]]:
    made = Engine(case.target, case.drafter, max_rows=max_rows)
    length, rule = CONTROLLERS.make(controller), RULES.make("standard")
    sources = case.sources or [None] * len(case.prompts)
    ids = [
        made.submit(Request(p, Sampling(max_new_tokens=12 + 3 * i, **how), length, rule, source))
        for i, (p, source) in enumerate(zip(case.prompts, sources, strict=True))
    ]
    done = {e.request: e.completion for e in made.run() if e.completion}
    return [done[i].tokens for i in ids]


def plainly(case: Case, **how: Any) -> list[list[int]]:
    alone = Case(case.target, NullDrafter(), case.prompts, case.sources)
    return written(alone, "fixed(0)", **how)


def test_every_drafter_is_in_the_table() -> None:
    assert {name.partition(" ")[0] for name in CASES} == set(DRAFTERS.names())


def one_each(name: str, controller: str, max_rows: int) -> bool:
    """Controllers in turn, and rows whenever all of them have had theirs."""
    turns, turn = divmod(list(CASES).index(name), len(CONTROLLED))
    return controller == CONTROLLED[turn] and max_rows == (1, 3)[(turns + turn) % 2]


@pytest.mark.parametrize(
    ("name", "controller", "max_rows"), slow_but(product(CASES, CONTROLLED, [1, 3]), one_each)
)
def test_greedy_text_is_that_of_plain_decoding(name: str, controller: str, max_rows: int) -> None:
    case = CASES[name]()
    if case.drafter.target is not None:
        model = with_a_layer() if name == "mtp" else TINY
        wanted = plainly(Case(torch_rows(model), NullDrafter(), case.prompts), ignore_eos=True)
    else:
        wanted = plainly(case, ignore_eos=True)
    assert written(case, controller, max_rows, ignore_eos=True) == wanted


@pytest.mark.parametrize("name", slow_but(CASES, list(CASES)[::2].__contains__))
def test_a_rows_sampled_text_does_not_depend_on_its_neighbours(name: str) -> None:
    together = written(CASES[name](), "fixed(3)", 4, temperature=0.8, seed=5, ignore_eos=True)
    alone = written(CASES[name](), "fixed(3)", 1, temperature=0.8, seed=5, ignore_eos=True)
    assert together == alone


class Greedy:
    """The least a guide does: the arg-max, until the limit."""

    greedy: frozenset[str] | None = None
    clock = staticmethod(time.perf_counter)

    def trees(self, limit: int) -> list[int]:
        return []

    def choose(self, step: Any, texts: Any, active: Any, proposal: Proposal) -> list[int]:
        drawn = []
        for row in active:
            if step.ended is not None and step.ended[row] is not None:
                continue
            best = step.best
            token = best.tokens[row][0] if best else int(step.logits[row].argmax())
            self.note(row, token, Token(), texts[row], proposal)
            drawn.append(row)
        return drawn

    def note(self, row: int, token: int, shown: Token, text: list[int], proposal: Proposal) -> None:
        proposal.tokens[row].append(token)
        text.append(token)

    def settle(self, active: Any, most: Any, proposal: Proposal, free: bool = False) -> list[int]:
        return [row for row in active if len(proposal.tokens[row]) < most[row]]

    def free(self, drafts: Any, enough: float) -> dict[int, int]:
        return {row: len(kept) for row, kept in drafts.items() if sum(kept) >= enough}


def test_a_long_text_is_read_beside_a_short_one() -> None:
    """What is left of the short one's is for the step, as is the end of the long one's."""
    texts = [[i % V for i in range(2 * CHUNK + 3)], [1, 2]]
    alone = []
    for text in texts:
        drafter = ModelDrafter(ScriptedModel(SCRIPT), V)
        drafter.join([text], 4)
        alone += drafter.propose([text], [4], Greedy()).tokens
    drafter = ModelDrafter(model := ScriptedModel(SCRIPT), V)
    drafter.join(texts, 4)
    assert drafter.propose(texts, [4, 4], Greedy()).tokens == alone
    assert model.passes[:3] == [[CHUNK, 0], [CHUNK, 0], [3, 2]]


@pytest.mark.parametrize("name", CASES)
def test_proposals_keep_to_their_rows_and_limits(name: str) -> None:
    """Also after rows were rejected, dropped, reordered and kept twice."""
    case, guide = CASES[name](), Greedy()
    contexts = [list(p) for p in case.prompts]
    drafter = case.drafter

    def covered() -> None:
        if drafter.target is None:
            return
        lengths = case.target.lengths
        pieces = [c[n:-1] for c, n in zip(contexts, lengths, strict=True)]
        case.target.feed(pieces, [0] * len(pieces))

    if drafter.target is not None:
        case.target.join(len(contexts), 40)
    if drafter.target is None and case.sources is not None:  # what it shares is read already
        case.target.join(len(contexts), 40, case.sources)
    drafter.join(contexts, 40, **case.joining([0, 1, 2, 3]))
    covered()
    most = [3, 0, 1, 4]
    asked = [list(c) if n else None for c, n in zip(contexts, most, strict=True)]
    first = drafter.propose(asked, most, guide)
    assert [len(tokens) <= n for tokens, n in zip(first.tokens, most, strict=True)] == [True] * 4
    assert first.tokens[1] == []
    assert all(why in (None, Stop.EXHAUSTED, Stop.DIFFICULT) for why in first.stopped_by)
    assert asked[0] == contexts[0], "the texts are only read"
    for row, context in enumerate(contexts):  # everything was rejected
        drafter.rollback(row, len(context))
        context.append(1)
        case.target.lengths[row:row + 1] = [min(len(context) - 1, n) for n in
                                            case.target.lengths[row:row + 1]]  # fmt: skip
    order = [2, 0, 2]
    contexts = [list(contexts[row]) for row in order]
    if drafter.target is not None:
        case.target.keep(order)
    drafter.keep(order)
    covered()
    able = [drafter.able(row, list(c)) for row, c in enumerate(contexts)]  # and nothing changes
    again = drafter.propose([list(c) for c in contexts], [3, 3, 3], guide)
    assert not any(tokens for on, tokens in zip(able, again.tokens, strict=True) if not on)
    if name == "lookup":
        assert able == list(map(bool, again.tokens))
    assert again.tokens[0] == again.tokens[2]
    fresh = CASES[name]()
    if fresh.drafter.target is not None:
        fresh.target.read(contexts, 40)
    fresh.drafter.join(contexts, 40, **case.joining(order))
    assert again.tokens == fresh.drafter.propose(contexts, [3, 3, 3], guide).tokens


# --- a datastore ----------------------------------------------------------------------------------


def slowly(texts: list[list[int]], run: list[int]) -> list[tuple[int, ...]]:
    """What follows every occurrence of a run, up to the end of its text."""
    return sorted(
        tuple(text[i + len(run) :])
        for text in texts
        for i in range(len(text) - len(run) + 1)
        if text[i : i + len(run)] == run
    )


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=5),
    st.lists(st.integers(0, 3), min_size=1, max_size=SORTED),
)
def test_a_datastore_finds_every_occurrence(texts: list[list[int]], run: list[int]) -> None:
    store = Datastore.build(texts)
    continuations = [store.follow(np.array([place]), 99) for place in store.find(run)]
    assert sorted(map(tuple, continuations)) == slowly(texts, run)
    part = texts[0][:3]
    assert len(store.find(part)) == len(slowly(texts, part)) >= 1


def test_a_datastore_is_followed_where_most_go() -> None:
    drafter = RESTDrafter(Datastore.build(STORED), n=8, least=2, most=9)
    propose = lambda text, most: drafter.propose([text], [most], Greedy()).tokens[0]  # noqa: E731
    assert propose([1, 2], 5) == [4, 1, 2, 4]  # twice 4, once 3; then the end of the text
    assert propose([0, 1, 2], 2) == [3, 1]  # the longer run decides
    assert propose([5, 6, 1], 3) == []


def test_a_datastore_on_disk(tmp_path: Path) -> None:
    path = str(tmp_path / "store.safetensors")
    Datastore.build(STORED).save(path)
    target = Rows(ScriptedModel(SCRIPT))
    drafter = REST(path, least=1).build(target, None)
    assert drafter.propose([[1, 2]], [2], Greedy()).tokens == [[4, 1]]
    Datastore.build([[V]]).save(path)
    with pytest.raises(ModelError, match="made with another tokenizer"):
        REST(path).build(target, None)
    Path(path).write_text("x")
    with pytest.raises(ModelError, match="is no datastore"):
        REST(path).build(target, None)
    for bad in ({"n": 33}, {"least": 0}, {"n": 2, "least": 3}, {"most": 0}, {"datastore": ""}):
        with pytest.raises(SettingError, match="rest "):
            REST(**{"datastore": path, **bad})
    with pytest.raises(SettingError, match="at least one token"):
        Datastore.build([[]])
