"""Model names → GGUF files: a path, the `models/` folder, a local Ollama store, an alias.

Knows where files lie and how Ollama names them. Refuses to know what is inside a GGUF file; `pcdlab.models` does what fetching
there is.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pcdlab import models
from pcdlab.errors import ModelError

__all__ = ["find_gguf", "ollama_models"]

MODELS_FOLDER = Path("models")

# How Ollama completes a name, and the kinds of layers its manifests list.
OLLAMA_HOST, OLLAMA_NAMESPACE, OLLAMA_TAG = "registry.ollama.ai", "library", "latest"
OLLAMA_MODEL, OLLAMA_ADAPTER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter"

_PART = re.compile(r"[\w.-]+(?::\d+)?")  # of an Ollama name; a host may have a port
_SPLIT = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")


def find_gguf(name: str | os.PathLike[str]) -> Path:
    """Return the GGUF file of a model.

    Parameters
    ----------
    name
        Tried in this order: a GGUF file, a folder with one; a file of the ``models/`` folder in the working directory, by name
        or without its ending; a model of the local Ollama store (``name`` or ``name:tag``), which is read directly: Ollama
        need not run; an alias of :func:`pcdlab.models.catalogue`, whose GGUF file is fetched on first use.

    Returns
    -------
    Path
        Of a model that is split over several files, the first.

    Raises
    ------
    ModelError
        If nothing bears that name, or several files do.
    """
    name = os.fspath(name)
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        return _only(_ggufs(path), f"folder {path}")
    if found := [file for file in _ggufs(MODELS_FOLDER) if name in (file.name, file.stem)]:
        return _only(found, f"{name!r} in {MODELS_FOLDER}/")
    if (found_in_store := _in_ollama(name)) is not None:
        return found_in_store
    if (spec := models.find(name)) is not None:
        return _only(_first_parts(models.gguf_files(spec)), f"alias {name!r}")
    aliases = [spec.alias for spec in models.catalogue() if models.checkpoint(spec, "llamacpp")]
    known = [*(file.stem for file in _ggufs(MODELS_FOLDER)), *ollama_models(), *aliases]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    raise ModelError(
        f"no GGUF file for {name!r}: it is not a file or folder, not in {MODELS_FOLDER}/, not an alias, and not in the Ollama "
        f"store ({' or '.join(map(str, _stores()))}). "
        + (f"Did you mean {' or '.join(near)}?" if near else "Give the path of a .gguf file.")
    )


def _ggufs(folder: Path) -> list[Path]:
    """GGUF files of a folder."""
    return _first_parts(sorted(file for file in folder.glob("*.gguf") if file.is_file()))


def _first_parts(files: list[Path]) -> list[Path]:
    """Files that are whole, or the first of a split model."""
    return [file for file in files if not (part := _SPLIT.search(file.name)) or part[1] == "00001"]


def _only(files: list[Path], where: str) -> Path:
    if len(files) == 1:
        return files[0]
    if not files:
        raise ModelError(f"{where} holds no GGUF file; give the path of a .gguf file")
    names = ", ".join(file.name for file in files)
    raise ModelError(f"{where}: {len(files)} GGUF files ({names}); give the path of the one you mean")


# --- Ollama -----------------------------------------------------------------------------------------------------


def ollama_models() -> list[str]:
    """Names of the models in the local Ollama store, as ``ollama list`` spells them.

    Returns
    -------
    list of str
        ``name:tag``, sorted; empty where there is no store.
    """
    return sorted({name for store in _stores() for name in _names(store)})


def _stores() -> list[Path]:
    """Where Ollama keeps models: as it was told, or where a user's and where the Linux service's store lies."""
    if chosen := os.environ.get("OLLAMA_MODELS"):
        return [Path(chosen).expanduser()]
    return [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]


def _names(store: Path) -> Iterator[str]:
    try:
        manifests = [file for file in (store / "manifests").glob("*/*/*/*") if file.is_file()]
    except OSError:  # the service's store may be closed to other users
        return
    for file in manifests:
        host, namespace, model, tag = file.parts[-4:]
        shown = [part for part, usual in ((host, OLLAMA_HOST), (namespace, OLLAMA_NAMESPACE)) if part != usual]
        if host != OLLAMA_HOST:
            shown = [host, namespace]
        yield "/".join([*shown, f"{model}:{tag}"])


def _in_ollama(name: str) -> Path | None:
    """The model blob of an Ollama name; None where no store has that name."""
    *path, last = name.split("/")
    model, _, tag = last.partition(":")
    defaults = (OLLAMA_HOST, OLLAMA_NAMESPACE)[: max(0, 2 - len(path))]
    parts = [*defaults, *path, model, tag or OLLAMA_TAG]
    if len(parts) != 4 or not all(_PART.fullmatch(part) and part.strip(".") for part in parts):
        return None
    for store in _stores():
        manifest = store.joinpath("manifests", *parts)
        try:
            if manifest.is_file():
                return _blob(store, manifest, name)
        except OSError as error:
            raise ModelError(f"Ollama model {name!r}: {manifest} cannot be read ({error})") from error
    return None


def _blob(store: Path, manifest: Path, name: str) -> Path:
    try:
        layers: dict[str, Any] = {
            layer["mediaType"]: layer for layer in json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        }
        digest = layers[OLLAMA_MODEL]["digest"]
    except (ValueError, LookupError, TypeError) as error:
        raise ModelError(
            f"Ollama model {name!r}: {manifest} names no model file ({error!r}); fetch it again with `ollama pull {name}`"
        ) from error
    if OLLAMA_ADAPTER in layers:
        raise ModelError(
            f"Ollama model {name!r} is an adapter on top of another model, which this backend does not apply; merge the two "
            "into one GGUF file"
        )
    blob = store / "blobs" / str(digest).replace(":", "-")
    if not blob.is_file():
        raise ModelError(f"Ollama model {name!r}: {blob} is missing; fetch it again with `ollama pull {name}`")
    return blob
