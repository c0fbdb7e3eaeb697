"""Sampling options on the command line become those of the request."""

from __future__ import annotations

import math

import pytest

from dspine.cli.options import Options
from dspine.cli.sampling import read_bias, read_sampling
from dspine.engine.sampling import SamplingOptions
from dspine.errors import UsageError
from dspine.settings import settings_of
from dspine.settings.setting import Value


def options(**given: Value) -> Options:
    return Options({setting.name: setting.default for setting in settings_of("run")} | given)


def test_without_any_option_the_most_likely_token_is_taken() -> None:
    assert read_sampling(options()) == SamplingOptions()
    assert read_sampling(options()).is_greedy


def test_options_reach_the_request() -> None:
    got = read_sampling(
        options(
            temp=0.7,
            typical=0.9,
            seed=5,
            logit_bias=("12-inf", "3+1.5"),
            dry_sequence_breaker=("none",),
            spec_verify="rejection",
        )
    )
    assert got == SamplingOptions(
        temperature=0.7,
        typical_p=0.9,
        seed=5,
        logit_bias=((12, -math.inf), (3, 1.5)),
        dry_sequence_breakers=(),
        verification="rejection",
    )


def test_the_order_of_the_steps_and_llama_cpps_other_names() -> None:
    assert read_sampling(options(samplers="top_k; nucleus;temp;")).samplers == (
        "top_k",
        "top_p",
        "temperature",
    )
    assert read_sampling(options(temp=0.5, samplers="top-k")).drawn_at == 1.0
    assert read_sampling(options(temp=0.5, samplers="")).steps == ()
    given: dict[str, Value] = {"temp": 0.5, "top_n_sigma": 1.5, "repeat_penalty": 1.2}
    order = "temperature;top_k;penalties;xtc;top_n_sigma"
    assert read_sampling(options(samplers=order, **given)).steps == (
        "temperature",
        "top_k",
        "penalties",
        "top_n_sigma",
    )
    assert read_sampling(options(samplers="top_k;temp", repeat_penalty=1.2)).is_greedy
    assert not read_sampling(options(samplers="penalties;temp", repeat_penalty=1.2)).is_greedy


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("top_k;mirostat;temp", "'mirostat', which is none: choose among penalties, dry, top_n_"),
        ("top_p;temp;nucleus", "top_p twice"),
        ("top_k;top_p", "leaves out temperature, which then is 1, and temperature is 0"),
    ],
)
def test_an_order_that_cannot_be_is_refused(order: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        read_sampling(options(samplers=order))


def test_what_is_out_of_range_is_refused_with_its_name() -> None:
    with pytest.raises(UsageError, match=r"top_p is 1\.5"):
        read_sampling(options(top_p=1.5))


@pytest.mark.parametrize("text", ["5", "a+1", "5+", "5+x", "-5", "+1"])
def test_a_bias_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="15043-inf"):
        read_bias(text)
