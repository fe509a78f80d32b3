"""What reports look like: an executed notebook as a page, and the indexes of a reports folder.

Knows HTML and Markdown. Refuses to know how a notebook is run, and touches no file.

Every page stands alone: styles and pictures inside, no scripts, nothing from the network.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Entry", "index_page", "readme", "report_page"]


@dataclass(frozen=True)
class Entry:
    """A report as the indexes show it.

    Parameters
    ----------
    name, title, question : str
        As in `pcdlab.notebooks.Source`.
    kind : {"current", "older", "failed", "missing"}
        The state in a word, for its colour.
    state : str
        The state for people.
    files : mapping of str to str
        File names by what they are, "page", "notebook" or "failed run"; only of what there is.
    model : str
        The alias of the model it ran with; empty if the notebook has no parameter ``model``.
    seconds : float or None
        How long the run took, if known.
    """

    name: str
    title: str
    question: str
    kind: Literal["current", "older", "failed", "missing"]
    state: str
    files: Mapping[str, str]
    model: str = ""
    seconds: float | None = None


def report_page(notebook: Any, title: str, file: str) -> str:
    """Make a page of an executed notebook.

    Parameters
    ----------
    notebook : nbformat.NotebookNode
        What to show. Its inputs are shown too.
    title : str
        For the browser's tab.
    file : str
        Where the page links to for the notebook itself.

    Returns
    -------
    str
        HTML. Formulas are MathML.
    """
    import jinja2
    from latex2mathml.converter import convert
    from nbconvert import HTMLExporter
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
    from traitlets.config import Config

    class Renderer(IPythonRenderer):
        """Formulas as MathML, which browsers show without the MathJax that nbconvert would load from the network."""

        def block_math(self, body: str) -> str:
            return self._math(body, "block")

        def inline_math(self, body: str) -> str:
            return self._math(body, "inline")

        def latex_environment(self, name: str, body: str) -> str:
            return self._math(f"\\begin{{{name}}}{body}\\end{{{name}}}", "block")

        def _math(self, tex: str, display: str) -> str:
            try:
                mathml = convert(tex.replace("{aligned}", "{align*}"), display=display)
            except Exception:  # whatever the converter trips over
                mathml = "<mi>\\"
            if "<mi>\\" in mathml:  # a command it does not know: the formula stays readable as TeX
                return f"<code>{self.escape_html(tex)}</code>"
            # the space TeX puts between the name of a function and its argument
            return re.sub(r"(<mi>[A-Za-z]{2,}</mi>)(?=<m[a-np-z])", r'\1<mspace width="0.17em" />', mathml)

    class Exporter(HTMLExporter):
        @jinja2.pass_context
        def markdown2html(self, context: Any, text: str) -> str:
            attachments = context.get("cell", {}).get("attachments", {})
            renderer = Renderer(escape=False, attachments=attachments, embed_images=True)
            return MarkdownWithMath(renderer=renderer).render(text)

    notebook = copy.deepcopy(notebook)
    notebook.metadata["title"] = title
    config = Config({"CSSHTMLHeaderPreprocessor": {"style": "default"}})
    exporter = Exporter(config=config, raw_template=_REPORT)
    resources = {"style": _STYLE + _REPORT_STYLE, "executed": file}
    return exporter.from_notebook_node(notebook, resources=resources)[0]


def index_page(
    entries: Sequence[Entry], parameters: Mapping[str, Any] | None = None, machine: Mapping[str, Any] | None = None
) -> str:
    """Make the page to start reading from.

    Parameters
    ----------
    entries : sequence of Entry
        One per notebook, in order.
    parameters : mapping, optional
        What the notebooks were run with instead of their own parameters.
    machine : mapping, optional
        Where the last report was run, as from `pcdlab.reports.machine`.

    Returns
    -------
    str
        HTML.
    """
    import jinja2
    import mistune

    environment = jinja2.Environment(autoescape=True)
    environment.filters["markdown"] = mistune.create_markdown(escape=True)
    environment.filters["duration"] = _duration
    return environment.from_string(_INDEX).render(style=_STYLE, entries=entries, parameters=parameters, machine=machine)


def readme(entries: Sequence[Entry]) -> str:
    """Make the index for people who read the reports on a code host.

    Parameters
    ----------
    entries : sequence of Entry
        One per notebook, in order. Those without an executed notebook are left out.

    Returns
    -------
    str
        Markdown. The same for the same notebooks, whatever machine ran them.
    """
    rows = [
        f"| [{entry.title}]({entry.files['notebook']}) | {entry.question.replace('|', chr(92) + '|')} | {entry.model} |"
        for entry in entries
        if "notebook" in entry.files
    ]
    return _README.format(rows="\n".join(rows))


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 99.5 else f"{seconds / 60:.0f} min"


# --- Templates --------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --soft: #59636e; --line: #d8dee4; --tint: #f6f8fa; --link: #0a58ca; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff; font: 1rem/1.6 system-ui, "Segoe UI", Roboto, "Helvetica Neue",
  "Liberation Sans", Arial, sans-serif; }
a { color: var(--link); }
a:focus-visible, [tabindex]:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
nav, main { max-width: 60rem; margin: 0 auto; padding: 0 1.25rem; }
nav { display: flex; gap: 1.5rem; padding-top: 1rem; font-size: .9rem; }
main { padding-bottom: 4rem; }
h1, h2, h3, h4 { line-height: 1.25; margin: 2em 0 .6em; } h1 { font-size: 2rem; margin-top: 1em; }
h2 { font-size: 1.4rem; padding-top: .8em; border-top: 1px solid var(--line); } h3 { font-size: 1.15rem; }
pre, code { font: .86em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
p code, li code, td code { padding: .1em .3em; background: var(--tint); border-radius: 3px; }
blockquote { margin: 1em 0; padding-left: 1em; border-left: 4px solid var(--line); color: var(--soft); }
img, svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: 1em 0; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35em .8em; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { border-bottom: 2px solid var(--soft); }
table.dataframe, table.dataframe th, table.dataframe td { border-width: 0 0 1px; }
table.dataframe td, table.dataframe thead th { text-align: right; }
math[display="block"] { margin: 1em 0; overflow-x: auto; }
mtd[columnalign="right"] { text-align: right; padding-right: 0; }
mtd[columnalign="left"] { text-align: left; padding-left: 0; }
"""

_REPORT_STYLE = """
.jp-InputPrompt, .jp-OutputPrompt { display: none; }
.jp-CodeCell .jp-InputArea-prompt { display: block; float: left; width: 4.5rem; margin-left: -5rem; padding-top: .75em;
  text-align: right; color: var(--soft); font: .75em/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.jp-CodeCell { margin: 1.2em 0; }
.highlight { background: var(--tint); border: 1px solid var(--line); border-radius: 4px; }
.highlight pre { margin: 0; padding: .7em 1em; overflow-x: auto; line-height: 1.5 !important; }
.jp-OutputArea-output { overflow-x: auto; padding: .3em 0; }
.jp-RenderedText pre { margin: .2em 0; padding: .2em 1em; border-left: 3px solid var(--line); }
[data-mime-type$="stderr"] pre { border-color: #d4a72c; background: #fff8e6; }
.anchor-link { margin-left: .4em; text-decoration: none; opacity: 0; }
:hover > .anchor-link, .anchor-link:focus { opacity: 1; }
.ansi-bold { font-weight: bold; } .ansi-red-fg { color: #b42318; } .ansi-green-fg { color: #116329; }
.ansi-yellow-fg { color: #7d4e00; } .ansi-blue-fg { color: #0550ae; } .ansi-cyan-fg { color: #1b6b78; }
@media (max-width: 70rem) { .jp-CodeCell .jp-InputArea-prompt { display: none; } }
@media print { nav { display: none; } .highlight pre { white-space: pre-wrap; } }
"""

_REPORT = """
{%- extends "lab/index.html.j2" -%}
{% block html_head_js %}{% endblock %}
{% block jupyter_widgets %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block notebook_css %}<style>{{ resources.style }}</style>{% endblock %}
{% block body_header %}
<body class="jp-Notebook">
<nav aria-label="Reports"><a href="index.html">All reports</a>
<a href="{{ resources.executed }}">This as a notebook</a></nav>
<main>
{% endblock %}
"""

_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>pcdlab reports</title>
<style>{{ style | safe }}
ol { list-style: none; margin: 2rem 0 0; padding: 0; }
li { display: grid; grid-template-columns: 3.5rem 1fr; padding: 1.3rem 0; border-top: 1px solid var(--line); }
.number { color: var(--soft); font-size: 1.3rem; line-height: 1.4; font-variant-numeric: tabular-nums; }
h2 { margin: 0; padding: 0; border: 0; font-size: 1.3rem; line-height: 1.4; } li p { margin: .3rem 0 .6rem; }
.about { color: var(--soft); margin: .2rem 0; }
.facts { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; align-items: baseline; font-size: .9rem;
  color: var(--soft); }
.state { padding: 0 .6em; border: 1px solid; border-radius: 1em; }
.current { color: #116329; background: #e9f7ec; } .older { color: #7d4e00; background: #fff8e6; }
.failed { color: #b42318; background: #fff1f0; } .missing { color: var(--soft); background: var(--tint); }
</style>
</head>
<body>
<main>
<h1>pcdlab reports</h1>
<p class="about">{{ entries | selectattr("kind", "eq", "current") | list | length }} of {{ entries | length }} reports
are up to date.
{%- for key, value in (parameters or {}).items() %} <code>{{ key }} = {{ value | tojson }}</code>{% endfor %}
{%- if machine %} Last run on {{ machine.cpu }}, {{ machine.cores }} cores, {{ machine.memory_gib }} GiB.{% endif %}
<code>pcdlab report</code> runs what has changed.</p>
<ol>
{% for entry in entries %}{% set link = entry.files.page or entry.files.notebook %}
<li>
<span class="number" aria-hidden="true">{{ entry.name[:2] }}</span>
<article>
<h2>{% if link %}<a href="{{ link }}">{{ entry.title }}</a>{% else %}{{ entry.title }}{% endif %}</h2>
{{ entry.question | markdown | safe }}
<div class="facts">
<span class="state {{ entry.kind }}">{{ entry.state }}</span>
{%- if entry.model %}<span>{{ entry.model }}</span>{% endif %}
{%- if entry.seconds is not none %}<span>ran {{ entry.seconds | duration }}</span>{% endif %}
{%- for label, file in entry.files.items() %}
<a href="{{ file }}" aria-label="{{ label }}: {{ entry.title }}">{{ label }}</a>{% endfor %}
</div>
</article>
</li>
{% endfor %}</ol>
</main>
</body>
</html>
"""

_README = """# Reports

The notebooks of this project, as they ran last. `pcdlab report` runs those that have changed and makes a page of each,
with `index.html` to start from.

| Report | Question | Model |
| --- | --- | --- |
{rows}
"""
