"""The two tensors a drafter shares with its target: token embedding and output head."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dspine.errors import FileError
from dspine.files.gguf_file import StoredTensor, find_tensor
from dspine.ggml import HostTensor, Tensor
from dspine.llama.model import Model

_EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"


@dataclass(frozen=True, slots=True)
class _ModelMemory:
    """Says when the memory behind a target's tensors is gone."""

    model: Model

    @property
    def closed(self) -> bool:
        return self.model.is_closed


def target_tensors(target: Model) -> tuple[Tensor | HostTensor, Tensor | HostTensor]:
    """(embedding, head) of a loaded target; a tied target has one tensor for both.

    A tensor is read from the target's file when the library does not give it away, or keeps it
    only in a repacked form in which rows cannot be looked up.
    """
    embedding = _find(target, _EMBEDDING)
    if embedding is None:
        raise FileError(
            f"the target {target.path} has no {_EMBEDDING}: it cannot be drafted for, answer "
            "without a drafter (--proposer ngram)"
        )
    return embedding, _find(target, _HEAD) or embedding


def host_tensor(stored: StoredTensor) -> HostTensor:
    """A tensor of a file, still mapped, as the weight store takes it."""
    return HostTensor(stored.type, stored.ne, stored.raw)


def _find(target: Model, name: str) -> Tensor | HostTensor | None:
    tensor = target.tensor(name)
    if tensor is not None and tensor.is_readable:
        return replace(tensor, owner=_ModelMemory(target))
    stored = find_tensor(target.path, name)
    return None if stored is None else host_tensor(stored)
