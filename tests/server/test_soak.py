"""A short soak: mixed requests of eight clients at once against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
import soak
from soak_requests import CHAT, Ask, Reply, asks, fault


def test_nothing_goes_wrong_and_no_slot_is_lost(
    users_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPINE_CACHE_DIR", str(users_cache))
    options = ("-np", "4", "-c", "2048", "-t", "1", "--no-calibrate")
    with soak.serving(options, 4) as server:
        found = soak.soak(server, 30, 8, seed=3, compares=False)
    assert found["failures"] == []
    assert found["statuses"]["200"] > 20 and found["statuses"]["400"] > 0
    assert len(found["kinds"]) > 10 and found["accepted"] > 0


def test_a_soak_notices_what_is_wrong() -> None:
    ask = Ask("chat", CHAT, b'{"max_tokens": 4}', is_stream=True)
    good = {
        "choices": [{"delta": {"content": "Hi"}, "token_ids": [1, 2], "finish_reason": "stop"}],
        "timings": {"predicted_n": 2},
    }
    assert fault(ask, Reply(200, [good], is_done=True)) is None
    many = {
        "choices": [{**good["choices"][0], "token_ids": [1] * 5}],  # type: ignore[index]
        "timings": {"predicted_n": 5},
    }
    for reply, words in (
        (Reply(500, [{"error": {"code": 500}}]), "status 500 instead of 200"),
        (Reply(200, [good]), "without its last line"),
        (Reply(200, [{**good, "timings": {"predicted_n": 3}}], is_done=True), "2 token ids"),
        (Reply(200, [{"error": {"code": 500}}], is_done=True), "a stream with an error"),
        (Reply(200, [many], is_done=True), "5 tokens, 4 at most"),
    ):
        assert words in (fault(ask, reply) or ""), words
    bad = Ask("bad body", CHAT, b"{", status=400)
    assert fault(bad, Reply(400, [{"error": {"code": 400, "message": "wrong"}}])) is None
    assert "without code" in (fault(bad, Reply(400, [{"error": "wrong"}])) or "")


def test_every_kind_of_request_is_asked_and_the_same_seed_asks_the_same() -> None:
    first, second = (list(asks(2000, 7, 512, 1 << 20)) for _ in range(2))
    assert [(one.kind, one.body, one.key) for one in first] == [
        (one.kind, one.body, one.key) for one in second
    ]
    assert len({one.kind for one in first}) == 19
    assert {one.leave for one in first} == {None, "chunks", "soon", "upload"}
