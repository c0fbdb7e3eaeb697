"""DFlash and DFlash2 in NumPy, float64, written from the description of the networks.

Nothing is taken from the ggml graphs: whole matrices of a block, weights by GGUF name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dspine.files.schema import DFlash2Config, DrafterConfig, tensor_specs

Array = npt.NDArray[np.float64]


@dataclass
class DFlashDraft:
    """One block; rows are slots 1 ... width - 1."""

    hidden: Array
    logits: Array
    """(n, vocabulary): minus infinity where a reduced head has no row."""
    tokens: list[int]
    scores: list[Array]
    """DFlash2: the row of each step of the walk, in the order of `candidates`."""
    candidates: list[list[int]]


class NumpyDFlash:
    """`embedding` and `head` (rows of `draft_vocab` if given, else of every token)."""

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, npt.NDArray[np.float32]],
        embedding: npt.NDArray[np.float32],
        head: npt.NDArray[np.float32],
        draft_vocab: npt.NDArray[np.int32] | None = None,
    ) -> None:
        self.c = config
        self.t = {name: np.asarray(value, dtype=np.float64) for name, value in tensors.items()}
        self.embedding = np.asarray(embedding, dtype=np.float64)
        self.head = np.asarray(head, dtype=np.float64)
        self.vocab = np.arange(len(head)) if draft_vocab is None else draft_vocab

    def draft(self, features: npt.NDArray[np.float32], anchor: int, width: int) -> DFlashDraft:
        c, p = self.c, len(features)
        context = self.norm(features.astype(np.float64) @ self.t["fc.weight"].T, "enc.output_norm")
        h = c.embedding_scale * self.embedding[[anchor] + [c.mask_token_id] * (width - 1)]
        for i in range(c.num_layers):
            h = h + self.around(i, "attn", h, lambda x, i=i: self.attend(i, x, context, p))
            h = h + self.around(i, "ffn", h, lambda x, i=i: self.feed(i, x))
        hidden = self.norm(h, "output_norm")[1:]
        logits = np.full((width - 1, len(self.embedding)), -np.inf)
        raw = c.logit_scale * (hidden @ self.head.T)
        cap = c.logit_softcap
        logits[:, self.vocab] = raw if cap is None else cap * np.tanh(raw / cap)
        if not isinstance(c, DFlash2Config):
            return DFlashDraft(hidden, logits, [int(i) for i in logits.argmax(1)], [], [])
        tokens, rows, lists = [], [], []
        before = anchor
        for slot, u in enumerate(logits):
            chosen = np.argsort(-u, kind="stable")[: c.top_k]
            gate = self.t["selector_hidden.weight"] @ hidden[slot]
            row = u[chosen] + self.t["selector_successor.weight"][chosen] @ (
                self.t["selector_predecessor.weight"][before] * gate
            )
            before = int(chosen[row.argmax()])
            tokens.append(before)
            rows.append(row)
            lists.append([int(i) for i in chosen])
        return DFlashDraft(hidden, logits, tokens, rows, lists)

    def around(self, i: int, part: str, h: Array, sublayer: object) -> Array:
        """A sublayer of the normed states, between its two convolutions if it has them."""
        assert callable(sublayer)
        x = self.norm(h, f"blk.{i}.{part}_norm")
        if not isinstance(self.c, DFlash2Config):
            return np.asarray(sublayer(x))
        delta = x @ self.t[f"blk.{i}.{part}_conv_proj.weight"].T
        base = self.t[f"blk.{i}.{part}_conv_base"]
        y = self.convolve(x, base[0], delta, 0)
        return self.convolve(np.asarray(sublayer(y)), base[1], delta, 1)

    def convolve(self, x: Array, base: Array, delta: Array, side: int) -> Array:
        assert isinstance(self.c, DFlash2Config)
        taps, groups = self.c.conv_kernel_size, self.c.conv_groups
        delta = delta.reshape(len(x), 2, taps, groups)[:, side]
        out = np.zeros_like(x)
        for t in range(len(x)):
            for j in range(min(taps, t + 1)):
                out[t] += (base[j] + np.repeat(delta[t, j], self.c.conv_group_size)) * x[t - j]
        return out

    def attend(self, i: int, x: Array, context: Array, p: int) -> Array:
        c, name = self.c, f"blk.{i}."
        window = c.windows[i] or 1 << 30
        both = np.concatenate((context, x))
        positions = np.arange(p + len(x))
        k = self.heads(both @ self.t[name + "attn_k.weight"].T, name + "attn_k_norm", positions)
        v = (both @ self.t[name + "attn_v.weight"].T).reshape(len(both), -1, c.head_dim)
        q = self.heads(x @ self.t[name + "attn_q.weight"].T, name + "attn_q_norm", positions[p:])
        repeat = c.num_heads // c.num_kv_heads
        k, v = np.repeat(k, repeat, 1), np.repeat(v, repeat, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(c.head_dim)
        distance = positions[p:, None] - positions[None, :]
        seen = distance < window
        if c.causal[i]:
            seen &= distance >= 0
        scores = np.where(seen, scores, -np.inf)
        if i in c.sink_layers:
            # A score for nothing, whose value is zero.
            sinks = np.broadcast_to(
                self.t[name + "attn_sinks.weight"][:, None, None], (c.num_heads, len(x), 1)
            )
            scores = np.concatenate((scores, sinks), -1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = (weights / weights.sum(-1, keepdims=True))[..., : len(both)]
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
        return np.asarray(c.value_scale * mixed @ self.t[name + "attn_output.weight"].T)

    def feed(self, i: int, x: Array) -> Array:
        gate = x @ self.t[f"blk.{i}.ffn_gate.weight"].T
        up = x @ self.t[f"blk.{i}.ffn_up.weight"].T
        return np.asarray((gate / (1 + np.exp(-gate)) * up) @ self.t[f"blk.{i}.ffn_down.weight"].T)

    def heads(self, x: Array, norm: str, positions: npt.NDArray[np.int64]) -> Array:
        """(rows, heads, head_dim): each head normed, then turned by its position."""
        c = self.c
        half = (c.rotary_size or c.head_dim) // 2
        x = self.norm(x.reshape(len(x), -1, c.head_dim), norm)
        angle = positions[:, None] * c.rope_theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = first * cos - second * sin, second * cos + first * sin
        return np.concatenate((*turned, rest), -1)

    def norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.c.rms_norm_eps)
        return np.asarray(x / scale * self.t[f"{name}.weight"])


def random_tensors(
    config: DrafterConfig, rng: np.random.Generator
) -> dict[str, npt.NDArray[np.float32]]:
    """Weights by GGUF name, of a scale at which every part matters."""
    made = {}
    for spec in tensor_specs(config):
        values = rng.standard_normal(spec.shape)
        if len(spec.shape) == 1:
            values = 1 + 0.2 * values
        elif spec.gguf_name.endswith("conv_base"):
            values = 0.3 * values
            values[:, 0] += 1
        elif "codebook" not in spec.torch_name:
            values /= np.sqrt(spec.shape[1])
        made[spec.gguf_name] = values.astype(np.float32)
    return made
