"""`dspine serve` on the default pair, asked by the `openai` package."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.support.rows import rows_are_invariant
from tests.support.served import PATIENCE, until

PROGRAM = [sys.executable, "-c", "from dspine.cli.main import main; main()", "serve"]
QUICK = (
    "-t",
    "1",
    "-np",
    "4",
    "-c",
    "4096",
    "--temp",
    "0",
    "--no-calibrate",
    "--spec-draft-n-max",
    "3",
)
QUESTION = "Write a Python function that adds two numbers."


class Server:
    """A server process; its lines of the log so far are in `log`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._log = folder / "server.log"
        with self._log.open("w") as stream:
            self.process = subprocess.Popen([*PROGRAM, *QUICK, *arguments], stderr=stream)
        self.address = ""
        limit = time.monotonic() + 2 * PATIENCE
        while time.monotonic() < limit and self.process.poll() is None:
            found = re.search(r"listening on (http://\S+)", self.log)
            if found:
                self.address = found.group(1)
                if self._is_ready():
                    return
            time.sleep(0.05)
        raise AssertionError(f"the server did not start: {self.log}")

    @property
    def log(self) -> str:
        return self._log.read_text()

    def slots(self) -> list[dict[str, Any]]:
        """What /slots tells."""
        headers = {"Authorization": "Bearer key"}
        request = urllib.request.Request(f"{self.address}/slots", headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            found: list[dict[str, Any]] = json.load(reply)
        return found

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=PATIENCE) as reply:
                return bool(reply.status == 200)
        except urllib.error.URLError:
            return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, users_cache: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPINE_CACHE_DIR", str(users_cache))
        made = Server(tmp_path_factory.mktemp("server"), "--port", "0", "--api-key", "key")
    yield made
    made.process.send_signal(signal.SIGTERM)
    assert made.process.wait(PATIENCE) == 0, made.log
    assert "Traceback" not in made.log and QUESTION not in made.log


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.address}/v1", api_key="key", max_retries=0)


def ask(text: str = QUESTION) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_streamed_and_whole_answers_agree(client: OpenAI) -> None:
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=ask(), max_tokens=40)
    pieces = client.chat.completions.create(
        model=model,
        messages=ask(),
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(pieces)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content and len(text) > 40
    assert chunks[-1].usage == whole.usage or chunks[-1].usage is not None
    assert whole.usage is not None and whole.usage.completion_tokens == 40
    assert whole.choices[0].finish_reason == "length"
    drafted = (whole.model_extra or {})["timings"]
    assert drafted["draft_n"] > drafted["draft_n_accepted"] > 0


def test_drafting_changes_no_text(client: OpenAI) -> None:
    texts = [
        client.chat.completions.create(
            model="x", messages=ask(), max_tokens=48, extra_body={"speculative": {"n_max": n}}
        )
        .choices[0]
        .message.content
        for n in (0, 3)
    ]
    assert texts[0] == texts[1]


def test_json_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    reply = client.chat.completions.create(
        model="x",
        messages=ask("Give me a person as JSON."),
        max_tokens=80,
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": schema}},
    )
    assert set(json.loads(reply.choices[0].message.content or "")) == {"name", "age"}


def test_tools(client: OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    found = []
    # Plain, with drafts, and with drafts on a memory that holds an answer made with them.
    for drafts, cache in ((0, False), (3, False), (3, True)):
        reply = client.chat.completions.create(
            model="x",
            messages=ask("How is the weather in Paris?"),
            tools=[tool],
            tool_choice="required",
            max_tokens=80,
            extra_body={"speculative": {"n_max": drafts}, "cache_prompt": cache},
        )
        assert reply.choices[0].finish_reason == "tool_calls"
        call = (reply.choices[0].message.tool_calls or [])[0]
        assert call.type == "function" and call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        found.append(call.function.arguments)
    assert len(set(found)) == 1


def test_log_probabilities_are_the_plain_ones(client: OpenAI) -> None:
    found = []
    for drafts in (0, 3):
        reply = client.chat.completions.create(
            model="x",
            messages=ask(),
            max_tokens=32,
            logprobs=True,
            top_logprobs=3,
            extra_body={"speculative": {"n_max": drafts}},
        )
        assert bool((reply.model_extra or {})["timings"].get("draft_n_accepted")) == bool(drafts)
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        found.append(logprobs.content)
    assert len(found[0]) == len(found[1]) == 32
    for plain, drafted in zip(*found, strict=True):
        assert plain.token == drafted.token
        assert plain.top_logprobs[0].logprob == pytest.approx(plain.logprob)
        assert drafted.logprob == pytest.approx(plain.logprob, abs=0.02)
        for one, other in zip(plain.top_logprobs, drafted.top_logprobs, strict=True):
            assert (one.token, one.logprob) == (other.token, pytest.approx(other.logprob, abs=0.02))


def test_seeds_and_temperature(client: OpenAI) -> None:
    texts = [
        client.chat.completions.create(
            model="x", messages=ask(), max_tokens=24, temperature=1.0, seed=seed
        )
        .choices[0]
        .message.content
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_errors_are_openais(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="leaves no room"):
        client.chat.completions.create(model="x", messages=ask("word " * 3000))


def test_text_completions(client: OpenAI) -> None:
    reply = client.completions.create(model="x", prompt="1, 2, 3, 4,", max_tokens=6)
    assert reply.choices[0].text.startswith(" 5")


def test_a_client_that_hangs_up_frees_the_slot(server: Server, client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="x", messages=ask(), max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    until(lambda: not any(slot["is_processing"] for slot in server.slots()))
    assert server.process.poll() is None
    # The answer was not made to its end, which the slot would hold.
    assert 0 < max(slot["n_held"] for slot in server.slots()) < 900


def test_four_clients_at_once_get_what_each_gets_alone(
    client: OpenAI, server: Server, users_cache: Path
) -> None:
    questions = (QUESTION, "Name three rivers.", "Count from 1 to 20.", "Why is the sky blue?")

    def text(question: str) -> str:
        chunks = client.chat.completions.create(
            model="x", messages=ask(question), max_tokens=32, stream=True
        )
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    alone = [text(question) for question in questions]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(text, questions * 2))
    if rows_are_invariant(users_cache):
        assert together == alone * 2
    else:
        assert all(a[:10] == b[:10] for a, b in zip(together, alone * 2, strict=True))
    slots = server.slots()
    assert [slot["n_ctx"] for slot in slots] == [1024] * 4
    assert sum(slot["n_held"] > 0 for slot in slots) == 4, "one slot has answered nothing"


def test_a_port_that_is_taken_is_told(server: Server) -> None:
    port = server.address.rsplit(":", 1)[1]
    done = subprocess.run(
        [*PROGRAM, *QUICK, "--port", port],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_ends_a_stream_with_its_last_chunk(tmp_path: Path) -> None:
    made = Server(tmp_path, "--port", "0", "--drain", "1", "-np", "1")
    client = OpenAI(base_url=f"{made.address}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model="x",
        messages=ask(),
        max_tokens=3900,
        stream=True,
        extra_body={"ignore_eos": True, "speculative": {"n_max": 0}},
    )
    next(iter(stream))
    made.process.send_signal(signal.SIGTERM)
    last = list(stream)[-1]  # an error of the connection would be raised here
    assert last.choices[0].finish_reason == "length"
    assert 0 < (last.model_extra or {})["timings"]["predicted_n"] < 3900
    assert made.process.wait(PATIENCE) == 0
    assert "Traceback" not in made.log, made.log
