"""A corpus cleaned: documents judged in parallel, duplicates and overlaps found, those that stay written in order."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from rung.config import CleanConfig, DataConfig, Filter
from rung.corpus.contamination import Index, Overlap, build_index
from rung.corpus.documents import Document, OnProgress, Scan, documents
from rung.corpus.duplicates import bands, chance_found, nearly_same_text, same_text
from rung.corpus.filters import check_languages, check_scripts
from rung.corpus.folder import Corpus, Record, is_corpus, read_lines
from rung.corpus.judging import EXAMPLES, FILTERS, STAYS, Block, Judged, judge_block, look_in_block
from rung.corpus.sources import Source, fingerprint, resolve
from rung.corpus.workers import Engine
from rung.corpus.writer import CorpusWriter
from rung.disk import check_apart
from rung.errors import RungError, note_kept

_FORMAT = 1  # of what is kept; another one is begun anew
_BLOCK_BYTES = 4 << 20  # of a shard's file, judged as one task; what is judged is kept by block
_EXCERPT = 160  # characters
_LISTED = 1000  # overlaps in the report; all are counted
_COPY_BYTES = 1 << 20

Choose = Callable[[Scan], Collection[int]]
"""Given what the documents that stay are like, which of them are held out, by number."""


@dataclass(frozen=True)
class Cleaned:
    """What a cleaning did: ``report`` as corpus.json keeps it; ``corpus`` is None where it was only a report.

    ``resumed``: bytes of the corpus's files that had been judged before an interruption.
    """

    report: dict[str, Any]
    corpus: Corpus | None
    resumed: int = 0


def clean(
    source: str | Path,
    out: str | Path | None,
    settings: CleanConfig,
    engine: Engine,
    *,
    data: DataConfig | None = None,
    choose: Choose | None = None,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> Cleaned:
    """Write the documents of a corpus folder that stay into another one; without ``out``, only report.

    Documents stay as they are, in their order. What is judged is kept beside ``out`` by block, so that the same call
    goes on from there after an interruption; the result depends neither on that nor on the number of workers.

    Args:
        source: a corpus folder.
        out: the folder to make.
        settings: the filters' limits.
        engine: where the work is done.
        data: how the texts held out are read.
        choose: for ``settings.held_out``: which documents those are.
        overwrite: replace a corpus that is there.
        on_progress: told (bytes done, bytes in all) of the corpus's files, which are read twice.

    Raises:
        RungError: no corpus, nothing that stays, an unknown script or language, unreadable texts held out; settings
            that leave nothing, or that have nothing to be held against.
    """
    if not is_corpus(source):
        hint = "`rung corpus files SOURCE... --out DIR` makes a corpus of any text"
        raise RungError(f"{source} is not a corpus folder", hint)
    if settings.held_out and settings.remove_contaminated:
        problem = "what is taken out as contaminated would change which documents are held out"
        raise RungError(problem, "hold out first: make a corpus of them, and name it with --validation")
    _check_contradictions(settings)
    check_scripts(settings.scripts)
    if "languages" not in settings.skip:
        check_languages(settings.languages)
    corpus = Corpus.open(source)
    held_out = [*_sources(settings.validation), *_sources(settings.evaluation)]
    _check_apart(corpus, held_out)
    cleaning = _Cleaning(corpus, settings, engine, held_out, data or DataConfig(), choose, on_progress or _nothing)
    if out is None:
        with tempfile.TemporaryDirectory(prefix="rung-") as folder:
            return Cleaned(cleaning.judge(Path(folder)).report, None)
    if Path(out).resolve() == corpus.path.resolve():
        raise RungError(f"{out} is the corpus itself", "name another folder with --out")
    check_apart(Path(out), [corpus.path, *(source.path for source in held_out)])
    made_from = [_fingerprint(one) for one in (_as_source(corpus), *held_out)]
    about = {"cleaned": corpus.kind, **dataclasses.asdict(settings)}
    with CorpusWriter(out, "clean", sources=made_from, settings=about, overwrite=overwrite) as writer:
        work = Path(out).parent / f".{Path(os.path.normpath(out)).name}.judged"
        try:
            judgement = cleaning.judge(_kept(work, [made_from, about, data and dataclasses.asdict(data)]))
        except BaseException as error:
            kept = any(work.glob("block-*.npz"))
            note_kept(error, kept)
            if not kept:
                shutil.rmtree(work, ignore_errors=True)
            raise
        if not (judgement.taken_by == STAYS).any():
            writer.abandon()
            shutil.rmtree(work, ignore_errors=True)
            raise RungError(f"no document of {source} stays: {_taken(judgement.report)}", "loosen what took most")
        cleaning.write(judgement, writer)
        shutil.rmtree(work)
        return Cleaned(judgement.report, writer.finish(judgement.report), judgement.resumed)


# The whole


@dataclass(frozen=True)
class _Judgement:
    """What becomes of every document, by its number in the corpus."""

    taken_by: np.ndarray  # int8 [N]
    blocks: Sequence[Block]
    judged: Sequence[Judged]  # by block, without signatures
    report: dict[str, Any]
    resumed: int  # bytes judged before


@dataclass(frozen=True)
class _Cleaning:
    corpus: Corpus
    settings: CleanConfig
    engine: Engine
    held_out: Sequence[Source]
    data: DataConfig
    choose: Choose | None
    on_progress: OnProgress

    def judge(self, work: Path) -> _Judgement:
        """Judge all documents; what is found is kept by block in the folder ``work``."""
        index = None
        if self.held_out:
            index = build_index(documents(self.held_out, self.data), work / "held-out", self.settings)
        blocks = list(self._blocks(str((work / "held-out").resolve()) if index else ""))
        resumed = self._judge_blocks(blocks, work)
        paths = [work / _block_name(number) for number in range(len(blocks))]
        judged = [Judged.load(path) for path in paths]
        taken_by = np.concatenate([np.empty(0, np.int8), *(one.taken_by for one in judged)])
        found = _Documents(blocks, judged)
        why = found.why()
        why |= _take_duplicates(taken_by, found, paths, self.settings, work)
        overlaps = [(number, one) for number, one in found.overlaps() if taken_by[number] == STAYS]
        if self.settings.remove_contaminated:
            taken_by[[number for number, _ in overlaps]] = FILTERS.index("contamination")
        report = _report(self.settings, taken_by, found, why)
        if index:
            report["contamination"] = _contamination(index, overlaps, found)
        if self.settings.held_out and self.choose:
            report["held_out"] = self._hold_out(taken_by, blocks, found, work / "part")
        return _Judgement(taken_by, blocks, judged, report, resumed)

    def write(self, judgement: _Judgement, writer: CorpusWriter) -> None:
        """Copy the lines of the documents that stay."""
        done, number = self._file_bytes, 0
        resume = writer.state["next"] if writer.state else 0
        for block, judged in zip(judgement.blocks, judgement.judged, strict=True):
            with Path(block.path).open("rb") as file:
                for k in range(len(judged.bytes)):
                    number += 1
                    if number <= resume or judgement.taken_by[number - 1] != STAYS:
                        continue
                    start, stop = judged.offsets[k : k + 2].tolist()
                    file.seek(start)
                    writer.copy(file, stop - start, int(judged.bytes[k]), int(judged.characters[k]))
                    writer.mark(lambda: {"next": number})  # noqa: B023 - called at once
            done += block.stop - block.start
            self.on_progress(done, 2 * self._file_bytes)

    def _hold_out(
        self, taken_by: np.ndarray, blocks: Sequence[Block], found: _Documents, folder: Path
    ) -> dict[str, Any]:
        """Report what the documents that will be held out share with the others that stay."""
        assert self.choose
        left = np.flatnonzero(taken_by == STAYS)
        chars, sizes = (array("q", values[left].tolist()) for values in (found.characters, found.bytes))
        held_out = set(left[sorted(self.choose(Scan(chars, sizes)))].tolist())
        index = build_index(map(found.document, sorted(held_out)), folder, self.settings)
        light = dataclasses.replace(self.settings, skip=get_args(Filter), scripts=(), languages=())
        looked = self.engine.map(
            look_in_block, (dataclasses.replace(one, index=str(folder.resolve()), settings=light) for one in blocks)
        )
        training = set(left.tolist()) - held_out
        overlaps = [(number, one) for number, one in found.numbered(looked) if number in training]
        return _contamination(index, overlaps, found)

    @property
    def _file_bytes(self) -> int:
        return sum(shard.file_bytes for shard in self.corpus.shards)

    def _blocks(self, index: str) -> Iterator[Block]:
        for shard in self.corpus.shards:
            path = self.corpus.path / shard.name
            start = 0
            while start < shard.file_bytes:
                stop = _end_of_line(path, min(start + _BLOCK_BYTES, shard.file_bytes))
                yield Block(str(path.resolve()), start, stop, self.settings, index)
                start = stop

    def _judge_blocks(self, blocks: Sequence[Block], work: Path) -> int:
        """Judge what is not yet judged; return the bytes that were."""
        missing = [number for number in range(len(blocks)) if not (work / _block_name(number)).exists()]
        done = resumed = self._file_bytes - sum(blocks[number].stop - blocks[number].start for number in missing)
        self.on_progress(done, 2 * self._file_bytes)
        results = self.engine.map(judge_block, (blocks[number] for number in missing))
        for number, judged in zip(missing, results, strict=True):
            judged.save(work / _block_name(number))
            done += blocks[number].stop - blocks[number].start
            self.on_progress(done, 2 * self._file_bytes)
        return resumed


class _Documents:
    """The documents of a corpus by number, for those that are named in a report."""

    def __init__(self, blocks: Sequence[Block], judged: Sequence[Judged]):
        self._blocks, self._judged = blocks, judged
        self._first = np.cumsum([0, *(len(one.bytes) for one in judged)])  # number of each block's first document
        self.bytes = np.concatenate([np.empty(0, np.int64), *(one.bytes for one in judged)])
        self.characters = np.concatenate([np.empty(0, np.int64), *(one.characters for one in judged)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def keys(self) -> np.ndarray:
        return np.concatenate([np.empty((0, 2), np.uint64), *(one.keys for one in self._judged)])

    def why(self) -> dict[int, str]:
        return {
            int(first) + n: text
            for first, one in zip(self._first[:-1], self._judged, strict=True)
            for n, text in one.why
        }

    def overlaps(self) -> Iterator[tuple[int, Overlap]]:
        return self.numbered(one.overlaps for one in self._judged)

    def numbered(self, by_block: Iterable[list[tuple[int, Overlap]]]) -> Iterator[tuple[int, Overlap]]:
        for first, overlaps in zip(self._first[:-1], by_block, strict=True):
            for n, overlap in overlaps:
                yield int(first) + n, overlap

    def document(self, number: int) -> Document:
        record = self._record(number)
        return Document(record.name, record.pieces)

    def shown(self, number: int) -> tuple[str, str]:
        """Return the name and the beginning of a document, fit for JSON in UTF-8."""
        record = self._record(number)
        text = ""
        for piece in record.pieces:
            text += piece[: _EXCERPT + 1]
            if len(text) > _EXCERPT:
                text = text[:_EXCERPT] + " ..."
                break
        return _encodable(record.name), _encodable(text)

    def _record(self, number: int) -> Record:
        block = int(np.searchsorted(self._first, number, side="right")) - 1
        offset = int(self._judged[block].offsets[number - self._first[block]])
        return next(read_lines(Path(self._blocks[block].path), offset))


def _take_duplicates(
    taken_by: np.ndarray, found: _Documents, paths: Sequence[Path], settings: CleanConfig, work: Path
) -> dict[int, str]:
    """Mark duplicates in ``taken_by``; return why, of the first that go."""
    why: dict[int, str] = {}
    if "duplicates" not in settings.skip:
        left = np.flatnonzero(taken_by == STAYS)
        twins = same_text(found.keys()[left])
        again = np.flatnonzero(twins >= 0)
        taken_by[left[again]] = FILTERS.index("duplicates")
        for k in again[:EXAMPLES].tolist():
            why[int(left[k])] = f"the text of {found.shown(int(left[twins[k]]))[0]}"
    if "near-duplicates" not in settings.skip:
        left = np.flatnonzero(taken_by == STAYS)
        twins, similarity = nearly_same_text(_signatures(paths, left, settings, work), settings.similarity)
        again = np.flatnonzero(twins >= 0)
        taken_by[left[again]] = FILTERS.index("near-duplicates")
        for k in again[:EXAMPLES].tolist():
            why[int(left[k])] = f"about {similarity[k]:.0%} of {found.shown(int(left[twins[k]]))[0]}"
    return why


def _signatures(paths: Sequence[Path], left: np.ndarray, settings: CleanConfig, work: Path) -> np.ndarray:
    """Return the signatures of the documents that are left, on disk: uint32 [len(left), permutations]."""
    if not left.size:
        return np.empty((0, settings.permutations), np.uint32)
    together = np.memmap(work / "signatures", np.uint32, "w+", shape=(len(left), settings.permutations))
    first = row = 0
    for path in paths:
        with np.load(path) as file:
            part = file["signatures"]
        here = left[row : np.searchsorted(left, first + len(part))] - first
        together[row : row + len(here)] = part[here]
        first, row = first + len(part), row + len(here)
    return together


# The report


def _report(settings: CleanConfig, taken_by: np.ndarray, found: _Documents, why: dict[int, str]) -> dict[str, Any]:
    def counted(which: np.ndarray) -> dict[str, int]:
        return {"documents": int(which.sum()), "bytes": int(found.bytes[which].sum())}

    filters: dict[str, Any] = {}
    for number, name in enumerate(FILTERS):
        taken = taken_by == number
        examples = np.flatnonzero(taken)[:EXAMPLES].tolist()
        filters[name] = counted(taken) | {"examples": [_example(n, found, why) for n in examples]}
    report = {"read": counted(np.ones(len(taken_by), bool)), "stay": counted(taken_by == STAYS), "filters": filters}
    if "near-duplicates" not in settings.skip:
        n_bands, rows = bands(settings.permutations, settings.similarity)
        chances = {
            f"{similarity:.2f}": round(chance_found(similarity, settings.permutations, settings.similarity), 4)
            for similarity in (settings.similarity, (1 + settings.similarity) / 2)
        }
        report["near_duplicates"] = {"bands": n_bands, "rows": rows, "chance_found": chances}
    return report


def _example(number: int, found: _Documents, why: dict[int, str]) -> dict[str, str]:
    name, text = found.shown(number)
    return {"name": name, "why": why.get(number, ""), "text": text}


def _contamination(index: Index, overlaps: Sequence[tuple[int, Overlap]], found: _Documents) -> dict[str, Any]:
    listed = [
        {
            "document": found.shown(number)[0],
            "held_out": _encodable(index.names[one.held_out]),
            "places": one.places,
            "words": one.words,
            "text": _encodable(one.text),
        }
        for number, one in overlaps[:_LISTED]
    ]
    return {
        "held_out": len(index.names),
        "too_short": len(index.too_short),
        "too_short_examples": [_encodable(name) for name in index.too_short[:EXAMPLES]],
        "found_in_training": len({one.held_out for _, one in overlaps}),
        "documents": len({number for number, _ in overlaps}),
        "overlaps": len(overlaps),
        "listed": listed,
    }


# Helpers


def _nothing(done: int, total: int) -> None:
    pass


def _encodable(text: str) -> str:
    """Return a text with halves of surrogate pairs as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _block_name(number: int) -> str:
    return f"block-{number:06d}.npz"


def _taken(report: dict[str, Any]) -> str:
    taken = {name: said["documents"] for name, said in report["filters"].items() if said["documents"]}
    return ", ".join(f"{name} took {count:,}" for name, count in taken.items()) or "it has none"


def _check_contradictions(settings: CleanConfig) -> None:
    if settings.remove_contaminated and not (settings.validation or settings.evaluation):
        hint = "name texts held out: --evaluation FILE or --validation FILE; or leave --remove-contaminated out"
        raise RungError("--remove-contaminated is given, and nothing to look for", hint)
    if "length" not in settings.skip and settings.max_words and settings.min_words > settings.max_words:
        problem = f"--min-words {settings.min_words} is over --max-words {settings.max_words}"
        raise RungError(problem, "lower --min-words, which is 50 where it is not given, or raise --max-words")


def _sources(names: Sequence[str]) -> list[Source]:
    return resolve(names) if names else []


def _as_source(corpus: Corpus) -> Source:
    return resolve([corpus.path])[0]


def _fingerprint(source: Source) -> dict[str, Any]:
    said = fingerprint(source)
    return {"name": said["name"], "size": said["bytes"], "sha256": said["sha256"], "sampled": said["sampled"]}


def _check_apart(corpus: Corpus, held_out: Sequence[Source]) -> None:
    for source in held_out:
        if source.path.resolve() == corpus.path.resolve():
            raise RungError(f"{source.name} is both training text and held out", "hold it against another corpus")


def _kept(work: Path, made_from: Any) -> Path:
    """Return the folder, with what it holds of the same work, and of no other."""
    identity = hashlib.sha256(json.dumps([_FORMAT, _BLOCK_BYTES, made_from]).encode()).hexdigest()
    file = work / "identity"
    if not file.exists() or file.read_text() != identity:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        file.write_text(identity)
    return work


def _end_of_line(path: Path, offset: int) -> int:
    """Return where the line ends that the byte before ``offset`` is in."""
    with path.open("rb") as file:
        file.seek(offset - 1)
        while (part := file.readline(_COPY_BYTES)) and not part.endswith(b"\n"):
            pass
        return file.tell()
