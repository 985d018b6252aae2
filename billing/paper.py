"""Words and tables on paper (PDF): one font, names as far as it can draw them, columns that wrap, numbers whole.

Knows reportlab and widths; refuses to know what a statement is.
"""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import escape

from reportlab.lib import colors
from reportlab.lib.enums import TA_LEFT, TA_RIGHT
from reportlab.lib.pagesizes import A4, landscape
from reportlab.lib.styles import ParagraphStyle
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.platypus import Flowable, Paragraph, SimpleDocTemplate, Spacer, Table, TableStyle

FONT = "DejaVuSans"  # 2.35, as matplotlib brings it, with its licence: Latin, Greek, Cyrillic, Armenian, signs
MARGIN_PT = 30
WIDTH_PT = landscape(A4)[0] - 2 * MARGIN_PT - 12  # the frame keeps 6 on either side
_SIZE_PT = 7
_PADDING_PT = 12  # of a cell, left and right together
_LEAST_TEXT_PT = 40
_WRITTEN_FROM_THE_RIGHT = frozenset({"R", "AL", "RLE", "RLO", "RLI"})  # nothing here orders and joins such letters


def drawable(text: str, name: str) -> str:
    """The text as the font draws it. A letter that it has not, or that is written from the right, stands as its escape
    (``\\u65e5``), and then ``name``, by which the thing is known elsewhere, stands behind.
    """
    composed = unicodedata.normalize("NFC", text)
    shown = "".join(letter if _has(letter) else _escaped(letter) for letter in composed)
    return shown if shown == composed or not name else f"{shown} ({name})"


def heading(text: str) -> Flowable:
    return Paragraph(escape(text), _style(18))


def line(text: str) -> Flowable:
    return Paragraph(escape(text), _style(9))


def gap() -> Flowable:
    return Spacer(1, 12)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, texts: Sequence[int]) -> Flowable:
    """``texts``: how large a share of what the numbers leave each of the first columns has, where it wraps. The columns
    after those hold numbers: each is as wide as its widest, and as the widest word of its heading.
    """
    num_texts = len(texts)
    columns = list(zip(headings, *rows, strict=True))[num_texts:]
    numbers = [max(_width(word) for word in (*first.split(), *rest)) + _PADDING_PT for first, *rest in columns]
    left = max(WIDTH_PT - sum(numbers), _LEAST_TEXT_PT * num_texts)
    shares = [left * share / sum(texts) for share in texts]
    text_style, number_style = _style(_SIZE_PT), _style(_SIZE_PT, alignment=TA_RIGHT)
    styles = [text_style] * num_texts + [number_style] * len(numbers)
    cells = [[_cell(text, style) for text, style in zip(row, styles, strict=True)] for row in (headings, *rows)]
    lines: list[Any] = [
        ("LINEBELOW", (0, 0), (-1, 0), 0.5, colors.black),
        ("LINEBELOW", (0, 1), (-1, -1), 0.25, colors.lightgrey),
        ("VALIGN", (0, 0), (-1, -1), "TOP"),
    ]
    widths = [*shares, *numbers]
    return Table(cells, colWidths=widths, repeatRows=1, splitInRow=1, style=TableStyle(lines), hAlign="LEFT")


def document(title: str, story: list[Flowable]) -> bytes:
    """A page or more of A4. The same story gives the same bytes."""
    out = io.BytesIO()
    page = SimpleDocTemplate(
        out,
        pagesize=landscape(A4),
        leftMargin=MARGIN_PT,
        rightMargin=MARGIN_PT,
        topMargin=MARGIN_PT,
        bottomMargin=MARGIN_PT,
        title=title,
        author="Rubato",
        invariant=1,
    )
    page.build(story)
    return out.getvalue()


@cache
def _font() -> TTFont:
    font = TTFont(FONT, str(Path(__file__).parent / "fonts" / f"{FONT}.ttf"))
    pdfmetrics.registerFont(font)
    return font


def _has(letter: str) -> bool:
    is_from_the_right = unicodedata.bidirectional(letter) in _WRITTEN_FROM_THE_RIGHT
    return letter.isprintable() and ord(letter) in _font().face.charToGlyph and not is_from_the_right


def _escaped(letter: str) -> str:
    return letter.encode("ascii", "backslashreplace").decode() if letter.isprintable() else " "


def _width(text: str) -> float:
    return pdfmetrics.stringWidth(text, _font().fontName, _SIZE_PT)


def _cell(text: str, style: ParagraphStyle) -> Paragraph:
    return Paragraph(escape(text), style)


def _style(size_pt: int, alignment: Literal[0, 2] = TA_LEFT) -> ParagraphStyle:
    name, leading = _font().fontName, size_pt * 1.25
    return ParagraphStyle(
        "own", fontName=name, fontSize=size_pt, leading=leading, alignment=alignment, splitLongWords=1, spaceShrinkage=0
    )
