"""A report to keep: one HTML page that needs nothing else, with the JSON beside it."""

from __future__ import annotations

from html import escape
from pathlib import Path

from dspine.bench.plots import picture
from dspine.bench.result import BenchResult
from dspine.bench.tables import Table, tables
from dspine.errors import FileError
from dspine.files.atomic import atomic_write, reason

PAGE, DATA = "report.html", "result.json"

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 0 0 1.5rem; display: block; overflow-x: auto; }
caption { text-align: left; font-weight: 600; padding: .4rem 0; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
tr.marked td { color: #c22; }
figure { margin: 0 0 1.5rem; background: #fff; } svg { max-width: 100%; height: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dd { margin: 0; }
"""


def write_report(result: BenchResult, folder: Path) -> Path:
    """Write `report.html` and `result.json` into a folder; returns the page's path."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot write {folder}: {reason(error)}") from error
    result.write(folder / DATA)
    with atomic_write(folder / PAGE, overwrite=True) as stream:
        stream.write(html(result).encode())
    return folder / PAGE


def html(result: BenchResult) -> str:
    """The page; everything in it follows from the result."""
    svg = picture(result, "svg").decode()
    svg = svg[svg.index("<svg") :]
    body = "\n".join(_table(table) for table in tables(result))
    partial = (
        "" if result.is_complete else "<p>The run was broken off: what follows is partial.</p>"
    )
    title = "dspine bench" if result.kind == "bench" else "dspine eval"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>\n<h1>{title}</h1>\n{partial}\n"
        f'{_facts(result)}\n{body}\n<figure role="img" aria-label="Speed and acceptance">{svg}'
        f'</figure>\n<p>All figures can be computed from <a href="{DATA}">{DATA}</a>.</p>\n'
        f"</body></html>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.header)
    rows = "\n".join(
        f"<tr{' class=marked' if number in table.marked else ''}>"
        + "".join(f"<td>{escape(text)}</td>" for text in row)
        + "</tr>"
        for number, row in enumerate(table.rows)
    )
    return f"<table><caption>{escape(table.title)}</caption><tr>{head}</tr>\n{rows}</table>"


def _facts(result: BenchResult) -> str:
    entries: list[tuple[str, str]] = []
    for one in result.provenance:
        machine = one.get("machine", {})
        entries += [
            ("measured", f"{one.get('date')}: {one.get('command')}"),
            ("machine", f"{machine.get('cpu')}, {machine.get('cores')} cores"),
            ("versions", _listed(one.get("versions", {}))),
            ("library", _listed(one.get("library", {}))),
            ("files", _listed(one.get("files", {}))),
        ]
    entries.append(("answers", f"at most {result.plan.get('max_tokens')} tokens each"))
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in entries)
    return f"<dl>{cells}</dl>"


def _listed(values: object) -> str:
    if not isinstance(values, dict):
        return str(values)
    return ", ".join(f"{key} {value}" for key, value in values.items())
