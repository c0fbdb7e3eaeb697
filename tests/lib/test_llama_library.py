"""Finding the library, the real probe, measuring, and the tokenizer's refusals."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspine.errors import FileError, LibraryError, UsageError
from dspine.llama.batch import Batch
from dspine.llama.context import Context
from dspine.llama.library import find_library
from dspine.llama.model import Model, load_safely
from dspine.llama.probe import model_kind
from tests.support.tiny_models import tiny_llama, tiny_qwen35


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("library") / "tiny.gguf", seed=5)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model.load(path) as model:
        yield model


def test_the_second_library_of_a_process_is_refused(tmp_path: Path) -> None:
    library = find_library()
    assert find_library(library.path) is library
    assert find_library(library.file) is library
    (tmp_path / library.file.name).touch()
    with pytest.raises(LibraryError, match=r"already uses the llama\.cpp library in"):
        find_library(tmp_path)


FIND = (
    "from dspine.errors import LibraryError\n"
    "from dspine.llama.library import find_library\n"
    "try:\n    find_library()\n"
    "except LibraryError as error:\n    print(error)\n"
)


def output_of(code: str, folder: Path | None) -> str:
    """What a fresh interpreter prints; nothing may go to its standard error."""
    environment = {**os.environ, **({"DSPINE_LIBRARY": str(folder)} if folder else {})}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout


def test_a_library_that_cannot_be_used_is_an_error_with_a_cure(tmp_path: Path) -> None:
    library = find_library()
    wrong = tmp_path / library.file.name
    wrong.write_text("not a library")
    assert re.match(
        r"the llama\.cpp library cannot be loaded \(.*pip install llama-cpp-python==0\.3\.36",
        output_of(FIND, tmp_path),
    )
    # a real library of the wrong kind: it loads and has none of the functions
    shutil.copy(library.path / library.file.name.replace("llama", "ggml-base"), wrong)
    assert re.match(
        r"the llama\.cpp library in \S+ has no function llama_\w+: it is another version",
        output_of(FIND, tmp_path),
    )
    missing = "import sys\nsys.modules['llama_cpp'] = None\n" + FIND
    assert output_of(missing, None) == (
        "the Python package llama_cpp is missing: run pip install llama-cpp-python==0.3.36\n"
    )


def test_success_prints_nothing(path: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from dspine.llama.model import load_safely\n"
        "from dspine.llama.context import Context\n"
        "from dspine.llama.batch import Batch\n"
        "with load_safely(Path(sys.argv[1])) as m, Context(m, n_ctx=64, taps=(0,)) as c:\n"
        "    b = Batch(2)\n    b.add_tokens([1, 2], 0)\n    c.decode(b)\n    c.argmax(1)\n"
    )
    environment = {**os.environ, "DSPINE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(list((tmp_path / "probe").glob("*.json"))) == 1


def test_the_real_probe_passes_here_and_damaged_files_keep_their_own_error(
    path: Path, tmp_path: Path
) -> None:
    with load_safely(path) as model:
        assert model.use_extra_buffers and model.notice is None
    with load_safely(path, use_extra_buffers=False) as model:
        assert not model.use_extra_buffers
    damaged = tmp_path / "cut.gguf"
    damaged.write_bytes(path.read_bytes()[:400_000])
    with pytest.raises(FileError, match=r"cut\.gguf cannot be loaded"):
        load_safely(damaged)


def test_the_kind_of_a_model_is_its_architecture_and_tensor_types(
    path: Path, tmp_path: Path
) -> None:
    assert model_kind(path) == "llama [0]"
    assert model_kind(tiny_llama(tmp_path / "q.gguf", weights="q8_0")) == "llama [0, 8]"
    assert model_kind(tiny_qwen35(tmp_path / "h.gguf")) == "qwen35 [0]"
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    assert model_kind(tmp_path / "bad.gguf").startswith(str(tmp_path))


def test_unknown_tokens_and_broken_text_are_refused(model: Model) -> None:
    for token in (-1, 320):
        with pytest.raises(UsageError, match=f"token id {token} is outside the vocabulary"):
            model.tokenizer.piece(token)
        with pytest.raises(UsageError, match=f"token id {token}"):
            model.tokenizer.is_end(token)
    with pytest.raises(UsageError, match="unpaired surrogate at character 1"):
        model.tokenizer.encode("a\ud800")


def test_a_batch_of_eight_is_built_and_checked_in_microseconds(model: Model) -> None:
    batch = Batch(16)
    tokens = list(range(8))
    with Context(model, n_ctx=64, n_threads=1) as context:

        def once() -> float:
            began = time.thread_time()
            batch.clear()
            batch.add_tokens(tokens, 0)
            context._check(batch)
            return time.thread_time() - began

        assert min(once() for _ in range(200)) < 200e-6
