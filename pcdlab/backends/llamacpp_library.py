"""llama.cpp as a library: importing it, keeping it quiet, and opening GGUF files with its own reason where it fails.

Knows llama-cpp-python's low-level functions that have to do with files and messages. Knows no tokens and no context.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from pathlib import Path
from typing import Any

from pcdlab.errors import BackendError, ModelError

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

__all__ = ["Model", "last_errors", "llama_cpp"]

_LOG_ERROR, _LOG_CONTINUES = 4, 5  # ggml_log_level
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
    pointer, vocab : int
        Handles for llama.cpp's functions.

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
