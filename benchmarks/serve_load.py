"""The server under load: throughput and latency by clients, overload, and a soak."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

import forerun
from benchmarks.closed_loop import Answer, closed_loop, in_turn, summary
from benchmarks.common import RESULTS, Task, console, provenance, save, table, tasks
from forerun import zoo
from forerun.engine import Sampling
from forerun.grammar import Grammars

MODES: dict[str, Any] = {
    "plain": False,
    "auto": {"controller": "auto"},
    "fixed(4)": {"controller": "fixed(4)"},
}
LATENCIES = (50, 99)
OURS = (sys.executable, "-m", "forerun", "serve", "--port", "0")


def others(vllm: Path | None) -> dict[str, tuple[str, ...]]:
    """Commands of other servers with the same weights in float32, 16 rows, no prefix cache.

    ``vllm`` is the program of an environment of its own.
    """
    own = (str(Path(sys.executable).with_name("transformers")), "serve", str(zoo.TARGET),
           "--device", "cpu", "--log-level", "info")  # fmt: skip
    commands: dict[str, tuple[str, ...]] = {
        "transformers serve": own,
        "transformers serve --continuous-batching": (*own, "--continuous-batching"),
    }
    if vllm is not None:
        plain = (str(vllm), "serve", str(zoo.TARGET), "--max-num-seqs", "16",
                 "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.1")  # fmt: skip
        draft = {"method": "draft_model", "model": str(zoo.DRAFT), "num_speculative_tokens": 4}
        commands |= {
            "vllm serve": plain,
            "vllm serve, draft, 4 tokens": (*plain, "--speculative-config", json.dumps(draft)),
        }
    return {
        name: (*command, "--dtype", "float32", "--host", "127.0.0.1", "--port", str(8417 + i))
        for i, (name, command) in enumerate(commands.items())
    }


@dataclass(frozen=True)
class Lengths:
    """How long to measure: seconds and turns of a cell of the curve, seconds of the soak."""

    seconds: float
    turns: int
    soak: float


@dataclass
class Served:
    """A running server."""

    url: str
    process: subprocess.Popen[str]

    @property
    def megabytes(self) -> float:
        """Resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


@contextlib.contextmanager
def serving(*options: str, command: Sequence[str] = OURS) -> Iterator[Served]:
    """A server in a process of its own, ours on a free port."""
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.search(r"http://127[0-9.:]+", line):
                # Who writes to a pipe that nobody reads stops when it is full.
                threading.Thread(target=process.stdout.read, daemon=True).start()
                time.sleep(2)  # some say where before they listen
                yield Served(match[0], process)
                return
        raise RuntimeError(f"{command[0]} did not start")
    finally:
        process.terminate()
        process.wait(30)


@dataclass
class Reply:
    """What became of one request."""

    task: int
    status: int = 0
    text: str = ""
    tokens: int = 0
    first: float = 0.0
    """Seconds to the first token."""
    between: float = 0.0
    """Seconds per token after the first frame's."""
    drafted: int = 0
    accepted: int = 0
    stamps: list[tuple[float, int]] = field(default_factory=list)
    """When how many tokens were there."""


async def ask(http: httpx2.AsyncClient, index: int, task: Task, mode: Any) -> Reply:
    """One streamed request, greedy."""
    out, began = Reply(index), time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body(task, mode)) as answer:
        out.status = answer.status_code
        async for line in answer.aiter_lines():
            if not line.startswith("data: {") or out.status != 200:
                continue
            frame = json.loads(line[6:])
            if "error" in frame:
                out.status = 500
                break
            out.text += frame["choices"][0]["text"]
            out.tokens = frame["usage"]["completion_tokens"]
            out.stamps.append((time.perf_counter(), out.tokens))
            if "timings" in frame:
                out.drafted = frame["timings"]["draft_n"]
                out.accepted = frame["timings"]["draft_n_accepted"]
    if out.stamps:
        (start, first), (end, last) = out.stamps[0], out.stamps[-1]
        out.first = start - began
        out.between = (end - start) / (last - first) if last > first else 0.0
    return out


def body(task: Task, mode: Any, **more: Any) -> dict[str, Any]:
    """A greedy, streamed request that tells how many tokens there are."""
    return {
        "prompt": task.tokens,
        "max_tokens": task.max_new_tokens,
        "temperature": 0,
        "repetition_penalty": task.repetition_penalty,
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
        "speculative": mode,
        **more,
    }


def curve(
    work: Sequence[Task], clients: Sequence[int], seconds: float, turns: int
) -> dict[str, Any]:
    """Every mode at every number of clients, in turns on one server, in a rotating order."""
    cells: dict[str, Any] = {}

    def loop(url: str, count: int, mode: Any, seconds: float) -> tuple[float, float, list[Any]]:
        def request(index: int) -> dict[str, Any]:
            return body(work[index % len(work)], mode)

        began, answers = asyncio.run(closed_loop(url, request, count, seconds))
        time.sleep(0.3)  # rows of those who hung up leave
        return began, seconds, answers

    for count in clients:
        runs: dict[str, list[Any]] = {name: [] for name in MODES}
        with serving("--prefix-cache", "0") as server:
            for mode in MODES.values():
                loop(server.url, count, mode, 3.0)
            for turn, step in itertools.product(range(turns), range(len(MODES))):
                name = list(MODES)[(turn + step) % len(MODES)]
                runs[name].append(loop(server.url, count, MODES[name], seconds))
                speed = summary(runs[name][-1:])["turns"][0]
                console.print(f"{count} clients, {name}: {speed:.0f} tokens/s")
        plain = summary(runs["plain"])["turns"]
        cells[str(count)] = {
            name: _cell(summary(parts), plain, seconds) for name, parts in runs.items()
        }
    return cells


def _cell(measured: dict[str, Any], plain: Sequence[float], seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds * len(plain),
        "requests": measured["requests"],
        "tokens_per_second": float(np.mean(measured["turns"])),
        "turns": measured["turns"],
        "of_plain": [a / b for a, b in zip(measured["turns"], plain, strict=True)],
        "acceptance": measured["acceptance"],
        "ttft_ms": {str(p): 1e3 * float(np.percentile(measured["first"], p)) for p in LATENCIES},
        "tpot_ms": {str(p): 1e3 * float(np.percentile(measured["between"], p)) for p in LATENCIES},
    }


def overload(model: forerun.Model, work: Sequence[Task], seconds: float) -> dict[str, Any]:
    """Ten times as many requests as it can serve; every answer is compared with the engine's."""
    wanted = [
        model.generate(
            [t.tokens], plain=True, max_new_tokens=t.max_new_tokens,
            repetition_penalty=t.repetition_penalty,
        )[0].text
        for t in work
    ]  # fmt: skip

    async def offered(url: str, rate: float) -> list[Reply]:
        coin, began, running = random.Random(1), time.perf_counter(), []
        async with httpx2.AsyncClient(base_url=url, timeout=300, limits=httpx2.Limits()) as http:
            for i in itertools.count():
                if time.perf_counter() - began > seconds:
                    break
                index = i % len(work)
                running.append(asyncio.create_task(ask(http, index, work[index], MODES["auto"])))
                await asyncio.sleep(coin.expovariate(rate))
            return await asyncio.gather(*running)

    with serving("--queue", "32") as server:
        before = _busy(server.url, work)
        rate = 10 * before["requests"] / 8.0
        memory = [server.megabytes]
        done = asyncio.run(offered(server.url, rate))
        memory.append(server.megabytes)
        after = _busy(server.url, work)
        memory.append(server.megabytes)
    taken = [a for a in done if a.status == 200]
    return {
        "seconds": seconds,
        "offered_per_second": rate,
        "offered": len(done),
        "statuses": {str(k): v for k, v in Counter(a.status for a in done).items()},
        "answered_per_second": len(taken) / seconds,
        "differing_from_plain": sum(a.text != wanted[a.task] for a in taken),
        "ttft_ms": {str(p): 1e3 * float(np.percentile([a.first for a in taken], p))
                    for p in LATENCIES},
        "tokens_per_second_before": before["turns"][0],
        "tokens_per_second_after": after["turns"][0],
        "megabytes": memory,
    }  # fmt: skip


def _busy(url: str, work: Sequence[Task]) -> dict[str, Any]:
    """Sixteen clients under `auto` for 8 seconds."""

    def request(index: int) -> dict[str, Any]:
        return body(work[index % len(work)], MODES["auto"])

    began, answers = asyncio.run(closed_loop(url, request, 16, 8.0))
    return summary([(began, 8.0, answers)])


KINDS = ("stream", "whole", "stream", "n", "stop", "grammar", "leaves", "stream")
"""What the requests of a soak are, in turn; one of eight hangs up in the middle."""
REGEX = "(yes|no|perhaps), [a-z]{3,6}!"


def _mixed(model: forerun.Model, work: Sequence[Task]) -> list[tuple[str, dict[str, Any], str]]:
    """Requests of all kinds, each with the text that plain decoding alone writes."""
    texts = Grammars.of(model)
    made, how = list[tuple[str, dict[str, Any]]](), list[Sampling]()
    plain = _alone(model, work, [_sampling(task) for task in work])
    for i, (task, text) in enumerate(zip(work, plain, strict=True)):
        kind, mode = KINDS[i % len(KINDS)], list(MODES.values())[i % len(MODES)]
        more: dict[str, Any] = {}
        sampling = _sampling(task)
        if kind == "n":
            more = {"n": 2, "stream": i % 2 == 0}
        elif kind == "whole":
            more = {"stream": False}
        elif kind == "stop" and len(text) > 4:
            more = {"stop": text[len(text) // 2 :][:2]}
            sampling = replace(sampling, stop=(more["stop"],))
        elif kind == "grammar":
            more = {"guided_regex": REGEX}
            sampling = replace(sampling, constraint=texts.regex(REGEX))
        elif kind == "leaves":
            more = {"max_tokens": 300, "ignore_eos": True}
        made.append((kind, body(task, mode, **more)))
        how.append(sampling)
    return [
        (kind, sent, text)
        for (kind, sent), text in zip(made, _alone(model, work, how), strict=True)
    ]


def _sampling(task: Task) -> Sampling:
    return Sampling(max_new_tokens=task.max_new_tokens, repetition_penalty=task.repetition_penalty)


def _alone(model: forerun.Model, work: Sequence[Task], how: Sequence[Sampling]) -> list[str]:
    done = model.generate([t.tokens for t in work], sampling=how, plain=True, batch_size=1)
    return [one.text for one in done]


def _choice_texts(answer: Answer, sent: dict[str, Any]) -> list[str]:
    """The texts of an answer, by choice."""
    if not sent["stream"]:
        return [choice["text"] for choice in answer.document()["choices"]]
    texts = [""] * sent.get("n", 1)
    for _, frame in answer.frames():
        for choice in frame["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


def soak(
    model: forerun.Model, work: Sequence[Task], requests: int, clients: int, seconds: float
) -> dict[str, Any]:
    """Short requests of all kinds at once: memory, rows and texts over time."""
    mixed, parts, coin = _mixed(model, work), list[dict[str, float]](), random.Random(1)
    differing: Counter[str] = Counter()

    def order(count: int) -> Iterator[tuple[int, dict[str, Any], float | None]]:
        for _ in range(count):
            index = coin.randrange(len(mixed))
            kind, sent, _ = mixed[index]
            yield index, sent, coin.uniform(0.005, 0.4) if kind == "leaves" else None

    with serving("--prefix-cache", "100MB", "--queue", "64") as server:
        for _ in range(10):
            counts: Counter[str] = Counter()

            def take(answer: Answer, counts: Counter[str] = counts) -> None:
                kind, sent, text = mixed[answer.index]
                counts["sent"] += 1
                if kind == "leaves":
                    counts["left"] += not answer.complete
                elif answer.status == 200 and answer.complete:
                    counts["answered"] += 1
                    wrong = any(written != text for written in _choice_texts(answer, sent))
                    differing[kind] += wrong
                    counts["differing"] += wrong
                else:
                    counts["failed"] += 1

            began = time.perf_counter()
            work_list = order(requests // 10)
            asyncio.run(in_turn(server.url, work_list, clients, seconds / 10, take))
            took = time.perf_counter() - began
            parts.append({**counts, "seconds": took, "megabytes": server.megabytes})
            console.print(parts[-1])
        time.sleep(1)
        idle = httpx2.get(f"{server.url}/metrics").text
    left = re.findall(r"num_requests_(?:running|waiting)\S* ([0-9.]+)", idle)
    return {
        "clients": clients,
        "requests": int(sum(part["sent"] for part in parts)),
        "parts": parts,
        "differing": dict(differing),
        "rows_left": sum(map(float, left)),
    }


def beside(
    model: forerun.Model,
    work: Sequence[Task],
    clients: Sequence[int],
    lengths: Lengths,
    vllm: Path | None,
) -> dict[str, Any]:
    """Whole answers from this server and from `others`, greedy, without penalties."""
    wanted = _alone(model, work, [Sampling(max_new_tokens=t.max_new_tokens) for t in work])
    prompts = [model.tokenizer.decode(t.tokens) for t in work]
    cells: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(serving("--prefix-cache", "0"))
        servers: dict[str, tuple[Served, Any]] = {
            "plain": (ours, False), "auto": (ours, {"controller": "auto"})
        }  # fmt: skip
        for name, command in others(vllm).items():
            servers[name] = (stack.enter_context(serving(command=command)), None)
        time.sleep(20)  # some still compile
        for count in clients:
            speeds: dict[str, list[float]] = {name: [] for name in servers}
            differing = dict.fromkeys(servers, 0)
            for turn, step in itertools.product(range(lengths.turns + 1), range(len(servers))):
                name = list(servers)[(turn + step) % len(servers)]
                server, mode = servers[name]

                def request(index: int, mode: Any = mode) -> dict[str, Any]:
                    at = index % len(work)
                    more = {} if mode is None else {"speculative": mode}
                    return {"prompt": prompts[at], "max_tokens": work[at].max_new_tokens,
                            "temperature": 0, **more}  # fmt: skip

                lasts = lengths.seconds if turn else 4.0  # the first turn does not count
                _, answers = asyncio.run(closed_loop(server.url, request, count, lasts))
                idle()
                if not turn:
                    continue
                whole = [a for a in answers if a.complete and a.status == 200]
                documents = [a.document() for a in whole]
                tokens = sum(d["usage"]["completion_tokens"] for d in documents)
                differing[name] += sum(
                    d["choices"][0]["text"] != wanted[a.index % len(work)]
                    for a, d in zip(whole, documents, strict=True)
                )
                speeds[name].append(tokens / lengths.seconds)
                console.print(f"{count} clients, {name}: {speeds[name][-1]:.0f} tokens/s")
            cells[str(count)] = {
                name: {
                    "tokens_per_second": float(np.mean(made)),
                    "of_plain": [a / b for a, b in zip(made, speeds["plain"], strict=True)],
                    "differing": differing[name],
                }
                for name, made in speeds.items()
            }
    return {"seconds": lengths.seconds * lengths.turns, "cells": cells}


def idle(most: float = 60.0) -> None:
    """Wait until the machine has next to nothing to do, for so many seconds at most: some servers
    go on with what nobody waits for any more, on all cores."""

    def ticks() -> tuple[int, int]:
        """Of all cores since the start, and the idle ones among them."""
        with Path("/proc/stat").open(encoding="ascii") as stat:
            spent = [int(count) for count in stat.readline().split()[1:]]
        return sum(spent), spent[3]

    until, (total, rested) = time.monotonic() + most, ticks()
    while time.monotonic() < until:
        time.sleep(1)
        before, (total, rested) = (total, rested), ticks()
        if rested - before[1] > 0.9 * (total - before[0]):
            return


def prefix(model: forerun.Model, turns: int) -> dict[str, Any]:
    """Long prompts sent twice: time to the first token when it was read before, and when not."""
    pairs: list[tuple[float, float]] = []

    async def twice(url: str, task: Task) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=300) as http:
            cold, warm = [await ask(http, 0, task, MODES["auto"]) for _ in range(2)]
        assert cold.text == warm.text
        pairs.append((1e3 * cold.first, 1e3 * warm.first))

    story = model.encode("There was a dog who lived near a forest, and a cat. " * 60)[:700]
    with serving() as server:
        for turn in range(turns + 1):
            asyncio.run(twice(server.url, Task("", [turn + 50, *story], 8)))
    cold, warm = zip(*pairs[1:], strict=True)
    out = {"prompt_tokens": len(story) + 1, "turns": turns}
    for name, values in (("cold_ms", cold), ("warm_ms", warm)):
        out[name] = {str(p): float(np.percentile(values, p)) for p in LATENCIES}  # type: ignore[assignment]
    return out


def main(
    model: forerun.Model,
    parts: Sequence[str],
    prompts: int,
    tokens: int,
    lengths: Lengths,
    clients: Sequence[int],
    vllm: Path | None,
) -> None:
    """Measure some parts; what is known of the others is kept."""
    work = tasks(model, "test", prompts, tokens)
    random.Random(0).shuffle(work)
    made = provenance(model, prompts=prompts, tokens=tokens)
    new: dict[str, Any] = {}
    if "curve" in parts:
        new["curve"] = {"cells": curve(work, clients, lengths.seconds, lengths.turns)}
    if "prefix" in parts:
        new["prefix"] = prefix(model, 12)
    if "overload" in parts:
        new["overload"] = overload(model, work, 300.0)
    if "beside" in parts:
        new["beside"] = beside(model, work, clients, lengths, vllm)
    if "soak" in parts:
        short = [replace(t, max_new_tokens=min(t.max_new_tokens, 10)) for t in work]
        new["soak"] = soak(model, short, 10_000, 32, lengths.soak)
    file = RESULTS / "serve-load.json"  # read now: another part may have been measured meanwhile
    results: dict[str, Any] = json.loads(file.read_text())["results"] if file.is_file() else {}
    if "curve" in new:
        cells = results.get("curve", {}).get("cells", {}) | new["curve"]["cells"]
        new["curve"]["cells"] = dict(sorted(cells.items(), key=_clients))
    results |= {name: {"made": made, **part} for name, part in new.items()}
    save("serve-load", made, results, "\n\n".join(_texts(results)))


def _clients(cell: tuple[str, Any]) -> int:
    return int(cell[0])


def _texts(results: dict[str, Any]) -> Iterator[str]:
    def both(cell: dict[str, Any], name: str) -> str:
        return " / ".join(f"{cell[name][str(p)]:.0f}" for p in LATENCIES)

    if (part := results.get("curve")) is not None:
        rows = [
            [count, name, f"{cell['seconds']:.0f}", str(cell["requests"]),
             f"{cell['tokens_per_second']:.0f}",
             _ratios(cell["of_plain"]),
             both(cell, "ttft_ms"), both(cell, "tpot_ms"), f"{cell['acceptance']:.2f}"]
            for count, cells in part["cells"].items()
            for name, cell in cells.items()
        ]  # fmt: skip
        yield (
            "Closed loop over HTTP, 16 rows, no prefix cache; clients on the same machine; modes "
            "in turns on one server; of plain: mean over the turns, and the lowest and highest; "
            "p50 / p99. `" + part["made"]["command"] + "`\n\n"
        ) + table(
            [
                "clients",
                "controller",
                "seconds",
                "requests",
                "tokens/s",
                "of plain",
                "TTFT ms",
                "TPOT ms",
                "accepted",
            ],
            rows,
        )
    if (part := results.get("beside")) is not None:
        rows = [
            [count, name, f"{cell['tokens_per_second']:.0f}", _ratios(cell["of_plain"]),
             str(cell["differing"])]
            for count, cells in part["cells"].items()
            for name, cell in cells.items()
        ]  # fmt: skip
        yield (
            f"Beside other servers with the same weights in float32 and 16 rows: whole answers "
            f"in {part['seconds']:.0f} seconds a cell, greedy, no penalties; answers that differ "
            f"from plain decoding alone. `{part['made']['command']}`\n\n"
        ) + table(["clients", "server", "tokens/s", "of plain", "differing"], rows)
    if (part := results.get("prefix")) is not None:
        yield (
            f"A prompt of {part['prompt_tokens']} tokens sent twice, {part['turns']} times: TTFT "
            f"p50 / p99 {both(part, 'cold_ms')} ms, the second time {both(part, 'warm_ms')} ms."
        )
    if (part := results.get("overload")) is not None:
        refused = part["statuses"].get("429", 0)
        megabytes = " → ".join(f"{m:.0f}" for m in part["megabytes"])
        yield (
            f"Overload: {part['offered']} requests in {part['seconds']:.0f} s, ten times what 16 "
            f"clients in turn had answered before. {part['statuses'].get('200', 0)} answered, "
            f"{refused} got status 429, "
            f"{part['offered'] - refused - part['statuses'].get('200', 0)} anything else; "
            f"{part['differing_from_plain']} of the answers differ from plain decoding alone. TTFT "
            f"p50 / p99 {both(part, 'ttft_ms')} ms. Tokens/s before and after: "
            f"{part['tokens_per_second_before']:.0f}, {part['tokens_per_second_after']:.0f}. "
            f"Memory before, after, later: {megabytes} MB."
        )
    if (part := results.get("soak")) is not None:
        yield (
            f"Soak: {part['requests']} requests by {part['clients']} clients, prefix cache of 100 "
            "MB: streams, whole answers, two copies, stop strings, a regular expression, each "
            "under plain, `auto` and `fixed(4)`; one of eight asks for 300 tokens and hangs up. "
            f"{part['rows_left']:.0f} rows left at its end. Differing from plain decoding alone: "
            f"{sum(part['differing'].values())}. By tenths:\n\n"
        ) + table(
            ["", *(str(i + 1) for i in range(len(part["parts"])))],
            [
                [name, *(f"{p.get(name, 0):.0f}" for p in part["parts"])]
                for name in ("sent", "answered", "left", "failed", "differing", "megabytes")
            ],
        )


def _ratios(turns: Sequence[float]) -> str:
    return f"{np.mean(turns):.2f} [{min(turns):.2f}, {max(turns):.2f}]"
