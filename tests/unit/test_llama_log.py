"""The captured log of the library: what is kept and what an error quotes."""

from __future__ import annotations

from dspine.llama.log import LogCapture

DEBUG, INFO, WARNING, ERROR, CONTINUED = range(1, 6)


def test_the_first_error_after_the_mark_is_quoted_without_function_names() -> None:
    log = LogCapture()
    log.add(ERROR, "old: an earlier failure\n")
    mark = log.count
    log.add(INFO, "llama_model_loader: loaded meta data\n")
    log.add(WARNING, "load: a warning\n")
    log.add(ERROR, "llama_model_load: error loading model: missing tensor 'output.weight'\n")
    log.add(ERROR, "llama_model_load_from_file_impl: failed to load model\n")
    assert log.reason(mark) == "error loading model: missing tensor 'output.weight'"


def test_a_warning_is_quoted_when_there_is_no_error() -> None:
    log = LogCapture()
    log.add(WARNING, "decode: failed to find a memory slot for batch of size 9\n")
    log.add(INFO, "later: information\n")
    assert log.reason(0) == "failed to find a memory slot for batch of size 9"


def test_without_any_line_the_reason_says_so() -> None:
    log = LogCapture()
    log.add(ERROR, "before\n")
    assert log.reason(log.count) == "the library gave no reason"


def test_a_continued_line_is_joined_and_debug_lines_are_not_shown() -> None:
    log = LogCapture()
    log.add(INFO, "load_tensors: ")
    log.add(CONTINUED, "...")
    log.add(CONTINUED, " done\n")
    log.add(DEBUG, "set_n_threads: call\n")
    assert log.lines() == ["load_tensors: ... done"]


def test_only_the_last_lines_are_kept() -> None:
    log = LogCapture()
    for number in range(500):
        log.add(INFO, f"line {number}\n")
    lines = log.lines()
    assert len(lines) < 200
    assert lines[-1] == "line 499"
    assert log.lines(since=499) == ["line 499"]
