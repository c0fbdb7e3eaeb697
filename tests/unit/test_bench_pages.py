"""Pictures and pages of a result."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dspine.bench.page import write_report
from dspine.bench.plots import write_plot
from dspine.bench.result import BenchResult
from dspine.errors import UsageError
from tests.support.bench_results import measurement, result


@pytest.fixture
def measured() -> BenchResult:
    rows = [
        measurement(name, f"p{i}", depth=depth, steps=2, drafted_at=drafted, accepted_at=accepted)
        for name, drafted, accepted in (("plain", (), ()), ("auto", (4, 3), (3, 1)))
        for i in range(2)
        for depth in (0, 512)
    ]
    return result(*rows, depths=(0, 512))


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml")])
def test_a_picture_has_the_format_of_its_name(
    tmp_path: Path, measured: BenchResult, name: str, start: bytes
) -> None:
    write_plot(measured, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_picture_shows_every_configuration_and_task(
    tmp_path: Path, measured: BenchResult
) -> None:
    write_plot(measured, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for word in ("plain", "auto", "maths", "Speed against depth", "Acceptance by slot"):
        assert word in text
    write_plot(measured, tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == text


def test_another_format_is_refused(tmp_path: Path, measured: BenchResult) -> None:
    with pytest.raises(UsageError, match=r"neither \.png nor \.svg"):
        write_plot(measured, tmp_path / "a.pdf")


def test_without_matplotlib_a_sentence_says_how_to_get_it(
    tmp_path: Path, measured: BenchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'dspine\[bench\]'"):
        write_plot(measured, tmp_path / "a.png")


class _Sources(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.cells: list[str] = []
        self._in_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]
        self._in_cell = tag in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.cells.append(data)


def test_a_report_needs_nothing_but_its_data(tmp_path: Path, measured: BenchResult) -> None:
    page = write_report(measured, tmp_path / "new" / "report")
    parser = _Sources()
    parser.feed(page.read_text())
    outside = [link for link in parser.found if not link.startswith("#")]
    assert outside == ["result.json"]
    assert {"configuration", "plain", "auto", "maths"} <= set(parser.cells)
    document = json.loads((page.parent / "result.json").read_text())
    assert document["kind"] == "bench"


def test_names_of_strangers_are_text_in_a_report(tmp_path: Path) -> None:
    made = result(measurement("<script>x</script>"))
    assert "<script>" not in write_report(made, tmp_path).read_text()


def test_a_picture_shows_answers_at_once(tmp_path: Path) -> None:
    rows = [
        measurement("auto", f"p{i}", concurrency=n, place=i * (n - 1), span_ms=20.0)
        for n in (1, 2)
        for i in range(2)
    ]
    made = result(*rows, concurrencies=(1, 2))
    write_plot(made, tmp_path / "a.svg")
    assert "answers at once" in (tmp_path / "a.svg").read_text()
    assert "to one at a time" in write_report(made, tmp_path).read_text()
