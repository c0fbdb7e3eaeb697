"""What a chain of samplers does: values by llama.cpp's names, and the order of the steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dspine.errors import UsageError
from dspine.llama.checks import require_count, require_number

DRY_BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's default ends of a repetition."""

SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip
"""The steps of a chain, in llama.cpp's default order."""

OTHER_NAMES = {
    "top-k": "top_k",
    "top-p": "top_p",
    "nucleus": "top_p",
    "top-n-sigma": "top_n_sigma",
    "typical-p": "typ_p",
    "typical": "typ_p",
    "typ-p": "typ_p",
    "typ": "typ_p",
    "min-p": "min_p",
    "temp": "temperature",
}
"""What llama.cpp also calls them."""

LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}
"""Their letters in llama.cpp's short form of an order."""

_LONGEST_BREAKER = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainOptions:
    """What a chain does, by llama-server's names and with llama.cpp's defaults but one:
    `temperature` is 0, which means the most likely token.

    top_k 0, top_p 1, min_p 0, typical_p 1, top_n_sigma 0 or less, repeat_penalty 1,
    dry_multiplier 0, xtc_probability 0 and an xtc_threshold above 0.5 switch that step off. A
    last_n counts tokens of prompt and answer, -1 all that fit into the context. Raises UsageError
    for values that cannot be.
    """

    samplers: tuple[str, ...] = SAMPLERS
    """The steps in their order; one that is not named is left out. The bias comes first."""
    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and what is added to its logit; -inf forbids the token."""

    def __post_init__(self) -> None:
        _check_order(self.samplers)
        require_number("temperature", self.temperature, least=0.0)
        require_count("top_k", self.top_k, 0)
        for name in ("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"):
            require_number(name, getattr(self, name), least=0.0, most=1.0)
        require_number("top_n_sigma", self.top_n_sigma)
        require_number("repeat_penalty", self.repeat_penalty, least=0.0)
        if self.repeat_penalty == 0:
            raise UsageError("repeat_penalty is 0: it must be above 0, and 1 switches it off")
        require_number("presence_penalty", self.presence_penalty)
        require_number("frequency_penalty", self.frequency_penalty)
        require_number("dry_multiplier", self.dry_multiplier, least=0.0)
        require_number("dry_base", self.dry_base, least=1.0)
        require_count("repeat_last_n", self.repeat_last_n, -1)
        require_count("dry_penalty_last_n", self.dry_penalty_last_n, -1)
        require_count("dry_allowed_length", self.dry_allowed_length, 1)
        for breaker in self.dry_sequence_breakers:
            _check_breaker(breaker)
        for token, bias in self.logit_bias:
            require_count("the token id of a logit bias", token, 0)
            if math.isnan(bias) or bias == math.inf:
                raise UsageError(
                    f"the logit bias of token {token} is {bias}: give a number, or -inf to "
                    f"forbid the token"
                )

        if self.temperature == 0 and "temperature" not in self.samplers:
            raise UsageError(
                "samplers leaves out temperature, which then is 1, and temperature is 0: name it "
                "among the samplers, or set it to 1"
            )

    @property
    def penalises(self) -> bool:
        """Whether the tokens before change what may follow, DRY apart."""
        changes = (
            self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        )
        return "penalties" in self.samplers and self.repeat_last_n != 0 and changes

    @property
    def dries(self) -> bool:
        """Whether DRY is on."""
        wanted = self.dry_multiplier > 0 and self.dry_penalty_last_n != 0
        return wanted and "dry" in self.samplers

    @property
    def excludes(self) -> bool:
        """Whether XTC is on."""
        wanted = self.xtc_probability > 0 and self.xtc_threshold <= 0.5
        return wanted and "xtc" in self.samplers

    @property
    def steps(self) -> tuple[str, ...]:
        """The samplers that are on, in their order."""
        on = {
            "penalties": self.penalises,
            "dry": self.dries,
            "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0,
            "typ_p": self.typical_p < 1,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "xtc": self.excludes,
            "temperature": self.temperature != 1,
        }
        return tuple(name for name in self.samplers if on[name])

    @property
    def drawn_at(self) -> float:
        """The temperature that counts: 1 where that step is left out."""
        return self.temperature if "temperature" in self.samplers else 1.0

    @property
    def is_greedy(self) -> bool:
        """Whether the chain always leaves the token with the highest logit."""
        others = {"penalties", "dry", "typ_p", "xtc"}
        return self.temperature == 0 and not (self.logit_bias or others & set(self.steps))


def read_samplers(text: str) -> tuple[str, ...]:
    """The order that a text such as "top_k;temperature" means; UsageError for other names."""
    names = (name.strip().lower() for name in text.split(";"))
    order = tuple(OTHER_NAMES.get(name, name) for name in names if name)
    _check_order(order)
    return order


def read_letters(text: str) -> tuple[str, ...]:
    """The order that a text such as "edkypmxt" means; UsageError for other letters."""
    order = tuple(LETTERS.get(letter, letter) for letter in text)
    _check_order(order)
    return order


def _check_order(samplers: tuple[str, ...]) -> None:
    for place, name in enumerate(samplers):
        if name not in SAMPLERS:
            raise UsageError(
                f"samplers names {name!r}, which is none: choose among {', '.join(SAMPLERS)}"
            )
        if name in samplers[:place]:
            raise UsageError(f"samplers names {name} twice: name each step once")


def _check_breaker(text: str) -> None:
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise UsageError(
            "a DRY sequence breaker has an unpaired surrogate: give valid Unicode"
        ) from None
    if not 1 <= size <= _LONGEST_BREAKER or "\0" in text:
        raise UsageError(
            f"the DRY sequence breaker {text!r} has {size} bytes: give 1 to {_LONGEST_BREAKER}, "
            f"none of them zero"
        )
