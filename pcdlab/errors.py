"""The one exception family of pcdlab.

Every message names the file, field or parameter it is about, what was seen, and how to fix it. Nothing else is
defined here.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "BankError",
    "ContextLengthError",
    "ModelError",
    "NumericsError",
    "ParameterError",
    "PcdlabError",
    "PresetError",
    "ReportError",
    "SchemaError",
    "TokenizationError",
]


class PcdlabError(Exception):
    """Base of every error pcdlab raises on purpose."""


class SchemaError(PcdlabError):
    """A schema that cannot be asked: no fields, unknown type, duplicate or empty labels, a dependency cycle."""


class PresetError(PcdlabError):
    """A preset file that cannot be read or does not have a preset's shape."""


class BankError(PcdlabError):
    """A labelled bank or a run that cannot be read, fetched or imported, or whose labels are outside its schema."""


class ParameterError(PcdlabError):
    """A function parameter or command-line option outside its domain."""


class ModelError(PcdlabError):
    """A model that cannot be found, fetched, converted or loaded."""


class BackendError(PcdlabError):
    """A framework that is not installed, or one that failed while it ran a model."""


class NumericsError(BackendError):
    """Logits that are NaN or infinite, where a decision would be a guess."""


class TokenizationError(PcdlabError):
    """A prompt or value that this tokenizer cannot place on clean token boundaries."""


class ContextLengthError(PcdlabError):
    """A prompt that is longer than the model's context."""


class ReportError(PcdlabError):
    """A report that cannot be built."""
