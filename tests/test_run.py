"""The notebook runner and the command line: what is refused before execution, what every ending leaves behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workbench import run
from workbench.__main__ import main
from workbench.measure.records import load_record, new_run_id
from workbench.paths import repo_root

NOTEBOOKS = Path(__file__).parent / "notebooks"
GOOD = str(NOTEBOOKS / "good.ipynb")


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    """One run of the working notebook, below a folder whose name papermill would take for a template."""
    out = tmp_path_factory.mktemp("runs {of} all")
    # A kernel spec that does not work must not matter.
    spec = tmp_path_factory.mktemp("jupyter") / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": ["/nonexistent"], "display_name": "x", "language": "python"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(spec.parent.parent))
        plan = run.plan_run(GOOD, options=[("count", "3"), ("names", "a, b"), ("label", "x=1 # y")], out=str(out))
        return plan, *run.execute(plan)


def test_good_run_leaves_everything(good_run):
    plan, code, folder = good_run
    assert code == run.OK
    assert folder.name == plan.run_id and folder.parent.name == "good"
    assert {p.name for p in folder.iterdir()} == {
        "executed.ipynb",
        "report.html",
        "params.json",
        "record.json",
        "figures",
    }
    assert [p.name for p in folder.parent.iterdir()] == [plan.run_id]
    params = json.loads((folder / "params.json").read_text())
    assert params == {"count": 3, "scale": 1.0, "label": "x=1 # y", "flag": False, "names": ["a", "b"]}
    record = load_record(folder)
    assert record["params"] == params and record["status"] == "ok" and record["notebook"] == "good"
    assert [row["name"] for row in record["rows"]] == ["a", "b"]
    assert record["checks"]["total"]["ok"] is True


def test_executed_notebook_used_this_interpreter_and_the_given_values(good_run):
    executed = json.loads((good_run[2] / "executed.ipynb").read_text())
    injected = [c for c in executed["cells"] if "injected-parameters" in c["metadata"].get("tags", [])]
    assert len(injected) == 1 and "count = 3" in "".join(injected[0]["source"])
    assert "scale" not in "".join(injected[0]["source"])
    text = json.dumps(executed)
    assert json.dumps(sys.executable)[1:-1] in text
    assert "widget-view" not in text, "progress bars must be text"
    assert executed["metadata"].get("widgets") is None


def test_report_is_self_contained(good_run):
    html = (good_run[2] / "report.html").read_text()
    assert len(html) < 8_000_000
    assert len(re.findall(r"Plotly\.newPlot\(", html.rpartition("</head>")[2])) == 1
    assert html.count("plotly.js v") == 1, "the library must be there exactly once"
    assert re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(?!data:)[^\"]+\"", html) == []
    assert "Bars </script>" not in html, "text of a figure must not end its script"
    assert "plotly.js v" not in (good_run[2] / "figures" / "01-bars-script-of-b-x-b.html").read_text()


def test_figures_can_be_read_back(good_run):
    import plotly.io

    files = sorted(p.name for p in (good_run[2] / "figures").iterdir())
    assert files == ["01-bars-script-of-b-x-b.html", "01-bars-script-of-b-x-b.json"]
    figure = plotly.io.read_json(good_run[2] / "figures" / files[1])
    assert list(figure.data[0].y) == [0.0, 1.0, 2.0]


def test_description_has_rows_checks_and_report(good_run):
    text = run.describe_run(*good_run[1:])
    assert re.search(r"^name +total$", text, re.M) and re.search(r"^a +3\.000$", text, re.M)
    assert "list" not in text.splitlines()[0]
    assert re.search(r"^total +3\.000 +>= 0\.500 +yes$", text, re.M)
    assert text.endswith(f"report: {good_run[2] / 'report.html'}")


def test_failure_keeps_what_there_was(tmp_path, capsys):
    code = main(
        [
            "run",
            str(NOTEBOOKS / "broken.ipynb"),
            "-p",
            "message",
            "a <b>bad</b> day",
            "--out",
            str(tmp_path),
            "--run-id",
            "one",
        ]
    )
    assert code == run.FAILED
    folder = tmp_path / "broken" / "one-failed"
    record = load_record(folder)
    assert record["status"] == "failed" and record["rows"] == [{"step": 1}]
    assert "RuntimeError: a <b>bad</b> day" in record["error"]
    assert record["params"] == {"message": "a <b>bad</b> day"}
    executed = json.loads((folder / "executed.ipynb").read_text())
    assert "record.json" in json.dumps(executed) and "papermill-error-cell" in json.dumps(executed)
    assert "RuntimeError" in (folder / "report.html").read_text()
    out = capsys.readouterr().out
    assert "failed: cell" in out and str(folder / "report.html") in out
    assert main(["run", str(NOTEBOOKS / "broken.ipynb"), "--out", str(tmp_path), "--run-id", "one"]) == run.USAGE


def test_dead_kernel_finishes_the_folder(tmp_path):
    code, folder = run.execute(run.plan_run(str(NOTEBOOKS / "dead.ipynb"), out=str(tmp_path)))
    assert code == run.FAILED and folder.name.endswith("-failed")
    record = load_record(folder)
    assert "DeadKernelError" in record["error"] and record["params"] == {"code": 3}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_signals_keep_the_partial_output(tmp_path, number):
    command = [sys.executable, "-m", "workbench", "run", str(NOTEBOOKS / "slow.ipynb"), "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=repo_root(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _wait_for(lambda: any("first cell done" in p.read_text() for p in tmp_path.glob("slow/.tmp-*/executed.ipynb")))
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == run.INTERRUPTED
    (folder,) = (tmp_path / "slow").iterdir()
    assert folder.name.endswith("-failed") and str(folder) in out
    assert load_record(folder)["status"] == "interrupted"
    assert "first cell done" in (folder / "executed.ipynb").read_text()
    assert "first cell done" in (folder / "report.html").read_text()


def _wait_for(condition, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the notebook did not get to its slow cell"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["goood"], "notebook='goood' does not exist; known:"),
        ([GOOD, "-p", "cuont", "3"], "unknown parameter 'cuont' (did you mean 'count'?); allowed: count, scale"),
        ([GOOD, "-p", "count", "3.5"], "count='3.5' is no int; allowed: int"),
        ([GOOD, "-p", "flag", "maybe"], "flag='maybe' is no bool"),
        ([GOOD, "-p", "scale", "nan"], "scale='nan' is no float"),
        ([GOOD, "-p", "run_dir", "x"], "'run_dir' is set by the runner"),
        ([GOOD, "--preset", "huge"], "preset='huge' of good does not exist; allowed: none"),
        ([GOOD, "--run-id", "../x"], "run_id='../x'; allowed:"),
        ([str(NOTEBOOKS / "bare.ipynb"), "-p", "a", "1"], "unknown parameter 'a'; allowed: none"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_usage_errors_come_before_execution(tmp_path, capsys, argv, message):
    assert main(["run", *argv, "--out", str(tmp_path)]) == run.USAGE
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("cout: 1", "unknown parameter 'cout' (did you mean 'count'?)"),
        ("count: true", "count=True has type bool; allowed: int"),
        ("count: '3'", "count='3' has type str; allowed: int"),
        ("names: a", "names='a' has type str; allowed: list[str]"),
        ("names: [a, 1]", "names[1]=1 has type int; allowed: str"),
        ("scale: .nan", "scale=nan is not finite"),
        ("- count", "holds list"),
        ("count: [", "not YAML"),
        ("run_dir: x", "set by the runner"),
    ],
)
def test_parameter_files_are_checked(tmp_path, capsys, yaml, message):
    file = tmp_path / "params.yaml"
    file.write_text(yaml)
    assert main(["run", GOOD, "--params", str(file), "--out", str(tmp_path / "out")]) == run.USAGE
    error = capsys.readouterr().err
    assert message in error and str(file) in error
    assert not (tmp_path / "out").exists()


def test_preset_then_file_then_option(tmp_path):
    notebook = tmp_path / "nb.ipynb"
    notebook.write_text(Path(GOOD).read_text())
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "nb.quick.yaml").write_text("count: 5\nscale: 1e-3\nlabel: preset\n")
    file = tmp_path / "more.yaml"
    file.write_text("label: file\nscale: 2\n")
    plan = run.plan_run(str(notebook), "quick", str(file), [("label", "option"), ("label", "last")], out=str(tmp_path))
    assert plan.params == {"count": 5, "scale": 2.0, "label": "last", "flag": False, "names": ["a"]}
    assert isinstance(plan.params["scale"], float)
    assert run.plan_run(str(notebook), "quick").params["scale"] == 1e-3
    with pytest.raises(ValueError, match="allowed: quick"):
        run.plan_run(str(notebook), "slow")


def test_run_ids_never_collide(tmp_path):
    assert len({new_run_id() for _ in range(500)}) == 500
    plan = run.plan_run(GOOD, run_id="mine", out=str(tmp_path))
    folder = run._claim(plan)
    with pytest.raises(ValueError, match="in progress"):
        run._claim(plan)
    folder.rename(folder.with_name("mine-failed"))
    with pytest.raises(ValueError, match="exists"):
        run._claim(plan)
    assert [p.name for p in folder.parent.iterdir()] == ["mine-failed"]


def test_progress_shows_whole_lines(capsys):
    progress = run._Progress(every_s=1e9)
    for piece in ("half ", "a line\nbar 1%\rbar 2%", "\rbar 100%\n"):
        progress.write(piece)
    assert [line.strip() for line in capsys.readouterr().err.splitlines()] == ["half a line", "bar 100%"]


def test_listing_commands(capsys):
    assert main(["notebooks", GOOD]) == run.OK
    out = capsys.readouterr().out
    assert "good  (presets: none)" in out and re.search(r"count +int +2 +points of the figure", out)
    assert "run_dir" not in out
    assert main(["prompts"]) == run.OK
    assert re.search(r"^maths +\d+ ", capsys.readouterr().out, re.M)
    assert main(["methods"]) == run.OK
    assert re.search(r"^ar ", capsys.readouterr().out, re.M)


def test_help_needs_no_heavy_module():
    code = "import sys; from workbench.__main__ import _parser; _parser(); print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(repo_root())}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "False"
