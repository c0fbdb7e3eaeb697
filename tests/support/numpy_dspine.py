"""DSpine in plain NumPy float64, one slot and one candidate at a time: the oracle for the graph.

Written from the published forward pass, without caching, batching or fusion, so that it shares
no code and no shortcut with what it checks. Tensors have GGUF names and PyTorch shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dspine.files.schema import DSpineConfig, tensor_specs

Array = npt.NDArray[np.float64]


@dataclass
class OracleDraft:
    """Everything about one block; lists run over slots 1 ... width - 1."""

    hidden: Array
    pre_injection: Array
    candidates: list[list[int]]
    tables: list[Array]
    tokens: list[int]


class NumpyDSpine:
    """`embedding` and `head` are the target's, (vocabulary, hidden)."""

    def __init__(
        self,
        config: DSpineConfig,
        tensors: Mapping[str, npt.NDArray[np.float32]],
        embedding: npt.NDArray[np.float32],
        head: npt.NDArray[np.float32],
        draft_vocab: npt.NDArray[np.int32] | None = None,
    ) -> None:
        self.c = config
        self.t = {name: np.asarray(value, dtype=np.float64) for name, value in tensors.items()}
        self.embedding = np.asarray(embedding, dtype=np.float64)
        self.head = np.asarray(head, dtype=np.float64)
        self.vocab = range(len(head)) if draft_vocab is None else [int(i) for i in draft_vocab]

    def draft(self, features: npt.NDArray[np.float32], anchor: int, width: int) -> OracleDraft:
        """Block of `width` slots after a context of `features` at positions 0, 1, ..."""
        c, position = self.c, len(features)
        context = [
            self._norm(self.t["fc.weight"] @ row.astype(np.float64), "enc.output_norm.weight")
            for row in features
        ]
        h = [self.embedding[anchor]] + [self.embedding[c.mask_token_id]] * (width - 1)
        before = h
        for layer in range(c.num_layers):
            h = self._layer(layer, h, context, position)
            before = h
            h = self._inject(layer, h, anchor)
        hidden = [self._norm(x, "output_norm.weight") for x in h[1:]]
        candidates = [self._candidates(x) for x in hidden]
        tables, tokens, row = [], [], 0
        for slot in range(1, width):
            earlier = [anchor] if slot == 1 else candidates[slot - 2]
            table = np.array(
                [
                    [
                        self.head[candidate] @ self._refined(before[slot], token)
                        for candidate in candidates[slot - 1]
                    ]
                    for token in earlier
                ]
            )
            tables.append(table)
            row = int(np.argmax(table[row]))
            tokens.append(candidates[slot - 1][row])
        return OracleDraft(np.array(hidden), np.array(before[1:]), candidates, tables, tokens)

    def led(self, draft: OracleDraft, lead: Sequence[int]) -> tuple[list[int], list[float]]:
        """(tokens, scores) of the slots after the tokens of a lead, which stand in the first ones:
        the walk is forced through them, and each write takes the code of the token before it.
        """
        tokens, scores, before = list[int](), list[float](), lead[-1]
        for slot in range(len(lead), len(draft.candidates)):
            ids = draft.candidates[slot]
            row = self.head[ids] @ self._refined(draft.pre_injection[slot], before)
            odds = np.exp(row - row.max())
            before = ids[int(np.argmax(row))]
            tokens.append(before)
            scores.append(float(odds.max() / odds.sum()))
        return tokens, scores

    def _layer(
        self, layer: int, h: list[Array], context: list[Array], position: int
    ) -> list[Array]:
        c, p = self.c, f"blk.{layer}."
        window = c.windows[layer]
        keys = [self._key(p, x, i) for i, x in enumerate(context)]
        values = [self._value(p, x) for x in context]
        normed = [self._norm(x, p + "attn_norm.weight") for x in h]
        block_keys = [self._key(p, x, position + o) for o, x in enumerate(normed)]
        block_values = [self._value(p, x) for x in normed]
        out = []
        for o, x in enumerate(normed):
            seen = [i for i in range(position) if window is None or position + o - i < window]
            block_seen = [i for i in range(o + 1) if window is None or o - i < window]
            all_keys = np.array([keys[i] for i in seen] + [block_keys[i] for i in block_seen])
            all_values = np.array([values[i] for i in seen] + [block_values[i] for i in block_seen])
            query = (self.t[p + "attn_q.weight"] @ x).reshape(c.num_heads, c.head_dim)
            mixed = []
            for head in range(c.num_heads):
                q = self._head_norm(query[head], p + "attn_q_norm.weight")
                q = self._rotate(q, position + o)
                shared = head // (c.num_heads // c.num_kv_heads)
                scores = all_keys[:, shared] @ q / np.sqrt(c.head_dim)
                weights = np.exp(scores - scores.max())
                mixed.append(weights / weights.sum() @ all_values[:, shared])
            attended = h[o] + self.t[p + "attn_output.weight"] @ np.concatenate(mixed)
            y = self._norm(attended, p + "ffn_norm.weight")
            gate = self.t[p + "ffn_gate.weight"] @ y
            up = self.t[p + "ffn_up.weight"] @ y
            out.append(attended + self.t[p + "ffn_down.weight"] @ (gate / (1 + np.exp(-gate)) * up))
        return out

    def _inject(self, layer: int, h: list[Array], anchor: int) -> list[Array]:
        features = [self._feature(layer, x) for x in h]
        out = [h[0]]
        for slot in range(1, len(h)):
            earlier = self._code(anchor) if slot == 1 else features[slot - 1]
            out.append(self._write(layer, h[slot], features[slot], earlier))
        return out

    def _write(self, layer: int, x: Array, feature: Array, earlier: Array) -> Array:
        gate = self.t["inj_receiver_gate.weight"] @ feature
        gate = gate + self.t["inj_predecessor_gate.weight"] @ earlier + self.t["inj_bias"]
        gated = 1 / (1 + np.exp(-gate)) * (self.t["inj_message.weight"] @ earlier)
        strength = np.linalg.norm(x) / np.sqrt(len(x))
        written: Array = x + strength * (self.t[f"blk.{layer}.inj_write.weight"] @ gated)
        return written

    def _refined(self, before: Array, token: int) -> Array:
        last = self.c.num_layers - 1
        feature = self._feature(last, before)
        return self._norm(
            self._write(last, before, feature, self._code(token)), "output_norm.weight"
        )

    def _feature(self, layer: int, x: Array) -> Array:
        y = self.t[f"blk.{layer}.inj_readout.weight"] @ x
        feature: Array = np.sqrt(len(y)) * y / np.linalg.norm(y)
        return feature

    def _code(self, token: int) -> Array:
        code: Array = np.sqrt(self.c.transfer_rank) * self.t["transfer_codes.weight"][token]
        return code

    def _candidates(self, hidden: Array) -> list[int]:
        logits = [(float(self.head[token] @ hidden), token) for token in self.vocab]
        return [token for _, token in sorted(logits, reverse=True)[: self.c.top_k]]

    def _key(self, prefix: str, x: Array, position: int) -> Array:
        k = (self.t[prefix + "attn_k.weight"] @ x).reshape(self.c.num_kv_heads, -1)
        return np.array(
            [
                self._rotate(self._head_norm(one, prefix + "attn_k_norm.weight"), position)
                for one in k
            ]
        )

    def _value(self, prefix: str, x: Array) -> Array:
        value: Array = (self.t[prefix + "attn_v.weight"] @ x).reshape(self.c.num_kv_heads, -1)
        return value

    def _rotate(self, x: Array, position: int) -> Array:
        half = len(x) // 2
        angle = position * self.c.rope_theta ** (-np.arange(half) / half)
        left, right = x[:half], x[half:]
        return np.concatenate(
            (
                left * np.cos(angle) - right * np.sin(angle),
                right * np.cos(angle) + left * np.sin(angle),
            )
        )

    def _head_norm(self, x: Array, name: str) -> Array:
        return self._norm(x, name)

    def _norm(self, x: Array, name: str) -> Array:
        normed: Array = x / np.sqrt(np.mean(x**2) + self.c.rms_norm_eps) * self.t[name]
        return normed


def random_tensors(
    config: DSpineConfig, rng: np.random.Generator
) -> dict[str, npt.NDArray[np.float32]]:
    """Weights of every tensor: matrices that keep magnitudes near 1, norms near 1, codes of
    unit length, and writes and gates strong enough to matter.
    """
    tensors = {}
    for spec in tensor_specs(config):
        if len(spec.shape) == 1:
            value = 1 + 0.2 * rng.standard_normal(spec.shape)
            if spec.gguf_name == "inj_bias":
                value = value - 1
        else:
            value = rng.standard_normal(spec.shape) / np.sqrt(spec.shape[1])
        if spec.gguf_name == "transfer_codes.weight":
            value = value / np.linalg.norm(value, axis=1, keepdims=True)
        tensors[spec.gguf_name] = value.astype(np.float32)
    return tensors
