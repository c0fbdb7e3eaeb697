"""GGUF architectures that accompany a language model and are never a target themselves."""

from __future__ import annotations

from collections.abc import Mapping

NOT_TARGETS: Mapping[str, str] = {
    "dspine": "a DSpine drafter",
    "dflash": "a drafter of the DFlash family",
    "eagle3": "an EAGLE-3 drafter",
    "clip": "a multimodal projector (mmproj)",
    "gemma4-assistant": "a Gemma 4 assistant drafter",
}
"""What a file of that architecture is."""
