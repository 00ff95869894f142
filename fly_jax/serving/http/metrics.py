"""Metrics for Prometheus: vLLM's names under a prefix of our own, and FLy's counts."""

from __future__ import annotations

import collections
from collections.abc import Callable

import jax
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fly_jax.engine.engine import Engine
from fly_jax.engine.request import RequestState, Settled
from fly_jax.serving.http.replies import SpeculativeDecoding

PREFIX = "fly_jax:"
_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)

_num_compilations = 0


def _count(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _num_compilations
    _num_compilations += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


class ServerMetrics:
    """The metrics of one server: gauges and the engine's totals are read, the rest is counted."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._registry = engine, CollectorRegistry()
        self._counted = collections.Counter[int]()  # rounds that `text` has been told of
        k = engine.spec.static.num_speculative_tokens
        slots = engine.slots
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "num_requests_running": ("Requests in a slot", lambda: len(slots.live)),
            "num_requests_waiting": ("Requests without a slot", lambda: engine.num_waiting),
            "num_slots": ("Requests that can be decoded together", lambda: len(slots.occupants)),
            "slot_usage_perc": (
                "Slots in use; 1 is all", lambda: len(slots.live) / len(slots.occupants)
            ),
            "num_spec_tokens": ("Draft tokens of a round (K), or the most", lambda: k),
            "spec_decode_depth": (
                "K of the last round",
                lambda: k if engine.costs is None else engine.costs.current,
            ),
            "compilations": ("Programs that this process compiled", lambda: _num_compilations),
        }  # fmt: skip
        for name, (text, value) in gauges.items():
            Gauge(PREFIX + name, text, registry=self._registry).set_function(value)
        counter, histogram = self._counter, self._histogram
        self._prompt = counter("prompt_tokens", "Prompt tokens of requests that got a slot")
        self._reused = counter(
            "prefix_cache_hits", "Prompt tokens that another request had brought into the caches"
        )
        self._tokens = counter("generation_tokens", "Tokens handed out")
        self._ends = counter("request_success", "Requests by how they ended", "finished_reason")
        self._refusals = counter("request_refused", "Requests not answered, by status", "status")
        self._drafts = counter("spec_decode_num_drafts", "Passes of the target over a draft")
        self._drafted = counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens kept")
        self._per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens kept, by position", "position"
        )
        self._rescued = counter("spec_decode_num_rescued_tokens", "Mismatches kept")
        self._rounds = counter("spec_decode_num_rounds", "Rounds, where K is chosen, by K", "depth")
        self._revoked = counter("spec_decode_num_revoked_windows", "Deferred windows that failed")
        self._refused = counter("spec_decode_num_refused_tokens", "Mismatches refused", "by")
        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token")
        self._between = histogram("inter_token_latency_seconds", "Of each token after the first")
        self._queued = histogram("request_queue_time_seconds", "From arrival to a slot")
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token")
        for position in range(k):
            self._per_position.labels(str(position))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self._registry, buckets=_SECONDS)

    def settled(self, settled: Settled, seconds: float | None) -> None:
        """Counts tokens of a request, `seconds` after those before them (None: the first)."""
        number = len(settled.token_ids)
        self._tokens.inc(number)
        for _ in range(0 if seconds is None else number):
            self._between.observe((seconds or 0) / number)

    def ended(self, state: RequestState) -> None:
        """Counts a request whose last tokens have come, or which was cancelled."""
        one = state.generation
        found = SpeculativeDecoding.of([one], self._engine.spec.static.num_speculative_tokens)
        self._ends.labels(one.finish_reason if state.is_finished else "cancelled").inc()
        self._drafts.inc(found.num_spec_steps)
        self._drafted.inc(found.num_draft_tokens)
        self._accepted.inc(found.num_accepted_draft_tokens)
        self._rescued.inc(found.num_rescued_tokens)
        self._revoked.inc(found.num_revoked_windows)
        for reason, number in found.refused_by.items():
            self._refused.labels(reason).inc(number)
        for position in range(len(found.acceptance_histogram) - 1):
            reached = sum(found.acceptance_histogram[position + 1 :])
            self._per_position.labels(str(position)).inc(reached)
        if state.seated is not None:
            self._prompt.inc(len(state.request.prompt))
            self._reused.inc(state.num_reused)
            self._queued.observe(state.seated - state.submitted)
        if state.first_token_seconds is not None:
            self._first.observe(state.first_token_seconds)
        if state.finished is not None and one.finish_reason != "cancelled":
            self._whole.observe(state.finished - state.submitted)

    def refused(self, status: int) -> None:
        """Counts a request that was not taken."""
        self._refusals.labels(str(status)).inc()

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        if self._engine.costs is not None:
            for depth, number in list(self._engine.costs.num_rounds.items()):
                self._rounds.labels(str(depth)).inc(number - self._counted[depth])
                self._counted[depth] = number
        return generate_latest(self._registry)
