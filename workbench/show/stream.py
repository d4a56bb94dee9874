"""The text of an output with every token coloured by who made it: the draft, or the target."""

from __future__ import annotations

import html

from workbench.show.tree_plot import Decoder, token_label
from workbench.types import GenerateResult

_STYLES = {
    "prefill": "background:#e3e3e3",
    "accepted": "background:#cdebd3",
    "bonus": "background:#fbdcb5",
}


def token_origins(result: GenerateResult) -> list[str]:
    """For each token of the output: "prefill" (the first one), "accepted" (drafted) or "bonus" (the target's own)."""
    origins = ["prefill"]
    for stats in result.rounds:
        drafted = min(stats.num_accepted, stats.num_emitted)
        origins += ["accepted"] * drafted + ["bonus"] * (stats.num_emitted - drafted)
    return origins[: len(result.token_ids)]


def coloured_text(result: GenerateResult, tokenizer: Decoder | None = None) -> str:
    """HTML of the output: green tokens were drafted and accepted, orange ones the target added; a bar ends a round.

    Line breaks are drawn and kept. Without a tokenizer the token ids are shown.
    """
    ends = set()
    count = 1
    for stats in result.rounds:
        count += stats.num_emitted
        ends.add(count)
    spans = []
    for number, (token, origin) in enumerate(zip(result.token_ids, token_origins(result), strict=True), 1):
        label = html.escape(token_label(token, tokenizer, space=" "))
        edge = ";border-right:2px solid #777" if number in ends else ""
        spans.append(f'<span title="token {token}, {origin}" style="{_STYLES[origin]}{edge}">{label}</span>')
        if "\\n" in label:
            spans.append("<br>")
    legend = " ".join(f'<span style="{style}">&nbsp;{name}&nbsp;</span>' for name, style in _STYLES.items())
    body = f'<div style="font-family:monospace;white-space:pre-wrap;line-height:1.6">{"".join(spans)}</div>'
    return f"<div>{legend}</div>{body}"
