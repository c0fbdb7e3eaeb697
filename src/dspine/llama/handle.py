"""The native model behind a Model, shared with the contexts made of it."""

from __future__ import annotations

from dspine.llama.native import Native


class Handle:
    """A native model with one user, freed when the last of its users has released it."""

    def __init__(self, native: Native, pointer: int) -> None:
        self.native = native
        self.pointer = pointer
        self.users = 1
        """The Model until it is closed, and each open Context."""

    def retain(self) -> None:
        """One more user."""
        self.users += 1

    def release(self) -> None:
        """One user less; after the last one it does nothing."""
        if self.users == 0:
            return
        self.users -= 1
        if self.users == 0:
            self.native.api.llama_model_free(self.pointer)
