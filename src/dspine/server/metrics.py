"""Counters in Prometheus' text format, under llama-server's names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from dspine.engine.stats import Stats
from dspine.server.engine_thread import Decodes

CONTENT_TYPE = CONTENT_TYPE_LATEST
_PREFIX = "llamacpp:"
# llama-server has no time of creation beside its counters.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """One registry of its own, so that several servers in one process stay apart."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(_PREFIX + name, text, registry=self._registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(_PREFIX + name, text, registry=self._registry)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens processed.")
        self._prompt_seconds = counter("prompt_seconds", "Time of processing prompts.")
        self._cached_tokens = counter("prompt_tokens_cached", "Prompt tokens taken from memory.")
        self._tokens = counter("tokens_predicted", "Tokens generated.")
        self._seconds = counter("tokens_predicted_seconds", "Time of generating tokens.")
        self._decodes = counter("n_decode", "Decodes of the target that gave tokens.")
        self._seen = 0
        self._busy = gauge("n_busy_slots_per_decode", "Answers that got tokens of a decode, mean.")
        self._drafts = counter("spec_decode_num_drafts", "Verifies that had drafts.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafts accepted.")
        self._accepted_at = Counter(
            _PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted at each position of the block.",
            ["position"],
            registry=self._registry,
        )
        self._requests = Counter(
            _PREFIX + "requests", "Requests answered.", ["status"], registry=self._registry
        )
        self._processing = gauge("requests_processing", "Answers being made.")
        self._deferred = gauge("requests_deferred", "Requests waiting.")
        self._speed = gauge("predicted_tokens_seconds", "Tokens a second of the last answer.")

    def answered(self, stats: Stats) -> None:
        """Count one answer."""
        self._prompt_tokens.inc(max(0, stats.prompt_tokens - stats.cached_tokens))
        self._prompt_seconds.inc(stats.prefill_ms / 1000)
        self._cached_tokens.inc(stats.cached_tokens)
        self._tokens.inc(stats.tokens)
        self._seconds.inc(stats.wall_ms / 1000)
        self._drafts.inc(stats.steps_with_drafts)
        self._drafted.inc(stats.drafted)
        self._accepted.inc(stats.accepted)
        for position, count in enumerate(stats.accepted_at_slot):
            self._accepted_at.labels(position=str(position)).inc(count)
        self._speed.set(stats.tokens_per_second)

    def replied(self, status: int) -> None:
        """Count one reply of any route."""
        self._requests.labels(status=str(status)).inc()

    def text(self, running: int, waiting: int, decodes: Decodes) -> bytes:
        """All of it, as Prometheus reads it."""
        self._processing.set(running)
        self._deferred.set(waiting)
        self._decodes.inc(decodes.count - self._seen)
        self._seen = decodes.count
        self._busy.set(decodes.answers / decodes.count if decodes.count else 0)
        return generate_latest(self._registry)
