"""Prometheus metrics: vLLM's names after a prefix of one's own, and those only forerun has."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from forerun.engine.results import Completion, Event, Origin
from forerun.serve.worker import Update, Worker
from forerun.types import Stop

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
POSITIONS = 16  # positions of a draft that are counted one by one; later ones count as the last
REASONS = ("eos", "stop", "length", "context", "error")
REFUSALS = ("queue_full", "shutting_down", "invalid", "unauthorized")
DEPARTURES = ("disconnected", "slow_reader")

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 32)
_DRIFT = (0, 1e-4, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.5, 1)

Counts = defaultdict[Counter, float]  # what to add to which


class Metrics:
    """The server's metrics, in a registry of their own.

    Args:
        prefix: of every name, e.g. ``"forerun:"``, or ``"vllm:"`` for tools that read vLLM's.
        model: the only value of the label `model_name`.
    """

    def __init__(self, prefix: str, model: str) -> None:
        disable_created_metrics()  # a second series for each, that nobody reads
        self.registry = CollectorRegistry()

        def make(kind: type[Any], name: str, what: str, *label: str, **more: Any) -> Any:
            labels = ["model_name", *label]
            metric = kind(f"{prefix}{name}", what, labels, registry=self.registry, **more)
            return metric if label else metric.labels(model)

        def by_label(name: str, what: str, label: str, values: Any) -> Any:
            """A counter per value of a label: all are there from the start, and no others."""
            metric = make(Counter, name, what, label)
            return {value: metric.labels(model, str(value)) for value in values}

        def seconds(name: str, what: str, buckets: Any = _SECONDS) -> Any:
            return make(Histogram, f"{name}_seconds", what, buckets=buckets)

        self.running = make(Gauge, "num_requests_running", "Texts that have a row.")
        self.waiting = make(Gauge, "num_requests_waiting", "Texts that wait for one.")
        self.cache = make(Gauge, "kv_cache_usage_perc", "Share of --memory in use, 0 to 1.")
        self.prompt_tokens = make(Counter, "prompt_tokens", "Prompt tokens read.")
        self.queries = make(Counter, "prefix_cache_queries", "Prompt tokens looked up.")
        self.hits = make(Counter, "prefix_cache_hits", "Prompt tokens found there.")
        self.tokens = make(Counter, "generation_tokens", "Tokens written.")
        reasons = "finished_reason", REASONS
        self.finished = by_label("request_success", "Texts by why they ended.", *reasons)
        self.refused = by_label("requests_refused", "Requests not taken.", "reason", REFUSALS)
        why = "reason", DEPARTURES
        self.gone = by_label("requests_cancelled", "Requests nobody waited for.", *why)
        self.errors = make(Counter, "engine_errors", "Texts lost to errors of the engine.")
        self.first = seconds("time_to_first_token", "Arrival to first tokens.")
        what = "Per token after the first round's."
        self.per_token = seconds("request_time_per_output_token", what, _TOKEN)
        self.total = seconds("e2e_request_latency", "Arrival to last token.")
        self.queue = seconds("request_queue_time", "Arrival to row.")
        self.prefill = seconds("request_prefill_time", "Reading the prompt.")
        self.decode = seconds("request_decode_time", "After that.")
        self.round = seconds("round", "Wall time of a round, per row in it.", _TOKEN)
        self.drafts = make(Counter, "spec_decode_num_drafts", "Rounds with a draft.")
        self.drafted = make(Counter, "spec_decode_num_draft_tokens", "Tokens drafted.")
        self.accepted = make(Counter, "spec_decode_num_accepted_tokens", "Drafted tokens kept.")
        what = f"Likewise by position in the draft; {POSITIONS - 1} and later together."
        name, places = "spec_decode_num_accepted_tokens_per_pos", range(POSITIONS)
        self.positions = by_label(name, what, "position", places)
        stops, origins = [stop.label for stop in Stop], [origin.value for origin in Origin]
        what = "Rounds by why drafting stopped."
        self.stopped = by_label("spec_decode_stopped", what, "reason", stops)
        self.origins = by_label("tokens_by_origin", "Tokens by who wrote them.", "origin", origins)
        what, phases = "Wall time of rounds, per row in them.", ["draft", "verify", "other"]
        self.phases = by_label("round_phase_seconds", what, "phase", phases)
        self.length = make(Histogram, "draft_length", "Drafted per round.", buckets=_LENGTHS)
        self.kept = make(Histogram, "accepted_length", "Kept per round.", buckets=_LENGTHS)
        what = "Distance per judged position of lossy rules."
        self.drift = make(Histogram, "drift", what, buckets=_DRIFT)

    def update(self, updates: Sequence[Update]) -> None:
        """Count what happened to texts, every counter once."""
        counts: Counts = defaultdict(float)
        for update in updates:
            if not isinstance(update, Event):
                if getattr(update, "status", 400) == 500:
                    counts[self.errors] += 1
                    counts[self.finished["error"]] += 1
                continue
            done = update.completion
            if done is not None and done.scores is not None:
                continue  # nothing was written
            self._round(update, counts)
            if done is not None:
                self._done(update.queued, done, counts)
        for metric, count in counts.items():
            metric.inc(count)

    def _round(self, event: Event, counts: Counts) -> None:
        r = event.round
        counts[self.tokens] += len(event.pieces)
        for piece in event.pieces:
            counts[self.origins[piece.origin.value]] += 1
        counts[self.stopped[r.stopped_by.label]] += 1
        counts[self.phases["draft"]] += r.draft_seconds
        counts[self.phases["verify"]] += r.verify_seconds
        counts[self.phases["other"]] += max(r.other_seconds, 0.0)
        self.round.observe(r.draft_seconds + r.verify_seconds + r.other_seconds)
        self.length.observe(r.drafted)
        if r.drafted:
            counts[self.drafts] += 1
            counts[self.drafted] += r.drafted
            counts[self.accepted] += r.accepted
            self.kept.observe(r.accepted)
        for place in range(r.accepted):
            counts[self.positions[min(place, POSITIONS - 1)]] += 1
        for drift in r.drift or ():
            self.drift.observe(drift)

    def _done(self, queued: float, done: Completion, counts: Counts) -> None:
        stats = done.stats
        counts[self.finished.get(done.finish_reason, self.finished["error"])] += 1
        counts[self.prompt_tokens] += stats.prompt_tokens
        counts[self.queries] += stats.prompt_tokens
        counts[self.hits] += stats.cached_tokens
        self.queue.observe(queued)
        self.first.observe(queued + stats.first_token_seconds)
        self.total.observe(queued + stats.seconds)
        self.prefill.observe(stats.prefill_seconds)
        self.decode.observe(max(stats.seconds - stats.prefill_seconds, 0.0))
        later = stats.tokens - done.rounds[0].committed
        if later > 0:
            self.per_token.observe((stats.seconds - stats.first_token_seconds) / later)

    def text(self, worker: Worker) -> bytes:
        self.running.set(worker.running)
        self.waiting.set(worker.waiting)
        self.cache.set(worker.share)
        return generate_latest(self.registry)
