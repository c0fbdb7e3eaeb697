"""DFlash and DFlash2 in torch: against plain NumPy, hand-computed convolutions and selector."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dspine.files.schema import DFlash2Config, DFlashConfig, tensor_specs
from dspine.train.attend import SequenceView
from dspine.train.backbone import BlockOutput, block_bias, block_embedding
from dspine.train.chain import expected_chain, walk_chain
from dspine.train.dflash import CandidateSelector, DFlash2Module, DFlashModule, DynamicConv
from dspine.train.kinds import build

Array = npt.NDArray[np.float64]
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "target_hidden_size": 20,
    "block_size": 5,
    "taps": (1, 3),
    "mask_token_id": 7,
    "rope_theta": 500.0,
}


def config(
    kind: str, causal: tuple[bool, ...], windows: tuple[int | None, ...]
) -> DFlashConfig | DFlash2Config:
    """A drafter of as many layers as `windows` has entries."""
    values = {**SIZES, "num_layers": len(windows), "causal": causal, "windows": windows}
    if kind == "dflash":
        return DFlashConfig(**values)
    return DFlash2Config(**values, conv_kernel_size=3, conv_group_size=6, selector_rank=10, top_k=4)


class Reference:
    """One block, one slot and one candidate at a time, in float64."""

    def __init__(self, module: DFlashModule, embedding: Array, head: Array) -> None:
        self.c = module.config
        self.t = {
            name: value.detach().numpy().astype(np.float64)
            for name, value in module.state_dict().items()
        }
        self.embedding, self.head = embedding, head

    def hidden(self, features: Array, anchor: int, width: int) -> list[Array]:
        """Final states of slots 0 ... width - 1 after a context at positions 0, 1, ..."""
        c, place = self.c, len(features)
        context = [self.norm(self.t["fc.weight"] @ row, "hidden_norm.weight") for row in features]
        h = [self.embedding[anchor]] + [self.embedding[c.mask_token_id]] * (width - 1)
        for layer in range(c.num_layers):
            p = f"layers.{layer}."
            x = [self.norm(row, p + "input_layernorm.weight") for row in h]
            mixed = self.around(
                p + "attention_conv.", x, lambda y, i=layer: self.attend(i, y, context, place)
            )
            h = [a + b for a, b in zip(h, mixed, strict=True)]
            x = [self.norm(row, p + "post_attention_layernorm.weight") for row in h]
            mixed = self.around(p + "mlp_conv.", x, lambda y, p=p: [self.mlp(p, row) for row in y])
            h = [a + b for a, b in zip(h, mixed, strict=True)]
        return [self.norm(row, "norm.weight") for row in h]

    def around(self, name: str, x: list[Array], sublayer: Any) -> list[Array]:
        """The sublayer between its convolutions, or alone where the drafter has none."""
        c = self.c
        if not isinstance(c, DFlash2Config):
            alone: list[Array] = sublayer(x)
            return alone
        taps, size = c.conv_kernel_size, c.conv_group_size
        changes = [
            (self.t[name + "kernel_projection.weight"] @ row).reshape(2, taps, -1) for row in x
        ]

        def convolve(side: int, rows: list[Array]) -> list[Array]:
            out = []
            for t in range(len(rows)):
                total = np.zeros(c.hidden_size)
                for tau, channel in itertools.product(range(taps), range(c.hidden_size)):
                    if t - tau >= 0:
                        weight = self.t[name + "base_kernel"][side, tau, channel]
                        weight += changes[t][side, tau, channel // size]
                        total[channel] += weight * rows[t - tau][channel]
                out.append(total)
            return out

        return convolve(1, sublayer(convolve(0, x)))

    def attend(self, layer: int, y: list[Array], context: list[Array], place: int) -> list[Array]:
        c, p = self.c, f"layers.{layer}.self_attn."
        window, causal = c.windows[layer], c.causal[layer]

        def heads(name: str, row: Array, position: int | None) -> Array:
            parts: Array = (self.t[f"{p}{name}_proj.weight"] @ row).reshape(-1, c.head_dim)
            if position is None:
                return parts
            normed = [self.norm(part, f"{p}{name}_norm.weight") for part in parts]
            return np.array([self.rotate(part, position) for part in normed])

        rows = [*context, *y]
        keys = np.array([heads("k", row, i) for i, row in enumerate(rows)])
        values = np.array([heads("v", row, None) for row in rows])
        out = []
        for o, row in enumerate(y):
            at = place + o
            seen = [
                i
                for i in range(len(rows))
                if (window is None or at - i < window) and (i < place or not causal or i <= at)
            ]
            query = heads("q", row, at)
            mixed = []
            for head in range(c.num_heads):
                shared = head // (c.num_heads // c.num_kv_heads)
                scores = np.exp(keys[seen, shared] @ query[head] / np.sqrt(c.head_dim))
                mixed.append(scores / scores.sum() @ values[seen, shared])
            out.append(self.t[p + "o_proj.weight"] @ np.concatenate(mixed))
        return out

    def mlp(self, p: str, row: Array) -> Array:
        gate = self.t[p + "mlp.gate_proj.weight"] @ row
        up = self.t[p + "mlp.up_proj.weight"] @ row
        out: Array = self.t[p + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return out

    def norm(self, x: Array, name: str) -> Array:
        out: Array = x / np.sqrt(np.mean(x**2) + self.c.rms_norm_eps) * self.t[name]
        return out

    def rotate(self, x: Array, position: int) -> Array:
        half = len(x) // 2
        turn = np.exp(1j * position * self.c.rope_theta ** (-np.arange(half) / half))
        turned = (x[:half] + 1j * x[half:]) * turn
        return np.concatenate([turned.real, turned.imag])

    def table(self, state: Array, previous: list[int], following: list[int]) -> Array:
        """Scores of candidates `following` after each of `previous`."""
        left, right = (
            self.t[f"candidate_selector.{side}_codebook"] for side in ("predecessor", "successor")
        )
        gate = self.t["candidate_selector.hidden_projection.weight"] @ state
        return np.array(
            [
                [self.head[c] @ state + np.sum(left[p] * gate * right[c]) for c in following]
                for p in previous
            ]
        )


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(4)


def random_module(made: DFlashConfig | DFlash2Config, random: np.random.Generator) -> DFlashModule:
    """Every weight drawn, also those that start at zero or one."""
    module = build(made)
    assert isinstance(module, DFlashModule)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = random.standard_normal(parameter.shape) / np.sqrt(parameter.shape[-1])
            if name.endswith("norm.weight"):
                value = 1 + 0.2 * random.standard_normal(parameter.shape)
            parameter.copy_(torch.from_numpy(value))
    return module


def run(
    module: DFlashModule,
    embedding: torch.Tensor,
    features: torch.Tensor,
    anchors: list[tuple[int, int]],
    width: int | None = None,
) -> BlockOutput:
    """Blocks of (anchor, position) pairs in one sequence."""
    c, positions = module.config, torch.arange(len(features))
    tokens = torch.tensor([a for a, _ in anchors])
    output: BlockOutput = module(
        block_embedding(embedding, tokens, c.mask_token_id, width or c.block_size),
        torch.tensor([p for _, p in anchors]),
        module.context(features, positions),
        positions,
        [SequenceView(0, len(features), 0, len(anchors))],
    )
    return output


CASES = [
    ("dflash", (False, False), (None, None)),
    ("dflash", (True, False), (6, None)),
    ("dflash2", (False, False), (None, 3)),
    ("dflash2", (True, True), (9, None)),
]


@pytest.mark.parametrize(("kind", "causal", "windows"), CASES)
def test_agrees_with_plain_numpy(
    kind: str,
    causal: tuple[bool, ...],
    windows: tuple[int | None, ...],
    random: np.random.Generator,
) -> None:
    module = random_module(config(kind, causal, windows), random)
    c = module.config
    embedding = random.standard_normal((c.vocab_size, c.hidden_size))
    head = random.standard_normal((c.vocab_size, c.hidden_size))
    features = random.standard_normal((11, c.feature_size))
    reference = Reference(module, embedding, head)
    anchors = [(3, 11), (20, 5)]
    with torch.no_grad():
        floats = torch.from_numpy(embedding).float()
        output = run(module, floats, torch.from_numpy(features).float(), anchors)
    for index, (anchor, place) in enumerate(anchors):
        expected = reference.hidden(features[:place], anchor, c.block_size)[1:]
        np.testing.assert_allclose(output.hidden[index], expected, atol=2e-5)
        if not isinstance(module, DFlash2Module):
            continue
        candidates = torch.from_numpy(np.argsort(-(np.array(expected) @ head.T))[:, :4].copy())
        with torch.no_grad():
            table = module.transition_table(
                BlockOutput(output.hidden[index : index + 1]),
                torch.tensor([anchor]),
                candidates[None],
                candidates[None],
                torch.from_numpy(head).float(),
            )[0]
        previous, chain = [anchor], []
        row = 0
        for slot, state in enumerate(expected):
            following = candidates[slot].tolist()
            right = reference.table(state, previous, following)
            np.testing.assert_allclose(table[slot, : len(previous)], right, atol=1e-4)
            row = int(np.argmax(right[row]))
            chain.append(row)
            previous = following
        assert walk_chain(table[None])[0].tolist() == chain


def test_the_convolution_by_hand() -> None:
    """Two channels in two groups, kernel 2: every coefficient written out."""
    made = DFlash2Config(
        **{**SIZES, "hidden_size": 2, "num_layers": 1, "causal": (False,), "windows": (None,)},
        conv_group_size=1, selector_rank=1, top_k=2,
    )  # fmt: skip
    conv = DynamicConv(made)
    x = torch.tensor([[[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]])
    before, after = conv.coefficients(x)
    assert torch.equal(conv.convolve(x, before), x)
    assert torch.equal(conv.convolve(x, after), x)
    with torch.no_grad():
        # Rows of the projection: side, tap, group. Side 0, tap 1, group 0 gets x_t[1] / 10.
        conv.kernel_projection.weight[2, 1] = 0.1
        conv.base_kernel[0, 1] = torch.tensor([0.0, 0.5])
        conv.base_kernel[1, 0] = torch.tensor([2.0, 3.0])
    before, after = conv.coefficients(x)
    # Channel 0: x_t + x_t[1] / 10 * x_t-1; channel 1: x_t + x_t-1 / 2; nothing before the block.
    expected = [[[1.0, 10.0], [2.0 + 2.0 * 1.0, 25.0], [3.0 + 3.0 * 2.0, 40.0]]]
    torch.testing.assert_close(conv.convolve(x, before), torch.tensor(expected))
    torch.testing.assert_close(conv.convolve(x, after), x * torch.tensor([2.0, 3.0]))


def test_the_selector_by_hand() -> None:
    made = DFlash2Config(
        **{**SIZES, "hidden_size": 2, "num_layers": 1, "causal": (False,), "windows": (None,)},
        conv_group_size=1, selector_rank=2, top_k=2,
    )  # fmt: skip
    selector = CandidateSelector(made)
    assert not selector.successor_codebook.any()
    with torch.no_grad():
        selector.hidden_projection.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        selector.predecessor_codebook[4] = torch.tensor([1.0, -1.0])
        selector.predecessor_codebook[5] = torch.tensor([0.5, 0.0])
        selector.successor_codebook[8] = torch.tensor([3.0, 1.0])
        scores = selector(torch.tensor([2.0, 5.0]), torch.tensor([4, 5]), torch.tensor([8, 9]))
    # Gate (2, 10). After 4: 1 * 2 * 3 - 1 * 10 * 1 = -4; after 5: 0.5 * 2 * 3 = 3.
    assert scores.tolist() == [[-4.0, 0.0], [3.0, 0.0]]


def test_untrained_dflash2_is_dflash(random: np.random.Generator) -> None:
    """Convolutions start as the identity and the selector adds nothing."""
    second = build(config("dflash2", (False, False), (None, 6)))
    first = build(config("dflash", (False, False), (None, 6)))
    assert isinstance(first, DFlashModule) and isinstance(second, DFlash2Module)
    first.load_state_dict(second.state_dict(), strict=False)
    embedding = torch.from_numpy(random.standard_normal((50, 24))).float()
    features = torch.from_numpy(random.standard_normal((9, 40))).float()
    with torch.no_grad():
        one, two = (run(m, embedding, features, [(4, 9), (8, 3)]) for m in (first, second))
    torch.testing.assert_close(one.hidden, two.hidden, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_narrow_block_is_a_prefix_only_when_causal(
    kind: str, causal: bool, random: np.random.Generator
) -> None:
    module = random_module(config(kind, (causal,) * 2, (None, None)), random)
    embedding = torch.from_numpy(random.standard_normal((50, 24))).float()
    features = torch.from_numpy(random.standard_normal((9, 40))).float()
    with torch.no_grad():
        wide = run(module, embedding, features, [(4, 9)]).hidden[:, :2]
        narrow = run(module, embedding, features, [(4, 9)], width=3).hidden
    assert torch.allclose(wide, narrow, atol=1e-5) == causal


def test_block_mask_without_causality() -> None:
    inf = float("inf")
    assert block_bias(3, None, causal=False).tolist() == [[0] * 3] * 3
    assert block_bias(3, 2, causal=False).tolist() == [[0, 0, 0], [0, 0, 0], [-inf, 0, 0]]


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_state_has_exactly_the_tensors_of_the_schema(kind: str) -> None:
    made = config(kind, (False, False), (None, None))
    shapes = {name: tuple(value.shape) for name, value in build(made).state_dict().items()}
    assert shapes == {s.torch_name: s.shape for s in tensor_specs(made)}


def brute_force(table: torch.Tensor) -> tuple[list[int], float]:
    """The best chain of one table (slots, K, K) among all of them."""
    chances = torch.softmax(table.double(), dim=-1)
    best: tuple[list[int], float] = ([], -1.0)
    for chain in itertools.product(range(table.shape[-1]), repeat=len(table)):
        expected, reached, row = 0.0, 1.0, 0
        for slot, choice in enumerate(chain):
            reached *= float(chances[slot, row, choice])
            expected += reached
            row = choice
        if expected > best[1]:
            best = (list(chain), expected)
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_expected_chain_is_the_best_of_all(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tables = 2 * torch.randn(3, 4, 3, 3, generator=generator)
    chosen, expected = expected_chain(tables)
    for index, table in enumerate(tables):
        chain, value = brute_force(table)
        assert chosen[index].tolist() == chain
        assert float(expected[index]) == pytest.approx(value, rel=1e-5)


def test_the_expected_chain_gives_up_a_slot_for_the_later_ones() -> None:
    """0.55 now and an even chance after it, or 0.45 now and two certain tokens after it."""
    table = torch.full((1, 3, 2, 2), 0.0)
    table[0, 0, :] = torch.tensor([0.55, 0.45]).log()
    table[0, 1:, 1] = torch.tensor([-30.0, 0.0])
    assert walk_chain(table).tolist() == [[0, 0, 0]]
    chosen, expected = expected_chain(table)
    assert chosen.tolist() == [[1, 1, 1]]
    # At best 0.55 (1 + 0.5 (1 + 1)) = 1.1 with the likelier first token, 0.45 * 3 with this one.
    assert float(expected[0]) == pytest.approx(1.35, rel=1e-4)
