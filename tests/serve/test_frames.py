"""What is sent of a round, without a server."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from forerun.engine import Event, Piece
from forerun.engine.reporting import NOTHING
from forerun.engine.results import Origin
from forerun.errors import SettingError
from forerun.serve import streaming
from forerun.serve.answers import Answer
from forerun.serve.streaming import EventStream
from forerun.serve.worker import Reply

TEXT = 'a "quoted"\n\x00 line, é and \U0001f436'


def made(chat: bool, usage: tuple[bool, bool], copies: int = 1) -> Answer:
    request = SimpleNamespace(
        calling=None, return_tokens_as_token_ids=False, return_token_ids=False, prediction=None,
        stream_options=SimpleNamespace(include_usage=usage[0], continuous_usage_stats=usage[1]),
    )  # fmt: skip
    plan = SimpleNamespace(
        calling=None, request=request, chat=chat, top=None, policy=SimpleNamespace(report="none"),
        copies=copies, prompts=[[1, 2]], jobs=[None] * copies, echo=False, opens_turn=False,
    )  # fmt: skip
    return Answer(plan, 'the "model"', SimpleNamespace(token=str))


def update(index: int, text: str) -> Event:
    return Event(index, [], NOTHING, [Piece(7, text, Origin.PLAIN)])


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("usage", [(False, False), (True, False), (True, True)])
def test_a_frame_holds_what_a_round_added_to_its_text(chat, usage):
    answer = made(chat, usage, copies=2)
    for index, text in [(0, "one"), (1, TEXT), (0, TEXT), (1, "two")]:
        sent = answer.frame(update(index, text))
        assert sent.startswith(b"data: ")
        assert sent.endswith(b"\n\n")
        wanted = answer._chunk(index, {"content": text} if chat else text)
        assert json.loads(sent[6:]) == wanted
    if usage[1]:
        assert json.loads(sent[6:])["usage"]["completion_tokens"] == 4


def test_nothing_new_is_no_frame():
    assert made(True, (False, False)).frame(update(0, "")) == b""


class Worker:
    """Nothing behind it."""

    def forget(self, reply: Reply) -> None:
        pass


def test_what_waits_comes_together_and_an_error_after_what_was_before_it():
    got = []

    async def read():
        reply = Reply(Worker(), range(2))
        for index in (0, 1, 0):
            reply.put(index, update(index, ""))
        reply.put(1, SettingError("wrong"))
        try:
            async for updates in reply.updates():
                got.append([u.request for u in updates])
        finally:
            assert not reply.open

    with pytest.raises(SettingError, match="wrong"):
        asyncio.run(read())
    assert got == [[0, 1, 0]]


def test_comments_never_stand_inside_a_frame_nor_behind_the_end(monkeypatch):
    """The client takes long for every part; in between a comment is due all the time."""
    sent: list[dict] = []
    writing = False

    async def frames():
        for i in range(5):
            await asyncio.sleep(0.01)
            yield b"data: %d\n\n" % i

    async def send(message):
        nonlocal writing
        assert not writing
        writing = True
        sent.append(message)
        await asyncio.sleep(0.003)
        writing = False

    async def receive():
        await asyncio.sleep(60)

    async def serve():
        await EventStream(frames(), asyncio.Event())({}, receive, send)

    monkeypatch.setattr(streaming, "SILENT", 0.002)
    asyncio.run(serve())
    bodies = [m["body"] for m in sent[1:]]
    assert [b for b in bodies if b.startswith(b"data")] == [b"data: %d\n\n" % i for i in range(5)]
    assert b": ping\n\n" in bodies
    assert [m["more_body"] for m in sent[1:]] == [True] * (len(sent) - 2) + [False]
