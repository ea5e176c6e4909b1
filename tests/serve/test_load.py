"""Queues, departures, faults and leaving."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse

import httpx2
import pytest

from forerun.engine.judging import ALONE, BESIDE
from forerun.serve import streaming, worker
from serve.conftest import eventually

BODY = {"prompt": [3], "max_tokens": 200, "temperature": 0}


def ask(server, **more):
    """Send a request and return the socket without reading: a client that can just go away."""
    import json

    body = json.dumps(BODY | more).encode()
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    client.sendall(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
    return client


def test_a_full_queue_answers_429_and_recovers(held):
    server, target = held
    target.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        taken = [pool.submit(server.complete, [3], max_tokens=4) for _ in range(3)]
        eventually(lambda: server.server.worker.waiting == 2)
        late = server.post("/v1/completions", **BODY)
        assert late.status_code == 429
        assert late.json()["error"]["code"] == "queue_full"
        assert 1 <= int(late.headers["retry-after"]) <= 60
        assert server.metric("num_requests_waiting") == 2
        target.gate.set()
        assert {t.result()["choices"][0]["finish_reason"] for t in taken} == {"length"}
    assert server.complete([3], max_tokens=4)["usage"]["completion_tokens"] == 4
    assert server.metric("requests_refused_total", reason="queue_full") == 1


@pytest.mark.slow
def test_a_connection_outlives_what_clients_keep_it_for(held):
    """httpx reuses one for 5 seconds: a server that closes it after as many loses requests."""
    server, _ = held
    assert server.listener.config.timeout_keep_alive > 5

    def status() -> int:
        answer = HTTPResponse(client)
        answer.begin()
        answer.read()  # head and body may come apart
        return answer.status

    with ask(server, max_tokens=4) as client:
        assert status() == 200
        time.sleep(5.5)
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert status() == 200


def test_more_texts_than_ever_fit_are_refused_for_good(held):
    server, _ = held
    answer = server.post("/v1/completions", **BODY | {"n": 4})
    assert answer.status_code == 400
    assert "at most 3" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("where", ["running", "waiting"])
def test_a_client_that_leaves_frees_its_row(held, stream, where):
    server, target = held
    worker = server.server.worker
    target.gate.clear()
    first = ask(server, max_tokens=4000, stream=stream)
    eventually(lambda: worker.running == 1)
    leaver = first
    if where == "waiting":
        leaver = ask(server, max_tokens=4000, stream=stream)
        eventually(lambda: worker.waiting == 1)
    leaver.close()
    eventually(lambda: worker.running + worker.waiting == (where == "waiting"))
    first.close()
    target.gate.set()
    eventually(server.idle)
    eventually(lambda: target.history == [])
    eventually(lambda: server.metric("requests_cancelled_total", reason="disconnected") >= 1)
    assert server.complete([3], max_tokens=4)["choices"][0]["finish_reason"] == "length"


def test_a_slow_reader_is_cancelled(held, monkeypatch):
    server, target = held
    monkeypatch.setattr(worker, "BUFFER", 200)
    listening = server.listener.servers[0].sockets[0]
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    target.gate.clear()
    # Many large frames, so that the buffers between the two are soon full.
    client = ask(server, max_tokens=4000, stream=True, logprobs=16,
                 return_tokens_as_token_ids=True,
                 speculative={"report": "rounds", "controller": "fixed(0)"})  # fmt: skip
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    target.gate.set()
    eventually(lambda: server.metric("requests_cancelled_total", reason="slow_reader") == 1, 20)
    eventually(server.idle)
    client.close()


def test_an_engine_that_fails_loses_its_requests_only(held, caplog):
    server, target = held
    target.fail = ValueError("/a/secret/path")
    lost = server.post("/v1/completions", **BODY)
    assert lost.status_code == 500
    assert lost.json()["error"]["type"] == "server_error"
    assert "secret" not in lost.text
    assert "Traceback" not in lost.text
    assert server.metric("engine_errors_total") == 1
    assert server.http.get("/health").status_code == 200
    assert server.complete([3], max_tokens=4)["usage"]["completion_tokens"] == 4
    assert "secret" in caplog.text  # the operator's log says it


class Broken:
    """A tokenizer that fails."""

    def decode(self, *_: object, **__: object) -> str:
        raise ValueError("/a/secret")


@pytest.mark.parametrize("stream", [True, False])
def test_text_that_cannot_be_made_loses_its_request_only(held, stream):
    server, _ = held
    engine = server.server.worker._engine
    engine.tokenizer = Broken()
    lost = server.post("/v1/completions", **BODY, stream=stream)
    assert lost.status_code == (200 if stream else 500)
    assert '"server_error"' in lost.text
    assert "secret" not in lost.text
    engine.tokenizer = None
    eventually(server.idle)
    assert server.complete([3], max_tokens=4)["usage"]["completion_tokens"] == 4


def test_numbers_that_are_none_are_said_to_be(held):
    server, target = held
    target._script = target._script * float("nan")
    lost = server.post("/v1/completions", **BODY)
    assert lost.status_code == 500
    assert "the target's logits are no numbers" in lost.json()["error"]["message"]


def test_an_error_in_mid_stream_is_a_frame(held):
    server, target = held
    target.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", **BODY, stream=True)
        eventually(lambda: server.server.worker.running == 1)
        target.fail = ValueError("broken")
        target.gate.set()
        text = answer.result().text
    assert '"error"' in text.strip().split("\n\n")[-1]
    assert "[DONE]" not in text


@pytest.mark.parametrize("stream", [True, False])
def test_a_fault_of_the_servers_own_is_no_traceback(held, monkeypatch, stream):
    server, _ = held
    from forerun.serve.answers import Answer

    def broken(*_):
        raise KeyError("/a/secret")

    monkeypatch.setattr(Answer, "take", broken)
    answer = server.post("/v1/completions", **BODY, stream=stream)
    assert answer.status_code == (200 if stream else 500)
    assert '"server_error"' in answer.text
    assert "secret" not in answer.text
    eventually(server.idle)
    assert server.http.get("/health").status_code == 200


def test_one_that_waits_survives_a_failure(held):
    server, target = held
    target.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        lost = pool.submit(server.post, "/v1/completions", **BODY)
        eventually(lambda: server.server.worker.running == 1)
        waits = pool.submit(server.complete, [3], max_tokens=4)
        eventually(lambda: server.server.worker.waiting == 1)
        target.fail = RuntimeError("broken")
        target.gate.set()
        assert lost.result().status_code == 500
        assert waits.result()["usage"]["completion_tokens"] == 4


def test_a_thread_that_ended_is_no_healthy_server(held):
    server, _ = held
    server.server.worker._inbox.put(lambda: (_ for _ in ()).throw(SystemExit))
    eventually(lambda: not server.server.worker.alive)
    assert server.http.get("/health").status_code == 503
    assert server.post("/v1/completions", **BODY).status_code == 503


def test_requests_that_do_not_fit_the_memory_wait_or_are_refused(held):
    server, target = held
    worker = server.server.worker
    memory = worker.memory
    worker._engine._max_rows = 2
    memory.budget, memory.per_token, memory.per_row = 300, 1, 0
    target.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(server.complete, [3], max_tokens=199) for _ in range(2)]
        eventually(lambda: (worker.running, worker.waiting) == (1, 1))  # 2 × 200 > 300
        assert server.metric("kv_cache_usage_perc") == pytest.approx(200 / 300)
        target.gate.set()
        assert [b.result()["usage"]["completion_tokens"] for b in both] == [199, 199]
    never = server.post("/v1/completions", prompt=[3], max_tokens=400)
    assert never.status_code == 400
    assert "memory" in never.json()["error"]["message"]
    eventually(server.idle)
    assert worker.share == 0


def test_many_clients_get_what_they_would_get_alone(shipped, pair):
    prompts = ["Once upon a time", "English: I like apples.\nGerman:", "User: Hi\nAssistant:"]
    bodies = [
        {"prompt": p, "max_tokens": 6 + 3 * i, "temperature": t, "seed": i,
         "speculative": {"controller": c}}
        for i, p in enumerate(prompts)
        for t in (0, 1)
        for c in ("auto", "fixed(4)")
    ]  # fmt: skip
    alone = [shipped.complete(**body)["choices"][0]["text"] for body in bodies]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda body: shipped.complete(**body), bodies))
    assert [done["choices"][0]["text"] for done in together] == alone
    eventually(shipped.idle)
    assert pair.target.lengths == []


def test_leaving_lets_running_requests_finish_and_takes_no_new_ones(held):
    server, target = held
    server.listener._grace = 10
    target.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        running_one = pool.submit(server.complete, [3], max_tokens=4)
        eventually(lambda: server.server.worker.running == 1)
        server.listener.should_exit = True
        eventually(lambda: server.server.worker.draining)
        late = server.post("/v1/completions", **BODY)
        assert late.status_code == 503
        assert "retry-after" in late.headers
        assert server.http.get("/health").status_code == 503
        target.gate.set()
        assert running_one.result()["usage"]["completion_tokens"] == 4


def test_a_second_interrupt_does_not_wait_for_what_runs(held):
    server, target = held
    server.listener._grace = 60
    target.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(server.post, "/v1/completions", **BODY)
        eventually(lambda: server.server.worker.running == 1)
        for _ in range(2):
            server.listener.handle_exit(signal.SIGTERM, None)
        assert cut.result().status_code == 503
        target.gate.set()


def test_leaving_without_grace_ends_what_runs(held):
    server, target = held
    target.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(server.post, "/v1/completions", **BODY)
        eventually(lambda: server.server.worker.running == 1)
        server.listener.should_exit = True
        assert cut.result().status_code == 503
        target.gate.set()


def test_a_silent_stream_gets_comments(held, monkeypatch):
    server, target = held
    monkeypatch.setattr(streaming, "SILENT", 0.05)
    target.gate.clear()
    threading.Timer(0.4, target.gate.set).start()
    text = server.post("/v1/completions", **BODY, stream=True).text
    assert ": ping\n\n" in text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_the_command_serves_and_leaves_on_sigterm():
    options = "--port 0 --runtime torch --memory 1GB --max-rows 2 --queue 1 --prefix-cache 9MB"
    command = [sys.executable, "-m", "forerun", "serve", "--api-key", "k", *options.split()]
    key = {"authorization": "Bearer k"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        line = process.stderr.readline()
        url = line.split(" at ")[1].split("/v1")[0]
        body = {"prompt": "Once upon a time there was a fox. " * 5, "max_tokens": 2}
        assert httpx2.post(f"{url}/v1/completions", json=body).status_code == 401
        cached = []
        for _ in range(2):
            done = httpx2.post(f"{url}/v1/completions", json=body, headers=key)
            cached.append(done.json()["timings"]["cache_n"])
        assert cached[0] == 0 < cached[1]
        many = httpx2.post(f"{url}/v1/completions", json=body | {"n": 4}, headers=key)
        assert "at most 3" in many.json()["error"]["message"]
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        rest = process.stderr.read()
        assert process.wait(15) == 0
        assert time.monotonic() - began < 15
        assert "Traceback" not in rest


def test_a_taken_port_is_said_so():
    from forerun.cli import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1


def test_memory_is_counted_by_what_caches_really_take():
    import forerun
    from forerun.serve.worker import Memory

    pair = forerun.load(runtime="torch")
    measured = Memory(pair, budget=10**9)
    pair.target.read([[1, 2, 3]])
    pair.drafter.rows.read([[1, 2, 3]])
    caches = [rows.executor.cache for rows in (pair.target, pair.drafter.rows)]
    took = [
        sum(tensor.shape[1] * tensor.shape[3] * tensor.itemsize for kv in cache._store.values()
            for tensor in kv)
        for cache in caches
    ]  # fmt: skip
    assert measured.per_token == sum(took)
    assert [pair.target.facts.token_bytes, pair.drafter.rows.facts.token_bytes] == took


def score(server, count=8):
    return server.post("/v1/completions", prompt=[3] * count, max_tokens=0, echo=True, logprobs=1)


def test_scoring_waits_in_the_queue_like_any_text(held):
    """One row, two may wait: three scorings are taken, a fourth is not; all are done at last."""
    server, target = held
    target.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        taken = [pool.submit(score, server) for _ in range(3)]
        worker = server.server.worker
        eventually(lambda: worker.running + worker.waiting == 3)
        refused = score(server)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        target.gate.set()
        assert [done.result(20).status_code for done in taken] == [200] * 3
    eventually(server.idle)


def test_a_long_scoring_lets_others_decode_between_its_parts(held):
    server, target = held
    passes: list[int] = []
    run = target.run
    target.run = lambda starts, pieces, wanted, **more: (
        passes.append(max(map(len, pieces))), run(starts, pieces, wanted, **more)
    )[1]  # fmt: skip
    target.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        scored = pool.submit(score, server, 1000)
        worker = server.server.worker
        eventually(lambda: worker.running + worker.waiting == 1)
        short = pool.submit(server.complete, [3], max_tokens=4, speculative=False)
        eventually(lambda: worker.running + worker.waiting == 2)
        target.gate.set()
        short.result(20)
        assert scored.result(20).status_code == 200
    longest = [n for n in passes if n > 8]
    assert ALONE >= max(longest) > min(longest[:-1]) == BESIDE  # small while the other one writes
    assert sum(longest) == 999


def test_an_abandoned_scoring_leaves_no_work(held):
    server, target = held
    target.gate.clear()
    worker = server.server.worker
    asked = {"prompt": [3] * 4000, "max_tokens": 0, "echo": True, "logprobs": 1}
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(server.http.post, "/v1/completions", timeout=2, json=asked)
        eventually(lambda: worker.running + worker.waiting == 1)
        with pytest.raises(httpx2.ReadTimeout):
            left.result()
    eventually(lambda: worker.running + worker.waiting == 0)
    target.gate.set()
    eventually(server.idle)
    eventually(lambda: target.history == [])
