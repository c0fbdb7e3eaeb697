"""A result as tables: for a terminal of 100 columns, for Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from dspine.bench.result import BenchResult
from dspine.bench.significance import Change
from dspine.bench.summary import ALL, Interval, Row

WIDTH = 100


@dataclass(frozen=True, slots=True)
class Table:
    """A title, a header and rows of texts; `marked` rows want attention."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()

    def lines(self) -> list[str]:
        """The header and one line a row, the first column left-aligned and cut where it must."""
        others = [[len(text) for text in row[1:]] for row in (self.header, *self.rows)]
        room = max(8, WIDTH - sum(2 + max(column) for column in zip(*others, strict=True)))
        cells = [(_cut(row[0], room), *row[1:]) for row in (self.header, *self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.header))]
        return [
            "  ".join(
                [row[0].ljust(widths[0])]
                + [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
            )
            for row in cells
        ]

    def markdown(self) -> str:
        rule = "|".join(["", " --- ", *(" ---: " for _ in self.header[1:]), ""])
        body = ["| " + " | ".join(row) + " |" for row in (self.header, *self.rows)]
        return "\n".join([f"**{self.title}**", "", body[0], rule, *body[1:]])


def tables(result: BenchResult) -> list[Table]:
    """What one wants to see: all tasks together first, then by task, then slots and texts."""
    made: list[Table] = []
    rows = result.rows
    least = min((row.concurrency for row in rows), default=1)
    for group in dict.fromkeys((row.temperature, row.depth) for row in rows):
        all_of_it = [row for row in rows if (row.temperature, row.depth) == group]
        own = [row for row in all_of_it if row.concurrency == least]
        whole = _wholes(own)
        if result.kind == "bench":
            made += [_main(result, whole), _costs(whole)]
        else:
            made.append(_accepted(whole))
        made += _by_task(own, whole, result)
        if any(row.slot_acceptance for row in whole):
            made += _slots(whole)
        every = _wholes(all_of_it)
        if any(row.concurrency > 1 for row in every):
            made.append(_at_once(every, result.plain))
        if any(row.differences for row in every):
            made.append(_differences(every))
    return made


def csv_text(result: BenchResult) -> str:
    """All rows of the summary, one a line; intervals as two columns."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    names = (
        *("configuration", "task", "temperature", "depth", "concurrency", "answers", "tokens"),
        *("tokens_per_second", "together_per_second", "gain", "ratio"),
        *("acceptance_length", "acceptance_rate"),
        *("draft_ms", "verify_ms", "host_ms", "prefill_tokens_per_second"),
        *("peak_mib", "device_mib", "spread", "same_text"),
    )
    intervals = ("gain_interval", "ratio_interval", "acceptance_interval")
    writer.writerow(
        [*names, *(f"{name}_{end}" for name in intervals for end in ("low", "high")), "slots"]
    )
    for row in result.rows:
        ends = [end for name in intervals for end in (getattr(row, name) or ("", ""))]
        slots = " ".join(f"{chance:.4f}" for chance in row.slot_acceptance)
        writer.writerow([*(_blank(getattr(row, name)) for name in names), *ends, slots])
    return stream.getvalue()


def changes_table(changes: Sequence[Change]) -> Table:
    """Two results side by side; significant changes are marked with a star."""
    rows = []
    marked = set()
    for number, one in enumerate(changes):
        name = one.first if one.first == one.second else f"{one.first} -> {one.second}"
        if one.is_significant:
            marked.add(number)
        rows.append(
            (
                name,
                _group_words(one.temperature, one.depth, one.concurrency),
                one.task,
                one.figure,
                f"{one.before:.2f}",
                f"{one.after:.2f}",
                f"{one.ratio:.3f}{'*' if one.is_significant else ' '}",
                _interval(one.interval, 3),
            )
        )
    header = ("configuration", "where", "task", "figure", "A", "B", "B/A", "95 % interval")
    return Table("B over A; * 1 lies outside the interval", header, tuple(rows), frozenset(marked))


def _main(result: BenchResult, rows: Sequence[Row]) -> Table:
    header = (
        *("configuration", "tok/s", "to plain", "accepted", "rate"),
        *("draft", "verify", "host", "text"),
    )
    cells = []
    marked = set()
    for number, row in enumerate(rows):
        if row.differences:
            marked.add(number)
        cells.append(
            (
                row.configuration,
                f"{row.tokens_per_second:.1f}",
                "-" if row.ratio is None else f"{row.ratio:.2f} {_interval(row.ratio_interval)}",
                f"{row.acceptance_length:.2f}",
                _percent(row.acceptance_rate) if row.slot_acceptance else "-",
                f"{row.draft_ms:.2f}",
                f"{row.verify_ms:.2f}",
                f"{row.host_ms:.2f}",
                _text_word(row, result.plain),
            )
        )
    spreads = [row.spread for row in rows if row.spread is not None]
    noise = f", repeats spread by {_percent(max(spreads))}" if spreads else ", one repeat"
    title = (
        f"{_group_words(rows[0].temperature, rows[0].depth, rows[0].concurrency)}: "
        f"{rows[0].answers} answers each"
        f"{noise}; draft, verify and host in ms a step"
    )
    return Table(title, header, tuple(cells), frozenset(marked))


def _at_once(rows: Sequence[Row], plain: str | None) -> Table:
    header = (
        *("configuration", "at once", "all tok/s", "to one at a time"),
        *("each tok/s", "to plain", "accepted", "text"),
    )
    ordered = sorted(rows, key=lambda row: row.concurrency)
    names = list(dict.fromkeys(row.configuration for row in rows))
    cells: list[tuple[str, ...]] = []
    marked: set[int] = set()
    for row in sorted(ordered, key=lambda row: names.index(row.configuration)):
        if row.differences:
            marked.add(len(cells))
        cells.append(
            (
                row.configuration,
                str(row.concurrency),
                "-" if row.together_per_second is None else f"{row.together_per_second:.1f}",
                "-" if row.gain is None else f"{row.gain:.2f} {_interval(row.gain_interval)}",
                f"{row.tokens_per_second:.1f}",
                "-" if row.ratio is None else f"{row.ratio:.2f}",
                f"{row.acceptance_length:.2f}",
                _text_word(row, plain),
            )
        )
    title = (
        f"{_group_words(rows[0].temperature, rows[0].depth)}, answers at once: tokens a second of "
        f"all (prompts included) and of each"
    )
    return Table(title, header, tuple(cells), frozenset(marked))


def _costs(rows: Sequence[Row]) -> Table:
    header = ("configuration", "prompt tokens/s", "process MiB", "card MiB")
    cells = tuple(
        (
            row.configuration,
            f"{row.prefill_tokens_per_second:.0f}",
            "-" if row.peak_mib is None else f"{row.peak_mib:.0f}",
            "-" if row.device_mib is None else f"{row.device_mib:.0f}",
        )
        for row in rows
    )
    return Table("Speed of the prompt, and most memory", header, cells)


def _accepted(rows: Sequence[Row]) -> Table:
    header = ("configuration", "answers", "tokens", "accepted", "95 % interval", "rate")
    cells = tuple(
        (
            row.configuration,
            str(row.answers),
            str(row.tokens),
            f"{row.acceptance_length:.3f}",
            _interval(row.acceptance_interval, 3),
            _percent(row.acceptance_rate),
        )
        for row in rows
    )
    title = f"{_group_words(rows[0].temperature, rows[0].depth)}: acceptance length over all tasks"
    return Table(title, header, cells)


def _by_task(rows: Sequence[Row], whole: Sequence[Row], result: BenchResult) -> list[Table]:
    tasks = tuple(dict.fromkeys(row.task for row in rows if row.task != ALL))
    known = {(row.configuration, row.task): row for row in rows}
    names = [row.configuration for row in whole]

    def cell(name: str, task: str) -> str:
        row = known.get((name, task))
        if row is None:
            return ""
        if result.kind != "bench":
            return f"{row.acceptance_length:.2f} {_interval(row.acceptance_interval)}"
        against = "" if row.ratio is None else f" {row.ratio:.2f}x"
        return f"{row.tokens_per_second:.0f}{against} {row.acceptance_length:.2f}"

    what = "tok/s, to plain, accepted" if result.kind == "bench" else "accepted, 95 % interval"
    title = f"{_group_words(rows[0].temperature, rows[0].depth)}, by task: {what}"
    columns = [(name, [cell(name, task) for task in tasks]) for name in names]
    return _folded(title, "task", tasks, columns)


def _slots(rows: Sequence[Row]) -> list[Table]:
    longest = max(len(row.slot_acceptance) for row in rows)
    columns = [
        (
            row.configuration,
            [
                _percent(row.slot_acceptance[slot]) if slot < len(row.slot_acceptance) else ""
                for slot in range(longest)
            ],
        )
        for row in rows
        if row.slot_acceptance
    ]
    labels = tuple(str(slot + 1) for slot in range(longest))
    title = "Chance of each slot, given that all before it were accepted"
    return _folded(title, "slot", labels, columns)


def _folded(
    title: str, first: str, labels: Sequence[str], columns: Sequence[tuple[str, list[str]]]
) -> list[Table]:
    """Tables of at most 100 columns: what does not fit beside goes below."""
    made: list[Table] = []
    left = list(columns)
    label_width = max(len(first), *(len(label) for label in labels))
    while left:
        chosen: list[tuple[str, list[str]]] = []
        width = label_width
        while left:
            needed = 2 + max(len(left[0][0]), *(len(text) for text in left[0][1]))
            if chosen and width + needed > WIDTH:
                break
            width += needed
            chosen.append(left.pop(0))
        header = (first, *(_cut(name, WIDTH - label_width - 2) for name, _ in chosen))
        rows = tuple((label, *(texts[i] for _, texts in chosen)) for i, label in enumerate(labels))
        made.append(Table(title, header, rows))
    return made


def _differences(rows: Sequence[Row]) -> Table:
    header = ("configuration", "task", "prompt", "repeat", "token", "plain", "own")
    cells = tuple(
        (
            row.configuration,
            one.task,
            one.prompt,
            str(one.repeat),
            str(one.position),
            "ended" if one.plain_token is None else str(one.plain_token),
            "ended" if one.token is None else str(one.token),
        )
        for row in rows
        for one in row.differences[:5]
    )
    title = "Answers unlike the plain ones (at most 5 a configuration), at their first difference"
    return Table(title, header, cells, frozenset(range(len(cells))))


def _wholes(rows: Sequence[Row]) -> list[Row]:
    """The rows over all tasks; with a single task, its own."""
    found: dict[tuple[str, int], Row] = {}
    for row in rows:
        key = row.configuration, row.concurrency
        if row.task == ALL or key not in found:
            found[key] = row
    return list(found.values())


def _text_word(row: Row, plain: str | None) -> str:
    if row.same_text is None or (row.configuration == plain and row.concurrency == 1):
        return "-"
    return f"{len(row.differences)} differ" if row.differences else "same"


def _group_words(temperature: float, depth: int, concurrency: int = 1) -> str:
    deep = f", depth {depth}" if depth else ""
    return f"temperature {temperature:g}{deep}" + (
        f", {concurrency} at once" if concurrency > 1 else ""
    )


def _interval(interval: Interval | None, digits: int = 2) -> str:
    return "" if interval is None else f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.1f} %"


def _cut(text: str, room: int) -> str:
    """The end of a long name tells more than its beginning."""
    return text if len(text) <= room else "…" + text[len(text) - room + 1 :]


def _blank(value: object) -> object:
    return "" if value is None else value
