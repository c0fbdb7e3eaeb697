"""How the fields of a request reach the engine, whichever server's client sends them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dspine.engine.sampling import SamplingOptions
from dspine.llama.sampler_options import SAMPLERS
from dspine.server.bodies import ChatBody
from dspine.server.requests import Defaults, chat_wish
from tests.support.served import served

ASK = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    "name",
    ["reasoning_budget", "thinking_budget_tokens", "thinking_token_budget", "thinking_budget"],
)
def test_a_limit_of_thoughts_has_many_names(name: str) -> None:
    def asked(body: dict[str, Any], usual: int | None = None) -> Any:
        defaults = Defaults(SamplingOptions(), None, max_thoughts=usual)
        return chat_wish(ChatBody.model_validate(body), defaults).options.get("max_thoughts")

    assert asked({**ASK, name: 100}) == 100
    assert asked({**ASK, name: 0}, 50) == 0
    assert asked({**ASK, name: -1}, 50) is None
    assert asked(ASK, 50) == 50
    # The server's own limit is no reason to refuse a form that leaves no room for thoughts.
    assert asked({**ASK, "response_format": {"type": "json_object"}}, 50) is None
    with served("Hi.") as client:
        reply = client.post("/v1/chat/completions", json={**ASK, name: 100})
    assert reply.json()["choices"][0]["message"]["content"] == "Hi."


def test_sampling_fields_reach_the_sampler_and_the_rest_stays_as_the_server_has_it() -> None:
    body = ChatBody.model_validate(
        {
            **ASK,
            "temperature": 0.5,
            "seed": 7,
            "top_k": 3,
            "top_n_sigma": 1.5,
            "logit_bias": {"5": -1, "6": False},
        }
    )
    defaults = Defaults(SamplingOptions(min_p=0.2, logit_bias=((9, 1.0),)), None)
    found = chat_wish(body, defaults).options["sampling"]
    assert (found.temperature, found.seed, found.top_k, found.min_p) == (0.5, 7, 3, 0.2)
    assert found.top_n_sigma == 1.5
    assert found.logit_bias == ((9, 1.0), (5, -1.0), (6, -math.inf))
    body = ChatBody.model_validate({**ASK, "top_k": -1, "logit_bias": [[5, False], [6, 0.5]]})
    found = chat_wish(body, defaults).options["sampling"]
    assert (found.top_k, found.logit_bias[1:]) == (0, ((5, -math.inf), (6, 0.5)))


def test_what_clients_of_other_servers_send_by_default_changes_nothing() -> None:
    """llama-server's defaults, as its page and other programs send them with every request, and
    those of vLLM."""
    off = {
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "min_keep": 0,
        "typical_p": 1.0,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "repeat_last_n": 64,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "samplers": list(SAMPLERS),
        "seed": -1,
        "reasoning_format": "auto",
        "timings_per_token": True,
        "n": 1,
        "best_of": 1,
        "use_beam_search": False,
        "repetition_penalty": 1.0,
    }
    usual = SamplingOptions(temperature=0.6)
    wish = chat_wish(ChatBody.model_validate({**ASK, **off}), Defaults(usual, None))
    assert wish.options["sampling"] == usual


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ("edkypmxt", [name for name in SAMPLERS if name != "top_n_sigma"]),
        ("skt", ["top_n_sigma", "top_k", "temperature"]),
        (["top-k", "temp"], ["top_k", "temperature"]),
    ],
)
def test_the_order_of_samplers_has_names_or_letters(
    given: str | list[str], order: list[str]
) -> None:
    body = ChatBody.model_validate({**ASK, "samplers": given})
    wish = chat_wish(body, Defaults(SamplingOptions(), None))
    assert wish.options["sampling"].samplers == tuple(order)


def test_a_penalty_under_two_names_is_that_of_llama_server() -> None:
    both = {**ASK, "repeat_penalty": 1.2, "repetition_penalty": 1.1}
    wish = chat_wish(ChatBody.model_validate(both), Defaults(SamplingOptions(), None))
    assert wish.options["sampling"].repeat_penalty == 1.2
