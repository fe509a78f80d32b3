"""Prefixes that outlive a call: a schema's head, kept in memory and on disk.

A head is the part of the prompt that is the same for every document. On disk each one is a safetensors file named after
the model's fingerprint and the head's tokens, so that a new process starts warm. Knows prefixes and files; not schemas.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pcdlab.backends.base import Backend

__all__ = ["HeadCache"]

IN_MEMORY = 8  # heads
ON_DISK = 2 << 30  # bytes


class HeadCache:
    """Least recently used heads of one backend.

    Parameters
    ----------
    backend : Backend
    folder : Path or None
        Where files go; None keeps heads in memory only, as does a backend without a fingerprint.
    """

    def __init__(self, backend: Backend, folder: Path | None) -> None:
        self._backend = backend
        self._folder = folder if backend.fingerprint else None
        self._memory: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def get(self, tokens: Sequence[int]) -> Any:
        """The prefix of `tokens`, or None."""
        key = tuple(tokens)
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        path = self._path(key)
        if path is None:
            return None
        try:
            prefix = self._backend.load_prefix(path)
        except Exception:  # no file, or one cut short, of another version, not to be read: run the head again
            return None
        with suppress(OSError):  # on a read-only disk nothing is trimmed either
            os.utime(path)
        if prefix.length != len(key):
            return None
        self._remember(key, prefix)
        return prefix

    def state(self, tokens: Sequence[int]) -> tuple[Any, bool]:
        """The prefix of `tokens`, run and kept where it is not there yet, and whether it was."""
        prefix = self.get(tokens)
        if prefix is not None:
            return prefix, True
        prefix = self._backend.prefill(tokens)
        self.put(tokens, prefix)
        return prefix, False

    def put(self, tokens: Sequence[int], prefix: Any) -> None:
        """Keep `prefix` as the state of `tokens`."""
        key = tuple(tokens)
        self._remember(key, prefix)
        path = self._path(key)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            os.close(handle)
            try:
                self._backend.save(prefix, Path(temporary))
                os.replace(temporary, path)
            finally:
                Path(temporary).unlink(missing_ok=True)
            self._trim(path.parent)
        except Exception:  # OSError or safetensors' own: a read-only or full disk costs the next process a head
            return

    def clear(self) -> None:
        """Forget the heads in memory; files stay."""
        self._memory.clear()

    def _remember(self, key: tuple[int, ...], prefix: Any) -> None:
        self._memory[key] = prefix
        self._memory.move_to_end(key)
        while len(self._memory) > IN_MEMORY:
            self._memory.popitem(last=False)

    def _path(self, key: tuple[int, ...]) -> Path | None:
        if self._folder is None:
            return None
        digest = hashlib.sha256(f"{self._backend.fingerprint} {key}".encode()).hexdigest()
        return self._folder / f"{digest[:40]}.safetensors"

    @staticmethod
    def _trim(folder: Path) -> None:
        for left in folder.glob("*.tmp"):  # of a process that was killed while it wrote
            if time.time() - left.stat().st_mtime > 3600:
                left.unlink(missing_ok=True)
        files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime, reverse=True)
        total = 0
        for file in files:
            total += file.stat().st_size
            if total > ON_DISK:
                file.unlink(missing_ok=True)
