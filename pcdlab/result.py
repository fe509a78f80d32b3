"""What an extraction returns: values, one decision per field, counted statistics.

Plain data with a few views of it. Knows nothing of how it came about.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pcdlab.schema import Field, Label

__all__ = ["Extraction", "FieldDecision", "Stats"]


@dataclass(frozen=True)
class FieldDecision:
    """One field's answer.

    Attributes
    ----------
    name : str
        The field.
    value : str, bool, int, float or None
        The chosen label.
    probability : float
        Share of the chosen label among the allowed labels' scores, in [0, 1].
    candidate_mass : float or None
        Probability, unconstrained, that the model's own continuation reaches a token that identifies an allowed label, in
        [0, 1]. Low: the model would rather have written something else. None where nothing was read (a field with one
        label).
    log_probs : dict
        Label → score, in label order. With method ``marginal`` or ``exact`` and normalisation ``sum`` this is the natural
        logarithm of the unconstrained probability; with other normalisations the normalised score; with ``walk`` and
        ``hybrid`` the logarithm of the label's share.
    method : str
        ``marginal``, ``exact``, ``walk``, ``hybrid``, or ``fixed`` for a field with one label.
    alternatives : tuple of (label, float)
        The other labels with their shares, most probable first.
    calibrated : bool
        Whether `value`, `probability` and `alternatives` are a calibrator's; `log_probs` are always the model's.
    """

    name: str
    value: Label
    probability: float
    candidate_mass: float | None
    log_probs: dict[Label, float]
    method: str
    alternatives: tuple[tuple[Label, float], ...] = ()
    calibrated: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; labels that become keys are written as their JSON text unless they are strings.

        Where a string is spelled like another label's JSON text (``"true"`` and ``true``), strings keep their quotes too.
        """
        keys = [k if isinstance(k, str) else Field.json(k) for k in self.log_probs]
        if len(set(keys)) < len(keys):
            keys = [Field.json(k) for k in self.log_probs]
        return {
            "value": self.value,
            "probability": self.probability,
            "candidate_mass": self.candidate_mass,
            "log_probs": dict(zip(keys, self.log_probs.values(), strict=True)),
            "alternatives": [{"value": value, "probability": share} for value, share in self.alternatives],
            "method": self.method,
            "calibrated": self.calibrated,
        }


@dataclass(frozen=True)
class Stats:
    """What it cost, counted while it ran.

    Attributes
    ----------
    forward_passes : int
        Times the model ran. Documents decided together share their passes and each report them.
    tokens_fed : int
        Tokens that went through the model's layers, all documents of the pass together.
    cached_tokens : int
        Prompt tokens of this document taken from the head cache instead.
    seconds : dict of str to float
        Wall-clock seconds by phase: ``tokenise``, ``head`` (running or loading the head), ``score`` (the passes over
        document and fields), ``assemble`` (decisions and result).
    documents : int
        Documents that were decided in the same passes, this one included.
    changes : tuple of int
        Joint mode: how many answers each refinement pass changed; the last one changed none, or settled the last field.
    """

    forward_passes: int
    tokens_fed: int
    cached_tokens: int
    seconds: dict[str, float]
    documents: int = 1
    changes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Extraction:
    """The answers for one document.

    Attributes
    ----------
    fields : dict of str to FieldDecision
        In schema order.
    stats : Stats
    warnings : tuple of str
        What a reader of the numbers should know.
    model, backend, dtype : str
        What computed them.
    """

    fields: dict[str, FieldDecision]
    stats: Stats
    warnings: tuple[str, ...] = ()
    model: str = ""
    backend: str = ""
    dtype: str = ""
    mode: str = "isolated"

    @property
    def values(self) -> dict[str, Label]:
        """Field → value, in schema order."""
        return {name: decision.value for name, decision in self.fields.items()}

    def low_confidence(self, threshold: float = 0.5) -> list[str]:
        """Names of the fields whose probability is below `threshold`, least confident first."""
        low = [d for d in self.fields.values() if d.probability < threshold]
        return [d.name for d in sorted(low, key=lambda d: d.probability)]

    def to_dict(self) -> dict[str, Any]:
        """One JSON-ready object: values, fields, stats, warnings, model, backend, dtype, mode."""
        return {
            "values": self.values,
            "fields": {name: decision.to_dict() for name, decision in self.fields.items()},
            "stats": asdict(self.stats),
            "warnings": list(self.warnings),
            "model": self.model,
            "backend": self.backend,
            "dtype": self.dtype,
            "mode": self.mode,
        }
