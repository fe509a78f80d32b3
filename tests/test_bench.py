"""The bench reports what it should; how fast anything is is not for tests to say."""

from __future__ import annotations

import json

import torch

from pcdlab import bench
from pcdlab.bench import run_bench


def test_peak_bytes_sees_what_was_alive_at_once() -> None:
    def work() -> None:
        for _ in range(3):
            a = torch.ones(1_000_000)  # 4 MB
            b = a + 1  # 4 MB more, then both go
            del a, b

    assert 8_000_000 <= bench._peak_bytes(work) < 9_000_000


def test_a_bench_has_the_promised_rows() -> None:
    result = run_bench("spam_phishing", "smollm2-135m", 1, lambda line: None)
    json.dumps(result)
    assert {row["engine"] for row in result["rows"]} == {"tree-cold", "tree-warm", "rows"}
    for row in result["rows"]:
        assert row["schema_valid"] == 1.0
        assert row["fields"] == 8
        assert 0 <= row["agreement"] <= 1
    cold, warm, rows = (next(r for r in result["rows"] if r["engine"] == e) for e in ("tree-cold", "tree-warm", "rows"))
    assert (cold["forward_passes"], warm["forward_passes"]) == (2, 1)
    assert rows["agreement"] == 1.0, "the same weights and numbers in another layout"
    assert rows["scoring_peak_bytes"] > 4 * warm["scoring_peak_bytes"]
