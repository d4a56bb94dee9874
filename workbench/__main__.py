"""The command line: `python -m workbench {run,notebooks,methods,prompts,trie}`.

Exit codes: 0 fine, 1 a notebook failed, 2 wrong usage, 130 interrupted. Heavy modules are imported by the command that
needs them, so that help is instant.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.signals import terminate_like_ctrl_c

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Parses `argv` (default: of the process), runs the command and returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        with terminate_like_ctrl_c():  # or half-written tries would lie about
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
    _add_trie_build(trie)
    info = trie.add_parser("info", help="size and order of a trie")
    info.add_argument("path", help="file written by build, or a published .trie file")
    info.set_defaults(command=_trie_info)
    _add_trie_files(trie)


def _add_trie_build(trie: argparse._SubParsersAction) -> None:
    build = trie.add_parser("build", help="count n-grams of text or tokens")
    add = build.add_argument
    add(
        "inputs",
        nargs="+",
        help="folders or files: .jsonl, .jsonl.gz, .jsonl.zst (each line text or {'text': ...}), .parquet, .txt, "
        "token shards (.npz), token arrays (.npy)",
    )
    add("--out", required=True, help="file to write")
    add("--tokenizer", help="folder with a tokenizer.json, or 'embedded' (text needs one)")
    add("--responses", action="store_true", help="of token shards, count the responses only")
    add("--order", type=int, default=3, help="longest n-gram (default 3)")
    add("--min-count", type=_numbers, default=1, metavar="N[,N...]", help="drop rarer n-grams (default 1)")
    add("--quantised", action="store_true", help="keep counts in 8 bits, as the action 'quantise' does")
    add("--field", default="text", help="field or column that holds the text (default text)")
    add("--eos", metavar="TOKEN", help="token put behind every text, by its text or id (default none)")
    add("--special-tokens", action="store_true", help="let the tokenizer add its special tokens to every text")
    add("--text-suffix", action="append", metavar=".EXT", help="ending of files that are one text each (default .txt)")
    add("--on-error", choices=("report", "raise"), default="report", help="what a bad line does (default report)")
    add("--workers", type=int, default=1, help="processes that read and count (default 1)")
    add("--memory-mb", type=float, default=1024.0, help="working memory of all workers together (default 1024)")
    add("--scheduler", metavar="ADDRESS", help="count on a Dask cluster that sees the same folders")
    add("--temp", metavar="DIR", help="folder of temporary files (default: beside --out)")
    build.set_defaults(command=_trie_build)


def _numbers(text: str) -> int | tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    return values[0] if len(values) == 1 else values


def _add_trie_files(trie: argparse._SubParsersAction) -> None:
    """Commands that make a trie file of others."""
    imported = trie.add_parser("import", help="convert a .trie file as DART publishes it")
    imported.add_argument("path", help="published file")
    imported.add_argument("--tokenizer", help="folder with a tokenizer.json, or 'embedded': whose ids these are")
    imported.add_argument("--vocab-size", type=int, help="ids are below it (default: of the tokenizer, else as found)")
    imported.add_argument(
        "--low-counts", choices=("refuse", "raise"), default="refuse", help="frequencies below 1 (default refuse)"
    )
    imported.add_argument("--memory-mb", type=int, default=4096, help="MiB for the conversion (default 4096)")
    imported.set_defaults(command=_trie_import)
    export = trie.add_parser("export", help="write a .trie file as DART publishes it")
    export.add_argument("path", help="trie to convert")
    export.set_defaults(command=_trie_export)
    merge = trie.add_parser("merge", help="add up tries")
    merge.add_argument("paths", nargs="+", help="tries of one order and tokenizer")
    merge.set_defaults(command=_trie_merge)
    threshold = trie.add_parser("threshold", help="drop rare n-grams; the others keep their counts")
    threshold.add_argument("path", help="trie to thin out")
    threshold.add_argument(
        "--min-count", type=_numbers, required=True, metavar="N[,N...]", help="drop rarer n-grams, by length if several"
    )
    threshold.set_defaults(command=_trie_threshold)
    quantise = trie.add_parser("quantise", help="keep counts in 8 bits: smaller if over 65,536 tokens, up to 4.2%% off")
    quantise.add_argument("path", help="trie with exact counts")
    quantise.set_defaults(command=_trie_quantise)
    for command in (imported, export, merge, threshold, quantise):
        command.add_argument("--out", required=True, help="file to write")
    for command in (imported, merge, threshold, quantise):
        command.add_argument("--temp", metavar="DIR", help="folder of temporary files (default: that of --out)")


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
    from workbench.search.corpus import CorpusOptions
    from workbench.search.count_corpus import count_corpus
    from workbench.search.trie import vocabulary_fingerprint

    tokenizer = _tokenizer(args.tokenizer) if args.tokenizer else None
    vocabulary = tokenizer.get_vocab() if tokenizer else {}
    options = CorpusOptions(
        tokenizer=str(_tokenizer_file(args.tokenizer)) if args.tokenizer else None,
        field=args.field,
        eos_id=None if args.eos is None else _token_id(args.eos, vocabulary),
        special_tokens=args.special_tokens,
        responses=args.responses,
        text_suffixes=tuple(args.text_suffix or (".txt",)),
        on_error=args.on_error,
    )
    with _exact_file(args) as exact:
        counted = count_corpus(
            args.inputs,
            exact,
            args.order,
            args.min_count,
            vocab_size=max(vocabulary.values()) + 1 if vocabulary else None,
            fingerprint=vocabulary_fingerprint(vocabulary) if vocabulary else "",
            options=options,
            workers=args.workers,
            memory_mb=args.memory_mb,
            cluster=args.scheduler,
            spill_dir=args.temp,
            progress=sys.stderr.isatty(),
        )
        if counted.problems:
            print("\n".join(counted.reports), file=sys.stderr)
            print(f"left out {counted.problems} bad lines ({len(counted.reports)} shown)", file=sys.stderr)
        return _quantise(exact, args) if args.quantised else _print_trie(args.out)


@contextmanager
def _exact_file(args: argparse.Namespace) -> Iterator[Path]:
    """The file to count into: --out, or one that is gone afterwards if --out is to receive quantised counts.

    So an older file at --out stays as it is if the counts cannot be quantised.
    """
    from workbench.search.trie_stream import check_target

    out = Path(args.out)
    if not args.quantised:
        yield out
        return
    check_target(out)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.exact-", dir=args.temp or out.parent) as folder:
        yield Path(folder) / out.name


def _token_id(token: str, vocabulary: dict[str, int]) -> int:
    number = vocabulary.get(token, int(token) if token.isdecimal() else -1)
    if vocabulary and number not in vocabulary.values():
        raise ValueError(f"--eos is {token!r}, allowed: a token of the vocabulary, or its id")
    return number


def _trie_info(args: argparse.Namespace) -> int:
    return _print_trie(args.path)


def _trie_import(args: argparse.Namespace) -> int:
    from workbench.search.trie import NgramTrie, vocabulary_fingerprint

    vocabulary = _tokenizer(args.tokenizer).get_vocab() if args.tokenizer else {}
    size, name = args.vocab_size, ""
    if vocabulary:
        size = max(vocabulary.values()) + 1 if size is None else size
        name = vocabulary_fingerprint(vocabulary)
    show = sys.stderr.isatty()
    NgramTrie.import_dart(args.path, args.out, size, name, args.low_counts, args.memory_mb, args.temp, show)
    return _print_trie(args.out)


def _trie_export(args: argparse.Namespace) -> int:
    from workbench.search.trie import NgramTrie

    NgramTrie.open(args.path).export_dart(args.out, progress=sys.stderr.isatty())
    return _print_trie(args.out)


def _trie_merge(args: argparse.Namespace) -> int:
    from workbench.search.trie_merge import merge_tries

    merge_tries(args.paths, args.out, args.temp, progress=sys.stderr.isatty())
    return _print_trie(args.out)


def _trie_threshold(args: argparse.Namespace) -> int:
    from workbench.search.trie_merge import threshold_trie

    threshold_trie(args.path, args.out, args.min_count, args.temp, progress=sys.stderr.isatty())
    return _print_trie(args.out)


def _trie_quantise(args: argparse.Namespace) -> int:
    return _quantise(args.path, args)


def _quantise(path: str | Path, args: argparse.Namespace) -> int:
    from workbench.search.quantise import quantise_trie

    quantise_trie(path, args.out, args.temp, progress=sys.stderr.isatty())
    return _print_trie(args.out)


def _print_trie(path: str) -> int:
    from workbench.search.published_read import published_info
    from workbench.search.trie import NgramTrie
    from workbench.show.tables import text_table

    info = published_info(path) or NgramTrie.open(path).info()
    print(text_table([{"field": k, "value": str(v)} for k, v in info.items()], max_width=200))
    return 0


def _tokenizer(name: str) -> Tokenizer:
    from tokenizers import Tokenizer

    file = _tokenizer_file(name)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # it raises nothing narrower
        raise ValueError(f"--tokenizer: {file} cannot be read: {error}") from error


def _tokenizer_file(name: str) -> Path:
    from workbench.models.embedded import embedded_folder

    file = (embedded_folder() if name == "embedded" else Path(name)) / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"--tokenizer: {file} does not exist; allowed: a folder with a tokenizer.json, or 'embedded'")
    return file


if __name__ == "__main__":
    sys.exit(main())
