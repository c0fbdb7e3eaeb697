"""What benchmarks compute from what they measured."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import drafters
import ops
import perplexity
import pytest
import runners
import verify_cost

GRAPH, OPERATION, WAIT, RESUME, END = range(5)
MS = 1_000_000


def test_time_is_shared_out_among_operations_and_waiting() -> None:
    # One product with a barrier inside (2 + 3 ms of work), then a norm (1 ms); in the other thread
    # the product takes 1 + 3 ms and the norm 1.
    first = [
        (GRAPH, 10 * MS, 0),
        (OPERATION, 11 * MS, 100),
        (WAIT, 13 * MS, 0),
        (RESUME, 14 * MS, 0),
        (WAIT, 17 * MS, 0),
        (RESUME, 18 * MS, 0),
        (OPERATION, 18 * MS, 200),
        (WAIT, 19 * MS, 0),
        (RESUME, 20 * MS, 0),
        (END, 21 * MS, 0),
    ]
    second = [
        (OPERATION, 11 * MS, 100),
        (WAIT, 12 * MS, 0),
        (RESUME, 14 * MS, 0),
        (WAIT, 17 * MS, 0),
        (RESUME, 18 * MS, 0),
        (OPERATION, 18 * MS, 200),
        (WAIT, 19 * MS, 0),
        (RESUME, 20 * MS, 0),
    ]
    found = ops.account([first, second], {100: "product", 200: "norm"}.__getitem__)
    # Waiting: 1 before the first operation, 1 + 1 + 1 at barriers and 1 at the end; 2 + 1 + 1.
    assert found == pytest.approx(
        {"graph": 11.0, "product": (5 + 4) / 2, "norm": 1.0, "waiting": (5 + 4) / 2}
    )


def test_the_better_stock_setting_counts() -> None:
    rows = {"1": 10.0, "2": 20.0, "4": 30.0, "8": 40.0, "16": 50.0}
    times = {
        "stock, flash attention off": {int(n): [ms] for n, ms in rows.items()},
        "stock, flash attention on": {int(n): [2 * ms] for n, ms in rows.items()},
        "dspine, flash attention on": {int(n): [5.0, 6.0, 4.0] for n in rows},
    }
    prompts = {name: [100.0 * (1 + index)] for index, name in enumerate(times)}
    memory = {"stock": {"resident": 10.0}, "dspine": {"resident": 15.0}}
    loads = {"stock": [1.0, 9.0, 2.0], "dspine": [4.0, 4.0, 4.0]}
    found = verify_cost.summary(Path(__file__), loads, prompts, memory, times)
    assert found["stock_setting"] == "stock, flash attention off"
    assert found["cost_of_rows"]["stock"]["16"] == 5.0
    assert found["cost_of_rows"]["dspine"]["16"] == 1.0
    assert found["dspine_over_stock"] == {
        "rows": {"1": 0.5, "2": 0.25, "4": 5 / 30, "8": 0.125, "16": 0.1},
        "prompt": 3.0,
        "load": 2.0,
        "resident": 1.5,
    }


def test_the_text_of_perplexity_is_documentation() -> None:
    text = perplexity.text_of(2000)
    assert len(text) == 2000
    assert text == perplexity.text_of(3000)[:2000]


class _FakeLlamaServer(BaseHTTPRequestHandler):
    """Answers /completion as llama-server does, and remembers what it was asked."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        timings = {"predicted_n": 11, "predicted_ms": 50.0, "draft_n": 12, "draft_n_accepted": 6}
        reply = json.dumps({"tokens": [1, 2, 3], "timings": timings}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


def test_answers_of_llama_server_are_counted_by_its_own_timings() -> None:
    with HTTPServer(("127.0.0.1", 0), _FakeLlamaServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tally = runners.Tally()
        run = runners.server_runner(f"http://127.0.0.1:{server.server_port}")
        assert run([7, 8], 10, tally) == (1, 2, 3)
        server.shutdown()
    figures = tally.to_json()
    assert figures["tokens_per_second"] == pytest.approx(200.0)
    # The first of 11 tokens comes with the prompt; 6 of the others were drafts, so 4 verifies.
    assert figures["acceptance_length"] == pytest.approx(2.5)
    assert figures["acceptance_rate"] == pytest.approx(0.5)
    asked = _FakeLlamaServer.asked[0]
    assert asked["prompt"] == [7, 8] and asked["cache_prompt"] is False
    assert asked["temperature"] == 0


ANSWERS: list[list[Any]] = [
    ["maths", "a", 12, 4, 6, 3],
    ["maths", "b", 8, 4, 8, 4],
    ["prose", "c", 10, 8, 10, 5],
]
"""Task, id, tokens, and verifies of the drafter, of single candidates and of expected chains."""


def test_lengths_of_drafters_by_hand() -> None:
    found = drafters.lengths(ANSWERS, ["maths", "prose"])
    assert found["maths"]["drafter"]["length"] == 20 / 8
    assert found["maths"]["single"]["length"] == pytest.approx(20 / 14, abs=1e-4)
    assert found["all"]["expected"]["length"] == 30 / 12
    # Drawn from two answers of 3 and 2 tokens a verify; from one alone there is no spread.
    assert found["maths"]["drafter"]["interval"] == [2.0, 3.0]
    assert found["prose"]["drafter"]["interval"] == [1.25, 1.25]
    # Three answers in all: the prose one is in every draw, the maths ones vary.
    low, high = found["all"]["drafter"]["interval"]
    assert low == pytest.approx(26 / 16, abs=1e-4) and high == pytest.approx(34 / 16, abs=1e-4)


def test_a_drafter_is_compared_on_the_same_answers() -> None:
    slower = [[*row[:3], row[3] + 2, *row[4:]] for row in ANSWERS]
    assert drafters.ratio(ANSWERS, ANSWERS) == {"ratio": 1.0, "interval": [1.0, 1.0]}
    assert drafters.ratio(ANSWERS, slower)["ratio"] == pytest.approx(22 / 16)
    with pytest.raises(SystemExit, match="different answers"):
        drafters.ratio(ANSWERS, slower[:2])
