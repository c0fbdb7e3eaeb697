"""Settings as click options: spelling, variables, help, and typed access to the values."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from dspine.cli.options import Options, settings_command
from dspine.errors import UsageError
from dspine.settings import settings_of


def parse(*arguments: str) -> Options:
    """The options of `run` on this command line."""
    seen: list[Options] = []

    @settings_command("run", click.Argument(["rest"], required=False))
    def command(options: Options, rest: str | None) -> None:
        """Help of the command."""
        seen.append(options)

    command.main(list(arguments), prog_name="run", standalone_mode=False)
    return seen[0]


def test_without_flags_every_setting_has_its_default() -> None:
    assert parse().values == {setting.name: setting.default for setting in settings_of("run")}


def test_short_names_of_several_letters_work_as_in_llama_cpp() -> None:
    options = parse(
        "-m", "t.gguf", "-md", "d.gguf", "-ngl", "-1", "-c", "64", "-ctk", "q8_0", "-fa", "on",
        "-n", "5", "-t", "2",
    )  # fmt: skip
    assert options.path("model") == Path("t.gguf")
    assert options.path("model_draft") == Path("d.gguf")
    assert options.number("n_gpu_layers") == -1
    assert options.choice("cache_type_k") == "q8_0"
    assert options.choice("flash_attn") == "on"
    assert (options.positive("ctx_size"), options.positive("threads")) == (64, 2)


def test_zero_leaves_the_choice_to_the_engine() -> None:
    assert parse("-c", "0").positive("ctx_size") is None


@pytest.mark.parametrize("flag", ["-md", "--model-draft", "--spec-draft-model"])
def test_every_spelling_of_a_flag_is_the_same_setting(flag: str) -> None:
    assert parse(flag, "x.gguf").path("model_draft") == Path("x.gguf")


def test_a_list_collects_every_use_and_a_variable_gives_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DSPINE_STOP", "from the shell")
    assert parse().texts("stop") == ("from the shell",)
    assert parse("--stop", "a", "--stop", "b").texts("stop") == ("a", "b")


def test_values_with_commas_between_them_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPINE_LOGIT_BIAS", "1+1,2-inf")
    assert parse().texts("logit_bias") == ("1+1", "2-inf")
    assert parse("-l", "3+1,4+1", "-l", "5-1").texts("logit_bias") == ("3+1", "4+1", "5-1")


def test_a_switch_comes_from_flag_or_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not parse().switch("raw")
    assert parse("--no-chat").switch("raw")
    monkeypatch.setenv("DSPINE_RAW", "on")
    assert parse().switch("raw")


def test_an_empty_text_is_a_text() -> None:
    assert parse("--system", "").text("system") == ""
    assert parse().text("system") is None


def test_wrong_values_name_the_flag_or_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="-c/--ctx-size is 'x': it must be a whole number"):
        parse("-c", "x")
    monkeypatch.setenv("DSPINE_THREADS", "all")
    with pytest.raises(UsageError, match="the variable DSPINE_THREADS is 'all'"):
        parse()


def test_asking_for_the_wrong_type_is_a_programming_error() -> None:
    options = parse()
    for ask, name in (
        (options.path, "json"),
        (options.number, "json"),
        (options.text, "threads"),
        (options.choice, "system"),
        (options.switch, "threads"),
        (options.texts, "json"),
    ):
        with pytest.raises(TypeError, match=name):
            ask(name)


def test_help_shows_each_flag_once_under_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(IndexError):
        parse("--help")
    shown = capsys.readouterr().out
    assert "Help of the command." in shown
    for group in ("Model:", "Speed:", "Prompt:", "Output:", "Library:"):
        assert shown.count(f"\n{group}") == 1
    assert "-ngl, --n-gpu-layers N" in shown
    assert "-fa, --flash-attn auto|on|off" in shown
    assert shown.count("--spec-draft-n-max") == 1
