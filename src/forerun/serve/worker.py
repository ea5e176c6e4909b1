"""The thread that owns the engine: requests go in, updates come out by a bounded queue per client.

The only module of the server that knows the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from forerun.engine import Completion, Engine, Event, Logprob, Request, Stats
from forerun.engine.prefixes import Prefixes
from forerun.engine.reporting import NOTHING
from forerun.errors import ForerunError, PromptError, SettingError
from forerun.model import Model
from forerun.serve.config import Config
from forerun.serve.errors import ApiError

log = logging.getLogger("forerun.serve")

BUFFER = 1024  # updates of a job that may wait for a slow reader; then it is cancelled
LAST_ROUND = 10.0  # seconds that the engine's thread has to end its round when the server stops


class Memory:
    """A budget of bytes (None: no bound) for the caches and logits of running requests of a model
    and its drafter, of whose logits a pass holds `width` a row. Caches are as wide as their longest
    row, so what a row takes depends on the others."""

    def __init__(self, model: Model, budget: int | None, width: int = 8) -> None:
        target, draft = model.target.facts, getattr(model.drafter, "rows", None)
        self.budget = budget
        self.per_token = target.token_bytes + (draft.facts.token_bytes if draft else 0)
        """Of one row in all caches."""
        self.per_row = 4 * width * target.vocab_size  # besides: the logits of a pass

    def bytes(self, columns: Sequence[int]) -> int:
        """Of rows that may grow to these lengths."""
        return len(columns) * (max(columns, default=0) * self.per_token + self.per_row)

    def fits(self, columns: Sequence[int], more: int) -> bool:
        return self.budget is None or self.bytes([*columns, more]) <= self.budget

    def share(self, columns: Sequence[int]) -> float:
        """Of the budget that they may come to take, in [0, 1]; 0 without a budget."""
        return min(self.bytes(columns) / self.budget, 1.0) if self.budget else 0.0


Update = Event | ForerunError
"""What happened to a job: an event, whose request is its place in the reply; or why it failed."""


class Reply:
    """The updates of the jobs of one client, whose ids follow each other, in order; iterate it on
    the event loop."""

    def __init__(self, worker: Worker, jobs: range) -> None:
        self._worker, self.jobs = worker, jobs
        self._room = BUFFER * len(jobs)
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        self._open = set(jobs)
        self.slow = asyncio.Event()  # whether it was cancelled because nobody read it

    def put(self, job: int, update: Update) -> None:
        """Take an update; one too many, and the reply fails: its reader is too slow."""
        if job not in self._open:
            return  # it was cancelled meanwhile
        if isinstance(update, Event):
            update.request = job - self.jobs.start
        if not isinstance(update, Event) or update.completion is not None:
            self._open.discard(job)
        if self._updates.qsize() >= self._room:
            self.cancel()
            self.slow.set()
            while not self._updates.empty():
                self._updates.get_nowait()
            update = ApiError(503, "the stream was not read fast enough and was cancelled")
        self._updates.put_nowait(update)

    async def updates(self) -> AsyncIterator[list[Event]]:
        """All events, those together that are there; ends with the last job's last, or raises the
        first error after what came before it."""
        left = len(self.jobs)
        while left:
            there = [await self._updates.get()]
            while not self._updates.empty():
                there.append(self._updates.get_nowait())
            events = [update for update in there if isinstance(update, Event)]
            left -= sum(event.completion is not None for event in events)
            if events:
                yield events
            for error in there:
                if isinstance(error, ForerunError):
                    self.cancel()  # one that fails takes its siblings along
                    raise error

    @property
    def open(self) -> bool:
        return bool(self._open)

    def cancel(self) -> None:
        """Nobody wants the rest: the rows are free after the running round."""
        if self._open:
            self._open.clear()
            self._worker.forget(self)


class Worker:
    """The engine in a thread, as the operator bounds it. `watch` is called on the event loop with
    the updates of a round.

    Its methods are called on the event loop, but for those that say otherwise.
    """

    def __init__(
        self, model: Model, config: Config, watch: Callable[[Sequence[Update]], None]
    ) -> None:
        self._config, self._watch = config, watch
        self.memory = Memory(model, config.memory)
        self.prefixes = Prefixes.of(config.prefix_cache, [model.target, *model.drafter.caches])
        self.draining = False
        self._live: dict[int, Reply] = {}
        """By the ids of jobs that are not done. They are the engine's, which counts likewise."""
        self._count = 0
        self._seconds = 1.0  # of a typical request, for Retry-After
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._engine = Engine(
            model.target, model.drafter, model.tokenizer, model.eos, config.max_rows,
            meter=model.meter, prefixes=self.prefixes,
        )  # fmt: skip
        self._engine.fits = lambda running, job: self.memory.fits(
            [*map(self._columns, running)], self._columns(job)
        )
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        # What follows belongs to the engine's thread.
        self._news: list[tuple[int, Update]] = []
        """What the event loop does not know yet. It wakes once per round: whenever it is woken,
        this thread may have to wait until it has done what there is to do."""
        self._given: set[int] = set()  # jobs that the engine has
        self._ended = False

    def start(self) -> None:
        """Begin to work; on the event loop that will read the replies."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        return len(self._live.keys() & self._engine.running.keys())

    @property
    def waiting(self) -> int:
        return len(self._live) - self.running

    @property
    def share(self) -> float:
        """Of the memory that running requests may come to take, in [0, 1]."""
        return self.memory.share([*map(self._columns, self._engine.running.values())])

    def check(self, jobs: Sequence[Request]) -> None:
        """Refuse what cannot be served: PromptError, SettingError. From any thread."""
        for job in jobs:
            self._engine.check(job)
            if not self.memory.fits([], columns := self._columns(job)):
                raise PromptError(
                    f"a prompt of {len(job.prompt)} tokens with {columns - len(job.prompt)} more "
                    "to come does not fit this server's memory; ask for fewer tokens"
                )

    def open(self, jobs: Sequence[Request]) -> Reply:
        """Queue the jobs of one client, which `check` passed, all or none; `ApiError` 429 if the
        queue is full, 503 if the server is shutting down."""
        rows = self._config.max_rows
        if self.draining or not self.alive:
            state = "shutting down" if self.draining else "not running"
            raise ApiError(503, f"the server is {state}", retry_after=5)
        if len(self._live) + len(jobs) > rows + self._config.queue:
            message = f"{self.waiting} requests wait already; try again later"
            after = round((1 + self.waiting / rows) * self._seconds)
            raise ApiError(429, message, None, "queue_full", max(1, min(60, after)))
        ids = range(self._count, self._count + len(jobs))
        reply, arrived = Reply(self, ids), time.perf_counter()
        self._count = ids.stop
        self._live.update(dict.fromkeys(ids, reply))
        self._inbox.put(lambda: self._submit(ids, jobs, arrived))
        return reply

    def answer_empty(self, jobs: Sequence[Request]) -> Reply:
        """The reply to jobs that write nothing: all of it is there at once."""
        reply = Reply(self, range(len(jobs)))
        for i, job in enumerate(jobs):
            stats = Stats.of([], len(job.prompt), 0.0, 0.0, 0.0)
            done = Completion("", [], "length", [], stats, [], seed=0, logprobs=[])
            reply.put(i, Event(i, [], NOTHING, [], done))
        return reply

    def forget(self, reply: Reply) -> None:
        for job in reply.jobs:
            self._live.pop(job, None)
        self._inbox.put(lambda: self._cancel(reply.jobs))

    async def score(self, texts: Sequence[Sequence[int]], top: int) -> list[Sequence[Logprob]]:
        """Of every token of some texts but their first, by the target alone."""
        out: list[Sequence[Logprob]] = [()] * len(texts)
        places = [i for i, text in enumerate(texts) if len(text) > 1]
        jobs = [Request.to_score(texts[i], top) for i in places]
        self.check(jobs)
        reply = self.open(jobs)
        try:
            async for updates in reply.updates():
                for update in updates:
                    if update.completion is not None:
                        out[places[update.request]] = update.completion.scores or ()
        finally:
            reply.cancel()
        return out

    async def stop(self, waits: Callable[[], bool] = lambda: False) -> None:
        """Take nothing new, let running and waiting requests finish while somebody waits, end."""
        self.draining = True
        while self._live and self.alive and waits():
            await asyncio.sleep(0.02)
        gone = ApiError(503, "the server is shutting down", retry_after=5)
        self._deliver([(job, gone) for job in self._live])
        self._inbox.put(self._end)
        await asyncio.to_thread(self._thread.join, LAST_ROUND)

    def _deliver(self, updates: Sequence[tuple[int, Update]]) -> None:
        known = [(self._live[job], job, update) for job, update in updates if job in self._live]
        for reply, job, update in known:
            done = update.completion if isinstance(update, Event) else None
            if done is not None:
                self._seconds += 0.1 * (done.stats.seconds - self._seconds)
            if done is not None or isinstance(update, ForerunError):
                self._live.pop(job, None)
            reply.put(job, update)
        self._watch([update for _, _, update in known])

    # --- in the engine's thread -------------------------------------------------------------

    def _run(self) -> None:
        """Rounds for as long as there is work; asleep otherwise."""
        try:
            while not self._ended:
                self._listen()
                self._flush()
                if self._given:
                    self._news.extend(map(self._update, self._engine.step()))
        except BaseException as error:
            log.exception("the engine's thread ended")
            ended = ApiError(503, f"the engine ended ({type(error).__name__})")
            self._news.extend((job, ended) for job in self._given)
            self._flush()

    def _flush(self) -> None:
        """Tell the event loop what happened since the last time."""
        if self._news:
            news, self._news = self._news, []
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody reads
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._deliver, news)

    def _listen(self) -> None:
        """Do what was asked meanwhile; with nothing else to do, wait for it."""
        idle = not self._given
        if idle:
            self._flush()
        while True:
            try:
                command = self._inbox.get(block=idle)
            except queue.Empty:
                return
            command()
            idle = False

    def _columns(self, job: Request) -> int:
        """Most tokens its caches will hold."""
        if job.scores is not None:
            return len(job.prompt)
        limit = self._engine.target.limit
        return min(len(job.prompt) + job.sampling.max_new_tokens, limit)

    def _submit(self, ids: range, jobs: Sequence[Request], arrived: float) -> None:
        for job, request in zip(ids, jobs, strict=True):
            number = self._engine.submit(request, since=arrived)
            assert number == job, "the engine counts the jobs it is given"
            self._given.add(job)

    def _cancel(self, jobs: range) -> None:
        for job in self._given.intersection(jobs):
            self._given.discard(job)
            self._engine.cancel(job)

    def _update(self, event: Event) -> tuple[int, Update]:
        job, done = event.request, event.completion
        if done is not None:
            self._given.discard(job)
            if done.error is not None:
                return job, _failed(done.error_type or Exception, done.error)
            seconds, first = (  # from when it had a row
                max(given - event.queued, 0.0)
                for given in (done.stats.seconds, done.stats.first_token_seconds)
            )
            stats = replace(done.stats, seconds=seconds, first_token_seconds=first)
            event.completion = replace(done, stats=stats)
        try:
            _ = event.pieces
        except Exception as error:  # its tokenizer
            self._cancel(range(job, job + 1))
            return job, _failed(type(error), f"its text could not be made: {error!r}")
        return job, event

    def _end(self) -> None:
        """Leave `_run`; what still ran is dropped."""
        self._ended = True
        self._given.clear()
        self._engine.clear()


def _failed(kind: type[Exception], error: str) -> ApiError:
    """What a client is told of the error that ended its request: of one that is not his the kind,
    no path and no traceback."""
    if issubclass(kind, ForerunError):
        return ApiError(400 if issubclass(kind, (PromptError, SettingError)) else 500, error)
    log.error("a request ended with an error: %s", error)
    return ApiError(500, f"the engine failed ({kind.__name__}); the request was lost")
