"""What is told about a generation besides its text, in the shapes that others read.

Each borrowed shape keeps its own definition of the acceptance rate: vLLM's is accepted over
drafted, forerun's accepted over judged.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from forerun.engine import Completion, Logprob, Round, Stats
from forerun.serve.plans import Policy

FLOOR = -9999.0  # what stands for minus infinity, which JSON does not have

Entry = tuple[int, Logprob | None]  # a token and what the target said of it; None of a text's first


def cached(done: Sequence[Completion | None], copies: int) -> int:
    """Prompt tokens that were not read: per prompt those that no copy of it read."""
    known = [0 if c is None else c.stats.cached_tokens for c in done]
    return sum(min(known[i : i + copies]) for i in range(0, len(known), copies))


def usage(prompts: Sequence[Sequence[int]], tokens: int, spared: int = 0) -> dict[str, Any]:
    """OpenAI's counts."""
    read = sum(map(len, prompts))
    return {
        "prompt_tokens": read,
        "completion_tokens": tokens,
        "total_tokens": read + tokens,
        "prompt_tokens_details": {"cached_tokens": spared},
    }


def predictions(done: Sequence[Completion]) -> dict[str, int]:
    """OpenAI's: tokens drafted from the client's prediction, kept and not."""
    rounds = [r for c in done for r in c.rounds if "predicted" in r.counters]
    accepted = sum(r.accepted for r in rounds)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(r.drafted for r in rounds) - accepted,
    }


def total(done: Sequence[Completion]) -> Stats:
    """Of several texts: counts added up, and times until the last of them."""
    names = "prefill_seconds", "first_token_seconds", "seconds"
    prefill, first, seconds = (
        max((getattr(c.stats, name) for c in done), default=0.0) for name in names
    )
    return Stats.of([r for c in done for r in c.rounds], 0, prefill, first, seconds)


def timings(
    prompts: Sequence[Sequence[int]], done: Sequence[Completion], spared: int = 0
) -> dict[str, Any]:
    """llama.cpp's: tokens and milliseconds of reading and of writing."""
    whole, read = total(done), sum(map(len, prompts)) - spared
    reading = 1e3 * whole.prefill_seconds
    writing = 1e3 * max((c.stats.seconds - c.stats.prefill_seconds for c in done), default=0.0)
    return {
        "cache_n": spared,
        "prompt_n": read,
        "prompt_ms": _ms(reading),
        "prompt_per_second": _rate(read, reading),
        "predicted_n": whole.tokens,
        "predicted_ms": _ms(writing),
        "predicted_per_second": _rate(whole.tokens, writing),
        "draft_n": whole.drafted,
        "draft_n_accepted": whole.accepted,
        "draft_n_verif_steps": len(_drafting(done)),
    }


def metrics(done: Sequence[Completion], queued: Sequence[float], detailed: bool) -> dict[str, Any]:
    """vLLM's: times and `speculative_decoding`, with the lists per step if `detailed`."""
    rounds, whole = _drafting(done), total(done)
    most = max((r.drafted for r in rounds), default=0)
    kept = Counter(r.accepted for r in rounds)
    speculative: dict[str, Any] = {
        "mean_acceptance_length": 1 + whole.accepted / len(rounds) if rounds else 1.0,
        "draft_acceptance_rate": whole.accepted / whole.drafted if rounds else 0.0,
        "acceptance_histogram": [kept[i] for i in range(most + 1)],
        "num_spec_steps": len(rounds),
        "num_accepted_draft_tokens": whole.accepted,
        "num_draft_tokens": whole.drafted,
        "num_spec_tokens": most,
    }
    if detailed:
        speculative["per_step_accepted"] = [r.accepted for r in rounds]
        speculative["per_step_drafted"] = [r.drafted for r in rounds]
    first, waited = whole.first_token_seconds, max(queued, default=0.0)
    longest = max((c.stats.tokens for c in done), default=0)
    between = 1e3 * (whole.seconds - first) / (longest - 1) if longest > 1 else None
    return {
        "time_to_first_token_ms": _ms(1e3 * (waited + first)),
        "generation_time_ms": _ms(1e3 * (whole.seconds - first)),
        "queue_time_ms": _ms(1e3 * waited),
        "mean_itl_ms": None if between is None else _ms(between),
        "tokens_per_second": _rate(whole.tokens, 1e3 * whole.seconds),
        "speculative_decoding": speculative,
    }


def forerun(policy: Policy, done: Sequence[Completion], queued: Sequence[float]) -> dict[str, Any]:
    """What only this server knows: who wrote what, why drafting stopped, how far it drifted."""
    whole = total(done)
    origins = Counter(piece.origin.value for c in done for piece in c.pieces)
    names = "prefill", "draft", "verify", "other", "first_token"
    seconds = {"queue": max(queued, default=0.0)}
    seconds |= {name: getattr(whole, f"{name}_seconds") for name in names}
    seconds["total"] = whole.seconds
    rate, drift = whole.acceptance_rate, whole.drift_mean
    return {
        **policy.to_json(),
        "rounds": whole.rounds,
        "drafted": whole.drafted,
        "accepted": whole.accepted,
        "acceptance_rate": None if rate is None else round(rate, 6),
        "block_efficiency": round(whole.block_efficiency, 6) if whole.rounds else None,
        "origins": dict(origins),
        "stopped_by": whole.stopped_by,
        "drift_mean": None if drift is None else round(drift, 8),
        "drift_max": whole.drift_max,
        "seeds": [c.seed for c in done],
        "ms": {name: _ms(1e3 * value) for name, value in seconds.items()},
    }


def _drafting(done: Sequence[Completion]) -> list[Round]:
    return [r for c in done for r in c.rounds if r.drafted]


def _ms(value: float) -> float:
    return round(value, 3)


def _rate(count: int, ms: float) -> float:
    return round(1e3 * count / ms, 3) if ms > 0 else 0.0


def completion_logprobs(
    entries: Sequence[Entry], top: int, name: Callable[[int], str], offset: int = 0
) -> dict[str, Any]:
    """Of a completion: `top` alternatives per token, places in the text from `offset` on."""
    out: dict[str, list[Any]] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
    }  # fmt: skip
    for token, score in entries:
        text = name(token)
        out["tokens"].append(text)
        out["text_offset"].append(offset)
        offset += len(text)
        chosen = best = None
        if score is not None:
            chosen = _finite(score.logprob)
            if top:
                best = {text: chosen} | {name(other): _finite(v) for other, v in score.top[:top]}
        out["token_logprobs"].append(chosen)
        out["top_logprobs"].append(best)
    return out


def chat_logprobs(
    entries: Sequence[Entry],
    top: int,
    name: Callable[[int], str],
    data: Callable[[int], bytes | None],
) -> dict[str, Any]:
    """Of a chat answer, none of whose tokens is the first of a text; likewise, with their bytes:
    several tokens together may make one character."""

    def entry(token: int, value: float) -> dict[str, Any]:
        own = data(token)
        shown = None if own is None else list(own)
        return {"token": name(token), "logprob": _finite(value), "bytes": shown}

    content = [
        {
            **entry(token, score.logprob),
            "top_logprobs": [entry(other, value) for other, value in score.top[:top]],
        }
        for token, score in entries
        if score is not None
    ]
    return {"content": content, "refusal": None}


def _finite(value: float) -> float:
    return value if value > FLOOR else FLOOR  # also what is no number
