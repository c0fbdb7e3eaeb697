"""Chat and text completions on a scripted engine: documents, streams, calls, errors."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from starlette.testclient import TestClient

from dspine.engine.sampling import SamplingOptions
from dspine.server.bodies import ChatBody
from dspine.server.requests import Defaults, chat_wish
from tests.support.fake_engine import EOS
from tests.support.served import served

ASK = {"messages": [{"role": "user", "content": "Hello"}]}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def chat(client: TestClient, **more: Any) -> dict[str, Any]:
    reply = client.post("/v1/chat/completions", json={**ASK, **more})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def stream(
    client: TestClient, body: dict[str, Any], path: str = "/v1/chat/completions"
) -> list[Any]:
    """Documents of a stream, without the last line."""
    reply = client.post(path, json={"stream": True, **body})
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    lines = [line for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_an_answer_in_one_document() -> None:
    with served("Hi there.") as client:
        reply = chat(client)
    choice = reply["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hi there."}
    assert choice["finish_reason"] == "stop"
    assert bytes(choice["token_ids"][:-1]) == b"Hi there."
    assert reply["object"] == "chat.completion" and reply["model"] == "fake"
    usage = reply["usage"]
    assert usage["completion_tokens"] == len(choice["token_ids"]) == 10
    assert usage["total_tokens"] == usage["prompt_tokens"] + 10
    timings = reply["timings"]
    assert timings["predicted_n"] == 10
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]


def test_a_stream_gives_the_same_text_and_every_token_once() -> None:
    with served("Grüße, 漢字!") as client:
        whole = chat(client)
        documents = stream(client, ASK)
    choices = [document["choices"][0] for document in documents]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == whole["choices"][0]["message"]["content"] == "Grüße, 漢字!"
    tokens = [t for choice in choices for t in choice.get("token_ids", [])]
    assert tokens == whole["choices"][0]["token_ids"]
    assert choices[0]["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for choice in choices[1:])
    # Every chunk with text has its token ids, also where a character was held back.
    assert all(c["token_ids"] for c in choices if c["delta"].get("content"))
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "stop"
    assert "timings" in documents[-1] and "usage" not in documents[-1]
    assert len({document["id"] for document in documents}) == 1


def test_null_is_as_good_as_nothing_where_the_api_says_so() -> None:
    nulls = dict.fromkeys(("stream", "stream_options", "stop", "n", "seed", "logit_bias"))
    with served("Hi.") as client:
        reply = client.post("/v1/chat/completions", json={**ASK, **nulls, "tools": None})
        assert reply.json()["choices"][0]["message"]["content"] == "Hi."
        body = {"prompt": "A:", **nulls, "echo": None, "suffix": None}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "Hi."
        body = {**ASK, "stream": True, "stream_options": {"include_usage": None}}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        wrong = client.post("/v1/chat/completions", json={**ASK, "stream": "yes"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "stream"


def test_usage_comes_last_with_no_choices_when_asked_for() -> None:
    with served("Hi.") as client:
        documents = stream(client, {**ASK, "stream_options": {"include_usage": True}})
    assert documents[-1]["choices"] == []
    assert documents[-1]["usage"]["completion_tokens"] == 4
    assert documents[-2]["choices"][0]["finish_reason"] == "stop"


def test_the_progress_of_a_long_prompt_is_told_to_who_asks() -> None:
    question = {"messages": [{"role": "user", "content": "x" * 40}]}
    with served("Hi.") as client:
        told = stream(client, {**question, "return_progress": True})
        again = stream(client, {**question, "return_progress": True})
        quiet = stream(client, question)
    total = told[-1]["timings"]["prompt_n"]
    done = [found["prompt_progress"] for found in told if "prompt_progress" in found]
    assert [part["processed"] for part in done] == [*range(8, total - 1, 8), total]
    assert {(part["total"], part["cache"]) for part in done} == {(total, 0)}
    times = [part["time_ms"] for part in done]
    assert times == sorted(times)
    # What was in memory from before counts as processed.
    (held,) = [found["prompt_progress"] for found in again if "prompt_progress" in found]
    assert (held["total"], held["cache"], held["processed"]) == (total, total - 1, total)
    assert not any("prompt_progress" in found for found in quiet)


def test_repeated_text_is_drafted_and_counted() -> None:
    with served("abcabcabcabcabcabcabcabc") as client:
        reply = chat(client)
    counts = reply["timings"]
    assert 0 < counts["draft_n_accepted"] <= counts["draft_n"]
    metrics = reply["metrics"]["speculative_decoding"]
    assert metrics["num_accepted_draft_tokens"] == counts["draft_n_accepted"]
    steps = reply["dspine"]["steps"]
    assert sum(step["tokens"] for step in steps) == reply["usage"]["completion_tokens"]
    assert sum(step["accepted"] for step in steps) == counts["draft_n_accepted"]


@pytest.mark.parametrize(
    "off", [{"speculative": {"n_max": 0}}, {"speculative.n_max": 0}], ids=["object", "dotted"]
)
def test_drafting_can_be_switched_off_for_a_request(off: dict[str, Any]) -> None:
    with served("abcabcabcabcabcabc") as client:
        reply = chat(client, **off)
    assert "draft_n" not in reply["timings"] and "metrics" not in reply
    assert reply["choices"][0]["message"]["content"] == "abcabcabcabcabcabc"


def test_limits_and_stop_texts() -> None:
    with served("one two three") as client:
        short = chat(client, max_tokens=5)["choices"][0]
        newer = chat(client, max_completion_tokens=3)["choices"][0]
        stopped = chat(client, stop=["tw", "x"])["choices"][0]
        single = chat(client, stop=" ")["choices"][0]
    assert (short["message"]["content"], short["finish_reason"]) == ("one t", "length")
    assert newer["message"]["content"] == "one"
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("one ", "stop")
    assert single["message"]["content"] == "one"


def test_a_full_context_ends_an_answer_as_a_limit_does() -> None:
    with served("x" * 4000) as client:
        reply = chat(client, max_tokens=4000)
    n_ctx = reply["usage"]["total_tokens"]
    assert reply["choices"][0]["finish_reason"] == "length"
    assert 5 < reply["usage"]["completion_tokens"] < 4000 and n_ctx < 4000


def test_the_second_turn_is_read_from_memory() -> None:
    with served("Hi.") as client:
        chat(client)
        again = chat(
            client,
            messages=[*ASK["messages"], {"role": "assistant", "content": "x"}],
        )
        cold = chat(client, cache_prompt=False)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 5
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_thoughts_are_kept_apart() -> None:
    with served("<think>\nHm.\n</think>\n\nTwo.") as client:
        message = chat(client)["choices"][0]["message"]
        deltas = [d["choices"][0]["delta"] for d in stream(client, ASK)]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Two.")
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Hm."
    assert "".join(d.get("content", "") for d in deltas) == "Two."


def test_thoughts_may_begin_in_the_prompt() -> None:
    template = "{{ messages[-1].content }}<think>A:<think>"
    with served("Hm.</think>Two.", template=template) as client:
        message = chat(client)["choices"][0]["message"]
    # The script begins after "A:", so the mark is its first word as well.
    assert message["content"].endswith("Two.") or message["reasoning_content"]


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_tool_calls_come_whole() -> None:
    with served(f"Let me see. {CALL}") as client:
        choice = chat(client, tools=[TOOL])["choices"][0]
        documents = stream(client, {**ASK, "tools": [TOOL]})
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert call["id"].startswith("call-") and call["type"] == "function"
    assert choice["message"]["content"] == "Let me see. "
    deltas = [d["choices"][0]["delta"] for d in documents]
    streamed = [call for d in deltas for call in d.get("tool_calls", [])]
    assert [c["index"] for c in streamed] == [0]
    assert streamed[0]["function"] == call["function"]
    assert documents[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_tools_a_call_is_text() -> None:
    with served(CALL) as client:
        choice = chat(client)["choices"][0]
        none = chat(client, tools=[TOOL], tool_choice="none")["choices"][0]
    for one in (choice, none):
        assert one["message"]["content"] == CALL and "tool_calls" not in one["message"]
        assert one["finish_reason"] == "stop"


def test_a_required_call_is_forced() -> None:
    with served("I would rather talk about something else entirely. " * 3) as client:
        reply = chat(client, tools=[TOOL], tool_choice="required", max_tokens=200)
        named = chat(
            client,
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            max_tokens=200,
        )
    for one in (reply, named):
        message = one["choices"][0]["message"]
        if one["choices"][0]["finish_reason"] == "tool_calls":
            assert message["tool_calls"][0]["function"]["name"] == "weather"
        else:  # the script may spin inside the string until the limit
            assert one["choices"][0]["finish_reason"] == "length"


def test_tools_are_described_where_the_template_does_not() -> None:
    template = "{% for m in messages %}{{ m.role }}={{ m.content }}\n{% endfor %}A:"
    with served("ok", template=template, n_ctx=2048) as client:
        bare = chat(client)["usage"]["prompt_tokens"]
        told = chat(client, tools=[TOOL])["usage"]["prompt_tokens"]
    assert told > bare + 100


def test_log_probabilities_stand_beside_their_tokens() -> None:
    with served("Hi.") as client:
        choice = chat(client, logprobs=True, top_logprobs=2)["choices"][0]
        without = chat(client, logprobs=True)["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["id"] for entry in content] == choice["token_ids"]
    assert [entry["token"] for entry in content[:3]] == ["H", "i", "."]
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in content)
    assert content[0]["bytes"] == [72]
    assert without["logprobs"]["content"][0]["top_logprobs"] == []


def test_an_answer_can_be_held_to_a_form() -> None:
    with served('{"a": 1} and more') as client:
        free = chat(client)["choices"][0]["message"]["content"]
        schema = {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        }
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        held = chat(client, response_format=wanted)["choices"][0]["message"]["content"]
        short = chat(client, response_format={"type": "regex", "pattern": "[{]"})["choices"][0]
    assert free == '{"a": 1} and more'
    assert json.loads(held)["a"] == 1 and "more" not in held
    assert short["message"]["content"] == "{"


def test_text_completions() -> None:
    with served("bcd") as client:
        reply = client.post("/v1/completions", json={"prompt": "A:", "logprobs": 1}).json()
        listed = client.post("/v1/completions", json={"prompt": ["A:"]}).json()
        tokens = client.post("/v1/completions", json={"prompt": [65, 58]}).json()
        documents = stream(client, {"prompt": "A:"}, "/v1/completions")
    choice = reply["choices"][0]
    assert reply["object"] == "text_completion"
    assert choice["text"] == "bcd" == listed["choices"][0]["text"] == tokens["choices"][0]["text"]
    assert choice["logprobs"]["tokens"][:3] == ["b", "c", "d"]
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]
    assert "".join(d["choices"][0]["text"] for d in documents) == "bcd"


@pytest.mark.parametrize("wish", [{"ignore_eos": True}, {"min_tokens": 9, "max_tokens": 9}])
def test_an_end_that_is_to_be_ignored_is_forbidden(wish: dict[str, Any]) -> None:
    defaults = Defaults(SamplingOptions(), None, end_tokens=lambda: (EOS,))
    sampling = chat_wish(ChatBody.model_validate({**ASK, **wish}), defaults).options["sampling"]
    assert sampling.logit_bias == ((EOS, -math.inf),)


def test_a_least_number_of_tokens_below_the_limit_is_the_engines_business() -> None:
    defaults = Defaults(SamplingOptions(), None, end_tokens=lambda: (EOS,))
    options = chat_wish(
        ChatBody.model_validate({**ASK, "min_tokens": 3, "max_tokens": 9}), defaults
    ).options
    assert options["min_tokens"] == 3
    assert options["sampling"].logit_bias == ()
    with served("Hi.") as client:
        wish = {**ASK, "min_tokens": 7, "max_tokens": 20}
        reply = client.post("/v1/chat/completions", json=wish).json()
        assert reply["usage"]["completion_tokens"] == 8
        least = client.post("/v1/chat/completions", json=ASK).json()
        assert least["usage"]["completion_tokens"] < 7


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({"messages": []}, "at least 1 item", "messages"),
        ({"messages": "hello"}, "valid array", "messages"),
        ({}, "Field required", "messages"),
        ({"messages": [{"role": "user"}], "n": 2}, "one answer a request", "n"),
        ({**ASK, "temperature": -1}, "greater than or equal to 0", "temperature"),
        ({**ASK, "max_tokens": 0}, "greater than or equal to 1", "max_tokens"),
        ({**ASK, "top_logprobs": 2}, "needs logprobs", "top_logprobs"),
        ({**ASK, "stop": [""]}, "empty text", "stop"),
        ({**ASK, "logit_bias": {"x": 1}}, "no token id", "logit_bias"),
        ({**ASK, "tool_choice": "required"}, "there are no tools", "tools"),
        (
            {**ASK, "tools": [TOOL], "tool_choice": {"function": {"name": "x"}}},
            "none of the tools",
            "tool_choice",
        ),
        ({**ASK, "response_format": {"type": "xml"}}, "Input should be", "response_format.type"),
        (
            {**ASK, "response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'},
            "second constraint",
            "response_format",
        ),
        ({**ASK, "response_format": {"type": "regex", "pattern": "("}}, "cannot be used", None),
        (
            {**ASK, "chat_template_kwargs": {"messages": []}},
            "which the server gives",
            "chat_template_kwargs",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "reads text only",
            "messages.0.content",
        ),
        (
            {**ASK, "min_tokens": 3, "max_tokens": 9, "response_format": {"type": "json_object"}},
            "min_tokens is 3",
            None,
        ),
        ({**ASK, "samplers": ["magic"]}, "magic", None),
        ({**ASK, "samplers": "kz"}, "samplers names 'z'", None),
        ({**ASK, "mirostat": 2}, "mirostat is 2", "mirostat"),
        ({**ASK, "dynatemp_range": 0.5}, "leave it out", "dynatemp_range"),
        ({**ASK, "min_keep": 2}, "leave it out", "min_keep"),
        ({**ASK, "repetition_penalty": 1.1}, "send repeat_penalty", "repetition_penalty"),
        ({**ASK, "best_of": 2}, "best_of is 2", "best_of"),
        (
            {**ASK, "logit_bias": [[5, True]]},
            "false for a token",
            "logit_bias",
        ),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_that_cannot_be_served_says_why(
    body: dict[str, Any], words: str, param: str | None, is_stream: bool
) -> None:
    with served("Hi.") as client:
        reply = client.post("/v1/chat/completions", json={**body, "stream": is_stream})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert words in error["message"] and error["type"] == "invalid_request_error"
        assert error["param"] == param
        # The server goes on.
        assert chat(client)["choices"][0]["message"]["content"] == "Hi."


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'"text"', b"[" * 100_000])
def test_a_body_that_is_no_object(raw: bytes) -> None:
    with served("Hi.") as client:
        reply = client.post("/v1/chat/completions", content=raw)
        assert reply.status_code == 400 and "the body is" in reply.json()["error"]["message"]


def test_text_parts_of_a_message_are_one_text() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    with served("Hi.") as client:
        both = [
            chat(client, messages=[{"role": "user", "content": content}])["usage"]["prompt_tokens"]
            for content in (parts, "Hel\nlo")
        ]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"max_tokens": -1}, 5),
        ({"max_completion_tokens": -1, "max_tokens": 3}, 5),
        ({"n_predict": 2}, 2),
        ({"n_predict": 2, "max_tokens": 3}, 3),
        ({"n_predict": -1}, 5),
        ({}, 5),
    ],
)
def test_names_and_values_of_the_limit_that_clients_of_llama_server_send(
    body: dict[str, int], count: int
) -> None:
    with served("abcdefghij", max_tokens=5) as client:
        reply = client.post("/v1/chat/completions", json={**ASK, **body})
        assert reply.json()["usage"]["completion_tokens"] == count
        for wrong in (0, -2):
            assert client.post("/v1/chat/completions", json={**ASK, "max_tokens": wrong}).is_error
