"""A look at text and at tokens, as pages that need nothing but themselves, and as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rung.corpus.look import Lengths, Look
from rung.report.columns import columns
from rung.report.html import document
from rung.report.series import log_ticks, ticks
from rung.report.words import NEWLINE, NOTHING, TAB, count, decimal, excerpt, plural, safe, short, visible
from rung.tokens.batches import IGNORED
from rung.tokens.look import SplitLook, Window
from rung.tokens.tokenizer import StreamDecoder, Tokenizer

STYLE = "data.css"
MOST_FREQUENT = 30  # tokens shown
MOST_SOURCES = 50  # listed
MOST_SCRIPTS = 20
SHOWN_CHARS = 1200  # of a document, on the page
DRAWN_TOKENS = 2048  # of a window
EDGE = 6  # positions that the table of a window shows at either end; half as many around a border
SPACE, WIDE_SPACE = "␣", "□"
BEGUN = "▫"  # stands for a token that ends within a character
BAR = 40  # columns of a terminal, of the longest bar
WIDTH, HEIGHT = 1000, 400  # units of a drawing, before it is stretched


@dataclass(frozen=True)
class TextView:
    """A look at text, with what is said around it."""

    title: str
    sources: Sequence[Mapping[str, Any]]  # name, bytes
    look: Look
    languages: Mapping[str, int] | None = None  # of the sampled documents; None: the library is not there
    about: Mapping[str, Any] = field(default_factory=dict)  # what the corpus says of how it was made
    samples: int = 5


@dataclass(frozen=True)
class TokenView:
    """A look at a store, with what is said around it."""

    title: str
    tokenizer: Tokenizer
    splits: Mapping[str, SplitLook]  # by the name of the split, of a mixture with that of the store
    documents: Mapping[str, int | None]
    windows: Sequence[Window]
    context_length: int
    notes: Sequence[str] = ()


# Text


def text_page(view: TextView) -> str:
    """Return the look at a text as HTML."""
    look = view.look
    lead = f"{plural(look.documents, 'document')} · {_size(look.bytes)} · {plural(look.characters, 'character')}"
    drawn = [look.excerpts[n] for n in _evenly(len(look.excerpts), view.samples)]
    excerpts = "".join(
        f'<div class="excerpt"><div class="about"><b>{safe(one.name)}</b>{plural(one.characters, "character")}'
        f"{_metadata(one.metadata)}</div>"
        f'<div class="text" dir="auto">{safe(one.text[:SHOWN_CHARS])}'
        f"{' …' if one.characters > SHOWN_CHARS else ''}</div></div>"
        for one in drawn
    )
    shares = [("Scripts", _share_table(dict(list(look.scripts.items())[:MOST_SCRIPTS]), look.characters, "Script"))]
    if view.languages:
        number = sum(view.languages.values())
        note = f'<p class="note">Of {plural(number, "document")} drawn evenly from all.</p>'
        shares.append(("Languages", note + _share_table(view.languages, number, "Language")))
    if look.odd:
        shares.append(("Signs of damage", _share_table(look.odd, look.characters, "Characters")))
    body = [
        f'<header><h1>{safe(view.title)}</h1><p class="lead">{safe(lead)}</p></header>',
        _numbers(_text_numbers(look)),
        _section("Length of documents", _lengths_figure(look.lengths, "characters")),
        *(_section(title, table) for title, table in shares),
        _section("Documents", f'<p class="note">Drawn evenly from all, in their order.</p>{excerpts}'),
        _section("Sources", _source_table(view.sources)),
        _section("How the corpus was made", _about(view.about)) if view.about else "",
    ]
    return document(f"{view.title} · Rung", "\n".join(body), STYLE)


def text_lines(view: TextView) -> list[str]:
    """Return the look at a text as lines for a terminal."""
    look = view.look
    numbers = [(name, f"{value}  {detail}".rstrip()) for name, value, detail in _text_numbers(look)]
    lines = [visible(view.title), "", *columns(("", ""), numbers, left=2)[1:]]
    tables: list[tuple[str, Mapping[str, int], int]] = [("script", look.scripts, look.characters)]
    if view.languages:
        tables.append((f"language (of {sum(view.languages.values())})", view.languages, sum(view.languages.values())))
    if look.odd:
        tables.append(("signs of damage", look.odd, look.characters))
    for name, counts, total in tables:
        rows = [(one, count(number), _share(number, total)) for one, number in list(counts.items())[:MOST_SCRIPTS]]
        lines += ["", *columns((name, "number", "share"), rows)]
    lines += ["", *_length_lines(look.lengths, "characters")]
    for one in [look.excerpts[n] for n in _evenly(len(look.excerpts), view.samples)]:
        lines += ["", f"{visible(one.name)}  ({plural(one.characters, 'character')})"]
        lines += [f"    {line}" for line in excerpt(one.text[:SHOWN_CHARS], lines=3)]
    return lines


def text_result(view: TextView) -> dict[str, Any]:
    """Return the look at a text as plain values."""
    look = view.look
    return {
        "documents": look.documents,
        "empty_documents": look.empty,
        "bytes": look.bytes,
        "characters": look.characters,
        "different_characters": look.different,
        "lengths": _length_values(look.lengths),
        "scripts": look.scripts,
        "languages": view.languages,
        "odd": look.odd,
        "samples": [
            {"name": one.name, "characters": one.characters, "metadata": dict(one.metadata), "text": one.text}
            for one in [look.excerpts[n] for n in _evenly(len(look.excerpts), view.samples)]
        ],
    }


# Tokens


def token_page(view: TokenView) -> str:
    """Return the look at a store as HTML."""
    train = next(iter(view.splits.values()))
    notes = "".join(f'<p class="problem">{safe(note)}</p>' for note in view.notes)
    lead = f"{view.tokenizer.kind} tokenizer of {count(view.tokenizer.vocab_size)} entries"
    body = [
        f'<header><h1>{safe(view.title)}</h1><p class="lead">{safe(lead)}</p>{notes}</header>',
        _numbers(_token_numbers(view, train)),
        _section("Splits", _split_table(view)),
        _section("What a batch shows the model", _windows(view)),
        _section(
            "Tokens",
            f'<div class="charts">{_rank_figure(train)}{_lengths_figure(train.lengths, "tokens")}</div>'
            f"<h3>Most frequent</h3>{_frequent_table(view.tokenizer, train)}",
        ),
    ]
    return document(f"{view.title} · Rung", "\n".join(body), STYLE)


def token_lines(view: TokenView) -> list[str]:
    """Return the look at a store as lines for a terminal."""
    lines = [visible(view.title), *map(visible, view.notes), ""]
    rows = [
        (
            name,
            count(split.tokens),
            _documents(view.documents[name]),
            decimal(split.bytes_per_token),
            _share(split.unused, len(split.counts_V)),
            "all" if split.whole else count(split.seen),
        )
        for name, split in view.splits.items()
    ]
    lines += columns(("split", "tokens", "documents", "bytes/token", "vocabulary unused", "looked at"), rows)
    train = next(iter(view.splits.values()))
    frequent = [
        (_piece(view.tokenizer, token), str(token), count(number), _share(number, train.seen))
        for token, number in train.most_frequent(MOST_FREQUENT // 2)
    ]
    lines += ["", *columns(("most frequent", "id", "times", "share"), frequent)]
    if train.lengths.number:
        lines += ["", *_length_lines(train.lengths, "tokens")]
    for window in view.windows:
        lines += ["", f"{_window_title(window)}  {_window_detail(window)}"]
        pairs = [
            (
                "" if position is None else str(position),
                "..." if position is None else _piece(view.tokenizer, int(window.tokens_T[position])),
                "" if position is None else _target(view.tokenizer, int(window.targets_T[position])),
                "" if position is None or window.segments_T is None else str(window.segments_T[position]),
                "document begins" if position is not None and position in _borders(window) else "",
            )
            for position in _positions(window)
        ]
        lines += [f"    {line}" for line in columns(("position", "input", "target", "segment", ""), pairs, left=5)]
    return lines


def token_result(view: TokenView) -> dict[str, Any]:
    """Return the look at a store as plain values."""
    return {
        "vocab_size": view.tokenizer.vocab_size,
        "splits": {
            name: {
                "tokens": split.tokens,
                "looked_at": split.seen,
                "documents": view.documents[name],
                "bytes_per_token": split.bytes_per_token,
                "unused": split.unused,
                "unused_part": split.unused / len(split.counts_V),
                "most_frequent": [
                    {"id": token, "piece": view.tokenizer.show(token), "times": number}
                    for token, number in split.most_frequent(MOST_FREQUENT)
                ],
                "lengths": _length_values(split.lengths),
            }
            for name, split in view.splits.items()
        },
        "context_length": view.context_length,
        "windows": [
            {
                "step": window.step + 1,
                "row": window.row,
                "source": window.source or None,
                "tokens": window.tokens_T.tolist(),
                "targets": window.targets_T.tolist(),
                "segments": None if window.segments_T is None else window.segments_T.tolist(),
                "text": view.tokenizer.decode(window.tokens_T),
            }
            for window in view.windows
        ],
        "notes": list(view.notes),
    }


# Numbers and tables


def _text_numbers(look: Look) -> list[tuple[str, str, str]]:
    lengths = look.lengths
    empty = f"{count(look.empty)} more are empty" if look.empty else ""
    return [
        ("Documents", count(look.documents), empty),
        ("Size", _size(look.bytes), f"{count(look.bytes)} bytes"),
        ("Characters", short(look.characters), count(look.characters)),
        ("Bytes per character", decimal(look.bytes / max(1, look.characters), 2), "in UTF-8"),
        ("Different characters", count(look.different), ""),
        ("Median length", count(lengths.quantile(0.5)), "characters"),
        ("Mean length", count(lengths.mean), "characters"),
        ("Longest", count(lengths.greatest or 0), "characters"),
    ]


def _token_numbers(view: TokenView, train: SplitLook) -> list[tuple[str, str, str]]:
    name = next(iter(view.splits))
    vocabulary = len(train.counts_V)
    unused = f"{count(train.unused)} of {count(vocabulary)} not seen"
    all_tokens = sum(split.tokens for split in view.splits.values())
    counted = [view.documents[split] for split in view.splits]
    documents = None if None in counted else sum(number or 0 for number in counted)
    every = " and ".join(view.splits) if len(view.splits) < 3 else "all splits"
    return [
        ("Tokens", short(all_tokens), f"{count(all_tokens)}, {every}"),
        ("Documents", _documents(documents), every),
        ("Bytes per token", decimal(train.bytes_per_token), f"{name}, UTF-8"),
        ("Vocabulary unused", _share(train.unused, vocabulary), unused),
        ("Context", count(view.context_length), "tokens of a window"),
    ]


def _numbers(cells: Sequence[tuple[str, str, str]]) -> str:
    items = (
        f'<div><dt>{name}</dt><dd><span class="value">{safe(value)}</span>'
        f'<span class="detail">{safe(detail)}</span></dd></div>'
        for name, value, detail in cells
    )
    return f'<dl class="numbers{" four" if len(cells) % 4 == 0 else ""}">{"".join(items)}</dl>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def _share_table(counts: Mapping[str, int], total: int, name: str) -> str:
    rows = "".join(_share_row(safe(one), number, total, max(counts.values())) for one, number in counts.items())
    head = f'<th>{name}</th><th class="number">Number</th><th class="number">Share</th><th></th>'
    return f'<table class="shares"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _share_row(label: str, number: int, total: int, most: int) -> str:
    return (
        f'<tr><th>{label}</th><td class="number">{count(number)}</td><td class="number">{_share(number, total)}</td>'
        f'<td><span class="bar" style="width:{100 * number / max(1, most):.1f}%"></span></td></tr>'
    )


def _frequent_table(tokenizer: Tokenizer, split: SplitLook) -> str:
    frequent = split.most_frequent(MOST_FREQUENT)
    rows = "".join(
        _share_row(
            f'<code class="piece">{safe(_piece(tokenizer, token))}</code> <span class="unit">{token}</span>',
            number,
            split.seen,
            frequent[0][1],
        )
        for token, number in frequent
    )
    head = '<th>Token</th><th class="number">Times</th><th class="number">Share</th><th></th>'
    return f'<table class="shares"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _split_table(view: TokenView) -> str:
    rows = "".join(
        f'<tr><th>{safe(name)}</th><td class="number">{count(split.tokens)}</td>'
        f'<td class="number">{_documents(view.documents[name])}</td>'
        f'<td class="number">{decimal(split.bytes_per_token)}</td>'
        f'<td class="number">{_share(split.unused, len(split.counts_V))}</td>'
        f'<td class="number">{"all" if split.whole else count(split.seen)}</td></tr>'
        for name, split in view.splits.items()
    )
    names = ("Tokens", "Documents", "Bytes per token", "Vocabulary unused", "Looked at")
    head = "<th>Split</th>" + "".join(f'<th class="number">{name}</th>' for name in names)
    return f'<div style="overflow-x:auto"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _source_table(sources: Sequence[Mapping[str, Any]]) -> str:
    rows = "".join(
        f'<tr><th>{safe(one["name"])}</th><td class="number">{count(one["bytes"])}</td></tr>'
        for one in sources[:MOST_SOURCES]
    )
    more = len(sources) - MOST_SOURCES
    note = f'<p class="note">The first {MOST_SOURCES} of {count(len(sources))}.</p>' if more > 0 else ""
    head = '<th>Source</th><th class="number">Bytes</th>'
    return f'{note}<table class="shares"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _about(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{safe(name)}</th><td><code>{safe(_shortened(value))}</code></td></tr>"
        for name, value in values.items()
    )
    return f'<table class="about"><tbody>{rows}</tbody></table>'


def _metadata(metadata: Mapping[str, Any]) -> str:
    return "".join(f"<br>{safe(name)}: {safe(_shortened(value))}" for name, value in metadata.items())


# Windows


def _windows(view: TokenView) -> str:
    note = (
        "Each box is a token; a new document begins at a coloured edge, with the end of text that its first token is "
        "predicted from. Of a token a model sees what stands before it in its own document. Struck out: no target. "
        f"{BEGUN}: a token that ends within a character, which stands in the box of the token that completes it."
    )
    return f'<p class="note">{note}</p>' + "".join(_window(view, window) for window in view.windows)


def _window(view: TokenView, window: Window) -> str:
    borders = _borders(window)
    written = StreamDecoder(view.tokenizer)
    tokens = "".join(
        _box(view.tokenizer, window, k, written.push([token]), k in borders)
        for k, token in enumerate(window.tokens_T[:DRAWN_TOKENS].tolist())
    )
    if len(window.tokens_T) > DRAWN_TOKENS:
        tokens += f"<small> … {plural(len(window.tokens_T) - DRAWN_TOKENS, 'more token')}</small>"
    rows = ""
    for position in _positions(window):
        if position is None:
            rows += '<tr><td class="number">…</td><td></td><td></td><td></td></tr>'
            continue
        segment = NOTHING if window.segments_T is None else str(window.segments_T[position])
        rows += (
            f'<tr{" class=border" if position in borders else ""}><td class="number">{position}</td>'
            f"<td><code>{safe(_piece(view.tokenizer, int(window.tokens_T[position])))}</code></td>"
            f"<td><code>{safe(_target(view.tokenizer, int(window.targets_T[position])))}</code></td>"
            f'<td class="number">{segment}</td></tr>'
        )
    head = '<th class="number">Position</th><th>Input</th><th>Target</th><th class="number">Segment</th>'
    return (
        f'<div class="window"><h3>{safe(_window_title(window))}<span>{safe(_window_detail(window))}</span></h3>'
        f'<div class="row" dir="auto">{tokens}</div>'
        f'<table class="pairs"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _box(tokenizer: Tokenizer, window: Window, position: int, written: str, border: bool) -> str:
    """Return one token; ``written`` is the text that is whole with it, nothing where a character is only begun."""
    token, target = int(window.tokens_T[position]), int(window.targets_T[position])
    classes = ["odd"] if position % 2 else []
    classes += ["border"] if border else []
    classes += ["special"] if token in tokenizer.special_ids else []
    piece = _marked(written) or (tokenizer.show(token) if token in tokenizer.special_ids else BEGUN)
    piece = piece.replace(NEWLINE, f"{NEWLINE}\n")
    said = f"position {position}: {_piece(tokenizer, token)}, id {token}; target {_target(tokenizer, target)}"
    tag = "i" if target == IGNORED else "b"
    return f'<{tag} class="{" ".join(classes)}" title="{safe(said)}">{safe(piece)}</{tag}>'


def _borders(window: Window) -> set[int]:
    """Return the positions within a row at which a document begins."""
    if window.segments_T is None:
        return set()
    return set((np.flatnonzero(np.diff(window.segments_T)) + 1).tolist())


def _positions(window: Window) -> Iterator[int | None]:
    """Yield the positions that a table shows: the first, the last, those around borders; ``None`` for those between."""
    last = len(window.tokens_T)
    near = [range(border - EDGE // 2, border + EDGE // 2) for border in sorted(_borders(window))[:EDGE]]
    wanted = sorted({k for part in (range(EDGE), range(last - EDGE, last), *near) for k in part if 0 <= k < last})
    before = -1
    for position in wanted:
        if position > before + 1:
            yield None
        yield position
        before = position


def _window_title(window: Window) -> str:
    return f"step {count(window.step + 1)}, row {window.row}" + (f", of {window.source}" if window.source else "")


def _window_detail(window: Window) -> str:
    known = int((window.targets_T != IGNORED).sum())
    parts = [f"{plural(len(window.tokens_T), 'token')}, {plural(known, 'target')}"]
    if window.segments_T is not None:
        parts.append(plural(len(_borders(window)) + 1, "document"))
    else:
        parts.append("documents are not told apart")
    return "; ".join(parts)


# Figures


def _lengths_figure(lengths: Lengths, unit: str) -> str:
    bins = lengths.histogram()
    if not bins:
        return '<p class="empty">No document lies whole within what was looked at.</p>'
    low, high = np.log(bins[0][0]), np.log(bins[-1][1])
    most = max(number for _, _, number in bins) * 1.05

    def across(value: float) -> float:
        return float((np.log(value) - low) / (high - low))

    drawn = "".join(
        f'<rect x="{across(start) * WIDTH + 1:.1f}" y="{(1 - number / most) * HEIGHT:.1f}" '
        f'width="{(across(stop) - across(start)) * WIDTH - 2:.1f}" height="{number / most * HEIGHT:.1f}">'
        f"<title>{count(number)} of {count(start)} to {count(stop)} {unit}</title></rect>"
        for start, stop, number in bins
    )
    x = [(across(tick), short(tick)) for tick in log_ticks(bins[0][0], bins[-1][1], most=6)]
    y = [(tick / most, short(tick)) for tick in ticks(0, most)]
    note = (
        f"median {count(lengths.quantile(0.5))}, a tenth over {count(lengths.quantile(0.9))}, longest "
        f"{count(lengths.greatest or 0)}"
    )
    return _figure("Documents by length", note, drawn, x, y, f"{unit}, log scale")


def _rank_figure(split: SplitLook) -> str:
    times = split.ranks()
    if len(times) < 2:
        return ""
    ranks = np.unique(np.geomspace(1, len(times), 200).round().astype(int))
    high_x, low_y, high_y = max(len(times), 2), float(times[-1]), float(times[0]) * 1.2
    right = np.log(ranks) / np.log(high_x)
    up = np.log(times[ranks - 1] / low_y) / np.log(high_y / low_y)
    points = "L".join(f"{a * WIDTH:.1f} {(1 - b) * HEIGHT:.1f}" for a, b in zip(right, up, strict=True))
    x = [(float(np.log(tick) / np.log(high_x)), short(tick)) for tick in log_ticks(1, high_x, most=6)]
    y = [
        (float(np.log(tick / low_y) / np.log(high_y / low_y)), short(tick)) for tick in log_ticks(low_y, high_y, most=7)
    ]
    drawn = f'<path class="train line" d="M{points}"/>'
    return _figure("Tokens by rank", "times seen, log scale", drawn, x, y, "rank, log scale")


def _figure(
    title: str,
    unit: str,
    drawing: str,
    x: Sequence[tuple[float, str]],
    y: Sequence[tuple[float, str]],
    x_title: str,
) -> str:
    """Return a drawing within axes, as HTML in the look of the report's charts; places are 0 to 1."""
    grid = "".join(f'<path class="grid" d="M0 {(1 - place) * HEIGHT:.1f}H{WIDTH}"/>' for place, _ in y)
    y_labels = "".join(f'<span style="top:{1 - place:.2%}">{words}</span>' for place, words in y)
    x_labels = "".join(f'<span style="left:{place:.2%}">{words}</span>' for place, words in x)
    return f"""<figure class="chart">
<figcaption>{safe(title)} <span class="unit">{safe(unit)}</span></figcaption>
<div class="frame">
<div class="y-axis" aria-hidden="true">{y_labels}</div>
<div class="plot" style="cursor:auto">
<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{safe(f"{title}: {unit}")}">
{grid}{drawing}
</svg>
</div>
<div class="x-axis" aria-hidden="true">{x_labels}</div>
<div class="x-title">{x_title}</div>
</div>
</figure>
"""


# Words


def _length_lines(lengths: Lengths, unit: str) -> list[str]:
    bins = lengths.histogram(1)
    most = max((number for _, _, number in bins), default=1)
    table = columns(("", "", ""), [(count(start), "to", count(stop)) for start, stop, _ in bins], left=0)[1:]
    wide = max((len(count(number)) for _, _, number in bins), default=0)
    middle, longest = count(lengths.quantile(0.5)), count(lengths.greatest or 0)
    lines = [f"documents by length in {unit}: median {middle}, longest {longest}"]
    for row, (_, _, number) in zip(table, bins, strict=True):
        lines.append(f"    {row}  {count(number):>{wide}}  {'#' * -(-BAR * number // most)}".rstrip())
    return lines


def _length_values(lengths: Lengths) -> dict[str, Any]:
    quantiles = {f"p{round(100 * part)}": lengths.quantile(part) for part in (0.1, 0.5, 0.9, 0.99)}
    return {
        "number": lengths.number,
        "mean": lengths.mean,
        "least": lengths.least,
        "greatest": lengths.greatest,
        **quantiles,
    }


def _piece(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as it stands alone, its white space as marks."""
    piece = _marked(tokenizer.show(token))
    return piece if token in tokenizer.special_ids else piece.replace(" ", SPACE).replace("\u3000", WIDE_SPACE)


def _marked(text: str) -> str:
    return visible(text).replace("\n", NEWLINE).replace("\t", TAB)


def _target(tokenizer: Tokenizer, target: int) -> str:
    return "none" if target == IGNORED else _piece(tokenizer, target)


def _documents(number: int | None) -> str:
    return "uncounted" if number is None else count(number)


def _share(number: float, total: float) -> str:
    return f"{number / max(1, total):.2%}"


def _size(n_bytes: int) -> str:
    return f"{short(n_bytes)}B" if n_bytes >= 1000 else f"{n_bytes} bytes"


def _shortened(value: Any, most: int = 200) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]} …"


def _evenly(n: int, wanted: int) -> list[int]:
    return np.unique(np.linspace(0, n - 1, min(n, wanted)).round().astype(int)).tolist() if n else []
