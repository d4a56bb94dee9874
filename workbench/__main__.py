"""The command line: `python -m workbench {run,notebooks,methods,prompts,trie}`.

Exit codes: 0 fine, 1 a notebook failed, 2 wrong usage, 130 interrupted. Heavy modules are imported by the command that
needs them, so that help is instant.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Parses `argv` (default: of the process), runs the command and returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return args.command(args)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workbench", description="Workbench for speculative decoding.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    listing = commands.add_parser("notebooks", help="list the notebooks, or the parameters of one")
    listing.add_argument("notebook", nargs="?", help="path or name")
    listing.set_defaults(command=_notebooks)
    commands.add_parser("methods", help="list the drafting methods").set_defaults(command=_methods)
    commands.add_parser("prompts", help="list the prompt sets").set_defaults(command=_prompts)
    _add_trie(commands)
    return parser


def _add_run(commands: argparse._SubParsersAction) -> None:
    run = commands.add_parser("run", help="run a notebook with checked parameters")
    run.add_argument("notebook", help="path, or name among the notebooks of the project")
    run.add_argument("--preset", help="parameters from params/<notebook>.<preset>.yaml")
    run.add_argument("--params", metavar="FILE", help="parameters from a YAML file; they win over the preset")
    run.add_argument(
        "-p",
        dest="options",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="one parameter; wins over the files; a list is written a,b",
    )
    run.add_argument("--run-id", help="name of the run folder (default: time and a random suffix)")
    run.add_argument("--out", metavar="DIR", help="folder of runs (default: reports/runs)")
    run.add_argument("--show-output", action="store_true", help="also print what the notebook prints")
    run.set_defaults(command=_run)


def _add_trie(commands: argparse._SubParsersAction) -> None:
    trie = commands.add_parser("trie", help="build or inspect an n-gram trie").add_subparsers(
        required=True, metavar="ACTION"
    )
    build = trie.add_parser("build", help="count n-grams of text or tokens")
    build.add_argument(
        "inputs", nargs="+", help="token shards (.npz), .jsonl (each line text or {'text': ...}) or .txt files"
    )
    build.add_argument("--out", required=True, help="file to write")
    build.add_argument("--tokenizer", help="folder with a tokenizer.json, or 'embedded' (text needs one)")
    build.add_argument("--responses", action="store_true", help="of token shards, count the responses only")
    build.add_argument("--order", type=int, default=3, help="longest n-gram (default 3)")
    build.add_argument("--min-count", type=int, default=1, help="drop rarer n-grams (default 1)")
    build.set_defaults(command=_trie_build)
    info = trie.add_parser("info", help="size and order of a trie")
    info.add_argument("path", help="file written by build")
    info.set_defaults(command=_trie_info)


def _run(args: argparse.Namespace) -> int:
    from workbench import run

    plan = run.plan_run(args.notebook, args.preset, args.params, args.options, args.run_id, args.out)
    code, folder = run.execute(plan, args.show_output)
    print(run.describe_run(code, folder))
    return code


def _notebooks(args: argparse.Namespace) -> int:
    from workbench.measure.parameters import read_parameters
    from workbench.paths import notebooks_dir
    from workbench.run import describe_parameters, find_notebook

    paths = [find_notebook(args.notebook)] if args.notebook else sorted(notebooks_dir().glob("*.ipynb"))
    for path in paths:
        presets = sorted(p.name.split(".")[-2] for p in (path.parent / "params").glob(f"{path.stem}.*.yaml"))
        print(f"{path.stem}  (presets: {', '.join(presets) or 'none'})")
        text = describe_parameters(read_parameters(path))
        print("\n".join(f"  {line}" for line in text.splitlines()) + "\n")
    return 0


def _methods(args: argparse.Namespace) -> int:
    from workbench.drafters.table import DRAFTERS
    from workbench.show.tables import text_table

    rows = [{"method": name, "what": _summary(builder)} for name, builder in DRAFTERS.items()]
    print(text_table(rows))
    return 0


def _summary(builder: object) -> str:
    return (getattr(builder, "__doc__", None) or "").strip().split("\n")[0]


def _prompts(args: argparse.Namespace) -> int:
    from workbench.prompts import load_prompts, prompt_set_names
    from workbench.show.tables import text_table

    rows = []
    for name in prompt_set_names():
        try:
            found = load_prompts(name)
            rows.append({"prompt set": name, "prompts": len(found), "source": found.source})
        except (ValueError, RuntimeError) as error:  # one foreign file must not hide the others
            rows.append({"prompt set": name, "prompts": "unreadable", "source": str(error)})
    print(text_table(rows, max_width=200) if rows else "no prompt sets found")
    return 0


def _trie_build(args: argparse.Namespace) -> int:
    from workbench.search.trie import NgramTrie, vocabulary_fingerprint

    tokenizer = _tokenizer(args.tokenizer) if args.tokenizer else None
    vocabulary = tokenizer.get_vocab() if tokenizer else {}
    sequences = [ids for name in args.inputs for ids in _sequences(Path(name), tokenizer, args.responses)]
    trie = NgramTrie.count(
        sequences,
        order=args.order,
        min_count=args.min_count,
        vocab_size=max(vocabulary.values()) + 1 if vocabulary else None,
        fingerprint=vocabulary_fingerprint(vocabulary) if vocabulary else "",
    )
    trie.save(args.out)
    return _print_trie(args.out)


def _trie_info(args: argparse.Namespace) -> int:
    return _print_trie(args.path)


def _print_trie(path: str) -> int:
    from workbench.search.trie import NgramTrie
    from workbench.show.tables import text_table

    print(text_table([{"field": k, "value": str(v)} for k, v in NgramTrie.open(path).info().items()], max_width=200))
    return 0


def _tokenizer(name: str) -> Tokenizer:
    from tokenizers import Tokenizer

    from workbench.models.embedded import embedded_folder

    file = (embedded_folder() if name == "embedded" else Path(name)) / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"--tokenizer: {file} does not exist; allowed: a folder with a tokenizer.json, or 'embedded'")
    return Tokenizer.from_file(str(file))


def _sequences(path: Path, tokenizer: Tokenizer | None, responses: bool) -> Iterator[np.ndarray]:
    """Token sequences of one input file: those of a shard, one a line of .jsonl, one for a whole .txt."""
    if path.suffix not in (".npz", ".jsonl", ".txt") or not path.is_file():
        raise ValueError(f"input {str(path)!r}: need an existing .npz, .jsonl or .txt file")
    if path.suffix == ".npz":
        yield from _shard(path, responses)
        return
    if tokenizer is None:
        raise ValueError(f"input {str(path)!r} is text; name its tokenizer with --tokenizer")
    text = path.read_text(encoding="utf-8-sig")
    # Lines of JSON end in \n alone: other separators may stand inside a string.
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    documents = [text] if path.suffix == ".txt" else [_line_text(path, i, line) for i, line in lines]
    for document in documents:
        yield np.asarray(tokenizer.encode(document, add_special_tokens=False).ids, np.int64)


def _shard(path: Path, responses: bool) -> Iterator[np.ndarray]:
    """Samples of a token shard with arrays tokens, offsets [n+1] and prompt_len [n]."""
    with np.load(path, allow_pickle=False) as archive:
        missing = {"tokens", "offsets", *(["prompt_len"] if responses else [])} - set(archive.files)
        if missing:
            raise ValueError(f"input {str(path)!r} lacks the arrays {sorted(missing)}")
        arrays = {name: archive[name] for name in archive.files}
    offsets = arrays["offsets"]
    starts = offsets[:-1] + (arrays["prompt_len"] if responses else 0)
    bounds = np.concatenate([starts, offsets])
    if (starts > offsets[1:]).any() or bounds.min(initial=0) < 0 or bounds.max(initial=0) > len(arrays["tokens"]):
        raise ValueError(f"input {str(path)!r}: offsets or prompt_len point outside the tokens or backwards")
    for start, stop in zip(starts, offsets[1:], strict=True):
        yield arrays["tokens"][start:stop]


def _line_text(path: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        value = None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f"{path}, line {number}: need a JSON string or an object with a string 'text'")
    return text


if __name__ == "__main__":
    sys.exit(main())
