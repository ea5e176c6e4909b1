"""One engine for many streams, from however many threads."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from forerun.drafters.base import Drafter
from forerun.engine.loop import Engine
from forerun.engine.results import Event
from forerun.errors import ModelError
from forerun.requests import Request


class FairLock:
    """A lock that is passed on in the order in which it was asked for. With an ordinary one, the
    thread that takes round after round might never let others join."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._queue: deque[threading.Lock] = deque()  # of those who have it and wait for it

    def __enter__(self) -> None:
        turn = threading.Lock()
        with self._guard:
            self._queue.append(turn)
            if self._queue[0] is turn:
                return
            turn.acquire()
        try:
            turn.acquire()  # until it is passed on to us
        except BaseException:
            with self._guard:
                ours = self._queue[0] is turn
                if not ours:
                    self._queue.remove(turn)
            if ours:
                self.leave()
            raise

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        with self._guard:
            self._queue.popleft()
            if self._queue:
                self._queue[0].release()

    def try_enter(self) -> bool:
        """Take it if it is free; never waits, so that a garbage collector may call it."""
        if not self._guard.acquire(blocking=False):
            return False
        try:
            if free := not self._queue:
                self._queue.append(threading.Lock())
            return free
        finally:
            self._guard.release()


@dataclass(eq=False)
class _Stream:
    """What one caller waits for."""

    places: dict[int, int] = field(default_factory=dict)
    """Of its requests that are not done, by the engine's ids: where in the list they stand."""
    events: list[Event] = field(default_factory=list)
    error: BaseException | None = None


class SharedEngine:
    """Runs the requests of all streams of one model together.

    Whoever waits for an event takes a round for everybody; the others find theirs when they look.
    Streams of the same drafter and batch size share a batch; others begin when that has ended, in
    an engine that is made anew, over the same target.
    """

    def __init__(self, make: Callable[[Drafter, int], Engine]) -> None:
        self.turns = FairLock()  # held while the engine, or anything it uses, is touched
        self._make = make
        self._engine: Engine | None = None
        self._kind: tuple[Drafter, int] | None = None
        self._streams: dict[int, _Stream] = {}  # the stream of each request that is not done
        self._left: deque[_Stream] = deque()  # streams whose callers walked away

    def stream(
        self, drafter: Drafter, batch_size: int, requests: Sequence[Request]
    ) -> Generator[Event]:
        """Events of these requests, whose ids are their places in the list; errors as of
        `Engine.submit`: then none of them runs."""
        stream = _Stream()
        try:
            with self.turns:
                self._join(stream, (drafter, batch_size), requests)
            while stream.places or stream.events:
                with self.turns:
                    while stream.places and not stream.events:
                        self._advance()
                    events, stream.events = stream.events, []
                yield from events
            if stream.error is not None:
                raise ModelError(
                    f"another request of the same batch broke the run: {stream.error!r}"
                ) from stream.error
        finally:
            if stream.places:
                self._left.append(stream)
            while self._left and self.turns.try_enter():
                try:
                    self._drop()
                finally:
                    self.turns.leave()

    def _join(
        self, stream: _Stream, kind: tuple[Drafter, int], requests: Sequence[Request]
    ) -> None:
        self._drop()
        while self._streams and self._kind != kind:
            try:
                self._advance()
            except Exception:  # not ours: those whose it is have been told
                break
        if not self._streams:
            self._engine, self._kind = self._make(*kind), kind
        assert self._engine is not None
        try:
            for place, request in enumerate(requests):
                stream.places[self._engine.submit(request)] = place
        except BaseException:
            self._cancel(stream)
            raise
        self._streams.update(dict.fromkeys(stream.places, stream))

    def _advance(self) -> None:
        self._drop()
        if not self._streams:
            return
        assert self._engine is not None
        try:
            for event in self._engine.step():
                request, stream = event.request, self._streams[event.request]
                event.request = stream.places[request]
                stream.events.append(event)
                if event.completion is not None:
                    del self._streams[request], stream.places[request]
        except BaseException as error:
            for stream in self._streams.values():
                stream.error, stream.places = error, {}
            self._streams.clear()
            self._engine.clear()
            raise

    def _drop(self) -> None:
        """Cancel what nobody waits for any more."""
        while self._left:
            self._cancel(self._left.popleft())

    def _cancel(self, stream: _Stream) -> None:
        assert self._engine is not None
        for request in stream.places:
            self._engine.cancel(request)
            self._streams.pop(request, None)
        stream.places = {}
