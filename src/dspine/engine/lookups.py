"""What costs nothing to propose: what repeats in the running text, and what a table knows.

In one native call a step where the CPU kernels run, else in Python; both find the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

from dspine.engine.ngram import MAX_CANDIDATES, MAX_MATCH, NgramIndex
from dspine.engine.ngram_table import NgramTable
from dspine.engine.proposal import CONTINUED, MOST, NGRAM, TABLE, Proposal
from dspine.ggml import kernels
from dspine.ggml.ngram import COUNT_BITS, NativeText
from dspine.ggml.ngram import MOST as COUNT_MASK

LEAST_REACH = 0.1
"""Chance of a table draft to be reached under which the table is not asked for more."""

LOOKUP_SCORES = (
    (32, 0.98), (24, 0.94), (16, 0.90), (12, 0.87), (10, 0.84), (8, 0.81), (7, 0.80),
    (6, 0.75), (5, 0.72), (4, 0.66), (3, 0.63), (2, 0.58), (1, 0.30),
)  # fmt: skip
"""Chance that the token after a match of this length (or more) repeats; measured on 600 answers
of the default target, where it depends on the length alone, not on the slot."""


class Lookups(Protocol):
    """The tokens of one sequence, and what may follow them."""

    @property
    def tokens(self) -> Sequence[int]:
        """All of them (read only)."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""

    def truncate(self, length: int) -> None:
        """Forget tokens from index `length` on."""

    def look_up(self, count: int) -> list[Proposal]:
        """At most one proposal of each kind, of at most `count` drafts: what repeats, and what the
        table knows, which a repeat may continue.
        """

    def continued(self, drafted: Proposal, count: int) -> Proposal:
        """A chain with what repeats after its end, or else is known: at most `count` drafts."""


def make_lookups(min_match: int, table: NgramTable | None, min_probability: float) -> Lookups:
    """Native ones where that is possible. `min_match` is the shortest match that is continued,
    `min_probability` what a table entry needs to be proposed.
    """
    plug_in = kernels.installed()
    if plug_in is None:
        return PythonLookups(NgramIndex(min_match), table, min_probability)
    return NativeLookups(
        NativeText(
            plug_in.library,
            None if table is None else table.native(plug_in),
            matches=(min_match, MAX_MATCH, MAX_CANDIDATES),
            scores=lookup_scores(0, MAX_MATCH + 1),
            least=min_probability,
            least_reach=LEAST_REACH,
        )
    )


class NativeLookups:
    """Those of the kernels."""

    def __init__(self, text: NativeText) -> None:
        self._text = text
        self.extend, self.truncate = text.extend, text.truncate

    @property
    def tokens(self) -> Sequence[int]:
        return self._text.tokens

    def look_up(self, count: int) -> list[Proposal]:
        tokens, scores, counts = self._text.look_up(count)
        if not counts:
            return []
        repeats = counts & COUNT_MASK
        own = counts >> COUNT_BITS & COUNT_MASK
        if not own:
            return [Proposal(tokens, scores, NGRAM)]
        if counts >> 2 * COUNT_BITS:
            name = CONTINUED
        else:
            name, own = TABLE, MOST
        if not repeats:
            return [Proposal(tokens, scores, name, (), own)]
        return [
            Proposal(tokens[:repeats], scores[:repeats], NGRAM),
            Proposal(tokens[repeats:], scores[repeats:], name, (), own),
        ]

    def continued(self, drafted: Proposal, count: int) -> Proposal:
        room = count - len(drafted.tokens)
        if room <= 0:
            return drafted
        tokens, scores, counts = self._text.after(drafted.tokens, room)
        return drafted.continued(tokens, scores, NGRAM if counts & COUNT_MASK else TABLE)


class PythonLookups:
    """Those of `NgramIndex` and `NgramTable`."""

    def __init__(self, index: NgramIndex, table: NgramTable | None, min_probability: float) -> None:
        self._index = index
        self._table = table
        self._min_probability = min_probability
        self.extend, self.truncate = index.extend, index.truncate

    @property
    def tokens(self) -> Sequence[int]:
        return self._index.tokens

    def look_up(self, count: int) -> list[Proposal]:
        found: list[Proposal] = []
        match = self._index.find()
        if match is not None:
            drafts = self._index.continuation(match.start, count)
            found.append(Proposal(tuple(drafts), lookup_scores(match.length, count), NGRAM))
        if self._table is not None:
            tokens, scores, reached = self._known(self._table, (), count)
            if tokens:
                known = Proposal(tuple(tokens), tuple(scores), TABLE)
                found.append(self._repeated(known, count) if reached >= LEAST_REACH else known)
        return found

    def continued(self, drafted: Proposal, count: int) -> Proposal:
        longer = self._repeated(drafted, count)
        if self._table is None or longer is not drafted or len(drafted.tokens) >= count:
            return longer
        tokens, scores, _ = self._known(self._table, drafted.tokens, count - len(drafted.tokens))
        return drafted.continued(tokens, scores, TABLE)

    def _repeated(self, drafted: Proposal, count: int) -> Proposal:
        """A chain with what repeats after its end."""
        room = count - len(drafted.tokens)
        match = self._index.find(drafted.tokens) if room > 0 else None
        if match is None:
            return drafted
        tokens = self._index.continuation(match.start, room, drafted.tokens)
        return drafted.continued(tokens, lookup_scores(match.length, room), NGRAM)

    def _known(
        self, table: NgramTable, tail: Sequence[int], count: int
    ) -> tuple[list[int], list[float], float]:
        """(drafts, scores, chance that all are right) after the text and the tail."""
        context = [*self._index.tokens[-3:], *tail]
        return table.chain(context, count, self._min_probability, LEAST_REACH)


def lookup_score(length: int) -> float:
    """Prior chance that a match of `length` tokens goes on."""
    for least, score in LOOKUP_SCORES:
        if length >= least:
            return score
    return 0.0


@cache
def lookup_scores(length: int, count: int) -> tuple[float, ...]:
    """The chances of `count` drafts after such a match: each right one makes it longer."""
    return tuple(lookup_score(length + slot) for slot in range(count))
