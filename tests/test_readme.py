"""README.md's Python: every block runs, pasted one after the other, under a small model with random weights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from brute_force import fresh_engine

from pcdlab.banks import load_bank
from pcdlab.engine import Engine
from pcdlab.studies.runs import run_study

ROOT = Path(__file__).parents[1]
RUN = "reports/runs/talks-smollm2-135m-40"


def test_the_blocks_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "presets", "presets")
    engine = fresh_engine("qwen")
    monkeypatch.setattr(Engine, "load", classmethod(lambda cls, name: engine))
    assert f'load_run("{RUN}")' in readme
    assert "pcdlab study talks --baseline grammar --limit 40 " in readme  # which writes that run
    run_study(load_bank("talks").first(40), engine, RUN, progress=False)
    names: dict[str, Any] = {"__name__": "readme"}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"README.md, Python block {number}", "exec", dont_inherit=True), names)
