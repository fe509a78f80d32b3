"""pcdlab: fill a schema of closed fields from one or two forward passes of a language model.

>>> from pcdlab import Engine, Schema, load_preset  # doctest: +SKIP
>>> engine = Engine.load("smollm2-135m")  # doctest: +SKIP
>>> preset = load_preset("presets/spam_phishing.json")  # doctest: +SKIP
>>> engine.extract(preset.context, preset.schema).values  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pcdlab.engine import Engine
    from pcdlab.errors import PcdlabError
    from pcdlab.presets import Preset, load_preset
    from pcdlab.result import Extraction, FieldDecision
    from pcdlab.schema import Field, Schema

__all__ = ["Engine", "Extraction", "Field", "FieldDecision", "PcdlabError", "Preset", "Schema", "load_preset"]

__version__ = "0.1.0"

_HOMES = {
    "Engine": "engine",
    "Extraction": "result",
    "Field": "schema",
    "FieldDecision": "result",
    "PcdlabError": "errors",
    "Preset": "presets",
    "Schema": "schema",
    "load_preset": "presets",
}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the command line answers --help without waiting for a framework.
    if name not in _HOMES:
        raise AttributeError(f"module 'pcdlab' has no attribute {name!r}")
    return getattr(import_module(f"pcdlab.{_HOMES[name]}"), name)
