"""Figures, tables and widgets, without a front end."""

import json
import re

import numpy as np
import plotly.graph_objects as go
import pytest

from workbench.show import plots
from workbench.show.stream import coloured_text, token_origins
from workbench.show.tables import cell_text, checks_rows, scalar_columns, styled, text_table, text_tables
from workbench.show.tree_plot import draft_tree, round_views, token_label, tree_heights
from workbench.show.widgets import PLOTLY_MIME, TreeExplorer
from workbench.types import STAGES, DraftTree, GenerateResult, RoundStats, root_tree


class Words:
    """A tokenizer with awkward texts."""

    texts = ("<b>", "\n", " the", "</script>", "", "averyverylongtoken", "é")

    def decode(self, token_ids):
        return self.texts[token_ids[0] % len(self.texts)]


def row(prompt_set, method, **fields):
    base = {"speedup": 1.5, "tau": 2.0, "acceptance_by_depth": [0.5, 0.25], "stage_ms": {"draft": 1.0, "verify": 3.0}}
    return {"prompt_set": prompt_set, "method": method, **base, **fields}


ROWS = [
    row("maths", "ar", speedup=1.0, acceptance_by_depth=[]),
    row("maths", "dart"),
    row("all", "ar", speedup=1.0, acceptance_by_depth=[]),
    row("all", "dart", speedup=None, stage_ms={"verify": 2.0}),
]

#   0 -> 1 -> 3 -> 4
#     -> 2 -> 5
TREE = DraftTree(
    tokens=np.array([2, 0, 1, 3, 5, 6], np.int32),
    parents=np.array([-1, 0, 0, 1, 3, 2], np.int32),
    depths=np.array([0, 1, 1, 2, 3, 2], np.int32),
    scores=np.array([0.0, 0.2, 0.7, 0.1, 0.05, 0.6], np.float32),
)


def traced(*paths, tree=TREE, cut=False) -> GenerateResult:
    stats = [
        RoundStats(5, 6, len(p) - 1, len(p) - (cut and i == len(paths) - 1), {}, 1, 3, tree, p)
        for i, p in enumerate(paths)
    ]
    return GenerateResult(list(range(1 + sum(s.num_emitted for s in stats))), "", "length", 1, stats)


# --- bars and lines


@pytest.mark.parametrize("make", [plots.speedup, plots.tau, plots.acceptance_by_depth, plots.stage_times])
def test_figures_have_titles_and_fixed_colours(make):
    figure = make(ROWS)
    assert figure.layout.title.text and figure.layout.xaxis.title.text and figure.layout.yaxis.title.text
    for trace in figure.data:
        colour = trace.marker.color or trace.line.color
        assert colour in (*plots.METHOD_COLOURS.values(), *plots.STAGE_COLOURS.values())
        if trace.name == "dart":
            assert colour == plots.METHOD_COLOURS["dart"]
    json.loads(figure.to_json())


def test_an_unstated_speedup_has_no_bar():
    bars = {trace.name: list(trace.y) for trace in plots.speedup(ROWS).data}
    assert bars == {"ar": [1.0, 1.0], "dart": [1.5, None]}


def test_set_is_chosen_and_checked():
    assert "all" in plots.acceptance_by_depth(ROWS).layout.title.text
    figure = plots.acceptance_by_depth(ROWS, "maths")
    assert [(t.name, list(t.x), list(t.y)) for t in figure.data] == [("dart", [1, 2], [0.5, 0.25])]
    with pytest.raises(ValueError, match="allowed: maths, all"):
        plots.stage_times(ROWS, "code")
    with pytest.raises(ValueError, match="no rows"):
        plots.acceptance_by_depth([])


def test_stages_stack_in_order_and_shares_sum_to_one():
    figure = plots.stage_times(ROWS, "maths")
    assert [t.name for t in figure.data] == ["draft", "verify"]
    assert figure.layout.barmode == "stack"
    share = plots.stage_times(ROWS, "maths", share=True)
    assert np.sum([t.y for t in share.data], axis=0) == pytest.approx([1.0, 1.0])
    assert list(plots.STAGE_COLOURS) == list(STAGES)
    plots.stage_times([row("s", "ar", stage_ms={})], share=True)


def test_other_methods_have_a_stable_colour():
    assert plots.method_colour("dart:trie=none") == plots.method_colour("dart:trie=none")
    assert plots.method_colour("dart:trie=none") not in plots.METHOD_COLOURS.values()
    assert len(set(plots.METHOD_COLOURS.values())) == len(plots.METHOD_COLOURS)


def test_training_curves_skip_missing_points():
    steps = [
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 2.0, "hit_by_position": [0.5, 0.1]},
        {"step": 3, "loss": None, "hit_by_position": [0.6]},
    ]
    loss, first, second = plots.training_curves(steps).data
    assert (list(loss.x), list(loss.y)) == ([1, 2], [3.0, 2.0])
    assert (list(first.x), list(first.y), first.yaxis) == ([2, 3], [0.5, 0.6], "y2")
    assert list(second.x) == [2]
    assert len(plots.training_curves(steps, hits=None).data) == 1
    assert len(plots.training_curves([]).data) == 1


def test_trie_info():
    (bar,) = plots.trie_info([10, 200, 3000]).data
    assert (list(bar.x), list(bar.y)) == (["1", "2", "3"], [10, 200, 3000])


# --- the draft tree


def test_heights_put_the_best_child_on_top_and_never_collide():
    heights = tree_heights(TREE)
    assert heights.tolist() == [0, 1, 0, 1, 1, 0]
    rng = np.random.default_rng(1)
    for size in (1, 2, 37, 60):
        parents = [-1, *(int(rng.integers(0, i)) for i in range(1, size))]
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        arrays = (np.array(parents, np.int32), np.array(depths, np.int32), rng.random(size).astype(np.float32))
        heights = tree_heights(DraftTree(np.zeros(size, np.int32), *arrays))
        assert len({(d, float(h)) for d, h in zip(depths, heights, strict=True)}) == size


def test_tree_marks_the_accepted_path():
    figure = draft_tree(TREE, Words(), path=(0, 2, 5), bonus=4)
    traces = {trace.name: trace for trace in figure.data if trace.name}
    assert set(traces) == {"root", "accepted", "not accepted", "bonus token"}
    assert list(traces["accepted"].x) == [1, 2] and list(traces["not accepted"].x) == [1, 2, 3]
    assert traces["accepted"].marker.color != traces["not accepted"].marker.color
    assert "2 of 5" in figure.layout.title.text
    assert traces["bonus token"].x[0] == 3 and traces["bonus token"].text[0] == "&lt;4&gt;"
    places = [(x, y) for trace in figure.data if trace.name for x, y in zip(trace.x, trace.y, strict=True)]
    assert len(set(places)) == len(TREE.tokens) + 1, "no node hides another"
    assert "score 0.7" in traces["accepted"].hovertext[0] and "depth 1" in traces["accepted"].hovertext[0]


@pytest.mark.parametrize("path", [(0,), (0, 1), (0, 2), (0, 1, 3), (0, 1, 3, 4)])
def test_bonus_token_has_a_place_of_its_own(path):
    figure = draft_tree(TREE, path=path, bonus=1)
    places = [(x, y) for trace in figure.data if trace.name for x, y in zip(trace.x, trace.y, strict=True)]
    assert len(set(places)) == len(TREE.tokens) + 1


def test_labels_are_visible_and_harmless():
    assert token_label(1, Words()) == "\\n" and token_label(2, Words()) == "·the"
    assert token_label(4, Words()) == "<4>" and token_label(6, Words()) == "é" and token_label(17, None) == "17"
    figure = draft_tree(TREE, Words())
    texts = [text for trace in figure.data if trace.text for text in trace.text]
    assert "&lt;b&gt;" in texts and not any("<" in text for text in texts)
    assert "averyverylong…" in texts
    assert (
        "</script>" not in figure.to_html(full_html=False, include_plotlyjs=False).replace("</script>  ", "", 1)[:-60]
    )
    ids = [text for trace in draft_tree(TREE, Words(), show_ids=True).data if trace.text for text in trace.text]
    assert sorted(ids) == ["0", "1", "2", "3", "5", "6"]


def test_root_alone_and_wrong_paths():
    assert len(draft_tree(root_tree(3), Words(), path=(0,), bonus=1).data) == 3
    for path in ((1,), (0, 3), (0, 9), (0, 1, 2)):
        with pytest.raises(ValueError, match="path="):
            draft_tree(TREE, path=path)


def test_round_views_find_the_bonus_tokens():
    views = round_views(traced((0, 2), (0,), (0, 1, 3)))
    assert [view.bonus for view in views] == [2, 3, 6]
    assert round_views(traced((0, 2), cut=True))[0].bonus is None
    with pytest.raises(ValueError, match="trace=True"):
        round_views(GenerateResult([1, 2], "", "stop", 1, [RoundStats(0, 1, 0, 1, {})]))


def test_coloured_text_tells_who_made_a_token():
    result = traced((0, 2, 5), (0,))
    assert token_origins(result) == ["prefill", "accepted", "accepted", "bonus", "bonus"]
    assert token_origins(traced((0, 2, 5), cut=True)) == ["prefill", "accepted", "accepted"]
    text = coloured_text(result, Words())
    assert text.count("border-right") == 2 and "<br>" in text and "&lt;b&gt;" in text and "</script>" not in text
    assert ">4</span>" in coloured_text(result)


# --- the explorer


def test_explorer_follows_its_controls():
    explorer = TreeExplorer([traced((0, 2, 5), (0,), (0, 1)), traced((0, 1, 3, 4))], Words())
    assert explorer.round.max == 2 and "2 of 5" in explorer.figure.layout.title.text
    explorer.round.value = 2
    assert "round 2: 1 of 5" in explorer.figure.layout.title.text
    explorer.prompt.value = 1
    assert (explorer.round.max, explorer.round.value) == (0, 0)
    assert "Prompt 1, round 0: 3 of 5" in explorer.figure.layout.title.text
    explorer.prompt.value = 0
    assert "Prompt 0, round 0: 2 of 5" in explorer.figure.layout.title.text
    explorer.accepted_only.value = True
    assert "not accepted" not in {trace.name for trace in explorer.figure.data}
    explorer.show_ids.value = True
    assert ["2"] in [list(trace.text) for trace in explorer.figure.data if trace.text]


def test_explorer_shows_plain_plotly_data():
    explorer = TreeExplorer([traced((0, 2))])
    (output,) = explorer.widget.children[-1].outputs
    shown = output["data"][PLOTLY_MIME]
    assert shown["layout"]["title"]["text"] == explorer.figure.layout.title.text
    assert type(explorer.figure) is go.Figure, "a FigureWidget would store plotly's state in every report"
    assert "1 accepted, 2 tokens emitted" in explorer.widget.children[1].value


def test_explorer_needs_traced_rounds():
    for wrong in ([], [GenerateResult([1], "", "stop", 1)]):
        with pytest.raises(ValueError, match="need one with rounds"):
            TreeExplorer(wrong)


# --- tables


def test_text_table_aligns_and_drops_what_does_not_fit():
    rows = [{"name": "a", "x": 1.23456, "list": [1], "ok": True}, {"name": "bb", "x": None, "ok": False, "late": 3}]
    assert scalar_columns(rows) == ["name", "x", "ok", "late"]
    lines = text_table(rows).splitlines()
    assert lines[0].split() == ["name", "x", "ok", "late"]
    assert lines[1].split() == ["a", "1.235", "yes", "-"] and lines[2].split() == ["bb", "-", "NO", "3"]
    assert text_table(rows, max_width=12).splitlines()[0].split() == ["name", "x"]
    assert text_table([]) == ""


def test_cell_text():
    values = [0.0, 1e-5, 12.3456, 1234.5, float("nan"), None, True, 7, "x"]
    assert [cell_text(v) for v in values] == ["0.000", "1e-05", "12.346", "1234.5", "-", "-", "yes", "7", "x"]


def test_styled_table():
    html = styled(ROWS, ["method", "speedup"], caption="About").to_html()
    assert re.findall(r"<th [^>]*>(\w+)</th>", html) == ["method", "speedup"] and "About" in html
    assert "acceptance_by_depth" not in styled(ROWS).to_html()
    with pytest.raises(ValueError, match="columns="):
        styled(ROWS, ["metod"])


def test_checks_rows():
    checks = {
        "a": {"value": 1.0, "goal": 2.0, "compare": ">=", "ok": False},
        "b": {"value": True, "goal": None, "ok": None},
    }
    assert [(r["check"], r["goal"], r["met"]) for r in checks_rows(checks)] == [
        ("a", ">= 2.000", "NO"),
        ("b", "-", "-"),
    ]


def test_several_tables_of_a_record_are_printed_by_themselves():
    rows = [{"table": "a", "x": i} for i in range(5)] + [{"table": "b", "y": 7}]
    assert text_tables(rows, max_rows=3) == "a:\nx\n0\n1\n2\n(2 more rows in the record)\n\nb:\ny\n7"
    assert text_tables([{"x": 1}, {"x": 2}], max_rows=1) == text_table([{"x": 1}, {"x": 2}])
    assert text_tables([]) == ""
