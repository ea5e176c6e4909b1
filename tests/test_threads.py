"""One model in many threads: requests share rounds, and nobody gets another's text."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from forerun.controllers import CONTROLLERS
from forerun.drafters.model import ModelDrafter
from forerun.engine import Engine, Sampling
from forerun.engine.shared import FairLock
from forerun.errors import PromptError, SettingError
from forerun.model import Model
from forerun.rules import RULES
from forerun.testing import ScriptedModel
from test_engine import V, chaotic, noisy

SCRIPT = chaotic(1)


def make(target: ScriptedModel | None = None) -> Model:
    draft = ScriptedModel(noisy(SCRIPT, 2, 0.5))
    return Model(target or ScriptedModel(SCRIPT), ModelDrafter(draft, V))


@pytest.fixture(autouse=True)
def _often() -> Any:
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def calls(seed: int, count: int) -> list[tuple[list[list[int]], dict[str, Any]]]:
    pick = random.Random(seed)
    made = []
    for _ in range(count):
        prompts = [[pick.randrange(V) for _ in range(pick.randint(1, 4))]
                   for _ in range(pick.randint(1, 3))]  # fmt: skip
        how: dict[str, Any] = {"max_new_tokens": pick.randint(1, 12)}
        how["controller"] = pick.choice(["fixed(3)", "auto", "gammatune+"])
        if pick.random() < 0.2:
            how["plain"] = True
        if pick.random() < 0.2:
            how["batch_size"] = 2
        if pick.random() < 0.3:
            how |= {"temperature": 0.9, "seed": pick.randrange(99)}
        made.append((prompts, how))
    return made


def test_eight_threads() -> None:
    alone, shared = make(), make()
    work = [calls(seed, 12) for seed in range(8)]
    wanted = [[[c.tokens for c in alone.generate(p, **how)] for p, how in one] for one in work]
    together = []

    def serve(which: int) -> list[list[list[int]]]:
        out = []
        for n, (prompts, how) in enumerate(work[which]):
            if n % 4 == 3:  # somebody who walks away
                stream = shared.stream(prompts, **how)
                next(stream)
                stream.close()  # type: ignore[attr-defined]
            tokens: list[list[int]] = [[] for _ in prompts]
            # As `generate` asks: under sampling a first token that comes sooner is another one.
            for event in shared.stream(prompts, first_token_soon=False, **how):
                tokens[event.request] += [piece.token for piece in event.pieces]
                together.append(len(shared.target.lengths))
            out.append(tokens)
            with pytest.raises(PromptError, match="outside the vocabulary"):
                shared.generate([[1], [V]])
        return out

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(serve, range(8))) == wanted
    assert max(together) > 3  # more rows than any one call has
    assert shared.target.lengths == []


def test_an_event_may_be_looked_at_while_another_thread_takes_the_next_round() -> None:
    class Slow:
        def decode(self, tokens: list[int], **_: Any) -> str:
            time.sleep(1e-3)
            return "".join(map(str, tokens))

    model = make()
    wanted = model.generate([1], max_new_tokens=20).tokens
    run = Engine(model.target, model.drafter, Slow())
    run.submit([1], Sampling(max_new_tokens=20), CONTROLLERS.make("fixed"), RULES.make("exact"))
    with ThreadPoolExecutor(8) as pool:
        looks = [pool.submit(lambda e: e.pieces, event) for event in run.run()]
    pieces = [piece for look in looks for piece in look.result()]
    assert [piece.token for piece in pieces] == wanted
    assert "".join(piece.text for piece in pieces) == "".join(map(str, wanted))


def test_streams_of_one_thread_may_be_read_in_any_order() -> None:
    alone, model = make(), make()
    asked = calls(9, 6)
    wanted = [[c.tokens for c in alone.generate(p, **how)] for p, how in asked]
    streams = [model.stream(p, first_token_soon=False, **how) for p, how in asked]
    got: list[list[list[int]]] = [[[] for _ in p] for p, _ in asked]
    open_ = list(range(6))
    while open_:
        which = open_[sum(map(len, got[0])) % len(open_)]
        event = next(streams[which], None)
        if event is None:
            open_.remove(which)
        else:
            got[which][event.request] += [piece.token for piece in event.pieces]
    assert got == wanted


def test_an_error_in_a_round_reaches_everybody_who_shares_it() -> None:
    class Breaking(ScriptedModel):
        broken = False

        def run(self, *args: Any) -> torch.Tensor:
            if self.broken:
                raise RuntimeError("out of memory")
            return super().run(*args)

    target = Breaking(SCRIPT)
    model = make(target)
    first, second = (model.stream([t], max_new_tokens=30) for t in (1, 2))
    next(first), next(second)
    target.broken = True
    for stream in (first, second):
        last = list(stream)[-1].completion
        assert last is not None
        assert last.finish_reason == "error"
        assert "out of memory" in str(last.error)
    target.broken = False
    assert target.history == []
    assert len(model.generate([1], max_new_tokens=5).tokens) == 5


def test_a_forgotten_stream_gives_its_rows_back() -> None:
    model = make()
    stream = model.stream([1], max_new_tokens=50)
    next(stream)
    assert len(model.target.lengths) == 1
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    del stream, cycle
    gc.collect()
    assert model.target.lengths == []


def test_rows_of_an_engine_of_ones_own_are_respected() -> None:
    model = make()
    own = Engine(model.target, model.drafter)
    own.submit([1], Sampling(), CONTROLLERS.make("fixed"), RULES.make("exact"))
    own.step()
    with pytest.raises(SettingError, match="another engine is running"):
        model.generate([1])


def test_turns_are_passed_on_in_order() -> None:
    turns, order, ready = FairLock(), [], threading.Semaphore(0)

    def take(name: int) -> None:
        ready.release()
        with turns:
            order.append(name)

    threads = [threading.Thread(target=take, args=(i,)) for i in range(5)]
    with turns:
        assert not turns.try_enter()
        for i, thread in enumerate(threads):
            thread.start()
            ready.acquire()
            while len(turns._queue) <= i + 1:
                time.sleep(1e-4)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]
    assert turns.try_enter()
    turns.leave()
