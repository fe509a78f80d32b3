"""Names lead to GGUF files: paths, the models/ folder, aliases, Ollama's store."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from pcdlab import models
from pcdlab.errors import BackendError, ModelError
from pcdlab.gguf_files import find_gguf, ollama_models


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))


def touch(path: str) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"GGUF")
    return file


def ollama(name: str, layers: list[tuple[str, str]], blobs: bool = True) -> None:
    """Put a model into the store; layers are (kind, digest)."""
    manifest = Path("store/manifests", name)
    manifest.parent.mkdir(parents=True, exist_ok=True)
    entries = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest} for kind, digest in layers]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": entries}), encoding="utf-8")
    for _, digest in layers if blobs else []:
        touch(f"store/blobs/{digest.replace(':', '-')}")


def test_paths_and_folders() -> None:
    file = touch("somewhere/a.Q4_1.gguf")
    assert find_gguf(file) == file
    assert find_gguf("somewhere") == file
    touch("somewhere/b.gguf")
    with pytest.raises(ModelError, match=r"2 GGUF files \(a.Q4_1.gguf, b.gguf\)"):
        find_gguf("somewhere")
    Path("empty").mkdir()
    with pytest.raises(ModelError, match="holds no GGUF file"):
        find_gguf("empty")


def test_of_a_split_model_the_first_part() -> None:
    for part in (1, 2, 3):
        touch(f"split/m-{part:05d}-of-00003.gguf")
    assert find_gguf("split").name == "m-00001-of-00003.gguf"


@pytest.mark.parametrize("name", ["tiny.Q8_0", "tiny.Q8_0.gguf"])
def test_the_models_folder(name: str) -> None:
    file = touch("models/tiny.Q8_0.gguf")
    assert find_gguf(name) == file


def test_the_models_folder_comes_before_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = models.catalogue()[0]
    inside = touch("cache/packed.gguf")
    monkeypatch.setattr(models, "gguf_files", lambda found: [inside] if found == spec else [])
    assert find_gguf(spec.alias) == inside
    file = touch(f"models/{spec.alias}.gguf")
    assert find_gguf(spec.alias) == file


def test_an_alias_leads_to_the_first_of_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [touch(f"cache/m-0000{i}-of-00002.gguf") for i in (1, 2)]
    monkeypatch.setattr(models, "gguf_files", lambda spec: parts)
    assert find_gguf("qwen2.5-0.5b") == parts[0]


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("registry.ollama.ai/library/smollm2/135m", "smollm2:135m"),
        ("registry.ollama.ai/library/smollm2/latest", "smollm2"),
        ("registry.ollama.ai/library/smollm2/latest", "library/smollm2"),
        ("registry.ollama.ai/someone/tuned/v1.2", "someone/tuned:v1.2"),
        ("hf.co/org/Model-GGUF/Q4_K_M", "hf.co/org/Model-GGUF:Q4_K_M"),
    ],
)
def test_ollama(stored: str, asked: str, tmp_path: Path) -> None:
    ollama(stored, [("model", "sha256:ab12"), ("template", "sha256:cd34")])
    assert find_gguf(asked) == tmp_path / "store/blobs/sha256-ab12"
    (listed,) = ollama_models()
    assert find_gguf(listed) == find_gguf(asked)


def test_ollama_beside_the_point() -> None:
    ollama("registry.ollama.ai/library/gone/latest", [("model", "sha256:ab12")], blobs=False)
    with pytest.raises(ModelError, match=r"sha256-ab12 is missing; fetch it again with `ollama pull gone`"):
        find_gguf("gone")
    ollama("registry.ollama.ai/library/lora/latest", [("model", "sha256:1"), ("adapter", "sha256:2")])
    with pytest.raises(ModelError, match="adapter"):
        find_gguf("lora")
    Path("store/manifests/registry.ollama.ai/library/broken").mkdir()
    Path("store/manifests/registry.ollama.ai/library/broken/latest").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="names no model file"):
        find_gguf("broken")
    touch("outside/latest")
    for name in ("../../outside", "..:x", "a/b/c/d/e", ""):
        with pytest.raises(ModelError):
            find_gguf(name)


def test_without_the_package_there_is_an_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("pcdlab.backends.llamacpp")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(BackendError, match=r"not installed; run\n  pip install 'pcdlab\[llamacpp\]'"):
        importlib.import_module("pcdlab.backends.llamacpp")


def test_unknown_names_get_near_ones() -> None:
    touch("models/tiny-llama.gguf")
    ollama("registry.ollama.ai/library/smollm2/360m", [("model", "sha256:1")])
    with pytest.raises(ModelError, match="Did you mean tiny-llama"):
        find_gguf("tiny-lama")
    with pytest.raises(ModelError, match=r"Did you mean qwen2\.5-0\.5b"):
        find_gguf("qwen2.5-05b")
    with pytest.raises(ModelError, match="Did you mean smollm2:360m"):
        find_gguf("smollm2:36")
    with pytest.raises(ModelError, match=r"store/?\)?.*Give the path of a .gguf file"):
        find_gguf("zzzz")
