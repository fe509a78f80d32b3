"""llama.cpp's own way to valid JSON: its GBNF grammar sampler, token by token, in a context of its own.

What someone with a GGUF file would run instead of the tree. The prompt's tokens are the engine's, greedy choice and grammar are
llama.cpp's, in the fast order of its own ``common_sampler``: the most probable token is asked about first, the whole vocabulary
only where the grammar refuses it. The grammar is about text; see :mod:`pcdlab.baselines.grammar` for what that means.

Knows llama-cpp-python's low-level API and compiled schemas. Needs the extra ``llamacpp``.
"""

from __future__ import annotations

import ctypes
import json
import os.path
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from pcdlab.backends.llamacpp_library import Model, last_errors, llama_cpp
from pcdlab.compile import CompiledSchema
from pcdlab.errors import BackendError

__all__ = ["GBNFGenerator", "gbnf"]

_UNKNOWN_ESCAPES = {"\\b": "\\x08", "\\f": "\\x0c"}  # of JSON, to GBNF


def gbnf(compiled: CompiledSchema) -> str:
    """The grammar of a schema's object behind its opening: one rule per field, what its lines share written once."""
    names = [f"field{i}" for i in range(len(compiled.fields))]
    rules = [f"root ::= {' '.join(names)}"]
    for name, item in zip(names, compiled, strict=True):
        lines = [compiled.format.line(item.field.name, item.field.json(label)) for label in item.field.labels]
        shared = os.path.commonprefix(lines) if len(lines) > 1 else ""  # noqa: RUF071 - of strings, no paths
        rules.append(f"{name} ::= {_quoted(shared)} ({' | '.join(_quoted(line[len(shared) :]) for line in lines)})")
    return "\n".join(rules)


def _quoted(text: str) -> str:
    written = json.dumps(text, ensure_ascii=False)
    for escape, known in _UNKNOWN_ESCAPES.items():
        # Pairs of backslashes are characters of the text, not the beginning of an escape.
        written = "\\\\".join(part.replace(escape, known) for part in written.split("\\\\"))
    return written


class GBNFGenerator:
    """A context of llama.cpp with nothing in it but one sequence.

    Parameters
    ----------
    model : Model
        The opened file.
    threads : int
        As many as the other side of the comparison has.
    cells : int
        Tokens of prompt and answer together.

    Attributes
    ----------
    length : int
        Tokens in the context.
    passes, tokens : int
        How often the model ran, and over how many tokens, since the context was made.

    Raises
    ------
    BackendError
        If llama.cpp has no room for the context.
    """

    def __init__(self, model: Model, threads: int, cells: int) -> None:
        self._model = model
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = cells
        params.n_threads = params.n_threads_batch = threads
        last_errors()
        self._context: Any = llama_cpp.llama_init_from_model(model.pointer, params)
        if not self._context:
            raise BackendError(f"{model.path}: llama.cpp has no room for {cells} tokens of context: {last_errors()}")
        weakref.finalize(self, llama_cpp.llama_free, self._context)
        self._memory: Any = llama_cpp.llama_get_memory(self._context)
        self._size = int(llama_cpp.llama_vocab_n_tokens(model.vocab))
        self._candidates = (llama_cpp.llama_token_data * self._size)()
        self._view: Any = np.ctypeslib.as_array(self._candidates)  # structured: id, logit, p
        self.length = self.passes = self.tokens = 0

    def keep(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1)
        self.length = min(length, self.length)

    def feed(self, tokens: Sequence[int]) -> None:
        """Run tokens behind what is there."""
        room = int(llama_cpp.llama_n_ctx(self._context)) - self.length
        if len(tokens) > room:  # llama.cpp would end the process
            raise BackendError(
                f"{self._model.path}: {len(tokens)} tokens do not fit the {room} cells left; make the context larger"
            )
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        last_errors()
        if code := llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(tokens))):
            raise BackendError(
                f"{self._model.path}: llama.cpp could not run {len(tokens)} tokens (code {code}): {last_errors()}"
            )
        self.length += len(tokens)
        self.passes += 1
        self.tokens += len(tokens)

    def write(self, grammar: str) -> list[int]:
        """Write greedily behind what was fed, under a grammar, to its end.

        Parameters
        ----------
        grammar : str
            From :func:`gbnf`.

        Returns
        -------
        list of int
            The tokens, without the one that ends the text.
        """
        vocab = self._model.vocab
        sampler: Any = llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode(), b"root")
        if not sampler:
            raise BackendError(f"{self._model.path}: llama.cpp refuses the schema's grammar: {last_errors()}")
        try:
            written: list[int] = []
            while True:
                token = self._choose(sampler)
                if llama_cpp.llama_vocab_is_eog(vocab, token):
                    return written
                written.append(token)
                llama_cpp.llama_sampler_accept(sampler, token)
                self.feed([token])
        finally:
            llama_cpp.llama_sampler_free(sampler)

    def _choose(self, sampler: Any) -> int:
        pointer = llama_cpp.llama_get_logits_ith(self._context, -1)
        logits = np.ctypeslib.as_array(pointer, (self._size,))
        best = int(logits.argmax())
        one = (llama_cpp.llama_token_data * 1)(llama_cpp.llama_token_data(best, float(logits[best]), 0.0))
        _apply(sampler, one, 1)
        if np.isfinite(one[0].logit):
            return best
        self._view["id"] = np.arange(self._size)
        self._view["logit"] = logits
        _apply(sampler, self._candidates, self._size)
        return int(self._view["id"][self._view["logit"].argmax()])


def _apply(sampler: Any, candidates: Any, size: int) -> None:
    array = llama_cpp.llama_token_data_array(candidates, size, -1, False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
