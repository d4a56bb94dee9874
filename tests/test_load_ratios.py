"""Statistics of repeated measurements, and ratios of load test cells."""

import numpy as np
import pytest

from workbench.measure.load_ratios import add_ratios, load_checks, summary_rows
from workbench.measure.statistics import bootstrap_interval, geometric_mean, median_row, percentiles

# --- statistics


def test_percentiles():
    assert percentiles(list(range(101))) == [50, 95, 99]
    assert percentiles([4.0], [0, 100]) == [4.0, 4.0]
    assert np.isnan(percentiles([])).all()
    with pytest.raises(ValueError, match="ranks="):
        percentiles([1.0], [101])


def test_geometric_mean():
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert geometric_mean([1.147, 1.118, 1.098]) ** 3 == pytest.approx(1.408, abs=1e-3)
    assert np.isnan(geometric_mean([]))
    for bad in ([1.0, 0.0], [-1.0], [float("nan")], [float("inf")]):
        with pytest.raises(ValueError, match="ratios="):
            geometric_mean(bad)


def test_bootstrap_interval():
    rng = np.random.default_rng(0)
    ratios = np.exp(rng.normal(0.3, 0.1, 40))
    low, high = bootstrap_interval(ratios)
    assert low < geometric_mean(ratios) < high
    spread = 1.96 * np.log(ratios).std() / np.sqrt(40)
    assert np.log(high / low) / 2 == pytest.approx(spread, rel=0.15)
    assert bootstrap_interval(ratios) == (low, high), "a seed fixes it"
    assert bootstrap_interval(ratios, seed=1) != (low, high)
    narrow = bootstrap_interval(ratios, level=0.5)
    assert low < narrow[0] < narrow[1] < high
    assert bootstrap_interval([1.5, 1.5]) == (pytest.approx(1.5), pytest.approx(1.5))
    assert np.isnan(bootstrap_interval([1.5])).all()
    for change in ({"level": 1.0}, {"resamples": 0}):
        with pytest.raises(ValueError, match=next(iter(change))):
            bootstrap_interval(ratios, **change)


def test_median_row():
    rows = [
        {"name": "x", "n": n, "maybe": m, "nan": float("nan"), "by": by}
        for n, m, by in ((3, 1.0, {"a": 1.0}), (1, None, {"a": 5.0, "b": 2.0}), (2, 2.0, {"a": 3.0}))
    ]
    done = median_row(rows)
    assert (done["name"], done["n"], done["maybe"], done["by"]) == ("x", 2, None, {"a": 3.0, "b": 2.0})
    assert np.isnan(done["nan"])


# --- ratios


def made_rows() -> list[dict]:
    """Two sets at two concurrencies; method m is 1.2, 1.3, 1.5, 1.6 times as fast as the control."""
    speeds = {("one", 8): 1.2, ("one", 16): 1.3, ("two", 8): 1.5, ("two", 16): 1.6}
    rows = []
    for (prompt_set, concurrency), factor in speeds.items():
        for method, speed in (("dflash", 1.0), ("dscale", factor)):
            rows.append(
                {"prompt_set": prompt_set, "concurrency": concurrency, "method": method, "lossless": True}
                | {"output_tokens_per_s": 100 * speed, "latency_mean_s": 3 / speed}
                | {"latency_p95_s": 4 / speed, "latency_p99_s": 5 / speed}
            )
    return rows


def test_summary_is_the_geometric_mean_of_cells():
    rows = add_ratios(made_rows(), "dflash")
    summary = {row["scope"]: row for row in summary_rows(rows, "dflash")}
    assert list(summary) == ["all", "c=8", "c=16", "one", "two"]
    assert {scope: row["cells"] for scope, row in summary.items()} == {
        "all": 4,
        "c=8": 2,
        "c=16": 2,
        "one": 2,
        "two": 2,
    }
    assert summary["all"]["throughput_ratio"] == pytest.approx((1.2 * 1.3 * 1.5 * 1.6) ** 0.25)
    assert summary["c=8"]["throughput_ratio"] == pytest.approx((1.2 * 1.5) ** 0.5)
    assert summary["two"]["latency_p95_ratio"] == pytest.approx(1 / (1.5 * 1.6) ** 0.5)
    assert 1.2 <= summary["all"]["throughput_low"] < summary["all"]["throughput_high"] <= 1.6
    checks = load_checks(rows, list(summary.values()), {"dscale": 1.3}, sampled=True)
    assert {name: check.ok for name, check in checks.items()} == {
        "lossless_load_sampled": True,
        "dscale_throughput": True,
    }
    assert load_checks(rows, list(summary.values()))["dscale_throughput"].ok is None


def test_one_cell_has_no_scopes_and_no_interval():
    (row,) = summary_rows(add_ratios(made_rows()[:2], "dflash"), "dflash")
    assert row["scope"] == "all" and row["throughput_ratio"] == pytest.approx(1.2)
    assert np.isnan(row["throughput_low"]) and np.isnan(row["throughput_high"])


def test_a_failed_control_leaves_no_ratio():
    rows = made_rows()
    rows[0]["lossless"] = False
    done = add_ratios(rows, "dflash")
    assert [row["throughput_ratio"] is None for row in done[:4]] == [True, True, False, False]
    summary = {row["scope"]: row["throughput_ratio"] for row in summary_rows(done, "dflash")}
    assert summary["all"] is None and summary["c=8"] is None and summary["two"] == pytest.approx((1.5 * 1.6) ** 0.5)
