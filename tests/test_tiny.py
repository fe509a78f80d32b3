"""The tiny model is one model for every backend, and opening it names what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from pcdlab import models
from pcdlab.backends.conformance import check_backend
from pcdlab.backends.tiny import write_tiny
from pcdlab.errors import BackendError, ModelError, ParameterError

TOKENS = np.random.default_rng(0).integers(259, size=80).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


def test_every_backend_reads_the_same_weights(folder: Path) -> None:
    loaded, missing = models.load_each(folder, dtype="float32")
    assert "torch" in loaded
    assert set(loaded) | set(missing) == set(models.BACKENDS)
    reference = loaded["torch"][0].stream(None).feed(TOKENS)
    assert reference.std() > 0.5  # no flat distributions, which would agree whatever went wrong
    for backend, codec in loaded.values():
        np.testing.assert_allclose(backend.stream(None).feed(TOKENS), reference, atol=3e-5, rtol=0)
        assert codec.decode(TOKENS) == loaded["torch"][1].decode(TOKENS)
        assert all(check.passed is not False for check in check_backend(backend))


def test_the_seed_decides(folder: Path, tmp_path: Path) -> None:
    again, other = write_tiny(tmp_path / "again"), write_tiny(tmp_path / "other", seed=1)
    weights = [(path / "model.safetensors").read_bytes() for path in (folder, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_nothing_is_overwritten(folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(ModelError, match="already exists"):
        write_tiny(folder)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_is_not_installed_is_named_with_its_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pcdlab.backends.llamacpp", "pcdlab.backends.llamacpp_library", "pcdlab.backends.llamacpp_codec"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import pcdlab.backends

    monkeypatch.delattr(pcdlab.backends, "llamacpp", raising=False)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    loaded, missing = models.load_each(folder, ["torch", "llamacpp"])
    assert list(loaded) == ["torch"]
    assert "pip install 'pcdlab[llamacpp]'" in missing["llamacpp"]


def test_a_model_one_backend_has_no_file_of(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    bare = write_tiny(tmp_path / "bare")
    (bare / "tiny.gguf").unlink()
    loaded, missing = models.load_each(bare, ["torch", "llamacpp"])
    assert list(loaded) == ["torch"]
    assert "holds no GGUF file" in missing["llamacpp"]


def test_a_backend_that_does_not_exist(folder: Path) -> None:
    with pytest.raises(BackendError, match="'jax' does not exist"):
        models.load_each(folder, ["jax"])


# --- other number formats ---------------------------------------------------------------------------------------------


def test_written_again_in_another_format(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from pcdlab.backends.llamacpp_library import quantise

    reference = models.load(folder, "llamacpp", "float32")[0].plain_logits(TOKENS)
    distance = {}
    for kind in ("F16", "Q8_0", "Q4_0"):
        path = quantise(folder / "tiny.gguf", tmp_path / f"{kind}.gguf", kind)
        backend = models.load(path, "llamacpp", "float16")[0]
        assert backend.dtype == kind
        distance[kind] = float(np.abs(backend.plain_logits(TOKENS) - reference).mean())
    assert 0 < distance["F16"] < distance["Q8_0"] < distance["Q4_0"]


def test_formats_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from pcdlab.backends.llamacpp_library import quantise

    with pytest.raises(ParameterError, match="did you mean 'Q8_0'"):
        quantise(folder / "tiny.gguf", tmp_path / "a.gguf", "Q8_O")
    (tmp_path / "no.gguf").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"no\.gguf: llama\.cpp cannot write this file as F16"):
        quantise(tmp_path / "no.gguf", tmp_path / "b.gguf", "F16")
