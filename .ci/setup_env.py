"""Makes the virtual environment of the Makefile: `python .ci/setup_env.py VENV STAMP`.

Standard library only, since nothing is installed yet. Several calls at once are safe (one installs, the others wait),
and an interrupted one leaves no stamp, so the next call starts over.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import venv
from pathlib import Path

OLDEST = (3, 11)


def wanted_stamp(root: Path) -> str:
    """What an up-to-date environment was made from; its place counts, since its scripts hold absolute paths."""
    project = hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest()
    return f"{root}\n{sys.version}\n{project}\n"


def install(folder: Path) -> None:
    """Makes the environment anew unless its interpreter runs, then installs the project with its dev extras."""
    python = folder / "bin" / "python"
    usable = python.exists() and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
    if not usable:
        venv.create(folder, with_pip=True, clear=True)
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-e", ".[dev]"], check=True
    )


def main() -> None:
    """Installs under a lock if the stamp does not say that it was done."""
    if sys.version_info < OLDEST:
        raise SystemExit(
            f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed, this is {sys.version.split()[0]}; "
            "choose another one with `make PYTHON=...`"
        )
    root = Path(__file__).resolve().parent.parent
    folder, stamp = (root / name for name in sys.argv[1:3])
    wanted = wanted_stamp(root)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == wanted:
            stamp.touch()
            return
        stamp.unlink(missing_ok=True)
        print(f"installing the project and its dependencies into {folder.name} (a few minutes, once)", flush=True)
        try:
            install(folder)
        except subprocess.CalledProcessError as error:
            raise SystemExit(
                f"installation failed (exit code {error.returncode}); run the same command again"
            ) from error
        stamp.write_text(wanted)


if __name__ == "__main__":
    main()
