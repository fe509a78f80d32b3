"""One notebook: what it says of itself, and what running it gives.

Knows the notebook format, the parameters cell and papermill. Refuses to know where reports are kept, how they look, and
what a notebook computes.

A notebook runs in the interpreter that runs this code, whatever kernels are installed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcdlab.errors import ParameterError, ReportError
from pcdlab.schema import did_you_mean

__all__ = [
    "Failure",
    "Source",
    "execute",
    "find_notebooks",
    "parameter_defaults",
    "parse_parameters",
    "read_notebook",
    "read_source",
    "select_notebooks",
    "source_sha256",
    "write_notebook",
]

# --- Reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A source notebook, read once, so that what is hashed is what runs.

    Parameters
    ----------
    name : str
        Its stem, ``NN_name``.
    text : str
        The whole file.
    sha256 : str
        As from `source_sha256`.
    cells : int
        How many cells it has.
    title : str
        Its first heading, else its name.
    question : str
        The first paragraph after that, as Markdown in one line; may be empty.
    defaults : dict of str to object
        As from `parameter_defaults`.
    """

    name: str
    text: str
    sha256: str
    cells: int
    title: str
    question: str
    defaults: dict[str, Any]


def find_notebooks(notebooks_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """List the numbered notebooks, in order.

    Parameters
    ----------
    notebooks_dir : path-like, optional
        Default: ``notebooks/`` of the checkout the package is in, else of the working directory.

    Returns
    -------
    list of pathlib.Path
        Every ``NN_name.ipynb``.

    Raises
    ------
    ReportError
        If there is no such folder.
    """
    if notebooks_dir is not None:
        folder = Path(notebooks_dir)
        if not folder.is_dir():
            raise ReportError(f"{folder}: there is no such folder; give the one that holds the notebooks")
    else:
        places = [Path(__file__).parents[1] / "notebooks", Path("notebooks").absolute()]
        found = next((place for place in places if place.is_dir()), None)
        if found is None:
            raise ReportError(f"there is no notebooks folder at {places[0]}; run the command in a checkout of pcdlab")
        folder = found
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def select_notebooks(names: Sequence[str], notebooks: Sequence[Path]) -> list[Path]:
    """Pick notebooks by number, by stem or by an unambiguous part of the stem.

    Parameters
    ----------
    names : sequence of str
        ``"1"``, ``"01"``, ``"01_first_look"`` (with or without ``.ipynb``, with or without a folder) or ``"first"``.
        None at all means every notebook.
    notebooks : sequence of pathlib.Path
        What there is to pick from.

    Returns
    -------
    list of pathlib.Path
        In the order of `notebooks`, each once.

    Raises
    ------
    ParameterError
        If a name fits no notebook, or several.
    """
    stems = {path.stem: path for path in notebooks}
    picked: set[str] = set()
    for name in names:
        wanted = Path(name).name.removesuffix(".ipynb")
        fits = [wanted] if wanted in stems else []
        if not fits and wanted.isdecimal():
            fits = [stem for stem in stems if int(stem[:2]) == int(wanted)]
        if not fits and wanted:
            fits = [stem for stem in stems if wanted.lower() in stem.lower()]
        if len(fits) != 1:
            what = f"fits {', '.join(fits)}; write more of it" if fits else "fits no notebook"
            hint = "" if fits else f"{did_you_mean(wanted, stems)}; there are {', '.join(stems) or 'none'}"
            raise ParameterError(f"notebook {name!r} {what}{hint}")
        picked.add(fits[0])
    return [path for path in notebooks if path.stem in picked or not names]


def source_sha256(path: str | os.PathLike[str]) -> str:
    r"""Hash a source notebook as the metadata of its report does.

    Parameters
    ----------
    path : path-like
        A notebook file.

    Returns
    -------
    str
        Hexadecimal SHA-256 of its bytes, line ends taken as ``\n`` so that a checkout on Windows gives the same.
    """
    return hashlib.sha256(Path(path).read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def parameter_defaults(notebook: Mapping[str, Any]) -> dict[str, Any]:
    """Read the parameters cell of a notebook: the code cell tagged ``parameters``.

    Parameters
    ----------
    notebook : mapping
        A notebook of format 4.

    Returns
    -------
    dict of str to object
        Every name assigned at the top level of that cell, with its value if it is a literal, else the expression as
        text. Empty without such a cell.

    Raises
    ------
    ReportError
        If the cell is not valid Python.
    """
    cell = next((cell for cell in notebook["cells"] if "parameters" in cell["metadata"].get("tags", [])), None)
    defaults: dict[str, Any] = {}
    try:
        statements = ast.parse("".join(cell["source"])).body if cell else []
    except SyntaxError as error:
        raise ReportError(f"the parameters cell is not Python (line {error.lineno}: {error.msg}); correct it") from None
    for statement in statements:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        try:
            default = _jsonable(ast.literal_eval(value))
        except ValueError:
            default = ast.unparse(value)
        defaults.update({target.id: default for target in targets if isinstance(target, ast.Name)})
    return defaults


def parse_parameters(assignments: Iterable[str]) -> dict[str, Any]:
    """Read ``key=value`` texts, as given on a command line.

    Parameters
    ----------
    assignments : iterable of str
        A value that is JSON (``3``, ``true``, ``["a", "b"]``), or Python's ``True``, ``False`` or ``None``, is that
        value; anything else is the text itself.

    Returns
    -------
    dict of str to object

    Raises
    ------
    ParameterError
        If one is no ``key=value`` with a Python name as key, or a key comes twice.

    Examples
    --------
    >>> parse_parameters(["model=smollm2-135m", "runs=3", "fast=True", "note=a=b"])
    {'model': 'smollm2-135m', 'runs': 3, 'fast': True, 'note': 'a=b'}
    """
    parameters: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.isidentifier():
            raise ParameterError(f"parameter {assignment!r} is not key=value; write for example -p model=smollm2-135m")
        if key in parameters:
            raise ParameterError(f"parameter {key!r} is given twice; remove one")
        parameters[key] = _parse_value(text)
    return parameters


def _parse_value(text: str) -> Any:
    if text in {"True", "False", "None"}:
        return ast.literal_eval(text)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError:
        return text


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)  # NaN and Infinity are no JSON; as words they stay words


def _jsonable(value: Any) -> Any:
    return json.loads(json.dumps(value, default=repr))


def read_source(path: str | os.PathLike[str]) -> Source:
    """Read a source notebook.

    Parameters
    ----------
    path : path-like
        A notebook file of format 4.

    Returns
    -------
    Source

    Raises
    ------
    ReportError
        If it cannot be read or is no such notebook, or its parameters cell is not Python.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        notebook = json.loads(text)
        if notebook["nbformat"] != 4:
            raise ReportError(f"is in notebook format {notebook['nbformat']}; save it in format 4")
        title, question = _opening(notebook, path.stem)
        cells = len(notebook["cells"])
        return Source(path.stem, text, source_sha256(path), cells, title, question, parameter_defaults(notebook))
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReportError(f"{path}: not a notebook ({type(error).__name__}: {error}); save it from Jupyter") from error


def _opening(notebook: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Find a notebook's title (its first heading) and its question (the first paragraph after that)."""
    markdown = "\n\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    heading = re.search(r"^#\s+(.+?)\s*#*$", markdown, re.MULTILINE)
    after = markdown[heading.end() :] if heading else markdown
    blocks = (block.strip() for block in re.split(r"\n\s*\n", after))
    question = next((block for block in blocks if block and not re.match(r"#|!\[|<|\||[-*]\s|\d+\.\s|```", block)), "")
    title = heading[1] if heading else name
    return title, re.sub(r"\s*\n(>\s?)?", " ", question.removeprefix(">")).strip()


# --- Running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """Where and why a notebook stopped.

    Parameters
    ----------
    cell, cells : int
        The cell that failed, counted from 1 over all cells of the source notebook, and their number; cell 0 is a
        failure before the first cell.
    prompt : int or None
        The number in the ``In [n]`` in front of that cell, if it got one.
    error, message : str
        The exception's class name and text.
    saved : pathlib.Path or None
        The notebook with everything up to the failure, if any was written.
    """

    cell: int
    cells: int
    prompt: int | None
    error: str
    message: str
    saved: Path | None = None


def execute(
    source: Source,
    parameters: Mapping[str, Any],
    *,
    root: Path,
    scratch: Path,
    on_cell: Callable[[int], None] = lambda number: None,
) -> tuple[Any, Failure | None, float]:
    """Run a notebook with papermill.

    Parameters
    ----------
    source : Source
        What to run.
    parameters : mapping of str to object
        Values to put in place of its own.
    root : pathlib.Path
        The working directory of the notebook.
    scratch : pathlib.Path
        An existing folder for temporary files, left to the caller to remove.
    on_cell : callable, optional
        Gets the number of each cell before it runs, counted from 1 over the cells of the source.

    Returns
    -------
    notebook : nbformat.NotebookNode or None
        The executed notebook, up to and with a failure. It holds what it shows and no more: no machine paths, timings,
        progress bars or widget state. None if it did not even start.
    failure : Failure or None
        What stopped it.
    seconds : float
        Wall time.
    """
    import papermill
    from papermill.exceptions import PapermillExecutionError

    written, executed = scratch / f"{source.name}.source.ipynb", scratch / f"{source.name}.executed.ipynb"
    written.write_text(source.text, encoding="utf-8")
    _register_engine()
    failure: Failure | None = None
    at = 0

    def start_cell(number: int) -> None:
        nonlocal at
        at = number
        on_cell(number)

    started = time.monotonic()
    try:
        papermill.execute_notebook(
            _unformatted(written),
            _unformatted(executed),
            parameters=dict(parameters),
            engine_name="pcdlab",
            kernel_name="python3",
            language="python",
            progress_bar=False,
            start_timeout=300,
            resources={"metadata": {"path": str(root)}},
            on_cell=start_cell,
        )
    except PapermillExecutionError as error:
        failure = Failure(at, source.cells, error.exec_count, error.ename, _plain(error.evalue, root))
    except Exception as error:  # a kernel that does not start, or dies: the caller's other notebooks go on
        failure = Failure(at, source.cells, None, type(error).__name__, _plain(str(error), root))
    seconds = time.monotonic() - started
    if not executed.exists():
        return None, failure, seconds
    notebook = read_notebook(executed)
    _clean(notebook, root)
    return notebook, failure, seconds


def _unformatted(path: Path) -> str:
    return str(path).replace("{", "{{").replace("}", "}}")  # papermill fills in {…} in a path


def _register_engine() -> None:
    """Teach papermill an engine "pcdlab": its own, in this interpreter, that tells `on_cell` the cell's number."""
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from papermill.engines import NBClientEngine, NotebookExecutionManager, papermill_engines

    class ThisInterpreter(KernelSpecManager):
        """Whatever kernels are installed, "python3" is the interpreter that runs this."""

        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(argv=argv, display_name="Python 3", language="python")

    class KernelManager(AsyncKernelManager):
        def __init__(self, **options: Any) -> None:
            super().__init__(kernel_spec_manager=ThisInterpreter(), **options)

    class Engine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(
            cls,
            nb_man: NotebookExecutionManager,
            kernel_name: str,
            *,
            on_cell: Callable[[int], None],
            **options: Any,
        ) -> Any:
            cell_start = nb_man.cell_start

            def tell(cell: Any, cell_index: int, **more: Any) -> None:
                up_to = nb_man.nb.cells[: cell_index + 1]
                on_cell(sum("injected-parameters" not in other.metadata.get("tags", []) for other in up_to))
                cell_start(cell, cell_index, **more)

            nb_man.cell_start = tell
            return super().execute_managed_notebook(nb_man, kernel_name, kernel_manager_class=KernelManager, **options)

    papermill_engines.register("pcdlab", Engine)


# --- What an executed notebook keeps ----------------------------------------------------------------------------------


def read_notebook(path: Path) -> Any:
    """Read a notebook as an `nbformat.NotebookNode` of format 4."""
    import nbformat

    return nbformat.read(path, as_version=4)


def write_notebook(notebook: Any, path: Path) -> None:
    """Write an `nbformat.NotebookNode`."""
    import nbformat

    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8", newline="\n")


def _clean(notebook: Any, root: Path) -> None:
    from nbformat import NotebookNode

    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info=notebook.metadata.get("language_info", {"name": "python"}),
    )
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if cell.metadata.get("tags") == []:
            del cell.metadata["tags"]
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell.id = "injected-parameters"  # papermill's is random
        if cell.cell_type == "code":
            cell.outputs = _clean_outputs(cell.outputs, root)


def _clean_outputs(outputs: Sequence[Any], root: Path) -> list[Any]:
    kept: list[Any] = []
    for output in outputs:
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
            continue  # nothing without a live kernel
        stream = output.output_type == "stream"
        if stream and kept and kept[-1].output_type == "stream" and kept[-1].name == output.name:
            kept[-1].text += output.text  # the kernel cuts streams anywhere
        else:
            kept.append(output)
    for output in kept:
        if output.output_type == "stream":
            output.text = _without_paths(_last_states(output.text), root)
        elif output.output_type == "error":
            output.evalue = _without_paths(output.evalue, root)
            output.traceback = [_without_paths(line, root) for line in output.traceback]
        else:
            for kind, value in output.data.items():
                if isinstance(value, str) and (kind.startswith("text/") or kind == "image/svg+xml"):
                    output.data[kind] = _without_paths(value, root)
    return kept


def _last_states(text: str) -> str:
    """Show lines as a terminal does once it is over: after a carriage return, the later text."""
    return "\n".join(re.sub(r"^.*\r(?=[^\r])", "", line).rstrip("\r") for line in text.split("\n"))


def _without_paths(text: str, root: Path) -> str:
    """Replace the paths of this machine by what they stand for."""
    text = re.sub(r"[\w./\\:~-]*ipykernel_\d+[/\\]\d+\.py", "cell", text)  # how tracebacks name a cell
    paths = sysconfig.get_paths()
    names = {
        str(root): "",
        paths["purelib"]: "site-packages",
        paths["platlib"]: "site-packages",
        paths["stdlib"]: "python",
        os.environ.get("PCDLAB_CACHE", ""): "$PCDLAB_CACHE",
        sys.executable: "python",
        tempfile.gettempdir(): "$TMPDIR",
        str(Path.home()): "~",
    }
    for path in sorted(filter(None, names), key=len, reverse=True):
        if len(path) > 1:  # not "/"
            short = names[path]
            begin = r"(?:(?<![\w.-])|(?<=\dm))" + re.escape(path)  # \dm: the end of a colour's escape sequence
            text = re.sub(begin + r"[/\\]", f"{short}/" if short else "", text)
            text = re.sub(begin + r"(?![\w.-])", short or ".", text)
    return text


def _plain(text: str, root: Path) -> str:
    """Make an error's text fit for a line: no colours, no machine paths."""
    return _without_paths(re.sub(r"\x1b\[[0-9;]*m", "", text), root).strip()
