"""llama.cpp as a library: importing it, keeping it quiet, and opening GGUF files with its own reason where it fails.

Knows llama-cpp-python's low-level functions that have to do with files and messages. Knows no tokens and no context.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import gguf

from pcdlab.errors import BackendError, ModelError, ParameterError
from pcdlab.schema import did_you_mean

INSTALL = "pip install 'pcdlab[llamacpp]'"

try:
    import llama_cpp
except ImportError as error:
    raise BackendError(
        f"the llamacpp backend needs llama-cpp-python, which is not installed; run\n  {INSTALL}"
    ) from error
except (OSError, RuntimeError) as error:  # installed, but its shared library does not load here
    raise BackendError(
        f"llama-cpp-python is installed, but its library does not load ({error}); install it again for this machine with\n"
        f"  {INSTALL} --force-reinstall --no-cache-dir"
    ) from error

__all__ = ["Model", "last_errors", "llama_cpp", "quantise", "unpack"]

_LOG_ERROR, _LOG_CONTINUES = 4, 5  # ggml_log_level
_GUESSED = 1024  # flag of llama.cpp's file types: from the tensors, not from the metadata
_errors: deque[str] = deque(maxlen=20)
_in_error = False


@llama_cpp.llama_log_callback
def _collect(level: int, text: bytes, _: Any) -> None:
    """Keep error messages, drop the hundreds of lines a load prints."""
    global _in_error
    if level != _LOG_CONTINUES:
        _in_error = level == _LOG_ERROR
    if _in_error:
        _errors.append(text.decode(errors="replace"))


llama_cpp.llama_log_set(_collect, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()


def last_errors() -> str:
    """What llama.cpp has complained about since the last call, in one line."""
    lines = [line.strip() for line in "".join(_errors).splitlines()]
    _errors.clear()
    # "function_name: message": who says it helps nobody here.
    messages = dict.fromkeys(line.partition(": ")[2] or line for line in lines if line)
    return "; ".join(messages)


class Model:
    """A GGUF file opened by llama.cpp; freed with the last reference to it.

    Parameters
    ----------
    path : Path
        The file; of a split model the first.
    vocabulary_only : bool
        Leave the weights on disk.

    Attributes
    ----------
    path : Path
        The file.
    pointer, vocab : int
        Handles for llama.cpp's functions.
    weights : str
        Number format of most of the weights, such as "Q4_1".
    unpacked_from : str
        What it was in the file, where these weights are a float32 copy; else empty.

    Raises
    ------
    ModelError
        With llama.cpp's reason, if it cannot load the file.
    """

    def __init__(self, path: Path, vocabulary_only: bool = False) -> None:
        self.path = path
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = vocabulary_only
        last_errors()
        pointer = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            raise ModelError(f"{path}: llama.cpp cannot load this file: {last_errors() or 'it gives no reason'}")
        weakref.finalize(self, llama_cpp.llama_model_free, pointer)
        self.pointer: Any = pointer
        self.vocab: Any = llama_cpp.llama_model_get_vocab(pointer)
        self.unpacked_from = ""

    @property
    def weights(self) -> str:  # noqa: D102 - above
        kind = llama_cpp.llama_model_ftype(self.pointer) & ~_GUESSED
        try:
            return gguf.LlamaFileType(kind).name.removeprefix("MOSTLY_").removeprefix("ALL_")
        except ValueError:  # one that this version of the gguf package does not know
            return f"file type {kind}"


def unpack(packed: Model, threads: int) -> Model:
    """Open a model again with its weights in float32, by way of a temporary file.

    Raises
    ------
    ModelError
        With llama.cpp's reason, if there is no room for the file (four bytes per weight).
    """
    # Where an open file cannot be removed, the operating system's clean-up does it.
    with tempfile.TemporaryDirectory(prefix="pcdlab-", ignore_cleanup_errors=True) as folder:
        model = Model(quantise(packed.path, Path(folder) / "float32.gguf", "F32", threads))
    model.path, model.unpacked_from = packed.path, packed.weights
    return model


def quantise(source: Path, target: Path, kind: str, threads: int = 1) -> Path:
    """Write a GGUF file again in another number format, as llama.cpp's own tool does.

    Parameters
    ----------
    source, target : Path
        The file there is and the one to write. What is packed already is unpacked first, so its rounding stays.
    kind : str
        A name of :class:`gguf.LlamaFileType` without its ``MOSTLY_``: "F32", "F16", "Q8_0", "Q4_0", "Q4_K_M" …. llama.cpp keeps
        some tensors finer, and takes another format where a row does not divide into blocks.
    threads : int

    Returns
    -------
    Path
        `target`.

    Raises
    ------
    ParameterError
        If there is no such format.
    ModelError
        With llama.cpp's reason, if it cannot write the file.
    """
    kinds = {type_.name.removeprefix("MOSTLY_").removeprefix("ALL_"): type_ for type_ in gguf.LlamaFileType}
    if kind not in kinds:
        raise ParameterError(f"kind={kind!r} is no number format of GGUF{did_you_mean(kind, kinds)}; 'Q8_0' is one")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(kinds[kind])
    params.allow_requantize = True
    params.nthread = threads
    last_errors()
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)):
        reason = last_errors() or "it gives no reason"
        raise ModelError(f"{source}: llama.cpp cannot write this file as {kind} to {target.parent}: {reason}")
    return target
