"""One measured answer, and the plan that a run of measurements follows."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dspine.bench.configuration import Configuration
from dspine.bench.prompts import BenchPrompt
from dspine.errors import FileError

FORMAT = 2
"""Changes when an older program could misread a result."""
READABLE = (1, FORMAT)
"""Format 1 knows no answers at once."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What one measurement is of: everything that the summary groups by."""

    configuration: str
    task: str
    prompt: str
    """The prompt's id."""
    repeat: int
    temperature: float
    depth: int
    """Tokens of other text before the prompt."""
    concurrency: int = 1
    """Answers that were made at once."""
    place: int = 0
    """Number in the order of asking where several are asked at once, else 0."""

    @property
    def batch(self) -> tuple[object, ...]:
        """What those that were asked at once have in common, and no others of the same
        configuration, temperature, depth and concurrency."""
        if self.concurrency == 1:
            return self.repeat, self.task, self.prompt
        return self.repeat, self.place // self.concurrency


@dataclass(frozen=True, slots=True)
class Measurement:
    """One answer of one configuration. Times are milliseconds, memory is MiB."""

    cell: Cell
    tokens: tuple[int, ...]
    """The answer's tokens, the end token included where it ended by itself."""
    reason: str
    counted: int
    """Tokens that `wall_ms` covers."""
    wall_ms: float
    steps: int
    drafted: int
    accepted: int
    draft_ms: float
    verify_ms: float
    host_ms: float
    prompt_tokens: int
    prefill_ms: float
    drafted_at_slot: tuple[int, ...]
    accepted_at_slot: tuple[int, ...]
    peak_mib: float | None
    """Most memory that the configuration's process has had so far."""
    span_ms: float | None = None
    """From asking until the last one of those asked at once had ended, prompts included; None in
    results of format 1."""
    device_mib: float | None = None
    """Memory taken of the graphics card when the answer ended; None without one."""
    proposers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        document.update(document.pop("cell"))
        return document

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Measurement:
        """Raises FileError for a row that lacks something or has it in another form."""
        try:
            cell = Cell(
                str(row["configuration"]),
                str(row["task"]),
                str(row["prompt"]),
                int(row["repeat"]),
                float(row["temperature"]),
                int(row["depth"]),
                int(row.get("concurrency", 1)),
                int(row.get("place", 0)),
            )
            numbers: dict[str, Any] = {
                **{name: int(row[name]) for name in _COUNTS},
                **{name: float(row[name]) for name in _TIMES},
            }
            return cls(
                cell=cell,
                tokens=tuple(int(token) for token in row["tokens"]),
                reason=str(row["reason"]),
                **numbers,
                drafted_at_slot=tuple(int(n) for n in row["drafted_at_slot"]),
                accepted_at_slot=tuple(int(n) for n in row["accepted_at_slot"]),
                peak_mib=_float(row["peak_mib"]),
                span_ms=_float(row.get("span_ms")),
                device_mib=_float(row["device_mib"]),
                proposers={
                    str(name): {str(key): int(n) for key, n in share.items()}
                    for name, share in row["proposers"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileError(
                f"a measurement is incomplete or damaged ({type(error).__name__}: {error}): "
                f"measure again"
            ) from error


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


_COUNTS = ("counted", "steps", "drafted", "accepted", "prompt_tokens")
_TIMES = ("wall_ms", "draft_ms", "verify_ms", "host_ms", "prefill_ms")


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Everything that decides what is measured; two runs of one plan can be one run."""

    kind: str
    """bench or eval."""
    configurations: tuple[Configuration, ...]
    prompts: tuple[BenchPrompt, ...]
    repeats: int
    temperatures: tuple[float, ...]
    depths: tuple[int, ...]
    max_tokens: int
    seed: int
    raw: bool = False
    concurrencies: tuple[int, ...] = (1,)
    """How many answers at once."""

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "configurations": [one.to_json() for one in self.configurations],
            "prompts": [prompt.to_json() for prompt in self.prompts],
            "repeats": self.repeats,
            "temperatures": list(self.temperatures),
            "depths": list(self.depths),
            "concurrencies": list(self.concurrencies),
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "raw": self.raw,
        }

    @property
    def key(self) -> str:
        """sha256 (hex, 16 digits) of the plan: what a journal must agree in to be continued."""
        text = json.dumps(self.to_json(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def turns(self) -> list[tuple[tuple[Cell, ...], ...]]:
        """All cells. Those of an inner tuple are asked at once; the tuples of a turn differ in the
        configuration only and are measured one after the other.

        The first of a turn changes from turn to turn, so that no configuration always follows
        the same one.
        """
        names = [one.name for one in self.configurations]
        turns: list[tuple[tuple[Cell, ...], ...]] = []
        for repeat, temperature, depth, concurrency in itertools.product(
            range(self.repeats), self.temperatures, self.depths, self.concurrencies
        ):
            for batch in self._batches(concurrency):
                start = len(turns) % len(names)
                turns.append(
                    tuple(
                        tuple(
                            Cell(
                                name,
                                *(prompt.task, prompt.id, repeat, temperature, depth),
                                *(concurrency, place if concurrency > 1 else 0),
                            )
                            for place, prompt in batch
                        )
                        for name in names[start:] + names[:start]
                    )
                )
        return turns

    def cells(self) -> list[Cell]:
        """All that is to be measured."""
        return [cell for turn in self.turns() for batch in turn for cell in batch]

    def _batches(self, concurrency: int) -> list[list[tuple[int, BenchPrompt]]]:
        """(place, prompt) of all prompts, so many at once; the last batch is filled up from the
        beginning.
        """
        count = -(-len(self.prompts) // concurrency)
        return [
            [
                (place, self.prompts[place % len(self.prompts)])
                for place in range(number * concurrency, (number + 1) * concurrency)
            ]
            for number in range(count)
        ]

    def seed_of(self, cell: Cell) -> int:
        """Seed of an answer: the same for all configurations, another one for each repeat."""
        text = f"{self.seed}/{cell.prompt}/{cell.repeat}/{cell.depth}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") & 0x7FFFFFFF
