"""The interactive tree explorer: widgets that choose what `tree_plot` draws. For a live notebook, not for a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import ipywidgets
import plotly.graph_objects as go

from workbench.show.tree_plot import Decoder, draft_tree, round_views
from workbench.types import GenerateResult, chain_tree

PLOTLY_MIME = "application/vnd.plotly.v1+json"


class TreeExplorer:
    """Sliders over the prompts and rounds of traced results, and the draft tree they point at.

    The figure goes into an `Output` as plotly's own data, so no widget copy of plotly is stored. All state is in the
    traits of the controls: set them from Python to drive it without a front end.

    Args:
        results: of `generate(..., trace=True)`, one a prompt, each with at least one round.
        tokenizer: turns ids into labels; None labels with ids.

    Attributes:
        prompt, round: sliders (zero-based prompt and round).
        show_ids: label with token ids.
        accepted_only: leave out the nodes that were not accepted.
        figure: the figure that is shown.
        widget: what a cell displays.

    Raises:
        ValueError: no results, a result without rounds, or one made without tracing.
    """

    def __init__(self, results: Sequence[GenerateResult], tokenizer: Decoder | None = None) -> None:
        self._views = [round_views(result) for result in results]
        empty = [i for i, views in enumerate(self._views) if not views]
        if not self._views or empty:
            raise ValueError(
                f"results: {len(self._views)} given, without rounds: {empty}; need one with rounds or more"
            )
        self._tokenizer = tokenizer
        self.prompt = ipywidgets.IntSlider(0, 0, len(self._views) - 1, description="prompt")
        self.round = ipywidgets.IntSlider(0, 0, len(self._views[0]) - 1, description="round")
        self.show_ids = ipywidgets.ToggleButton(False, description="token ids")
        self.accepted_only = ipywidgets.ToggleButton(False, description="accepted only")
        self._output = ipywidgets.Output()
        self._text = ipywidgets.HTML()
        self.figure = go.Figure()
        self.prompt.observe(self._on_prompt, "value")
        for control in (self.round, self.show_ids, self.accepted_only):
            control.observe(self._draw, "value")
        controls = ipywidgets.HBox([self.prompt, self.round, self.show_ids, self.accepted_only])
        self.widget = ipywidgets.VBox([controls, self._text, self._output])
        self._draw()

    def _on_prompt(self, change: dict[str, Any]) -> None:
        """Limits the round slider to the new prompt; draws once, whether or not that moves the slider."""
        last = len(self._views[change["new"]]) - 1
        moves = self.round.value > last
        self.round.max = last  # clamps the value, which draws
        if not moves:
            self._draw()

    def _draw(self, change: dict[str, Any] | None = None) -> None:
        view = self._views[self.prompt.value][self.round.value]
        tree, path = view.tree, view.path
        if self.accepted_only.value:
            kept = list(path[1:])
            tree = chain_tree(int(tree.tokens[0]), tree.tokens[kept].tolist(), tree.scores[kept].tolist())
            path = tuple(range(len(path)))
        title = f"Prompt {self.prompt.value}, round {self.round.value}"
        self.figure = draft_tree(tree, self._tokenizer, path, view.bonus, title, self.show_ids.value)
        emitted = len(view.path) - 1 + (view.bonus is not None)
        self._text.value = (
            f"{view.tree.num_nodes} nodes drafted, {len(view.path) - 1} accepted, {emitted} tokens emitted"
        )
        data = {PLOTLY_MIME: json.loads(self.figure.to_json()), "text/plain": title}
        self._output.outputs = ({"output_type": "display_data", "data": data, "metadata": {}},)

    def _ipython_display_(self) -> None:
        """Shows the widget when the explorer is the value of a cell."""
        from IPython.display import display  # only a notebook calls this

        display(self.widget)
