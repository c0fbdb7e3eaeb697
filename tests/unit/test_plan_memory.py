"""The memory plan: hand-computed items, published contexts, budgets, advice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspine.errors import CapacityError, FileError, UsageError
from dspine.files.drafter_file import write_drafter
from dspine.files.gguf_writer import TensorToWrite, WritableValue, write_gguf
from dspine.ggml.types import type_by_name
from dspine.plan.from_file import read_drafter_geometry, read_geometry
from dspine.plan.geometry import Geometry, Layer, Weight
from dspine.plan.largest import RESERVE_SHARE, Budget, advise, largest_context, require_room
from dspine.plan.memory import (
    DrafterGeometry,
    MemoryPlan,
    Mode,
    Setup,
    cache_positions,
    compute_bytes,
    drafter_context_bytes,
    plan_memory,
    planes,
)
from dspine.plan.mixes import QUANTS, mixed_types
from dspine.plan.packing import host_weights, packed_bytes, stock_kernels
from dspine.plan.presets import DRAFTERS, TARGETS, drafter_preset, drafters_of, target_preset
from dspine.plan.report import Question, answer, preset_drafter, smaller_target
from dspine.plan.shapes import geometry_of
from dspine.plan.sizes import GIB, MIB, parse_size, shown
from tests.support.drafter_files import PAIR, RECORD, SMALL
from tests.support.drafter_files import weights as drafter_weights
from tests.support.tiny_models import tiny_llama, tiny_qwen35

CARD = 24 * GIB
PUBLISHED = {"plain": 176_128, "DFlash2": 102_400, "DSpine": 65_536}
"""Largest contexts on a card of 24 GiB, with caches in q8_0; drafters keep snapshots."""


def item(plan: MemoryPlan, label: str, device: str = "cpu") -> int:
    return sum(i.n_bytes for i in plan.items if i.label == label and i.device == device)


def card_setup() -> Setup:
    return Setup(
        "plain",
        cache_type_k="q8_0",
        cache_type_v="q8_0",
        n_gpu_layers=-1,
        drafter_on_gpu=True,
        reserve_bytes=int(RESERVE_SHARE * CARD),
    )


def small() -> Geometry:
    """Two layers: one attends to all, one has a window of 300."""
    return Geometry(
        name="small",
        architecture="llama",
        hidden=64,
        feed_forward=128,
        heads=4,
        queries=64,
        vocabulary=512,
        context_train=8192,
        layers=(Layer(32, 32), Layer(32, 32, window=300)),
        weights=(
            Weight("token_embd.weight", "q8_0", (64, 512)),
            Weight("output.weight", "q8_0", (64, 512)),
            Weight("blk.0.ffn_up.weight", "q8_0", (64, 128)),
            Weight("blk.1.ffn_up.weight", "q8_0", (64, 128)),
        ),
        block_count=2,
    )


# -- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24G", 24 * GIB),
        ("24GiB", 24 * GIB),
        ("24000M", 24_000 * MIB),
        ("24GB", 24_000_000_000),
        ("1.5g", GIB * 3 // 2),
        (" 512 MiB ", 512 * MIB),
        ("4096", 4096),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text, "--vram") == expected


@pytest.mark.parametrize("text", ["24X", "", "G", "-3G", "1e3G", "24 G B", "nan"])
def test_other_sizes_are_refused_with_the_units(text: str) -> None:
    with pytest.raises(UsageError, match=r"--vram is .*24G.*powers of 1024.*powers of 1000"):
        parse_size(text, "--vram")


def test_no_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="more than nothing"):
        parse_size("0G", "--ram")


def test_sizes_are_shown_in_mib_and_gib() -> None:
    assert shown(MIB // 2) == "0.5 MiB"
    assert shown(200 * MIB) == "200 MiB"
    assert shown(GIB * 5 // 2) == "2.50 GiB"


# -- weights -----------------------------------------------------------------------------------


def test_the_published_sizes_of_the_27b() -> None:
    target = geometry_of(target_preset("qwen3.8-27b"), "Q4_K_M")
    assert target.num_parameters == pytest.approx(26.9e9, rel=0.002)
    # 17.1 GB is the published file, with the next-token layers that are not loaded.
    assert target.weight_bytes == pytest.approx(17.1e9, rel=0.05)
    assert target.state_bytes / MIB == 149.625  # as llama.cpp logs it
    # 16 of 64 layers keep 2 x 4 x 256 numbers of a position.
    assert sum(layer.keys + layer.values for layer in target.layers) == 16 * 2 * 4 * 256


def test_the_published_sizes_of_the_drafters() -> None:
    dspine = preset_drafter("qwen3.8-27b-dspine", "bf16")
    dflash2 = preset_drafter("qwen3.8-27b-dflash2", "bf16")
    assert dspine.weight_bytes / 2 == pytest.approx(2.03e9, rel=0.005)
    assert dflash2.weight_bytes / 1e9 == pytest.approx(3.85, rel=0.005)


def test_q4_k_m_gives_more_bits_to_a_third_of_the_values_and_ways_down() -> None:
    parts = ("attn_v", "ffn_down", "ffn_up")
    names = [f"blk.{i}.{part}.weight" for i in range(8) for part in parts]
    shapes = [("output.weight", (256, 512)), *((name, (256, 256)) for name in names)]
    types = dict(zip([n for n, _ in shapes], mixed_types(shapes, "Q4_K_M", gqa=4), strict=True))
    # use_more_bits of 8 layers: the first, the last, and every third from layer 3 on.
    assert [i for i in range(8) if types[f"blk.{i}.ffn_down.weight"] == "q6_k"] == [0, 3, 6, 7]
    assert [i for i in range(8) if types[f"blk.{i}.attn_v.weight"] == "q6_k"] == [0, 3, 6, 7]
    assert {types[f"blk.{i}.ffn_up.weight"] for i in range(8)} == {"q4_k"}
    assert types["output.weight"] == "q6_k"


def test_rows_that_are_no_multiple_of_256_get_the_next_type() -> None:
    rows = {"output.weight": 896, "blk.0.ffn_up.weight": 896, "blk.0.other.weight": 33}
    shapes = [(name, (row, 10)) for name, row in rows.items()]
    assert mixed_types(shapes, "q4_k_m", gqa=7) == ["q8_0", "q5_0", "f16"]


def test_vectors_and_convolutions_stay_as_they_are() -> None:
    shapes = [("blk.0.attn_norm.weight", (64,)), ("blk.0.ssm_conv1d.weight", (4, 64))]
    assert mixed_types(shapes, "q8_0", gqa=1) == ["f32", "f32"]


def test_smaller_mixes_are_smaller() -> None:
    sizes = [geometry_of(target_preset("qwen3-8b"), quant).weight_bytes for quant in QUANTS]
    assert sizes[0] == min(sizes) and sizes[-1] == max(sizes)
    found = smaller_target(geometry_of(target_preset("qwen3-8b"), "q8_0"))
    assert found is not None and found[0] == "q6_k"


def test_an_unknown_mix_names_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"--quant is 'Q9_K'.*Q4_K_M"):
        geometry_of(target_preset("qwen3-8b"), "Q9_K")


def test_unknown_presets_name_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"did you mean qwen3.8-27b.*smollm2-135m"):
        target_preset("qwen3.8-28b")
    with pytest.raises(UsageError, match=r"--preset-draft is 'eagle'.*qwen3.8-27b-dspine"):
        drafter_preset("eagle")


def test_every_preset_has_a_source_and_belongs_to_a_target() -> None:
    assert all(sizes.source for sizes in TARGETS.values())
    for name, (config, target, source) in DRAFTERS.items():
        assert source and name in drafters_of(target)
        assert config.target_hidden_size == TARGETS[target].hidden
        assert config.vocab_size == TARGETS[target].vocabulary
        assert max(config.taps) < TARGETS[target].layers - 1


def test_packed_matrices() -> None:
    # 20 outputs are two panels; a row of 64 inputs has two units of 320 bytes for each.
    assert packed_bytes("q4_1", (64, 20)) == 2 * 2 * 320
    assert packed_bytes("q8_0", (64, 16)) == type_by_name("q8_0").row_bytes(64) * 16
    assert packed_bytes("q4_k", (256, 16)) == 2368
    assert packed_bytes("q4_k", (128, 16)) is None
    assert packed_bytes("f32", (64, 16)) is None
    assert packed_bytes("q8_0", (64, 16, 8)) is None


def test_a_tied_head_is_there_once_with_our_kernels_and_twice_if_ggml_repacks_it() -> None:
    embedding = Weight("token_embd.weight", "q4_0", (64, 32))
    for tied in (False, True):
        ours = host_weights([embedding], "dspine", tied_head=tied)
        assert (ours.packed, ours.n_bytes) == (embedding.n_bytes, embedding.n_bytes)
        stock = host_weights([embedding], "ggml", tied_head=tied)
        assert stock.n_bytes == (2 if tied else 1) * embedding.n_bytes


def test_ggml_repacks_some_types_beside_the_mapped_file() -> None:
    weights = [Weight("blk.0.ffn_up.weight", kind, (256, 8)) for kind in ("q4_0", "q8_0")]
    found = host_weights(weights, "ggml", tied_head=False)
    assert (found.plain, found.copied) == (8 * (144 + 272), 8 * 144)


def test_ggml_copies_more_types_for_amx() -> None:
    amx = stock_kernels(frozenset({"amx_int8", "avx512_vnni", "avx2"}))
    assert stock_kernels(frozenset({"avx512_vnni", "avx2"})) == "ggml"
    weights = [Weight(f"blk.0.{kind}", kind, (256, 64)) for kind in ("q4_1", "q8_0", "f16", "f32")]
    weights.append(Weight("too small", "q4_1", (256, 32)))
    weights.append(Weight("repacked as without", "q4_0", (256, 32)))
    found = host_weights(weights, amx, tied_head=False)
    # By row of 256: 8 blocks of 20 bytes; 8 of 34 and their sums; 256 numbers of 2.
    assert found.copied == 64 * (160 + 8 * (34 + 4) + 512) + 32 * 144


# -- caches and states -------------------------------------------------------------------------


def test_a_window_is_kept_once_with_room_for_a_batch() -> None:
    setup = Setup("plain", n_batch=512)
    layer = Layer(32, 32, window=300)
    assert cache_positions(layer, setup, 4096) == 1024  # 300 + 512, rounded up to 256
    assert cache_positions(layer, setup, 700) == 768  # never more than the context
    assert cache_positions(layer, replace(setup, swa_full=True), 4096) == 4096
    plan = plan_memory(small(), None, setup, 4096)
    assert item(plan, "keys and values") == (4096 + 1024) * 2 * 32 * 2


def test_quantised_caches_and_slots() -> None:
    setup = Setup("plain", cache_type_k="q8_0", cache_type_v="q4_0", slots=3, swa_full=True)
    plan = plan_memory(small(), None, setup, 1000)
    assert item(plan, "keys and values") == 3 * 2 * 1024 * (34 + 18)


def test_copies_of_the_state() -> None:
    target = replace(small(), layers=(Layer(32, 32), Layer(state=1000)))
    modes: tuple[tuple[Mode, int, int], ...] = (
        ("plain", 0, 0),
        ("checkpoint", 15, 1),
        ("snapshots", 15, 15),
    )
    for mode, drafts, copies in modes:
        setup = Setup(mode, drafts, slots=2)
        plan = plan_memory(target, None, setup, 1024)
        assert item(plan, "recurrent state") == 2 * 4000
        assert item(plan, "copies for rollback") == 2 * 4000 * copies
        assert planes(setup) == 1 + copies


def test_the_drafters_context_is_its_largest_window() -> None:
    config = drafter_preset("qwen3.8-27b-dspine")
    # 8191 + 2048 rows, a block of 32 and one for padding; 5 layers, 8 heads of 128, 16 bits.
    assert drafter_context_bytes(config, 65536) == (32 + 10240 + 1) * 5 * 2 * 8 * 128 * 2
    assert drafter_context_bytes(config, 1 << 20) == drafter_context_bytes(config, 65536)
    full = drafter_preset("qwen3-8b-dspine")
    assert drafter_context_bytes(full, 4096) == (32 + 4096 + 1) * 5 * 2 * 8 * 128 * 2


def test_buffers_by_hand() -> None:
    target = small()
    # A batch of 512 rows: 3 x 128 + 4 x 64 numbers each; masks of 4096 and 1024 positions.
    expected = 512 * (3 * 128 + 4 * 64) * 4 + 512 * (4096 + 1024) * 2
    assert compute_bytes(target, Setup("plain"), 4096) == expected
    # Without flash attention the scores are larger, and masks have 32 bits.
    scores = 512 * (4 * 4096 + 3 * 64 + 2 * 64) * 4 + 512 * (4096 + 1024) * 4
    assert compute_bytes(target, Setup("plain", flash_attention=False), 4096) == scores


def test_layers_on_the_card_begin_with_the_last() -> None:
    target = small()
    plan = plan_memory(target, None, Setup("plain", n_gpu_layers=2), 1024)
    one = target.weights[2].n_bytes
    assert item(plan, "target's weights", "gpu") == target.weights[1].n_bytes + one  # head, layer 1
    assert item(plan, "target's weights") == target.weights[0].n_bytes + one
    everything = plan_memory(target, None, Setup("plain", n_gpu_layers=-1), 1024)
    assert item(everything, "target's weights") == target.weights[0].n_bytes  # the embedding
    assert item(everything, "keys and values") == 0


# -- the published contexts --------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "drafts"), [("plain", 0), ("DFlash2", 7), ("DSpine", 15)])
def test_published_contexts_within_five_percent(kind: str, drafts: int) -> None:
    target = geometry_of(target_preset("qwen3.8-27b"), "q4_k_m")
    drafter, setup = None, card_setup()
    if drafts:
        drafter = preset_drafter(f"qwen3.8-27b-{kind.lower()}", "q4_k_m")
        setup = replace(setup, mode="snapshots", drafts=drafts)
    found = largest_context(target, drafter, setup, Budget(CARD, None))
    assert found == pytest.approx(PUBLISHED[kind], rel=0.05)


def test_a_checkpoint_nearly_doubles_the_context_of_dspine() -> None:
    target = geometry_of(target_preset("qwen3.8-27b"), "q4_k_m")
    question = Question(
        target, (preset_drafter("qwen3.8-27b-dspine", "q4_k_m"),), card_setup(), Budget(CARD, None)
    )
    plain, snapshots, checkpoint = answer(question)
    assert 1.85 < checkpoint.context / snapshots.context < 2.05
    assert checkpoint.context < plain.context
    # 14 copies of 149.6 MiB, at 34,816 bytes a token and 1,024 of the mask.
    gain = 14 * 149.625 * MIB / (16 * 2048 * 34 / 32 + 1024)
    assert checkpoint.context - snapshots.context == pytest.approx(gain, rel=0.02)
    changes = {advice.flags: advice.context for advice in snapshots.advice}
    assert changes["--rollback checkpoint"] == checkpoint.context
    assert all(context > snapshots.context for context in changes.values())
    assert [row.label for row in answer(replace(question, rollback="checkpoint"))] == [
        "plain",
        "DSpine, 15 drafts, checkpoint",
    ]


# -- budgets and advice ------------------------------------------------------------------------


def test_the_largest_context_is_the_last_that_fits() -> None:
    target, setup = small(), Setup("plain", kernels="ggml")
    budget = Budget(None, plan_memory(target, None, setup, 2048).peak_host)
    found = largest_context(target, None, setup, budget)
    assert found == 2048
    assert not budget.holds(plan_memory(target, None, setup, found + 256))
    assert largest_context(target, None, setup, Budget(None, None)) == target.context_train
    assert largest_context(target, None, setup, Budget(None, 1)) == 0


def test_a_budget_below_the_weights_is_an_error_with_the_numbers() -> None:
    target = geometry_of(target_preset("qwen3.8-27b"), "q4_k_m")
    with pytest.raises(CapacityError, match=r"needs 18.* GiB on the graphics card.*8.00 GiB"):
        require_room(target, None, card_setup(), Budget(8 * GIB, None))
    with pytest.raises(CapacityError, match=r"in main memory.*--ram is 4.00 GiB"):
        require_room(target, None, Setup("plain"), Budget(None, 4 * GIB))


def test_advice_gives_only_what_helps() -> None:
    target = small()
    setup = Setup("plain", cache_type_k="q8_0", cache_type_v="q8_0", slots=2, n_batch=128)
    budget = Budget(None, plan_memory(target, None, setup, 1024).peak_host)
    flags = [advice.flags for advice in advise(target, None, setup, budget)]
    assert flags == ["-ctk q4_0 -ctv q4_0", "--parallel 1"]
    assert list(advise(target, None, setup, Budget(None, None))) == []


# -- files -------------------------------------------------------------------------------------


def test_a_dense_target_from_its_file(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf", num_layers=3)
    found = read_geometry(path)
    assert (found.hidden, found.heads, found.vocabulary) == (64, 4, 320)
    assert found.layers == (Layer(32, 32),) * 3
    assert found.state_bytes == 0 and not found.is_tied
    assert found.weight_bytes == sum(w.n_bytes for w in found.weights)


def test_a_hybrid_target_from_its_file(tmp_path: Path) -> None:
    found = read_geometry(tiny_qwen35(tmp_path / "m.gguf", num_layers=8))
    assert [bool(layer.state) for layer in found.layers] == [True, True, True, False] * 2
    # 4 value heads of 16 x 16, and 3 rows of (2 x 2 + 4) x 16 channels.
    assert found.layers[0] == Layer(state=4 * 16 * 16 + 3 * 128)
    assert found.layers[3] == Layer(32, 32)


def test_windows_from_a_file(tmp_path: Path) -> None:
    def write(name: str, architecture: str, **more: WritableValue) -> Path:
        keys: dict[str, WritableValue] = {
            "block_count": np.uint32(6),
            "embedding_length": np.uint32(64),
            "attention.head_count": np.uint32(4),
            "attention.head_count_kv": np.uint32(2),
            "attention.sliding_window": np.uint32(512),
            **more,
        }
        metadata: dict[str, WritableValue] = {"general.architecture": architecture}
        metadata |= {f"{architecture}.{key}": value for key, value in keys.items()}
        data = np.zeros((8, 64), np.float32).data.cast("B")
        tensors = [TensorToWrite("token_embd.weight", type_by_name("f32"), (64, 8), lambda: [data])]
        write_gguf(tmp_path / name, metadata, tensors)
        return tmp_path / name

    gemma = read_geometry(write("a.gguf", "gemma3"))
    assert [layer.window for layer in gemma.layers] == [512] * 5 + [0]
    pattern = {"attention.sliding_window_pattern": np.array([True, False] * 3)}
    listed = read_geometry(write("b.gguf", "gemma4", **pattern))
    assert [layer.window for layer in listed.layers] == [512, 0] * 3
    fewer = {"attention.shared_kv_layers": np.uint32(2)}
    shared = read_geometry(write("c.gguf", "gemma3n", **fewer))
    assert [layer.keys for layer in shared.layers] == [32] * 4 + [0] * 2
    # An architecture that is not known to use its window is counted as a whole.
    assert {layer.window for layer in read_geometry(write("d.gguf", "qwen2")).layers} == {0}
    with pytest.raises(FileError, match=r"attention.kv_lora_rank.*cannot tell"):
        read_geometry(write("e.gguf", "deepseek2", **{"attention.kv_lora_rank": np.uint32(512)}))


def test_a_drafter_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "d.gguf"
    write_drafter(path, SMALL, PAIR, RECORD, drafter_weights(), "f16")
    found = read_drafter_geometry(path)
    assert isinstance(found, DrafterGeometry)
    assert found.file_bytes == path.stat().st_size
    assert 0 < found.weight_bytes < found.file_bytes
    with pytest.raises(FileError, match="drafter"):
        read_geometry(path)


def test_files_that_cannot_be_planned(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        read_geometry(tmp_path / "none.gguf")
    with pytest.raises(FileError, match="is a folder"):
        read_geometry(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04 is a zip")
    with pytest.raises(FileError, match="is not a GGUF file"):
        read_geometry(tmp_path / "x.gguf")
    with pytest.raises(FileError, match="does not exist"):
        read_drafter_geometry(tmp_path / "none.gguf")
