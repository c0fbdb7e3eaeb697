"""The docs part of `make check`: links resolve, generated tables are true, files are short."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tools import flag_table, readme_table, result_tables

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 500
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")


def pages(root: Path) -> list[Path]:
    """Every page of prose: at the top and below docs, benchmarks and examples."""
    found = list(root.glob("*.md"))
    for folder in ("docs", "benchmarks", "examples"):
        found.extend((root / folder).rglob("*.md"))
    return sorted(found)


def broken_links(page: Path, root: Path) -> Iterator[str]:
    """A sentence for each relative link whose file or heading is not there."""
    text = page.read_text(encoding="utf-8")
    for match in LINK.finditer(strip_code(text)):
        address = match[1]
        if re.match(r"[a-z][a-z+.-]*:", address):
            continue
        name, _, anchor = address.partition("#")
        file = (page.parent / name).resolve() if name else page
        where = f"{page.relative_to(root)}: link `{address}`"
        if not file.exists():
            yield f"{where} leads to no file"
        elif not file.is_relative_to(root):
            yield f"{where} leads out of the repository"
        elif anchor and file.suffix == ".md" and anchor not in headings(file):
            yield f"{where} names no heading of {file.name}"


def headings(page: Path) -> set[str]:
    """Anchors of a page as code hosts build them: lower case, spaces to dashes."""
    lines = FENCE.sub("", page.read_text(encoding="utf-8")).split("\n")
    titles = (line.lstrip("#").strip() for line in lines if re.match(r"#{1,6} ", line))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def strip_code(text: str) -> str:
    return INLINE_CODE.sub("", FENCE.sub("", text))


def long_files(root: Path, most: int = MAX_LINES) -> Iterator[str]:
    """A sentence for each source file that has grown beyond what one reads in one go."""
    for file in sorted((root / "src").rglob("*.py")):
        lines = file.read_text(encoding="utf-8").count("\n")
        if lines > most:
            yield f"{file.relative_to(root)}: {lines} lines, more than {most}: split it"


def problems(root: Path = ROOT) -> list[str]:
    found = [problem for page in pages(root) for problem in broken_links(page, root)]
    found.extend(long_files(root))
    generated = [flag_table.difference(root / "docs" / "flags.md")]
    generated.extend(result_tables.differences(root))
    if (root / "README.md").exists():
        result = root / readme_table.RESULT.relative_to(ROOT)
        generated.append(readme_table.difference(root / "README.md", result))
    return [*found, *(problem for problem in generated if problem)]


def main() -> int:
    found = problems()
    for problem in found:
        print(problem)
    print(f"docs: {len(pages(ROOT))} pages checked, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
