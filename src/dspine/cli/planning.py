"""What `dspine plan` does: from its options to a plan, and its output."""

from __future__ import annotations

import os
from collections.abc import Mapping

import click

from dspine.cli import plan_table
from dspine.cli.options import Options
from dspine.cli.output import print_json
from dspine.default_pair import choose_pair
from dspine.errors import UsageError
from dspine.kernels.build import is_supported
from dspine.kernels.status import switched_off, wanted_family
from dspine.kernels.verdict import kept_in
from dspine.machine import available_bytes, cache_folder, cpu_flags
from dspine.plan import presets
from dspine.plan.acceptance import read_acceptance
from dspine.plan.devices import device_model
from dspine.plan.from_file import read_drafter_geometry, read_geometry
from dspine.plan.geometry import Geometry
from dspine.plan.largest import RESERVE_SHARE, Budget
from dspine.plan.memory import DrafterGeometry, Setup
from dspine.plan.packing import Kernels, stock_kernels
from dspine.plan.report import Question, answer, preset_drafter
from dspine.plan.shapes import geometry_of
from dspine.plan.sizes import parse_size
from dspine.plan.speed import predict


def run_plan(options: Options) -> None:
    """Plan what the options say and print it."""
    if (options.text("preset") or "").lower() == "list":
        for line in plan_table.preset_lines():
            click.echo(line)
        return
    document: dict[str, object] = {}
    lines: list[str] = []
    if wants_memory(options):
        question = memory_question(options)
        rows = answer(question)
        document["memory"] = plan_table.memory_json(question, rows)
        lines += plan_table.memory_lines(question, rows)
    if options.text("device") is not None or options.path("acceptance") is not None:
        parts = speed_parts(options)
        document["speed"] = plan_table.speed_json(*parts)
        lines += ["", *plan_table.speed_lines(*parts)] if lines else plan_table.speed_lines(*parts)
    if options.switch("json"):
        print_json(document)
        return
    for line in lines:
        click.echo(line)


def wants_memory(options: Options) -> bool:
    """Unless only speed was asked for."""
    named = any(options.text(name) for name in ("preset", "vram", "ram"))
    return named or options.path("model") is not None or options.text("device") is None


def memory_question(options: Options) -> Question:
    """Target, drafters, setup and budget as the options say."""
    target, drafters = pair(options)
    vram, ram = size(options, "vram"), size(options, "ram")
    layers = options.number("n_gpu_layers") if vram is not None else 0
    whole = bool(layers) and (layers < 0 or layers > target.block_count)
    where = options.choice("draft_device")
    if where == "gpu" and vram is None:
        raise UsageError("--draft-device is gpu, and there is no card: give its memory with --vram")
    reserve = size(options, "reserve")
    if reserve is None:
        reserve = int(RESERVE_SHARE * (vram or 0))
    setup = Setup(
        mode="plain",
        n_batch=options.number("batch_size"),
        cache_type_k=options.choice("cache_type_k"),
        cache_type_v=options.choice("cache_type_v"),
        slots=options.number("parallel"),
        n_gpu_layers=layers,
        drafter_on_gpu=whole if where == "auto" else where == "gpu",
        flash_attention=options.choice("flash_attn") != "off",
        swa_full=options.switch("swa_full"),
        kernels=machine_kernels(),
        reserve_bytes=reserve if layers else 0,
    )
    n_ctx = options.positive("ctx_size")
    if n_ctx is not None and 0 < target.context_train < n_ctx:
        raise UsageError(
            f"-c is {n_ctx}, above the {target.context_train} tokens that {target.name} was "
            f"trained for: choose at most {target.context_train}"
        )
    return Question(
        target,
        drafters,
        setup,
        Budget(vram, ram if ram is not None or vram is not None else available_bytes()),
        options.choice("rollback"),
        options.positive("spec_draft_n_max"),
        n_ctx,
    )


def pair(options: Options) -> tuple[Geometry, tuple[DrafterGeometry, ...]]:
    """The target and the drafters to show, from files or presets."""
    name, drafter_name = options.text("preset"), options.text("preset_draft")
    model, drafter = options.path("model"), options.path("model_draft")
    if name is not None and model is not None:
        raise UsageError("--preset and --model exclude each other: give one of them")
    if drafter_name is not None and drafter is not None:
        raise UsageError("--preset-draft and --model-draft exclude each other: give one of them")
    quant = options.choice("quant_draft")
    if name is not None:
        target = geometry_of(presets.target_preset(name), options.choice("quant"))
        if drafter is None and drafter_name is None:
            names = presets.drafters_of(name)
            return target, tuple(preset_drafter(one, quant) for one in names)
    else:
        model, drafter = choose_pair(model, drafter)
        target = read_geometry(model)
    if drafter_name is not None:
        found = preset_drafter(drafter_name, quant)
    elif drafter is not None:
        found = read_drafter_geometry(drafter)
    else:
        return target, ()
    if found.config.target_hidden_size != target.hidden:
        raise UsageError(
            f"{found.name} reads layers of {found.config.target_hidden_size} numbers, and "
            f"{target.name} has {target.hidden}: name the drafter made for this target"
        )
    return target, (found,)


def speed_parts(options: Options) -> plan_table.SpeedParts:
    """Device, predictions, and the context they are for."""
    name, path = options.text("device"), options.path("acceptance")
    if name is None:
        raise UsageError("--acceptance needs the costs of a device: name one with --device")
    model, drafter = options.path("model"), options.path("model_draft")
    if name.lower() == "here" and options.text("preset") is None:
        model, drafter = choose_pair(model, drafter)
    device = device_model(name, options.path("cache_dir") or cache_folder(), model, drafter)
    drafts = options.positive("spec_draft_n_max")
    width = drafts + 1 if drafts else max(2, device.widest)
    tasks = read_acceptance(path, width) if path is not None else []
    depth = options.number("context_depth")
    return device, predict(device, tasks, depth), width, depth


def size(options: Options, name: str) -> int | None:
    text = options.text(name)
    return None if text is None else parse_size(text, f"--{name}")


def machine_kernels(environment: Mapping[str, str] = os.environ) -> Kernels:
    """Whose kernels would compute on this machine's CPU, if dspine's are built."""
    stock = stock_kernels(cpu_flags())
    if switched_off(environment) or not (is_supported() and "avx2" in cpu_flags()):
        return stock
    folder = cache_folder() / "kernels"
    refused = wanted_family(environment) is None and kept_in(folder) is False
    return "dspine" if any(folder.glob("*.so")) and not refused else stock
