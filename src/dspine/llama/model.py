"""A loaded GGUF target: its facts, its tensors and its tokenizer."""

from __future__ import annotations

import ctypes
import re
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dspine.architectures import NOT_TARGETS
from dspine.errors import ClosedError, FileError
from dspine.ggml.kernels import installed
from dspine.llama.handle import Handle
from dspine.llama.header import MOST_LAYERS, Header, read_header
from dspine.llama.library import Library, find_library, native_functions
from dspine.llama.log import capture
from dspine.llama.pages import forget_pages
from dspine.llama.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dspine.ggml.tensor import Tensor

_OTHER_WINDOWS = frozenset({"llama4", "deepseek4"})
"""Windows that jump from chunk to chunk, or with a compressed rest: not one of so many positions
before the last."""

_VOCAB_TYPE_NONE = 0


class Model:
    """One GGUF model in memory; make it with `Model.load` and close it, or use it in `with`.

    Closing while Contexts are open is allowed: the memory is freed with the last of them.
    """

    def __init__(
        self, handle: Handle, path: Path, n_gpu_layers: int, use_extra_buffers: bool
    ) -> None:
        api, pointer = handle.native.api, handle.pointer
        self._handle = handle
        self._closed = False
        self._closer = weakref.finalize(self, handle.release)
        self.path = path
        self.n_gpu_layers = n_gpu_layers
        self.use_extra_buffers = use_extra_buffers
        """Whether weights may be repacked for the CPU (also AMX)."""
        self.notice: str | None = None
        """A sentence for the user when the library had to run in a slower way."""
        self.architecture: str = self.metadata("general.architecture") or "unknown"
        self.num_layers: int = api.llama_model_n_layer(pointer)
        self.num_heads: int = api.llama_model_n_head(pointer)
        self.hidden_size: int = api.llama_model_n_embd(pointer)
        self.output_size: int = api.llama_model_n_embd_out(pointer)
        self.context_train: int = api.llama_model_n_ctx_train(pointer)
        self.is_recurrent: bool = bool(
            api.llama_model_is_recurrent(pointer) or api.llama_model_is_hybrid(pointer)
        )
        """Recurrent or hybrid: its memory cannot be trimmed to an earlier position."""
        self.window: int = (
            0 if self.architecture in _OTHER_WINDOWS else api.llama_model_n_swa(pointer)
        )
        """Positions that its sliding-window layers see, 0 without such layers."""
        self.size_bytes: int = api.llama_model_size(pointer)
        self.num_parameters: int = api.llama_model_n_params(pointer)
        self.tokenizer = Tokenizer(
            handle.native, api.llama_model_get_vocab(pointer), self._require_open
        )
        self.vocab_size: int = self.tokenizer.vocab_size

    @classmethod
    def load(cls, path: Path, *, n_gpu_layers: int = 0, use_extra_buffers: bool = True) -> Model:
        """Load a GGUF file.

        `n_gpu_layers` layers go to the GPU (-1 = all). Raises FileError when the file is
        missing, no GGUF, damaged, or of a kind that cannot be a target.
        """
        path = Path(path)
        check_file(path)
        library = find_library()
        native = native_functions()
        header = _check_header(path)
        params = native.api.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.use_extra_bufts = use_extra_buffers
        mark = capture.count
        with ExitStack() as stack:
            kernels = installed() if use_extra_buffers and n_gpu_layers == 0 else None
            if kernels is not None and header is not None:
                stack.enter_context(kernels.expecting(header.matrix_bytes))
            pointer = native.api.llama_model_load_from_file(str(path).encode(), params)
        if not pointer:
            raise FileError(_load_failure(path, capture.reason(mark)))
        if library.kernels.active and use_extra_buffers:
            # Packed weights are copies: their originals must not stay in memory beside them.
            forget_pages(path)
        handle = Handle(native, pointer)
        try:
            _check_kind(native.api, pointer, path)
            return cls(handle, path, n_gpu_layers, use_extra_buffers)
        except BaseException:
            handle.release()
            raise

    def metadata(self, key: str) -> str | None:
        """Value of a GGUF metadata key as text, or None; arrays are not kept by the library."""
        api = self.handle.native.api
        name = key.encode()
        return _read_text(
            lambda buffer, size: api.llama_model_meta_val_str(
                self._handle.pointer, name, buffer, size
            )
        )

    def tensor(self, name: str) -> Tensor | None:
        """The model's own tensor of that name, without a copy; valid while the model is open.

        None when the model has no such tensor, or when this build of the library does not give
        tensors away (`Library.has_tensor_symbol`); read it from the file then.
        """
        from dspine.ggml.tensor import Tensor

        native = self.handle.native
        if native.get_tensor is None:
            return None
        pointer = native.get_tensor(self._handle.pointer, name.encode())
        return Tensor.foreign(pointer) if pointer else None

    @property
    def handle(self) -> Handle:
        """The native model, for the parts of this package; ClosedError once it is closed."""
        self._require_open()
        return self._handle

    @property
    def library(self) -> Library:
        """The library that loaded this model."""
        return find_library()

    @property
    def is_closed(self) -> bool:
        # Asked for each new token: the finalizer would take several calls to answer.
        return self._closed or not self._handle.users

    def close(self) -> None:
        """Free the model (at once, or when its last Context is closed); later use raises."""
        self._closed = True
        self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{self.architecture}, {self.num_layers} layers"
        return f"Model({self.path.name}, {state})"

    def _require_open(self) -> None:
        if self.is_closed:
            raise ClosedError(f"the model {self.path.name} is closed: load it again")


def load_safely(
    path: Path,
    *,
    n_gpu_layers: int = 0,
    use_extra_buffers: bool = True,
    cache_dir: Path | None = None,
) -> Model:
    """Load a target after making sure, in a child process, that the library survives a decode.

    Some compilers build a library that dies at the first decode on CPUs with AMX; then the model
    is loaded without extra buffers and `model.notice` says how to cure it. What was found is
    kept in `cache_dir` (default: the user's cache folder). Raises LibraryError when the library
    fails either way, FileError like `Model.load`.
    """
    from dspine.llama.probe import probe

    path = Path(path)
    check_file(path)
    library = find_library()
    _check_header(path)
    if not use_extra_buffers:
        return Model.load(path, n_gpu_layers=n_gpu_layers, use_extra_buffers=False)
    result = probe(path, library, folder=cache_dir)
    result.require_usable()
    model = Model.load(path, n_gpu_layers=n_gpu_layers, use_extra_buffers=result.use_extra_buffers)
    model.notice = result.notice
    return model


def check_file(path: Path) -> None:
    """Raise FileError when `path` cannot be a GGUF model, judged by its first bytes."""
    if not path.exists():
        raise FileError(f"the model file {path} does not exist: check the path")
    if path.is_dir():
        raise FileError(f"{path} is a folder: name the .gguf file in it")
    try:
        with path.open("rb") as file:
            start = file.read(24)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    if start[:4] != b"GGUF":
        shown = start[:8].hex(" ") or "nothing"
        raise FileError(
            f"{path} is not a GGUF file (it begins with {shown}, not with 47 47 55 46): targets "
            "must be in llama.cpp's GGUF format, convert it or name another"
        )
    if len(start) < 24:
        raise FileError(f"{path} is cut off after {len(start)} bytes: download it again")
    if int.from_bytes(start[8:16], "little") == 0:
        raise FileError(f"{path} holds a vocabulary and no weights: name a complete model file")


def _load_failure(path: Path, reason: str) -> str:
    unknown = re.search(r"unknown model architecture: '([^']*)'", reason)
    if unknown:
        return (
            f"{path} is a model of architecture {unknown[1]!r}, which this llama.cpp library does "
            "not know (`dspine doctor` shows its version): choose another model"
        )
    return f"{path} cannot be loaded: {reason}; if it was downloaded, check that it is complete"


def _check_header(path: Path) -> Header | None:
    """Raises for what is no target, and for a layer count that would make the library end the
    process.
    """
    header = read_header(path)
    if header is None:
        return None  # the load itself refuses such a file, with its reason
    what = NOT_TARGETS.get(header.architecture)
    if what is not None:
        raise FileError(f"{path} is {what}, not a target: name the language model's own file")
    if not header.has_trunk:
        raise FileError(
            f"{path} holds next-token (MTP) layers of a {header.architecture} model and not the "
            "model: name the model's own file"
        )
    if header.num_layers is not None and not 1 <= header.num_layers <= MOST_LAYERS:
        raise FileError(
            f"{path} says that it has {header.num_layers} layers, possible are 1 to "
            f"{MOST_LAYERS}: the file is damaged, download it again"
        )
    return header


def _check_kind(api: Any, pointer: int, path: Path) -> None:
    if api.llama_model_has_encoder(pointer) or not api.llama_model_has_decoder(pointer):
        raise FileError(
            f"{path} has an encoder: targets must be decoder-only language models, choose another "
            "model"
        )
    if api.llama_model_is_diffusion(pointer):
        raise FileError(
            f"{path} is a diffusion language model: it does not generate token after token, "
            "choose another model"
        )
    if api.llama_vocab_type(api.llama_model_get_vocab(pointer)) == _VOCAB_TYPE_NONE:
        raise FileError(f"{path} has no tokenizer: convert it again with its vocabulary")


def _read_text(read: Any, first_size: int = 256) -> str | None:
    """Call `read(buffer, size)`, which returns the full length or a negative number."""
    size = first_size
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = read(buffer, size)
        if length < 0:
            return None
        if length < size:
            return buffer.raw[:length].decode("utf-8", "replace")
        size = length + 1
