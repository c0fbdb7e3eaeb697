"""What a reply of the server says of an answer beside its text."""

from __future__ import annotations

from dataclasses import replace

from dspine.engine.stats import Stats
from dspine.server.answers import timings

PLAIN = Stats(
    prompt_tokens=10,
    prefill_ms=50.0,
    tokens=20,
    steps=20,
    drafted=0,
    accepted=0,
    draft_ms=0.0,
    verify_ms=390.0,
    host_ms=10.0,
    wall_ms=400.0,
    cached_tokens=6,
)


def test_timings_are_those_of_llama_server() -> None:
    assert timings(PLAIN) == {
        "cache_n": 6,
        "prompt_n": 4,
        "prompt_ms": 50.0,
        "prompt_per_token_ms": 12.5,
        "prompt_per_second": 80.0,
        "predicted_n": 20,
        "predicted_ms": 400.0,
        "predicted_per_token_ms": 20.0,
        "predicted_per_second": 50.0,
    }


def test_timings_say_what_was_drafted_or_why_nothing_is() -> None:
    drafted = timings(replace(PLAIN, steps=10, drafted=15, accepted=10))
    assert (drafted["draft_n"], drafted["draft_n_accepted"]) == (15, 10)
    assert "drafting_off" not in drafted
    assert timings(replace(PLAIN, disabled_reason="it broke"))["drafting_off"] == "it broke"
