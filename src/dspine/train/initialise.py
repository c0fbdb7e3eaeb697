"""Where a drafter starts: from the target's own last layers, its final norm and its head.

Context rows start as the target's last tap, per channel divided by its root mean square, and the
target layers' own norms are folded into the projections. So context keys and values equal those of
the copied target layer where that tap is its input, up to the key norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.errors import TrainingError
from dspine.files.schema import DrafterConfig
from dspine.train.backbone import Backbone
from dspine.train.dflash import DFlash2Module
from dspine.train.kinds import DrafterModule, build
from dspine.train.module import DSpineModule
from dspine.train.shards import Shard
from dspine.train.target import Target
from dspine.train.transfer_codes import transfer_codes

_SAMPLE_ROWS = 4096
_OTHER_TAPS_STD = 0.002
LEAST_RMS = 1e-4
# Architectures whose GGUF stores q and k rows in interleaved rotary order.
_INTERLEAVED = frozenset({"llama"})


def initialise(
    config: DrafterConfig, target: Target, shards: Sequence[Shard], *, seed: int, copy_layers: bool
) -> DrafterModule:
    """A module ready to train: codes from the head, features scaled, layers copied.

    `copy_layers` needs a target whose layers have the drafter's sizes; False starts them at random.
    """
    torch.manual_seed(seed)
    module = build(config)
    with torch.no_grad():
        if isinstance(module, DSpineModule):
            set_codes(module, target.head)
        elif isinstance(module, DFlash2Module):
            set_predecessors(module, target.head)
        module.norm.weight.copy_(_needed(target, "output_norm.weight"))
        sample = feature_sample(shards)
        rms = sample.square().mean(dim=0).sqrt().clamp_min(LEAST_RMS)
        module.feature_scale.copy_(1 / rms)
        if copy_layers:
            _copy_context(module, rms)
            for i in range(config.num_layers):
                _copy_layer(module, i, target, sample, rms)
    return module


def set_codes(module: DSpineModule, head: Tensor) -> None:
    """Fill the code table and the readouts from the target's whole head (V, H)."""
    codes, readout = transfer_codes(head, module.config.transfer_rank)
    with torch.no_grad():
        module.transfer_codes.copy_(codes)
        for layer in range(module.config.num_layers):
            module.injection.readout(layer).weight.copy_(readout)
        module.transfer_ready.fill_(True)


def set_predecessors(module: DFlash2Module, head: Tensor) -> None:
    """Let predecessors that the head (V, H) treats alike begin alike: rows sqrt(r) long.

    A codebook of random rows knows nothing of the tokens that training seldom meets.
    """
    rank = module.config.selector_rank
    codes, _ = transfer_codes(head, rank)
    with torch.no_grad():
        module.candidate_selector.predecessor_codebook.copy_(rank**0.5 * codes)


def feature_sample(shards: Sequence[Shard]) -> Tensor:
    """Up to a few thousand feature rows (n, T * H), evenly spaced over the given shards."""
    total = sum(s.num_tokens for s in shards)
    if total == 0:
        raise TrainingError("there are no feature shards to start from: capture features first")
    stride = max(1, total // _SAMPLE_ROWS)
    rows = [s.features_tensor()[::stride].float() for s in shards]
    return torch.cat(rows)[:_SAMPLE_ROWS]


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """Rows of a q or k matrix from interleaved rotary pairs (2 d, 2 d + 1) to (d, d + D / 2)."""
    rows, columns = weight.shape
    split = weight.view(heads, rows // heads // 2, 2, columns)
    return split.transpose(1, 2).reshape(rows, columns)


def _last_tap(module: Backbone, x: Tensor) -> Tensor:
    return x[..., -module.config.target_hidden_size :]


def _channel_scale(module: Backbone, rms: Tensor) -> tuple[Tensor, float]:
    """Size (rms) of the last tap relative to its median channel (H,), and median / whole rms."""
    last = _last_tap(module, rms)
    median = last.median()
    return last / median, float(median / last.square().mean().sqrt())


def _copy_context(module: Backbone, rms: Tensor) -> None:
    c = module.config
    if c.hidden_size != c.target_hidden_size:
        raise TrainingError(
            f"copying layers needs a drafter of the target's hidden size {c.target_hidden_size}, "
            f"not {c.hidden_size}: start from random layers instead"
        )
    torch.nn.init.normal_(module.fc.weight, std=_OTHER_TAPS_STD)
    module.fc.weight[:, -c.hidden_size :] = torch.eye(c.hidden_size)
    module.hidden_norm.weight.fill_(_channel_scale(module, rms)[1])


def _copy_layer(module: Backbone, index: int, target: Target, sample: Tensor, rms: Tensor) -> None:
    c = module.config
    source = target.pair.num_layers - c.num_layers + index
    if source < 0:
        raise TrainingError(
            f"the target has {target.pair.num_layers} layers, too few to fill a drafter of "
            f"{c.num_layers}: start from random layers instead"
        )

    def get(name: str) -> Tensor:
        return _needed(target, f"blk.{source}.{name}.weight")

    layer = module.layer(index)
    attention = layer.self_attn
    relative, _ = _channel_scale(module, rms)
    norm = get("attn_norm")
    q, k = get("attn_q"), get("attn_k")
    if target.pair.architecture in _INTERLEAVED:
        q, k = unpermute(q, target.num_heads), unpermute(k, target.num_kv_heads)
    fold = (norm * relative)[None]
    layer.input_layernorm.weight.copy_(1 / relative)
    _fill(attention.q_proj.weight, q * fold, "q_proj")
    _fill(attention.k_proj.weight, k * fold, "k_proj")
    _fill(attention.v_proj.weight, get("attn_v") * fold, "v_proj")
    _fill(attention.o_proj.weight, get("attn_output"), "o_proj")
    layer.post_attention_layernorm.weight.copy_(get("ffn_norm"))
    _fill(layer.mlp.gate_proj.weight, get("ffn_gate"), "gate_proj")
    _fill(layer.mlp.up_proj.weight, get("ffn_up"), "up_proj")
    _fill(layer.mlp.down_proj.weight, get("ffn_down"), "down_proj")
    # The target has no q and k norms: start ours at the mean length they would take away.
    state = F.rms_norm(_last_tap(module, sample), (c.hidden_size,), norm, c.rms_norm_eps)
    for matrix, scale in ((q, attention.q_norm), (k, attention.k_norm)):
        rows = (state @ matrix.T).view(len(state), -1, c.head_dim)
        scale.weight.fill_(float(rows.square().mean(dim=-1).sqrt().mean()))


def _fill(parameter: Tensor, value: Tensor, name: str) -> None:
    if parameter.shape != value.shape:
        raise TrainingError(
            f"{name} is {list(value.shape)} in the target and {list(parameter.shape)} in the "
            f"drafter: give the drafter the target's sizes or start from random layers"
        )
    parameter.copy_(value)


def _needed(target: Target, name: str) -> Tensor:
    tensor = target.tensor(name)
    if tensor is None:
        raise TrainingError(
            f"the target {target.path.name} has no tensor {name}: start from random layers instead"
        )
    return tensor
