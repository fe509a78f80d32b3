"""The embedded model for tests that need it, which are skipped where it is not set up."""

from __future__ import annotations

from pathlib import Path

import pytest

from pcdlab import models


def embedded_model() -> Path:
    """Its folder."""
    spec = models.catalogue()[0]
    if (seen := models.status(spec)) != "ready":
        pytest.skip(f"the embedded model is not set up ({seen}); `make test` does it")
    return models.locate(spec.alias)
