"""From measurements to the figures of a table. Pure: the same measurements, the same figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dspine.bench.measurement import Measurement

ALL = "all"
"""Stands for all tasks together."""
RESAMPLES = 2000
CONFIDENCE = 0.95

Interval: TypeAlias = tuple[float, float]
Parts: TypeAlias = npt.NDArray[np.float64]
"""What a figure is made of, a row an answer: figures are quotients of column sums."""
Group: TypeAlias = tuple[float, int, int]
"""Temperature, depth and concurrency: only speeds of the same one are compared with plain."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where an answer is not the plain one's."""

    task: str
    prompt: str
    repeat: int
    position: int
    plain_token: int | None
    """None where that answer had ended."""
    token: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "prompt": self.prompt,
            "repeat": self.repeat,
            "position": self.position,
            "plain_token": self.plain_token,
            "token": self.token,
        }


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration on one task (or all), at one temperature, depth and number of answers at
    once. Times a step in ms.
    """

    configuration: str
    task: str
    temperature: float
    depth: int
    concurrency: int
    answers: int
    tokens: int
    tokens_per_second: float
    """Of one answer, its prompt not counted."""
    together_per_second: float | None
    """Tokens a second of all answers at once, from asking to the last one's end, prompts included;
    None for a task of which only some were asked at once."""
    gain: float | None
    """Of that over the same prompts one at a time; None where these were not measured."""
    gain_interval: Interval | None
    """95 % bootstrap interval over what was asked at once."""
    ratio: float | None
    """To plain decoding, over the same prompts and repeats; None without a plain configuration."""
    ratio_interval: Interval | None
    """95 % bootstrap interval over prompts and repeats; None with fewer than two."""
    acceptance_length: float
    acceptance_interval: Interval | None
    acceptance_rate: float
    slot_acceptance: tuple[float, ...]
    """Chance of slot 1, 2, ... given that every earlier one was accepted."""
    draft_ms: float
    verify_ms: float
    host_ms: float
    prefill_tokens_per_second: float
    peak_mib: float | None
    device_mib: float | None
    spread: float | None
    """Standard deviation over mean of the speed of one prompt's repeats, their median."""
    same_text: int | None
    """Answers that are token by token the plain ones of one at a time (where these were not
    measured, of as many at once); None without a plain configuration."""
    differences: tuple[Difference, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in self.__slots__ if name != "differences"},
            "slot_acceptance": list(self.slot_acceptance),
            "differences": [one.to_json() for one in self.differences],
        }


def summarise(measurements: Iterable[Measurement], plain: str | None) -> list[Row]:
    """Rows for every temperature, depth and concurrency, configuration, and task (then all tasks
    together).

    `plain` names the configuration that ratios and texts are compared with.
    """
    by_group: dict[Group, dict[str, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    for one in measurements:
        group = by_group[one.cell.temperature, one.cell.depth, one.cell.concurrency]
        group[one.cell.configuration].append(one)
    rows = []
    for group_key, configurations in by_group.items():
        single = by_group.get((*group_key[:2], 1), {})
        base = configurations.get(plain, []) if plain is not None else []
        texts = single.get(plain, base) if plain is not None else []
        for name, own in configurations.items():
            tasks = tuple(dict.fromkeys(one.cell.task for one in own))
            for task in (*tasks, ALL) if len(tasks) > 1 else tasks:
                chosen = [one for one in own if task in (ALL, one.cell.task)]
                alone = single.get(name, [])
                rows.append(_row(name, task, group_key, chosen, base, texts, alone))
    return rows


def _row(
    name: str,
    task: str,
    group: Group,
    asked: Sequence[Measurement],
    base: Sequence[Measurement],
    texts: Sequence[Measurement],
    alone: Sequence[Measurement],
) -> Row:
    """`asked`: its answers, of which those that only fill a batch up count for the speed of all at
    once and nothing else; `base`: plain answers of the same group, for speed; `texts`: those that
    texts are compared with; `alone`: the configuration's answers one at a time.
    """
    temperature, depth, concurrency = group
    own = list({_key(one): one for one in reversed(asked)}.values())[::-1]
    steps = max(1, sum(one.steps for one in own))
    drafted = sum(one.drafted for one in own)
    pairs = _paired(own, base)
    speeds = speed_parts([one for one, _ in pairs]), speed_parts([other for _, other in pairs])
    same = _paired(own, texts)
    differences = [found for one, other in same if (found := _difference(one, other))]
    batches = together_parts(asked)
    gains = _gain_parts(asked, alone)
    prefill_ms = sum(one.prefill_ms for one in own)
    peaks = [one.peak_mib for one in own if one.peak_mib is not None]
    cards = [one.device_mib for one in own if one.device_mib is not None]
    return Row(
        configuration=name,
        task=task,
        temperature=temperature,
        depth=depth,
        concurrency=concurrency,
        answers=len(own),
        tokens=sum(one.counted for one in own),
        tokens_per_second=speed(own),
        together_per_second=None if batches is None else quotient(batches),
        gain=None if gains is None else ratio(*gains),
        gain_interval=None if gains is None else ratio_interval(*gains),
        ratio=ratio(*speeds) if pairs else None,
        ratio_interval=ratio_interval(*speeds) if pairs else None,
        acceptance_length=acceptance_length(own),
        acceptance_interval=quotient_interval(acceptance_parts(own)),
        acceptance_rate=sum(one.accepted for one in own) / drafted if drafted else 0.0,
        slot_acceptance=_slots(own),
        draft_ms=sum(one.draft_ms for one in own) / steps,
        verify_ms=sum(one.verify_ms for one in own) / steps,
        host_ms=sum(one.host_ms for one in own) / steps,
        prefill_tokens_per_second=(
            sum(one.prompt_tokens for one in own) / prefill_ms * 1000 if prefill_ms else 0.0
        ),
        peak_mib=max(peaks, default=None),
        device_mib=max(cards, default=None),
        spread=_spread(own),
        same_text=len(same) - len(differences) if same else None,
        differences=tuple(differences),
    )


def speed(measurements: Sequence[Measurement]) -> float:
    """Tokens a second of all together, prefill apart."""
    return quotient(speed_parts(measurements))


def acceptance_length(measurements: Sequence[Measurement]) -> float:
    """Tokens a verify, the target's own included."""
    return quotient(acceptance_parts(measurements))


def speed_parts(measurements: Sequence[Measurement]) -> Parts:
    """(n, 2): tokens and seconds of each answer."""
    return np.array([[one.counted, one.wall_ms / 1000] for one in measurements]).reshape(-1, 2)


def acceptance_parts(measurements: Sequence[Measurement]) -> Parts:
    """(n, 2): tokens and verifies of each answer."""
    return np.array([[one.counted, one.steps] for one in measurements], float).reshape(-1, 2)


def together_parts(measurements: Sequence[Measurement]) -> Parts | None:
    """(n, 2): tokens and seconds of all that was asked at once; None when some of it is missing or
    was not timed.
    """
    batches = _batches(measurements)
    whole = all(len(batch) == batch[0].cell.concurrency for batch in batches)
    if not batches or not whole or any(one.span_ms is None for one in measurements):
        return None
    return np.array([_together(batch) for batch in batches])


def _gain_parts(
    own: Sequence[Measurement], alone: Sequence[Measurement]
) -> tuple[Parts, Parts] | None:
    """`together_parts`, and tokens and seconds of the same prompts one at a time."""
    parts = together_parts(own)
    if parts is None or together_parts(alone) is None:
        return None
    known = {_key(one): one for one in alone}
    pairs = [
        (part, [known[_key(one)] for one in batch])
        for part, batch in zip(parts, _batches(own), strict=True)
        if all(_key(one) in known for one in batch)
    ]
    if not pairs:
        return None
    base = [np.sum([_together([one]) for one in others], axis=0) for _, others in pairs]
    return np.array([part for part, _ in pairs]), np.array(base)


def _batches(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    found: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for one in measurements:
        found[one.cell.batch].append(one)
    return list(found.values())


def _together(batch: Sequence[Measurement]) -> tuple[float, float]:
    return sum(one.counted for one in batch), (batch[0].span_ms or 0.0) / 1000


def quotient(parts: Parts) -> float:
    """Sum of the first column over the sum of the second; 0 where there is nothing."""
    return float(_quotients(parts.sum(axis=0, keepdims=True))[0])


def ratio(own: Parts, base: Parts) -> float:
    """Quotient of `own` over that of `base`, row for row the same prompts."""
    return float(_ratios(np.hstack((own, base)).sum(axis=0, keepdims=True))[0])


def quotient_interval(parts: Parts) -> Interval | None:
    """95 % bootstrap interval of `quotient`."""
    return _bootstrap(parts, _quotients)


def ratio_interval(own: Parts, base: Parts) -> Interval | None:
    """95 % bootstrap interval of `ratio`, pairs drawn together."""
    return _bootstrap(np.hstack((own, base)), _ratios)


def _quotients(sums: Parts) -> Parts:
    return np.divide(sums[:, 0], sums[:, 1], out=np.zeros(len(sums)), where=sums[:, 1] > 0)


def _ratios(sums: Parts) -> Parts:
    own, base = _quotients(sums[:, :2]), _quotients(sums[:, 2:])
    return np.divide(own, base, out=np.zeros(len(sums)), where=base > 0)


def _bootstrap(parts: Parts, figures: Callable[[Parts], Parts]) -> Interval | None:
    """Percentile interval of a figure of column sums, rows drawn with replacement, seed 0."""
    if len(parts) < 2:
        return None
    drawn = np.random.default_rng(0).multinomial(
        len(parts), np.full(len(parts), 1 / len(parts)), RESAMPLES
    )
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(figures(drawn @ parts), [tail, 100 - tail])
    return float(low), float(high)


def _paired(
    own: Sequence[Measurement], base: Sequence[Measurement]
) -> list[tuple[Measurement, Measurement]]:
    known = {_key(one): one for one in base}
    return [(one, known[_key(one)]) for one in own if _key(one) in known]


def _key(one: Measurement) -> tuple[str, str, int]:
    return one.cell.task, one.cell.prompt, one.cell.repeat


def _difference(one: Measurement, plain: Measurement) -> Difference | None:
    if one.tokens == plain.tokens:
        return None
    shorter = min(len(one.tokens), len(plain.tokens))
    at = next((i for i in range(shorter) if one.tokens[i] != plain.tokens[i]), shorter)
    cell = one.cell
    return Difference(
        cell.task, cell.prompt, cell.repeat, at, _at(plain.tokens, at), _at(one.tokens, at)
    )


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _slots(measurements: Sequence[Measurement]) -> tuple[float, ...]:
    longest = max((len(one.drafted_at_slot) for one in measurements), default=0)
    drafted, accepted = [0] * longest, [0] * longest
    for one in measurements:
        for slot, count in enumerate(one.drafted_at_slot):
            drafted[slot] += count
        for slot, count in enumerate(one.accepted_at_slot):
            accepted[slot] += count
    # A slot is judged where the one before was accepted and it was drafted at all.
    judged = [min(d, before) for d, before in zip(drafted, [*drafted[:1], *accepted], strict=False)]
    return tuple(a / n if n else 0.0 for a, n in zip(accepted, judged, strict=True))


def _spread(measurements: Sequence[Measurement]) -> float | None:
    repeats: Mapping[tuple[str, str], list[float]] = defaultdict(list)
    for one in measurements:
        repeats[one.cell.task, one.cell.prompt].append(speed([one]))
    several = [values for values in repeats.values() if len(values) > 1 and np.mean(values) > 0]
    if not several:
        return None
    return float(np.median([np.std(values, ddof=1) / np.mean(values) for values in several]))
