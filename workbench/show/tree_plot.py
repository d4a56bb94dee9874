"""The figure of one draft tree: nodes by depth, the accepted path marked."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import plotly.graph_objects as go

from workbench.types import DraftTree, GenerateResult

_REJECTED, _ACCEPTED, _ROOT, _BONUS = "#a9b4c2", "#2a9d4a", "#333333", "#e07b00"
_LABEL_CHARS = 14


class Decoder(Protocol):
    """The part of a tokenizer that labels need."""

    def decode(self, token_ids: list[int]) -> str:
        """Text of the ids."""
        ...


@dataclass(frozen=True)
class RoundView:
    """One traced round, ready to draw.

    Attributes:
        tree: the verified tree.
        path: accepted nodes, root first.
        bonus: token id the target added behind the path; None when a stop cut it off.
    """

    tree: DraftTree
    path: tuple[int, ...]
    bonus: int | None


def round_views(result: GenerateResult) -> list[RoundView]:
    """The rounds of a traced result.

    Raises:
        ValueError: the result was made without tracing.
    """
    views = []
    emitted = 1  # the first token comes from prefill
    for number, stats in enumerate(result.rounds):
        if stats.tree is None or stats.path is None:
            raise ValueError(f"round {number} has no tree; generate with trace=True")
        whole = stats.num_emitted == stats.num_accepted + 1
        emitted += stats.num_emitted
        views.append(RoundView(stats.tree, stats.path, result.token_ids[emitted - 1] if whole else None))
    return views


def token_label(token_id: int, tokenizer: Decoder | None, space: str = "·") -> str:
    """Visible text of a token: escapes for control characters, `space` for a space; the id without a tokenizer."""
    if tokenizer is None:
        return str(token_id)
    return repr(tokenizer.decode([token_id]))[1:-1].replace(" ", space) or f"<{token_id}>"


def tree_heights(tree: DraftTree) -> np.ndarray:
    """[N+1] float32 vertical place of each node: leaves one apart, best children first, a parent level with its first.

    Children are ordered by score, then by index, so the most likely continuation runs straight along the top.
    """
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node in range(1, len(tree.tokens)):
        children[tree.parents[node]].append(node)
    heights = np.zeros(len(tree.tokens), np.float32)
    row = 0
    stack = [0]
    while stack:
        node = stack.pop()
        heights[node] = row
        row += not children[node]
        stack += sorted(children[node], key=lambda n: (tree.scores[n], -n))
    return heights


def draft_tree(
    tree: DraftTree,
    tokenizer: Decoder | None = None,
    path: Sequence[int] = (),
    bonus: int | None = None,
    title: str = "Draft tree",
    show_ids: bool = False,
) -> go.Figure:
    """Figure of a draft tree: depth to the right, best continuation on top, accepted path in green.

    Args:
        tree: at least its root.
        tokenizer: turns ids into labels; None labels with ids.
        path: accepted nodes, root first.
        bonus: token id the target added behind the path, drawn as one more node.
        title: of the figure; the accepted count is appended when there is a path.
        show_ids: label with token ids even though there is a tokenizer.

    Raises:
        ValueError: `path` is no path from the root.
    """
    _check_path(tree, path)
    decoder = None if show_ids else tokenizer
    with_bonus = bonus is not None and len(path) > 0
    heights = tree_heights(_with_leaf(tree, path[-1], bonus) if with_bonus else tree)
    accepted = np.zeros(len(tree.tokens), bool)
    accepted[list(path)] = True
    figure = go.Figure()
    for flag, colour, width in ((False, _REJECTED, 1.2), (True, _ACCEPTED, 3.5)):
        _add_edges(figure, tree, heights, np.flatnonzero(accepted == flag), colour, width)
    _add_nodes(figure, tree, heights, [0], decoder, "root", _ROOT)
    for flag, name, colour in ((True, "accepted", _ACCEPTED), (False, "not accepted", _REJECTED)):
        nodes = [n for n in np.flatnonzero(accepted == flag) if n]
        if nodes:
            _add_nodes(figure, tree, heights, nodes, decoder, name, colour)
    if with_bonus:
        _add_bonus(figure, int(tree.depths[path[-1]]), heights[[path[-1], -1]].tolist(), bonus, decoder)
    if len(path):
        title += f": {len(path) - 1} of {tree.num_nodes} drafted nodes accepted"
    return _layout(figure, title, int(tree.depths.max()), float(heights.max()))


def _check_path(tree: DraftTree, path: Sequence[int]) -> None:
    for before, node in zip([-1, *path], path, strict=False):
        if not 0 <= node < len(tree.tokens) or tree.parents[node] != before:
            raise ValueError(f"path={tuple(path)}: node {node} is no child of node {before}; allowed: a path from 0")


def _add_edges(
    figure: go.Figure, tree: DraftTree, heights: np.ndarray, nodes: np.ndarray, colour: str, width: float
) -> None:
    """Lines from the parents to `nodes`, as one trace broken by gaps."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for node in nodes:
        parent = tree.parents[node]
        if parent >= 0:
            xs += [int(tree.depths[parent]), int(tree.depths[node]), None]
            ys += [float(heights[parent]), float(heights[node]), None]
    if xs:
        figure.add_scatter(
            x=xs, y=ys, mode="lines", line={"color": colour, "width": width}, hoverinfo="skip", showlegend=False
        )


def _add_nodes(
    figure: go.Figure,
    tree: DraftTree,
    heights: np.ndarray,
    nodes: Sequence[int],
    decoder: Decoder | None,
    name: str,
    colour: str,
) -> None:
    labels = [token_label(int(tree.tokens[n]), decoder) for n in nodes]
    hover = [
        f"{html.escape(label)}<br>token {tree.tokens[n]}, node {n}, depth {tree.depths[n]}"
        f"<br>score {tree.scores[n]:.4g}"
        for label, n in zip(labels, nodes, strict=True)
    ]
    figure.add_scatter(
        x=[int(tree.depths[n]) for n in nodes],
        y=[float(heights[n]) for n in nodes],
        mode="markers+text",
        name=name,
        text=[_short(label) for label in labels],
        textposition="top center",
        textfont={"size": 11},
        hovertext=hover,
        hoverinfo="text",
        marker={"size": 9, "color": colour},
    )


def _with_leaf(tree: DraftTree, parent: int, token: int) -> DraftTree:
    """The tree with one more node, the best child of `parent`, so that the layout keeps a place for it."""
    return DraftTree(
        np.append(tree.tokens, token),
        np.append(tree.parents, parent),
        np.append(tree.depths, tree.depths[parent] + 1),
        np.append(tree.scores, np.inf),
    )


def _add_bonus(figure: go.Figure, depth: int, places: list[float], bonus: int, decoder: Decoder | None) -> None:
    """The target's own token, one level below the last accepted node; `places` are the heights of the two."""
    label = token_label(bonus, decoder)
    figure.add_scatter(
        x=[depth, depth + 1],
        y=places,
        mode="lines",
        line={"color": _BONUS, "dash": "dot", "width": 2},
        hoverinfo="skip",
        showlegend=False,
    )
    figure.add_scatter(
        x=[depth + 1],
        y=places[1:],
        mode="markers+text",
        name="bonus token",
        text=[_short(label)],
        textposition="top center",
        textfont={"size": 11},
        hoverinfo="text",
        hovertext=[f"{html.escape(label)}<br>token {bonus}, added by the target"],
        marker={"size": 10, "color": "white", "line": {"color": _BONUS, "width": 2}},
    )


def _short(label: str) -> str:
    """A label for the figure: shortened, and with markup characters made harmless."""
    return html.escape(label if len(label) <= _LABEL_CHARS else label[: _LABEL_CHARS - 1] + "…")


def _layout(figure: go.Figure, title: str, depth: int, lowest: float) -> go.Figure:
    figure.update_xaxes(title_text="depth (tokens after the root)", dtick=1, range=[-0.4, depth + 1.5], zeroline=False)
    figure.update_yaxes(visible=False, range=[lowest + 0.6, -1.8])
    height = int(min(1400, 170 + 30 * (lowest + 1)))
    figure.update_layout(
        title_text=title,
        template="plotly_white",
        height=height,
        legend={"orientation": "h", "y": 1.02, "x": 1, "xanchor": "right", "yanchor": "bottom"},
        margin={"l": 30, "r": 30, "t": 80, "b": 55},
    )
    return figure
