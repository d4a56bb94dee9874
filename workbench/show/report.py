"""From an executed notebook to a page that works offline, and to figure files.

Figures are stored in a notebook as plotly's own data, which a plain HTML export does not draw. Here each becomes an
HTML fragment and plotly.js goes into the page once. Nothing is loaded from the network.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import plotly.io
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from plotly.offline import get_plotlyjs

from workbench.measure.records import write_json

PLOTLY_MIME = "application/vnd.plotly.v1+json"
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"

#: The stock page without the scripts it would fetch (require.js, MathJax, Mermaid, widgets).
_TEMPLATE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js %}<script>{{ resources.plotly_js }}</script>{% endblock %}
{% block jupyter_widgets %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block html_head_css %}<style>
body.jp-Notebook { max-width: 1100px; margin: 0 auto; }
.jp-RenderedHTMLCommon table { font-variant-numeric: tabular-nums; }
</style>{% endblock %}
"""


def read_notebook(path: str | Path) -> NotebookNode:
    """An executed notebook in format 4."""
    return nbformat.read(path, as_version=4)


def figures_of(notebook: NotebookNode) -> list[tuple[str, dict[str, Any]]]:
    """(file stem, plotly figure as a dict) of every figure in the outputs; stems are numbered and carry the title."""
    figures = []
    for output in _outputs(notebook):
        figure = output.get("data", {}).get(PLOTLY_MIME)
        if figure is not None:
            title = figure.get("layout", {}).get("title", {})
            words = re.findall(r"[a-z0-9]+", str(title.get("text", "")).lower())
            figures.append(("-".join([f"{len(figures) + 1:02d}", *words[:8]]), figure))
    return figures


def save_figures(notebook: NotebookNode, folder: str | Path) -> list[str]:
    """Writes each figure as `<stem>.json` (for plotly.io.read_json) and `<stem>.html` (a fragment, no plotly.js)."""
    target = Path(folder)
    target.mkdir(exist_ok=True)
    stems = []
    for stem, figure in figures_of(notebook):
        write_json({"data": figure["data"], "layout": figure["layout"]}, target / f"{stem}.json")
        (target / f"{stem}.html").write_text(_fragment(figure), encoding="utf-8")
        stems.append(stem)
    return stems


def write_report(notebook: NotebookNode, path: str | Path, title: str) -> Path:
    """Writes the notebook as one self-contained HTML page."""
    page = copy.deepcopy(notebook)
    page.metadata["title"] = title
    page.metadata.pop("widgets", None)
    found = bool(figures_of(page))
    for output in _outputs(page):
        data = output.get("data", {})
        data.pop(WIDGET_MIME, None)  # a widget needs a kernel; its text form stays
        if PLOTLY_MIME in data:
            output["data"] = NotebookNode({"text/html": _fragment(data[PLOTLY_MIME])})
    exporter = HTMLExporter(raw_template=_TEMPLATE, embed_images=True)
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    html, _ = exporter.from_notebook_node(page, resources={"plotly_js": get_plotlyjs() if found else ""})
    file = Path(path)
    file.write_text(html, encoding="utf-8")
    return file


def _outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def _fragment(figure: dict[str, Any]) -> str:
    plain = json.loads(json.dumps({"data": figure["data"], "layout": figure["layout"]}))
    return plotly.io.to_html(
        plain,
        full_html=False,
        include_plotlyjs=False,
        validate=False,
        config={"responsive": True, "displaylogo": False},
    )
