"""Settings: where a value comes from, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspine.errors import UsageError
from dspine.settings import SETTINGS, Setting, Value, resolve, settings_of

BY_NAME = {setting.name: setting for setting in SETTINGS}


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (None, {}, 512),
        (None, {"DSPINE_BATCH_SIZE": "64"}, 64),
        ("32", {"DSPINE_BATCH_SIZE": "64"}, 32),
        ("32", {"DSPINE_BATCH_SIZE": "not looked at"}, 32),
    ],
)
def test_flag_wins_over_variable_and_variable_over_default(
    given: str | None, environment: dict[str, str], expected: int
) -> None:
    assert resolve(BY_NAME["batch_size"], given, "-b", environment) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("model", "a/b.gguf", Path("a/b.gguf")),
        ("model", "~/b.gguf", Path.home() / "b.gguf"),
        ("n_gpu_layers", "-1", -1),
        ("flash_attn", "ON", "on"),
        ("plain", "enabled", True),
        ("plain", "0", False),
        ("plain", "", False),
        ("stop", "a,b", ("a,b",)),
        ("cors_origin", "https://a, http://b:1,", ("https://a", "http://b:1")),
        ("cors_origin", "", ()),
        ("logit_bias", "5+1,6-inf", ("5+1", "6-inf")),
        ("system", "", ""),
    ],
)
def test_parse_gives_the_kind_of_the_setting(name: str, text: str, expected: Value) -> None:
    value = BY_NAME[name].parse(text, "it")
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("ctx_size", "many", "DSPINE_CTX_SIZE is 'many': it must be a whole number"),
        ("ctx_size", "1.5", "whole number"),
        ("ctx_size", "-1", "is -1: it must be at least 0"),
        ("n_gpu_layers", "-2", "at least -1"),
        ("flash_attn", "maybe", "choose one of auto, on or off"),
        ("cache_type_k", "q4_K", "iq4_nl"),
        ("plain", "perhaps", "use on or off"),
        ("model", "", "give a file or folder"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(name: str, text: str, told: str) -> None:
    setting = BY_NAME[name]
    assert setting.env is not None
    with pytest.raises(UsageError) as caught:
        resolve(setting, None, "--flag", {setting.env: text})
    assert setting.env in str(caught.value)
    assert told in str(caught.value)


def test_not_a_number_is_below_every_limit() -> None:
    setting = Setting("x", ("--x",), "float", 1.0, "G", "help", ("run",), least=0.0)
    with pytest.raises(UsageError, match="at least 0"):
        setting.parse("nan", "--x")


def test_the_prompt_is_not_read_from_the_environment() -> None:
    assert resolve(BY_NAME["prompt"], None, "-p", {"DSPINE_PROMPT": "text"}) is None


def test_a_server_can_be_set_up_by_variables_alone() -> None:
    assert [setting.name for setting in settings_of("serve") if setting.env is None] == []


def test_names_flags_and_variables_are_unique() -> None:
    for values in (
        [setting.name for setting in SETTINGS],
        [flag for setting in SETTINGS for flag in setting.flags],
        [setting.env for setting in SETTINGS if setting.env],
    ):
        assert len(values) == len(set(values))


def test_a_command_may_say_something_else_of_a_shared_option() -> None:
    told = {setting.name: setting for setting in settings_of("convert")}["model"]
    assert "default" not in told.shown_default and "required" in told.help
    assert told.flags == BY_NAME["model"].flags
    assert {s.name: s for s in settings_of("run")}["model"] == BY_NAME["model"]
    for setting in SETTINGS:
        assert setting.variants.keys() <= {*setting.commands}, setting.name


def test_the_name_is_the_long_flag() -> None:
    for setting in SETTINGS:
        assert "--" + setting.name.replace("_", "-") in setting.flags


def test_defaults_pass_their_own_checks() -> None:
    for setting in SETTINGS:
        if setting.default not in (None, (), False):
            assert setting.parse(str(setting.default), "default") == setting.default
