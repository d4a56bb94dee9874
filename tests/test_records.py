"""Records: schema, null for NaN, atomic writing, loading into a table."""

import json

import numpy as np
import pytest

from workbench.measure import records
from workbench.measure.records import Check, clean, load_record, load_records, make_record, save_record, validate

ROWS = [
    {"prompt_set": "maths", "method": "ar", "tau": 1.0, "stages": {"verify": 0.5}},
    {"prompt_set": "maths", "method": "dart", "tau": np.float32(2.5), "acceptance": np.array([0.5, 0.25])},
]


def test_check_directions_and_missing_values():
    assert Check(3.0, 3.0).ok is True
    assert Check(2.99, 3.0).ok is False
    assert Check(2.0, 3.0, "<=").ok is True
    assert Check(True, True, "==").ok is True
    assert Check(False, True, "==").ok is False
    assert Check(float("nan"), 3.0).ok is False
    assert Check(None, 3.0, "<=").ok is False
    assert Check(5.0, None).ok is None
    with pytest.raises(ValueError, match="compare='>'"):
        Check(1.0, 1.0, ">")


def test_clean_turns_numpy_and_nan_into_plain_json():
    dirty = {
        "a": np.float64("nan"),
        "b": float("inf"),
        "c": (np.int32(3), np.bool_(True)),
        "d": np.array([1.5, np.nan]),
    }
    assert clean(dirty) == {"a": None, "b": None, "c": [3, True], "d": [1.5, None]}
    with pytest.raises(ValueError, match="type set"):
        clean({"a": {1, 2}})
    with pytest.raises(ValueError, match="key 1 has type int"):
        clean({1: 2})


def test_round_trip_and_environment(tmp_path):
    record = make_record("01_decode", {"seed": 0}, ROWS, {"dart_tau": Check(2.5, 3.0)}, device="cpu")
    path = save_record(record, tmp_path)
    assert path.name == "record.json"
    assert load_record(path) == load_record(tmp_path) == record
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]
    assert record["checks"]["dart_tau"] == {"value": 2.5, "goal": 3.0, "compare": ">=", "ok": False}
    environment = record["environment"]
    assert environment["device"] == "cpu" and environment["device_name"]
    assert environment["cores"] >= 1 and environment["versions"]["numpy"]
    assert {"git_revision", "git_dirty", "threads", "python", "cpu"} <= set(environment)


def test_same_parameters_same_record_but_for_the_environment():
    first, second = (make_record("nb", {"seed": 1}, ROWS, {"x": Check(1, 1)}) for _ in range(2))
    first.pop("environment"), second.pop("environment")
    assert json.dumps(first) == json.dumps(second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "schema=99"),
        ({"status": "fine"}, "status='fine'"),
        ({"rows": {}}, "rows"),
        ({"rows": [1]}, "rows"),
        ({"checks": {"a": {"value": 1}}}, "check a="),
        ({"extra": 1}, "extra"),
    ],
)
def test_validate_names_the_field(change, message):
    record = make_record("nb", {}) | change
    with pytest.raises(ValueError, match=message):
        validate(record)


def test_missing_field_and_not_json(tmp_path):
    record = make_record("nb", {})
    del record["params"]
    with pytest.raises(ValueError, match="'params' is missing"):
        save_record(record, tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(ValueError, match=r"record\.json"):
        load_record(tmp_path)


def test_nan_is_refused_on_write_and_leaves_nothing(tmp_path):
    record = make_record("nb", {})
    record["rows"] = [{"a": float("nan")}]
    with pytest.raises(ValueError):
        save_record(record, tmp_path)
    assert not list(tmp_path.iterdir())


def test_load_records_makes_one_line_a_row(tmp_path):
    for seed in (0, 1):
        folder = tmp_path / "01_decode" / f"run{seed}"
        (folder / "figures").mkdir(parents=True)
        (folder / "figures" / "01-speedup.json").write_text("{}")
        (folder / "params.json").write_text("{}")
        save_record(make_record("01_decode", {"seed": seed}, ROWS), folder)
    failed = make_record("01_decode", {"seed": 2}, ROWS) | {"status": "failed", "error": "boom"}
    for name in ("run2-failed", ".tmp-run3"):
        (tmp_path / "01_decode" / name).mkdir()
        save_record(failed | {"status": "failed"}, tmp_path / "01_decode" / name)
    other = make_record("02_train", {}, [{"loss": 1.0}])
    (tmp_path / "alone.json").write_text(json.dumps(other))
    table = load_records(tmp_path)
    assert len(table) == 5
    assert set(table["run"]) == {"run0", "run1", "alone"}
    decode = load_records(tmp_path, notebook="01_decode")
    assert list(decode["param.seed"]) == [0, 0, 1, 1]
    assert list(decode["tau"]) == [1.0, 2.5] * 2
    assert load_records(tmp_path / "alone.json" / "..", notebook="none").empty


def test_run_folder_uses_the_given_one_or_a_new_one(tmp_path, monkeypatch):
    assert records.run_folder(str(tmp_path / "given"), "nb") == tmp_path / "given"
    monkeypatch.setattr(records, "reports_dir", lambda: tmp_path)
    first, second = records.run_folder("", "nb"), records.run_folder("", "nb")
    assert first != second and first.parent == tmp_path / "runs" / "nb" and first.is_dir()


def test_require_names_the_failed_checks():
    checks = {"lossless": Check(False, True, "=="), "tau": Check(3.0, 2.0)}
    records.require(checks, ["tau"])
    with pytest.raises(ValueError, match="lossless=False"):
        records.require(checks, ["tau", "lossless"])
