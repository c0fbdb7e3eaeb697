"""Which prompts are asked: task sets of the package, or the user's own files and chat logs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from dspine.errors import FileError, UsageError
from dspine.files.atomic import reason

MIX, LANGUAGES = "mix", "languages"
OWN = (MIX, LANGUAGES)
"""Sets of prompts of our own, whose tasks (maths, prose, german, ...) have names too."""
TASK_SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
"""Public task sets in the package."""

Messages: TypeAlias = list[dict[str, str]]
_TEXT_KEYS = ("prompt", "question", "instruction", "text")
_READABLE = (".jsonl", ".json", ".txt", ".md")


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt: text of a single user message, or chat messages that end with the user's."""

    task: str
    id: str
    prompt: str | Messages

    def to_json(self) -> dict[str, Any]:
        return {"task": self.task, "id": self.id, "prompt": self.prompt}


def named_tasks(names: Sequence[str], limit: int | None = None) -> list[BenchPrompt]:
    """Prompts of task sets by name, `limit` evenly spaced ones of each (None: all).

    A task of our own sets (maths, prose, german, ...) may be named as well. Raises UsageError for
    another name, with the possible ones.
    """
    own = {name: _read_set(name) for name in OWN}
    kinds = tuple(dict.fromkeys(prompt.task for found in own.values() for prompt in found))
    chosen: list[BenchPrompt] = []
    for name in names:
        if name in own:
            found = own[name]
        elif name in kinds:
            found = [prompt for part in own.values() for prompt in part if prompt.task == name]
        elif name in TASK_SETS:
            found = _read_set(name)
        else:
            known = ", ".join((MIX, *TASK_SETS, LANGUAGES, *kinds))
            raise UsageError(f"there is no task {name!r}: choose of {known}")
        chosen += evenly_spaced(found, limit)
    return chosen


def read_prompts(path: Path, limit: int | None = None) -> list[BenchPrompt]:
    """The user's own prompts: a file, or every readable file of a folder (a task each).

    `.jsonl`: an object a line with `prompt` (or question, instruction, text), `messages` (a chat)
    or `turns`, and if wanted `task` and `id`. `.json`: a list of such objects, one chat log with
    `messages`, or a list of messages. `.txt`, `.md`: one prompt. Of a chat everything up to and
    with the last user message is the prompt. Raises FileError with the line that does not fit.
    """
    if not path.exists():
        raise FileError(f"there is no file or folder {path}: check the name")
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in _READABLE)
        if not files:
            raise FileError(f"{path} holds no prompts: put {', '.join(_READABLE)} files there")
    else:
        files = [path]
    return [prompt for file in files for prompt in evenly_spaced(_read_file(file), limit)]


def evenly_spaced(prompts: Sequence[BenchPrompt], limit: int | None) -> list[BenchPrompt]:
    """`limit` of them over the whole length, so that a sorted file is sampled fairly."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def filler_text() -> str:
    """A long text without repeats, for contexts of a given depth: the GSM8K questions."""
    return "\n\n".join(str(prompt.prompt) for prompt in _read_set("gsm8k"))


def _read_set(name: str) -> list[BenchPrompt]:
    folder = resources.files("dspine") / "data" / "tasks"
    if name in OWN:
        text = (folder / f"{name}.jsonl").read_text(encoding="utf-8")
    else:
        text = gzip.decompress((folder / f"{name}.jsonl.gz").read_bytes()).decode("utf-8")
    rows = (json.loads(line) for line in text.split("\n") if line)
    return [BenchPrompt(row.get("task", name), row["id"], row["prompt"]) for row in rows]


def _read_file(path: Path) -> list[BenchPrompt]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"cannot read {path}: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not text in UTF-8: save it as UTF-8 first") from error
    kind = path.suffix.lower()
    if kind == ".jsonl":
        lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
        rows = [(f"line {number} of {path}", _json(line, path, number)) for number, line in lines]
    elif kind == ".json":
        rows = _rows_of_document(_json(text, path, None), path)
    else:
        rows = [(str(path), text)]
    prompts = [_prompt(row, where, path.stem, i) for i, (where, row) in enumerate(rows)]
    if not prompts:
        raise FileError(f"{path} holds no prompts: give at least one")
    return prompts


def _json(text: str, path: Path, line: int | None) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        where = path if line is None else f"line {line} of {path}"
        raise FileError(f"{where} is not JSON: {error}; correct it") from error


def _rows_of_document(document: Any, path: Path) -> list[tuple[str, Any]]:
    if isinstance(document, list) and not _is_chat(document):
        return [(f"entry {i} of {path}", row) for i, row in enumerate(document, 1)]
    return [(str(path), document)]


def _is_chat(rows: Iterable[Any]) -> bool:
    return all(isinstance(row, dict) and "role" in row for row in rows)


def _prompt(row: Any, where: str, task: str, number: int) -> BenchPrompt:
    if isinstance(row, list):
        row = {"messages": row}
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise FileError(f"{where} is no prompt: give an object with 'prompt' or 'messages'")
    found: Any = next((row[key] for key in _TEXT_KEYS if isinstance(row.get(key), str)), None)
    if found is None and isinstance(row.get("turns"), list) and row["turns"]:
        found = row["turns"][0]
    if found is None and isinstance(row.get("messages"), list):
        found = _up_to_the_user(row["messages"], where)
    if not found or not isinstance(found, str | list):
        raise FileError(
            f"{where} has no prompt: give it as 'prompt' (text) or 'messages' (a chat with a "
            f"message of the user)"
        )
    return BenchPrompt(str(row.get("task", task)), str(row.get("id", f"{task}-{number}")), found)


def _up_to_the_user(messages: list[Any], where: str) -> Messages:
    if not _is_chat(messages):
        raise FileError(f"{where}: every message needs a 'role' and a 'content'")
    last = max((i for i, row in enumerate(messages) if row["role"] == "user"), default=-1)
    chat: Messages = []
    for row in messages[: last + 1]:
        if not isinstance(row.get("content"), str):
            raise FileError(f"{where}: the content of a message is not text: leave images out")
        chat.append({"role": str(row["role"]), "content": row["content"]})
    return chat
