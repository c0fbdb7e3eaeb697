"""A tiny llama target against the formulas of the architecture, written in numpy."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from dspine.llama.batch import Batch
from dspine.llama.context import Context
from dspine.llama.model import Model
from tests.support.tiny_models import tiny_llama

Matrix = npt.NDArray[np.float64]
HEADS, KV_HEADS, HEAD, LAYERS = 4, 2, 16, 4


def norm(x: Matrix) -> Matrix:
    scale: Matrix = np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
    return x / scale


def rotate(x: Matrix) -> Matrix:
    """Rotary positions on neighbouring pairs, base 10000; x is (rows, heads, HEAD)."""
    angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(0, HEAD, 2) / HEAD)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None, :]
    out = np.empty_like(x)
    out[..., 0::2], out[..., 1::2] = turned.real, turned.imag
    return out


def forward(path: Path, tokens: list[int]) -> tuple[list[Matrix], Matrix, Matrix]:
    """Output of every layer, the normed last state and the logits (all norms have weight 1)."""
    w = {t.name: t.data.astype(np.float64) for t in gguf.GGUFReader(path).tensors}
    x, outputs = w["token_embd.weight"][tokens], []
    n = len(tokens)
    mask = np.triu(np.full((n, n), -np.inf), 1)
    for i in range(LAYERS):
        b, a = f"blk.{i}.", norm(x)
        q = rotate((a @ w[b + "attn_q.weight"].T).reshape(n, HEADS, HEAD))
        k = rotate((a @ w[b + "attn_k.weight"].T).reshape(n, KV_HEADS, HEAD))
        v = (a @ w[b + "attn_v.weight"].T).reshape(n, KV_HEADS, HEAD)
        k, v = (np.repeat(m, HEADS // KV_HEADS, axis=1) for m in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD) + mask
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(n, HEADS * HEAD)
        x = x + mixed @ w[b + "attn_output.weight"].T
        a = norm(x)
        gate = a @ w[b + "ffn_gate.weight"].T
        up = a @ w[b + "ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[b + "ffn_down.weight"].T
        outputs.append(x)
    hidden = norm(x)
    return outputs, hidden, hidden @ w["output.weight"].T


def test_taps_hidden_states_and_logits_follow_the_formulas(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", seed=3)
    tokens = [1, 72, 101, 300, 9, 33, 250, 8, 8, 17]
    outputs, hidden, logits = forward(path, tokens)
    for by_callback in (False, True):
        with (
            Model.load(path) as model,
            Context(
                model,
                n_ctx=64,
                n_threads=1,
                taps=(2, 0, 1),
                embeddings=True,
                taps_by_callback=by_callback,
                cache_type_k="f32",
                cache_type_v="f32",
            ) as context,
        ):
            batch = Batch(16)
            batch.add_tokens(tokens[:4], 0)
            context.decode(batch)
            first = context.features(0, 4)
            batch.clear()
            batch.add_tokens(tokens[4:], 4)
            context.decode(batch)
            features = np.concatenate([first, context.features(0, 6)])
            expected = np.concatenate([outputs[tap] for tap in (2, 0, 1)], axis=1)
            assert np.abs(features - expected).max() < 1e-4
            assert np.abs(context.hidden(5) - hidden[-1]).max() < 1e-4
            assert np.abs(context.logits(5) - logits[-1]).max() < 1e-3
            assert context.argmax(2) == int(logits[6].argmax())
