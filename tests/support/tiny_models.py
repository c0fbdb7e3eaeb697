"""Writes tiny random GGUF targets (a dense `llama` and a hybrid `qwen35`) in milliseconds.

The tokenizer is byte-level with a few merges, so every text round-trips; ids 0, 1, 2 are
`<|endoftext|>`, `<|im_start|>` (bos) and `<|im_end|>` (eos), as in SmolLM2.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import quantize

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAIRS = (
    ("t", "h"), ("i", "n"), ("a", "n"), ("e", "r"), ("o", "n"), ("th", "e"), ("an", "d"),
    ("in", "g"), ("Ġ", "t"), ("Ġ", "a"), ("o", "r"), ("e", "n"), ("Ġ", "s"), ("a", "t"),
)  # fmt: skip
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256 + len(PAIRS)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
}

Array = npt.NDArray[np.float32]


class ModelWriter:
    """A GGUF file in the making, with one random stream so that a seed fixes every byte."""

    def __init__(self, path: Path, architecture: str, seed: int, weights: str) -> None:
        self.file = gguf.GGUFWriter(path, architecture)
        self.random = np.random.default_rng(seed)
        self.type = _TYPES[weights]

    def vector(self, name: str, values: Array) -> None:
        self.file.add_tensor(name, values.astype(np.float32))

    def matrix(self, name: str, rows: int, columns: int, spread: float | None = None) -> None:
        """Random normal (rows, columns); `spread` is its standard deviation (1/sqrt(columns))."""
        scale = spread if spread is not None else columns**-0.5
        values = (self.random.standard_normal((rows, columns)) * scale).astype(np.float32)
        if self.type is gguf.GGMLQuantizationType.F32:
            self.file.add_tensor(name, values)
        else:
            self.file.add_tensor(name, quantize(values, self.type), raw_dtype=self.type)

    def ones(self, name: str, size: int) -> None:
        self.vector(name, np.ones(size, dtype=np.float32))

    def close(self) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def tiny_llama(
    path: Path,
    seed: int = 0,
    *,
    num_layers: int = 4,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 128,
    vocab_size: int = 320,
    context: int = 2048,
    tied: bool = False,
    weights: str = "f32",
    name: str = "tiny llama",
) -> Path:
    """Write a dense target of architecture `llama` with random weights; returns `path`.

    `weights` is the type of the matrices: f32, f16, q8_0, q4_0 or q4_1 (sizes must divide by 32).
    """
    out = ModelWriter(path, "llama", seed, weights)
    head_dim = hidden_size // num_heads
    meta = out.file
    meta.add_name(name)
    meta.add_block_count(num_layers)
    meta.add_context_length(context)
    meta.add_embedding_length(hidden_size)
    meta.add_feed_forward_length(intermediate_size)
    meta.add_head_count(num_heads)
    meta.add_head_count_kv(num_kv_heads)
    meta.add_layer_norm_rms_eps(1e-5)
    meta.add_rope_freq_base(10000.0)
    meta.add_rope_dimension_count(head_dim)
    meta.add_vocab_size(vocab_size)
    add_tokenizer(meta, vocab_size)
    add_outer_tensors(out, hidden_size, vocab_size, tied)
    for i in range(num_layers):
        block = f"blk.{i}."
        out.ones(block + "attn_norm.weight", hidden_size)
        out.matrix(block + "attn_q.weight", num_heads * head_dim, hidden_size)
        out.matrix(block + "attn_k.weight", num_kv_heads * head_dim, hidden_size)
        out.matrix(block + "attn_v.weight", num_kv_heads * head_dim, hidden_size)
        out.matrix(block + "attn_output.weight", hidden_size, num_heads * head_dim)
        add_feed_forward(out, block, "ffn_norm", hidden_size, intermediate_size)
    out.close()
    return path


def tiny_qwen35(
    path: Path,
    seed: int = 0,
    *,
    num_layers: int = 4,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    vocab_size: int = 320,
    context: int = 2048,
    full_attention_interval: int = 4,
    weights: str = "f32",
    name: str = "tiny qwen35",
) -> Path:
    """Write a hybrid target of architecture `qwen35`: every 4th layer attends, the others are
    Gated DeltaNet with a recurrent state that cannot be trimmed; returns `path`.
    """
    heads, kv_heads, head_dim = 2, 1, 32
    state, groups, value_heads, kernel = 16, 2, 4, 4
    keys, values = state * groups, state * value_heads
    out = ModelWriter(path, "qwen35", seed, weights)
    meta = out.file
    meta.add_name(name)
    meta.add_block_count(num_layers)
    meta.add_context_length(context)
    meta.add_embedding_length(hidden_size)
    meta.add_feed_forward_length(intermediate_size)
    meta.add_head_count(heads)
    meta.add_head_count_kv(kv_heads)
    meta.add_key_length(head_dim)
    meta.add_value_length(head_dim)
    meta.add_layer_norm_rms_eps(1e-6)
    meta.add_rope_freq_base(1e6)
    meta.add_rope_dimension_count(16)
    meta.add_rope_dimension_sections([3, 3, 2, 0])
    meta.add_ssm_conv_kernel(kernel)
    meta.add_ssm_inner_size(values)
    meta.add_ssm_state_size(state)
    meta.add_ssm_time_step_rank(value_heads)
    meta.add_ssm_group_count(groups)
    meta.add_uint32("qwen35.full_attention_interval", full_attention_interval)
    add_tokenizer(meta, vocab_size)
    add_outer_tensors(out, hidden_size, vocab_size, tied=False)
    for i in range(num_layers):
        block = f"blk.{i}."
        out.ones(block + "attn_norm.weight", hidden_size)
        if (i + 1) % full_attention_interval == 0:
            out.matrix(block + "attn_q.weight", 2 * heads * head_dim, hidden_size)
            out.matrix(block + "attn_k.weight", kv_heads * head_dim, hidden_size)
            out.matrix(block + "attn_v.weight", kv_heads * head_dim, hidden_size)
            out.matrix(block + "attn_output.weight", hidden_size, heads * head_dim)
            out.ones(block + "attn_q_norm.weight", head_dim)
            out.ones(block + "attn_k_norm.weight", head_dim)
        else:
            mixed = 2 * keys + values
            out.matrix(block + "attn_qkv.weight", mixed, hidden_size)
            out.matrix(block + "attn_gate.weight", values, hidden_size)
            convolution = out.random.standard_normal((mixed, kernel)) * 0.5
            out.vector(block + "ssm_conv1d.weight", convolution.astype(np.float32))
            shift = out.random.standard_normal(value_heads) * 0.5
            out.vector(block + "ssm_dt.bias", shift.astype(np.float32))
            out.vector(block + "ssm_a", np.full(value_heads, -0.5, dtype=np.float32))
            out.matrix(block + "ssm_beta.weight", value_heads, hidden_size)
            out.matrix(block + "ssm_alpha.weight", value_heads, hidden_size)
            out.ones(block + "ssm_norm.weight", state)
            out.matrix(block + "ssm_out.weight", hidden_size, values)
        add_feed_forward(out, block, "post_attention_norm", hidden_size, intermediate_size)
    out.close()
    return path


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte 0 ... 255 in a GPT-2 vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(shifted)) for b in range(256)]


def add_tokenizer(meta: gguf.GGUFWriter, vocab_size: int) -> None:
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(f"vocab_size {vocab_size} is below {SMALLEST_VOCABULARY}")
    texts = [*SPECIAL_TOKENS, *byte_alphabet(), *(left + right for left, right in PAIRS)]
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    kinds += [gguf.TokenType.NORMAL] * (len(texts) - len(kinds))
    spare = vocab_size - len(texts)
    texts += [f"<|spare_{i}|>" for i in range(spare)]
    kinds += [gguf.TokenType.UNUSED] * spare
    meta.add_tokenizer_model("gpt2")
    meta.add_tokenizer_pre("gpt-2")
    meta.add_token_list(texts)
    meta.add_token_types(kinds)
    meta.add_token_merges([f"{left} {right}" for left, right in PAIRS])
    meta.add_bos_token_id(1)
    meta.add_eos_token_id(2)
    meta.add_add_bos_token(False)
    meta.add_chat_template(CHAT_TEMPLATE)


def add_outer_tensors(
    out: ModelWriter, hidden_size: int, vocab_size: int, tied: bool, norm: str = "output_norm"
) -> None:
    out.matrix("token_embd.weight", vocab_size, hidden_size, 1.0)
    out.ones(f"{norm}.weight", hidden_size)
    if not tied:
        out.matrix("output.weight", vocab_size, hidden_size, 0.3)


def add_feed_forward(
    out: ModelWriter, block: str, norm: str, hidden_size: int, intermediate_size: int
) -> None:
    out.ones(f"{block}{norm}.weight", hidden_size)
    out.matrix(block + "ffn_gate.weight", intermediate_size, hidden_size)
    out.matrix(block + "ffn_up.weight", intermediate_size, hidden_size)
    out.matrix(block + "ffn_down.weight", hidden_size, intermediate_size)
