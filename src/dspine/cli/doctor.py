"""`dspine doctor`: what this machine's llama.cpp can do, and whether drafting pays on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from dspine.cli.models import named_pair
from dspine.cli.options import Options, settings_command
from dspine.cli.output import print_json
from dspine.cli.session import FLASH_ATTENTION
from dspine.doctor import Question, Report, examine

if TYPE_CHECKING:
    from dspine.llama.library import Library


@settings_command("doctor")
def command(options: Options) -> int:
    """Examine the llama.cpp library and this machine; exit code 0 means that all works."""
    model, drafter = named_pair(options)
    question = Question(
        model=model,
        drafter=drafter,
        library=options.path("library"),
        cache_dir=options.path("cache_dir"),
        n_ctx=options.positive("ctx_size"),
        n_threads=options.positive("threads"),
        n_gpu_layers=options.number("n_gpu_layers"),
        flash_attention=FLASH_ATTENTION[options.choice("flash_attn")],
        cache_type_k=options.choice("cache_type_k"),
        cache_type_v=options.choice("cache_type_v"),
    )
    report = examine(question, lambda stage: click.echo(f"... {stage}", err=True))
    if options.switch("json"):
        print_json(report.to_json())
    else:
        for line in lines(report):
            click.echo(line)
    return report.exit_code


def lines(report: Report) -> Iterator[str]:
    """The report for people."""
    if report.library is not None:
        yield from library_lines(report.library)
    if report.probe is not None:
        told = {
            "ok": "one token decoded in a child process",
            "fallback": "works without extra buffers only (slower)",
            "broken": "crashes at its first decode",
        }
        yield f"probe        {told[report.probe.status]}"
    if report.target is not None:
        target = report.target
        yield (
            f"target       {target['path']} ({target['architecture']}, {target['layers']} layers, "
            f"{target['parameters'] / 1e6:.0f} M parameters, {target['bytes'] / 1e6:.0f} MB)"
        )
    if report.rows_ms:
        counts = sorted(next(iter(report.rows_ms.values())))
        yield "rows         " + "".join(f"{count:>9}" for count in counts)
        for on, rows in sorted(report.rows_ms.items()):
            used = "  <- used" if on == report.flash_attention else ""
            shown = "".join(f"{rows[count]:>9.1f}" for count in counts)
            yield f"  ms, flash {'on ' if on else 'off'}{shown}{used}"
    if report.deep_ms:
        shown = ", ".join(f"{ms:.1f} ms for {count}" for count, ms in report.deep_ms.items())
        yield f"  after {report.deep} tokens: {shown}"
    if report.draft_ms:
        shown = ", ".join(f"{ms:.1f} ms for {width}" for width, ms in report.draft_ms.items())
        yield f"drafts       {shown} (block width)"
    if report.threads:
        yield f"threads      {report.threads}"
    if report.measured_s:
        keys, values = report.cache_types
        yield (
            f"measured     in {report.measured_s:.1f} s, for keys in {keys}, values in {values} "
            f"and a context of {report.n_ctx} tokens"
        )
    if report.speculation is not None:
        yield f"drafter      {report.speculation.drafter or 'none'}"
        yield f"speculation  {report.speculation.verdict}"
    if report.rollback:
        yield f"rollback     {report.rollback}: {report.rollback_reason}"
    for note in report.notes:
        yield f"note         {note}"
    for problem in report.problems:
        yield f"problem      {problem}"
    if not report.problems:
        yield "all works"


def library_lines(library: Library) -> Iterator[str]:
    yield f"library      {library.path}"
    yield (
        f"version      llama-cpp-python {library.version}, llama.cpp {library.llama_version} "
        f"({library.commit or 'commit unknown'}), ggml {library.ggml_version}"
    )
    yield f"cpu          {', '.join(library.features) or 'no features reported'}"
    note = f" ({library.kernels.note})" if library.kernels.note else ""
    yield f"kernels      {library.kernels.text}{note}"
    for device in library.devices:
        memory = f", {device.total_bytes / 2**30:.1f} GiB" if device.total_bytes else ""
        yield f"device       {device.name}: {device.description} ({device.kind}{memory})"
    taps = "read directly" if library.has_tap_symbols else "read through a callback (slower)"
    tensors = "shared with the drafter" if library.has_tensor_symbol else "read from the file"
    yield f"symbols      layer outputs {taps}; embedding and head {tensors}"
