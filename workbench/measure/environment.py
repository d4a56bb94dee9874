"""What a run ran on: git revision, versions, device, cores. Part of every record."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from workbench.paths import repo_root

PACKAGES = ("torch", "transformers", "numba", "numpy", "triton", "plotly", "papermill")


def describe_environment(device: str | None = None) -> dict[str, Any]:
    """Git state, versions, machine and the device `device` ("cpu", "cuda:0"; None when the run used none).

    torch is asked for threads and the GPU's name only when the process has it loaded already.
    """
    revision = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain")
    torch = sys.modules.get("torch")
    return {
        "git_revision": revision,
        "git_dirty": None if status is None else bool(status),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "device": device,
        "device_name": _device_name(device),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": None if torch is None else torch.get_num_threads(),
    }


def cpu_model() -> str:
    """The processor's name as the system states it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device_name(device: str | None) -> str | None:
    if device is None:
        return None
    torch = sys.modules.get("torch")
    if torch is not None and device.startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return cpu_model()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(*args: str) -> str | None:
    """Output of a git command in the checkout; None without git, a checkout or a first commit."""
    try:
        done = subprocess.run(["git", *args], cwd=repo_root(), capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
