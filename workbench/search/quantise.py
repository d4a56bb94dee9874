"""Quantising saved tries in memory that does not depend on their size; the counts' codes are in `count_codes.py`."""

from __future__ import annotations

from pathlib import Path

from tqdm.auto import tqdm

from workbench.search.trie_format import TrieHeader
from workbench.search.trie_reader import TrieReader
from workbench.search.trie_stream import TrieWriter, spill_folder

_CHUNK = 1 << 18


def quantise_trie(
    path: str | Path,
    out_path: str | Path,
    folder: str | Path | None = None,
    chunk: int = _CHUNK,
    progress: bool = False,
) -> TrieHeader:
    """Writes the n-grams of a saved trie with counts of 8 bits: byte for byte what `NgramTrie.quantise` saves.

    Args:
        path: the trie; its counts must be exact.
        out_path: trie file to write; may be `path`.
        folder: where temporary files go, about as large as the result; beside `out_path` when None.
        chunk: n-grams that are in memory at once, about 100 bytes each.
        progress: show a bar.

    Returns:
        The header of the written file.

    Raises:
        ValueError: the vocabulary is over 2^24, the counts are quantised already, or the file is damaged.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, allowed 1 or more")
    out_path = Path(out_path)
    with TrieReader.open(path) as reader, spill_folder(out_path, folder) as spills:
        header = reader.header
        try:
            writer = TrieWriter(spills, header.order, header.vocab_size, header.fingerprint, quantised=True)
        except ValueError as error:
            raise ValueError(f"{reader.name}: {error}") from None
        bar = {"total": header.num_nodes, "desc": "quantise", "unit": "node", "unit_scale": True}
        with tqdm(**bar, disable=not progress) as shown:
            for level in range(1, header.order + 1):
                for part in reader.chunks(level, chunk):
                    writer.append(part)
                    shown.update(part.tokens.size)
                writer.end_level()
        return writer.finish(out_path, header.total_tokens)
