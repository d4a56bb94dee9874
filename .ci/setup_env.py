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


def wanted_stamp(root: Path) -> list[str]:
    """What the environment is made for: place (its scripts hold absolute paths), interpreter, project file."""
    interpreter = f"{sys.base_prefix} {sys.version.split()[0]}"
    return [str(root), interpreter, hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest()]


def install(folder: Path, anew: bool) -> None:
    """Installs the project with its dev extras, into an emptied folder if `anew`."""
    if anew:
        venv.create(folder, with_pip=True, clear=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-e", ".[dev]"], check=True)


def main() -> None:
    """Installs under a lock unless the stamp says that it was done."""
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
        made = stamp.read_text().splitlines() if stamp.is_file() else []
        if made == wanted:
            stamp.touch()
            return
        stamp.unlink(missing_ok=True)
        print(f"installing the project and its dependencies into {folder.name} (a few minutes, once)", flush=True)
        try:
            install(folder, anew=made[:2] != wanted[:2])
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"installation failed (exit code {error.returncode}); run the command again") from error
        stamp.write_text("\n".join(wanted) + "\n")


if __name__ == "__main__":
    main()
