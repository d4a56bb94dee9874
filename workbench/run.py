"""The strict notebook runner: check every parameter, execute, and leave a folder that tells what happened.

A run writes `<out>/<notebook>/<run id>/{executed.ipynb, report.html, params.json, record.json, figures/}`. The folder
is made under a name that starts with `.tmp-` and renamed at the end, to `<run id>-failed` if the notebook did not
finish; what it had produced until then is kept. Knows nothing about what notebooks do.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import papermill
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm
from traitlets.config import Config

from workbench.measure.parameters import RUN_DIR, Parameter, read_options, read_parameters, read_yaml
from workbench.measure.records import RECORD, load_record, make_record, new_run_id, save_record, write_json
from workbench.paths import notebooks_dir, repo_root, reports_dir
from workbench.show.report import read_notebook, save_figures, write_report
from workbench.show.tables import checks_rows, text_table, text_tables
from workbench.signals import terminate_like_ctrl_c

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_STATUS = {OK: "ok", FAILED: "failed", INTERRUPTED: "interrupted"}

#: Text progress bars instead of widgets, which a page without a kernel cannot draw.
_PLAIN_BARS = "import tqdm.auto, tqdm.std; tqdm.auto.tqdm, tqdm.auto.trange = tqdm.std.tqdm, tqdm.std.trange"


class OwnKernel(AsyncKernelManager):
    """A kernel of the interpreter that runs this program, whatever kernel specs are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """The spec that the manager starts."""
        path = [str(repo_root()), *filter(None, [os.environ.get("PYTHONPATH")])]
        spec = KernelSpec(**get_kernel_dict([f"--IPKernelApp.exec_lines={_PLAIN_BARS}"]))
        spec.env = {"PYTHONPATH": os.pathsep.join(path), "PLOTLY_RENDERER": "plotly_mimetype"}
        return spec


class _Progress:
    """Passes on what a kernel writes to stderr: finished lines at once, a moving progress bar every few seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._shown = time.monotonic()
        self._rest = ""

    def write(self, text: str) -> None:
        """Takes a piece of output, which may end anywhere."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._show(line.rpartition("\r")[2])
        bar = self._rest.rpartition("\r")[2]
        if bar and time.monotonic() - self._shown >= self._every_s:
            self._show(bar)

    def flush(self) -> None:
        """Nothing is held back for long."""

    def _show(self, line: str) -> None:
        if line.strip():
            tqdm.write(line, file=sys.stderr)
            self._shown = time.monotonic()


@dataclass(frozen=True)
class RunPlan:
    """A checked run: `params` holds every parameter of the notebook, `overrides` those that differ from its cell."""

    notebook: Path
    params: dict[str, Any]
    overrides: dict[str, Any]
    out: Path
    run_id: str
    takes_run_dir: bool

    @property
    def name(self) -> str:
        """Stem of the notebook."""
        return self.notebook.stem


def find_notebook(name: str) -> Path:
    """A notebook by path, or by name among those of the project (`01_decode`).

    Raises:
        ValueError: there is none; the message lists the project's.
    """
    stem = name.removesuffix(".ipynb")
    for path in (Path(name), Path(f"{stem}.ipynb"), notebooks_dir() / f"{Path(stem).name}.ipynb"):
        if path.is_file() and path.suffix == ".ipynb":
            return path.resolve()
    known = ", ".join(sorted(path.stem for path in notebooks_dir().glob("*.ipynb")))
    raise ValueError(f"notebook={name!r} does not exist; known: {known or 'none'}")


def preset_file(notebook: Path, preset: str) -> Path:
    """The parameter file of a preset, `params/<notebook>.<preset>.yaml` beside the notebook.

    Raises:
        ValueError: there is none; the message lists the presets of the notebook.
    """
    file = notebook.parent / "params" / f"{notebook.stem}.{preset}.yaml"
    if not file.is_file():
        known = sorted(path.name.split(".")[-2] for path in file.parent.glob(f"{notebook.stem}.*.yaml"))
        raise ValueError(f"preset={preset!r} of {notebook.stem} does not exist; allowed: {', '.join(known) or 'none'}")
    return file


def plan_run(
    notebook: str,
    preset: str | None = None,
    params_file: str | None = None,
    options: Sequence[Sequence[str]] = (),
    run_id: str | None = None,
    out: str | None = None,
) -> RunPlan:
    """Resolves names and checks all values; a preset yields to the file, the file to `-p name value` options.

    Raises:
        ValueError: anything a user can get wrong, before something is executed.
    """
    path = find_notebook(notebook)
    declared = read_parameters(path)
    overrides: dict[str, Any] = {}
    if preset:
        overrides |= read_yaml(preset_file(path, preset), declared)
    if params_file:
        overrides |= read_yaml(params_file, declared)
    overrides |= read_options(options, declared)
    if run_id is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_id):
        raise ValueError(f"run_id={run_id!r}; allowed: letters, digits, '.', '_', '-', the first a letter or digit")
    params = {name: p.default for name, p in declared.items() if name != RUN_DIR} | overrides
    try:
        json.dumps(params, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a parameter is no plain JSON value, so the run could not be recorded: {error}") from error
    base = Path(out).expanduser().resolve() if out else reports_dir() / "runs"
    return RunPlan(path, params, overrides, base / path.stem, run_id or new_run_id(), RUN_DIR in declared)


def execute(plan: RunPlan, show_output: bool = False) -> tuple[int, Path]:
    """Runs the notebook of `plan` and finishes its folder.

    Args:
        plan: from `plan_run`.
        show_output: also print what the notebook prints.

    Returns:
        Exit code (OK, FAILED or INTERRUPTED) and the final folder.

    Raises:
        ValueError: a run of that id exists or is in progress.
    """
    temporary = _claim(plan)
    write_json(plan.params, temporary / "params.json")
    injected = dict(plan.overrides) | ({RUN_DIR: str(temporary)} if plan.takes_run_dir else {})
    code, error = OK, None
    try:
        with terminate_like_ctrl_c():
            _papermill(plan, injected, temporary / "executed.ipynb", show_output)
    except KeyboardInterrupt:
        code, error = INTERRUPTED, "stopped by a signal"
    except PapermillExecutionError as failure:
        code, error = FAILED, f"cell {failure.exec_count}: {failure.ename}: {failure.evalue}"
    except Exception as failure:  # a kernel that died, a full disk: the folder must be finished all the same
        code, error = FAILED, f"{type(failure).__name__}: {failure}"
    problem = _finish(plan, temporary, code, error)
    if problem and code == OK:
        code = FAILED
    final = plan.out / (plan.run_id if code == OK else f"{plan.run_id}-failed")
    temporary.rename(final)
    return code, final


def _claim(plan: RunPlan) -> Path:
    """Makes the temporary folder; making it is what reserves the run id."""
    temporary = plan.out / f".tmp-{plan.run_id}"
    plan.out.mkdir(parents=True, exist_ok=True)
    taken = [plan.out / plan.run_id, plan.out / f"{plan.run_id}-failed"]
    try:
        temporary.mkdir()
    except FileExistsError:
        raise ValueError(f"run_id={plan.run_id!r} is in progress, or was killed: {temporary}") from None
    for folder in taken:
        if folder.exists():
            temporary.rmdir()
            raise ValueError(f"run_id={plan.run_id!r} exists: {folder}")
    return temporary


def _papermill(plan: RunPlan, injected: Mapping[str, Any], output: Path, show_output: bool) -> None:
    logging.getLogger("papermill").setLevel(logging.ERROR)
    terminal = sys.stderr.isatty()
    with tempfile.TemporaryDirectory(prefix="workbench-") as sockets:
        # Free TCP ports are a race between kernels that start together, and open to other users of the machine.
        local = {"transport": "ipc", "connection_file": f"{sockets}/kernel.json"} if os.name == "posix" else {}
        papermill.execute_notebook(
            read_notebook(plan.notebook),
            str(output).replace("{", "{{").replace("}", "}}"),  # papermill fills in braces of a path
            parameters=dict(injected),
            kernel_name="python3",
            language="python",
            kernel_manager_class=OwnKernel,
            config=Config({OwnKernel.__name__: local}),
            progress_bar={"desc": plan.name, "mininterval": 0.1 if terminal else 10.0},
            stdout_file=sys.stdout if show_output else None,
            stderr_file=_Progress(2.0 if terminal else 15.0),
            coalesce_streams=True,
            shutdown_kernel="immediate",
        )


def _finish(plan: RunPlan, folder: Path, code: int, error: str | None) -> str | None:
    """Writes figures, report and the final record; returns what went wrong, the run's own error first."""
    executed = folder / "executed.ipynb"
    try:
        if executed.is_file():
            notebook = read_notebook(executed)
            save_figures(notebook, folder / "figures")
            write_report(notebook, folder / "report.html", f"{plan.name} {plan.run_id}")
    except Exception as failure:  # the record below must be written whatever the notebook's outputs hold
        error = error or f"report: {type(failure).__name__}: {failure}"
    try:
        record = load_record(folder) if (folder / RECORD).is_file() else make_record(plan.name, plan.params)
    except ValueError as failure:
        error = error or str(failure)
        record = make_record(plan.name, plan.params)
    status = _STATUS[code] if code != OK or error is None else "failed"
    record |= {"notebook": plan.name, "params": plan.params, "status": status}
    if error is not None:
        record["error"] = error
    save_record(record, folder)
    return error


def describe_run(code: int, folder: Path) -> str:
    """What a person wants to know after a run: its rows and checks, the error if there was one, and the report."""
    record = load_record(folder)
    parts = []
    if record["rows"]:
        parts.append(text_tables(record["rows"]))
    if record["checks"]:
        parts.append(text_table(checks_rows(record["checks"])))
    if code != OK:
        parts.append(f"{record['status']}: {record.get('error', '')}")
    report = folder / "report.html"
    parts.append(f"report: {report}" if report.is_file() else f"folder: {folder}")
    return "\n\n".join(parts)


def describe_parameters(parameters: Mapping[str, Parameter]) -> str:
    """One line a parameter: name, type, default, help."""
    rows = [
        {"parameter": p.name, "type": p.type, "default": repr(p.default), "help": p.help}
        for p in parameters.values()
        if p.name != RUN_DIR
    ]
    return text_table(rows, max_width=200)
