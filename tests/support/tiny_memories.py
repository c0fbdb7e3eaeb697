"""Tiny random GGUF targets by kind of memory: short convolutions, sliding windows, no attention.

With `tiny_llama` and `tiny_qwen35` they cover every memory that the library has for text.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.tiny_models import (
    ModelWriter,
    add_feed_forward,
    add_outer_tensors,
    add_tokenizer,
)

VOCABULARY, CONTEXT, HIDDEN, INNER = 320, 2048, 64, 128
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 16


def tiny_lfm2(path: Path, seed: int = 0, *, window: int = 0) -> Path:
    """Write a hybrid target of architecture `lfm2`: attention, then three short convolutions.

    With a `window` its attention layers slide.
    """
    kernel, kv_heads = 3, [KV_HEADS, 0, 0, 0]
    out = ModelWriter(path, "lfm2", seed, "f32")
    meta = out.file
    meta.add_block_count(len(kv_heads))
    _add_sizes(out)
    meta.add_head_count_kv(kv_heads)
    meta.add_rope_freq_base(10000.0)
    meta.add_shortconv_l_cache(kernel)
    if window:
        meta.add_sliding_window(window)
    add_tokenizer(meta, VOCABULARY)
    add_outer_tensors(out, HIDDEN, VOCABULARY, tied=False, norm="token_embd_norm")
    for i, heads in enumerate(kv_heads):
        block = f"blk.{i}."
        out.ones(block + "attn_norm.weight", HIDDEN)
        if heads:
            _add_attention(out, block)
            out.ones(block + "attn_q_norm.weight", HEAD_SIZE)
            out.ones(block + "attn_k_norm.weight", HEAD_SIZE)
        else:
            convolution = out.random.standard_normal((HIDDEN, kernel)) * 0.5
            out.vector(block + "shortconv.conv.weight", convolution.astype(np.float32))
            out.matrix(block + "shortconv.in_proj.weight", 3 * HIDDEN, HIDDEN)
            out.matrix(block + "shortconv.out_proj.weight", HIDDEN, HIDDEN)
        add_feed_forward(out, block, "ffn_norm", HIDDEN, INNER)
    out.close()
    return path


def tiny_gemma2(path: Path, seed: int = 0, *, window: int = 24) -> Path:
    """Write an attention target of architecture `gemma2`: every other layer sees `window`."""
    out = ModelWriter(path, "gemma2", seed, "f32")
    meta = out.file
    meta.add_block_count(4)
    _add_sizes(out)
    meta.add_head_count_kv(KV_HEADS)
    meta.add_key_length(HEAD_SIZE)
    meta.add_value_length(HEAD_SIZE)
    meta.add_sliding_window(window)
    meta.add_attn_logit_softcapping(50.0)
    meta.add_final_logit_softcapping(30.0)
    add_tokenizer(meta, VOCABULARY)
    # The graph scales embeddings by sqrt(64); small ones leave the layers something to say.
    out.matrix("token_embd.weight", VOCABULARY, HIDDEN, 0.1)
    out.ones("output_norm.weight", HIDDEN)
    for i in range(4):
        block = f"blk.{i}."
        out.ones(block + "attn_norm.weight", HIDDEN)
        _add_attention(out, block)
        out.ones(block + "post_attention_norm.weight", HIDDEN)
        add_feed_forward(out, block, "ffn_norm", HIDDEN, INNER)
        out.ones(block + "post_ffw_norm.weight", HIDDEN)
    out.close()
    return path


def tiny_mamba(path: Path, seed: int = 0) -> Path:
    """Write a target of architecture `mamba`, whose whole memory is recurrent state."""
    inner, state, rank, kernel = 2 * HIDDEN, 8, 4, 4
    out = ModelWriter(path, "mamba", seed, "f32")
    meta = out.file
    meta.add_block_count(3)
    meta.add_context_length(CONTEXT)
    meta.add_embedding_length(HIDDEN)
    meta.add_feed_forward_length(0)
    meta.add_head_count(0)
    meta.add_layer_norm_rms_eps(1e-5)
    meta.add_ssm_conv_kernel(kernel)
    meta.add_ssm_inner_size(inner)
    meta.add_ssm_state_size(state)
    meta.add_ssm_time_step_rank(rank)
    add_tokenizer(meta, VOCABULARY)
    add_outer_tensors(out, HIDDEN, VOCABULARY, tied=False)
    for i in range(3):
        block = f"blk.{i}."
        out.ones(block + "attn_norm.weight", HIDDEN)
        out.matrix(block + "ssm_in.weight", 2 * inner, HIDDEN)
        convolution = out.random.standard_normal((inner, kernel)) * 0.5
        out.vector(block + "ssm_conv1d.weight", convolution.astype(np.float32))
        out.vector(block + "ssm_conv1d.bias", np.zeros(inner, np.float32))
        out.matrix(block + "ssm_x.weight", rank + 2 * state, inner)
        out.matrix(block + "ssm_dt.weight", inner, rank)
        shift = out.random.standard_normal(inner) * 0.5
        out.vector(block + "ssm_dt.bias", shift.astype(np.float32))
        decay = np.tile(-np.arange(1, state + 1, dtype=np.float32), (inner, 1))
        out.vector(block + "ssm_a", decay)
        out.ones(block + "ssm_d", inner)
        out.matrix(block + "ssm_out.weight", HIDDEN, inner)
    out.close()
    return path


def _add_sizes(out: ModelWriter) -> None:
    out.file.add_context_length(CONTEXT)
    out.file.add_embedding_length(HIDDEN)
    out.file.add_feed_forward_length(INNER)
    out.file.add_head_count(HEADS)
    out.file.add_layer_norm_rms_eps(1e-5)


def _add_attention(out: ModelWriter, block: str) -> None:
    out.matrix(block + "attn_q.weight", HEADS * HEAD_SIZE, HIDDEN)
    out.matrix(block + "attn_k.weight", KV_HEADS * HEAD_SIZE, HIDDEN)
    out.matrix(block + "attn_v.weight", KV_HEADS * HEAD_SIZE, HIDDEN)
    out.matrix(block + "attn_output.weight", HIDDEN, HEADS * HEAD_SIZE)
