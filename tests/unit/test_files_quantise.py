"""Which type a drafter's tensors get, and everything about a new file but the block formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from dspine.errors import FileError, UsageError
from dspine.files.drafter_file import read_drafter, write_drafter
from dspine.files.gguf_file import read_header
from dspine.files.quantise import MIXES, fitting_type, is_important, quantise_drafter, wanted_type
from dspine.files.schema import tensor_specs
from tests.support.drafter_files import (
    PAIR,
    RECORD,
    SMALL,
    SMALL_DFLASH2,
    weights,
    with_reduced_head,
)


@pytest.mark.parametrize(
    ("wanted", "row", "expected"),
    [
        ("q4_k", 512, "q4_k"),
        ("q4_k", 576, "q5_0"),
        ("q5_k", 576, "q5_1"),
        ("q6_k", 576, "q8_0"),
        ("q8_0", 576, "q8_0"),
        ("q4_k", 20, "f16"),
        ("q8_0", 20, "f16"),
        ("bf16", 20, "bf16"),
        ("f32", 7, "f32"),
    ],
)
def test_rows_that_do_not_fit_fall_back_as_in_llama_cpp(
    wanted: str, row: int, expected: str
) -> None:
    assert fitting_type(wanted, row) == expected


def test_layers_with_more_bits_are_llama_cpps() -> None:
    # Worked out by hand from i < n/8, i >= 7n/8, (i - n/8) % 3 == 2 in whole numbers.
    assert [i for i in range(5) if is_important(i, 5)] == [2, 4]
    assert [i for i in range(16) if is_important(i, 16)] == [0, 1, 4, 7, 10, 13, 14, 15]


def test_small_and_sensitive_tensors_keep_more_bits() -> None:
    config = replace(SMALL, num_layers=5, windows=(None,) * 5, causal=(True,) * 5)
    found = {s.gguf_name: wanted_type(s, MIXES["q4_k_m"], 5) for s in tensor_specs(config)}
    assert found["output_norm.weight"] == found["inj_bias"] == "f32"
    assert found["blk.0.attn_q_norm.weight"] == "f32"
    assert found["transfer_codes.weight"] == found["inj_message.weight"] == "q8_0"
    assert found["blk.3.inj_readout.weight"] == found["blk.3.inj_write.weight"] == "q8_0"
    assert found["fc.weight"] == "q6_k"
    assert (found["blk.1.attn_v.weight"], found["blk.2.attn_v.weight"]) == ("q4_k", "q6_k")
    assert (found["blk.3.ffn_down.weight"], found["blk.4.ffn_down.weight"]) == ("q4_k", "q6_k")
    assert {found[f"blk.2.{n}.weight"] for n in ("attn_q", "attn_output", "ffn_up")} == {"q4_k"}
    sparse = replace(SMALL_DFLASH2, num_layers=5, windows=(None,) * 5, causal=(False,) * 5)
    second = {s.gguf_name: wanted_type(s, MIXES["q4_k_m"], 5) for s in tensor_specs(sparse)}
    precise = {"selector_predecessor.weight", "selector_successor.weight", "selector_hidden.weight"}
    precise |= {f"blk.{i}.{part}_conv_proj.weight" for i in range(5) for part in ("attn", "ffn")}
    assert {name for name, kind in second.items() if kind == "q8_0"} == precise
    assert {second[f"blk.{i}.attn_conv_base"] for i in range(5)} == {"f32"}
    plain = {s.gguf_name: wanted_type(s, MIXES["f16"], 5) for s in tensor_specs(config)}
    assert set(plain.values()) == {"f16", "f32"}


def test_a_float_file_keeps_everything_but_its_matrices(tmp_path: Path) -> None:
    source, output = tmp_path / "in.gguf", tmp_path / "out.gguf"
    config = with_reduced_head()
    vocab = list(range(48))
    write_drafter(source, config, PAIR, RECORD, weights(config), "f32", vocab, name="Mine")
    seen: list[tuple[int, int]] = []
    warnings = quantise_drafter(
        source, output, "BF16", progress=lambda done, total: seen.append((done, total))
    )
    assert warnings == []
    before, after = read_drafter(source), read_drafter(output)
    assert (after.config, after.pair) == (before.config, before.pair)
    assert after.draft_vocab is not None
    assert after.draft_vocab.tolist() == vocab
    assert after.record.acceptance_curve == RECORD.acceptance_curve
    provenance = dict(after.record.provenance)
    noted = provenance.pop("quantised")
    assert provenance == RECORD.provenance
    assert isinstance(noted, list)
    assert (noted[0]["type"], noted[0]["from"], noted[0]["source"]) == ("BF16", "F32", "in.gguf")
    metadata = read_header(output).metadata
    assert (metadata["general.file_type"], metadata["general.name"]) == (32, "Mine")
    for spec in tensor_specs(config):
        old, new = before.tensors[spec.gguf_name], after.tensors[spec.gguf_name]
        if spec.is_matrix:
            assert new.type.name == "bf16"
            assert np.allclose(new.as_float32(), old.as_float32(), rtol=2**-8, atol=0)
        else:
            assert new.raw.tobytes() == old.raw.tobytes()
    total = sum(info.n_bytes for info in read_header(output).tensors.values())
    assert seen[-1] == (total, total)
    # Once more: the list of quantisations grows, and what is bf16 stays bit by bit.
    again = tmp_path / "again.gguf"
    quantise_drafter(output, again, "bf16")
    third = read_drafter(again)
    assert [n["from"] for n in third.record.provenance["quantised"]] == ["F32", "BF16"]  # type: ignore[attr-defined]
    assert all(third.tensors[n].raw.tobytes() == t.raw.tobytes() for n, t in after.tensors.items())


def test_other_keys_are_copied_with_values_and_kinds(tmp_path: Path) -> None:
    source, plain, output = (tmp_path / f"{n}.gguf" for n in ("in", "plain", "out"))
    write_drafter(plain, SMALL, PAIR, RECORD, weights(), "f32")
    reader = GGUFReader(plain)
    writer = GGUFWriter(source, "dspine")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kinds = [*field.types, None]
        assert kinds[0] is not None
        writer.add_key_value(field.name, field.contents(), kinds[0], kinds[1])
    writer.add_string("general.author", "grüß")
    writer.add_uint32("general.alignment", 64)
    writer.data_alignment = 64
    writer.add_array("general.tags", ["a", "b"])
    writer.add_float32("x.third", 1 / 3)
    writer.add_int64("x.low", -5)
    writer.add_uint64("x.high", 1 << 63)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    quantise_drafter(source, output, "f16")
    found = {f.name: f.contents() for f in GGUFReader(output).fields.values()}
    assert (found["general.author"], found["general.tags"]) == ("grüß", ["a", "b"])
    assert (found["x.third"], found["x.low"], found["x.high"]) == (np.float32(1 / 3), -5, 1 << 63)
    assert GGUFReader(output).fields["x.third"].types == [GGUFValueType.FLOAT32]
    assert "general.alignment" not in found
    assert read_drafter(output).matrix_type == "f16"


def test_refusals_leave_nothing_behind(tmp_path: Path) -> None:
    source, output = tmp_path / "in.gguf", tmp_path / "out.gguf"
    write_drafter(source, SMALL, PAIR, RECORD, weights(), "q8_0")
    with pytest.raises(FileError, match=r"quantised already \(q8_0\).*--allow-requantize"):
        quantise_drafter(source, output, "bf16")
    with pytest.raises(UsageError, match="'q9': choose one of q4_0, q4_k_m"):
        quantise_drafter(source, output, "q9")
    assert not output.exists()
    told = quantise_drafter(source, output, "bf16", allow_requantize=True)
    assert len(told) == 1
    assert "less accurate" in told[0]
    before, after = read_drafter(source), read_drafter(output)
    assert np.allclose(
        after.tensors["fc.weight"].as_float32(), before.tensors["fc.weight"].as_float32(), rtol=0.01
    )
    bytes_before = output.read_bytes()
    with pytest.raises(FileError, match="exists already"):
        quantise_drafter(source, output, "bf16", allow_requantize=True)
    assert output.read_bytes() == bytes_before
    damaged = weights()
    damaged["fc.weight"] = damaged["fc.weight"].astype(np.float32)
    damaged["fc.weight"][0, 0] = 1e6
    big = tmp_path / "big.gguf"
    write_drafter(big, SMALL, PAIR, RECORD, damaged, "f32")
    with pytest.raises(FileError, match=r"fc\.weight has a value of 1e\+06, too large for f16"):
        quantise_drafter(big, tmp_path / "no.gguf", "f16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.gguf", "in.gguf", "out.gguf"]
