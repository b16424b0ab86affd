"""Which spelling a Japanese text is in: old or new characters (字), old or new kana (仮名)."""

from __future__ import annotations

import re
from typing import Literal

Orthography = Literal["新字新仮名", "新字旧仮名", "旧字旧仮名", "旧字新仮名"]
ORTHOGRAPHIES: tuple[Orthography, ...] = ("新字新仮名", "新字旧仮名", "旧字旧仮名", "旧字新仮名")

_ENOUGH = 5  # signs of either side, below which nothing is told
_CLEAR = 0.75  # share of the side that has more, below which nothing is told

# The same characters before and after the reform of 1946, all frequent and with one meaning.
_OLD_CHARACTERS = re.compile("[國會學氣來樣體變當實對點讀聲廣歸發經戀澤圖圓樂應傳單假觀關淺邊畫數晝寢賣澁靈雙續黨]")
_NEW_CHARACTERS = re.compile("[国会学気来様体変当実対点読声広帰発経恋沢図円楽応伝単仮観関浅辺画数昼寝売渋霊双続党]")
_OLD_KANA = re.compile(
    "[ゐゑヰヱ]|[きしちにひみりいつ]つ[てた]|つた|つて|でせう|ませう|だらう|やう[なにだで]|[思云言笑問買]ふ"
)
_NEW_KANA = re.compile("った|って|ている|ていた|でしょう|ましょう|だろう|よう[なにだで]|[思云言笑問買]う")


def orthography(text: str) -> Orthography | None:
    """Return the spelling of a text as far as it can be told from its characters; None where it cannot."""
    characters = _side(text, _OLD_CHARACTERS, _NEW_CHARACTERS)
    kana = _side(text, _OLD_KANA, _NEW_KANA)
    if characters is None or kana is None:
        return None
    return ORTHOGRAPHIES[(0, 1, 3, 2)[2 * characters + kana]]


def _side(text: str, old: re.Pattern[str], new: re.Pattern[str]) -> bool | None:
    """Return whether ``text`` is clearly on the ``old`` side; None where neither is clear."""
    n_old, n_new = len(old.findall(text)), len(new.findall(text))
    if n_old + n_new < _ENOUGH or max(n_old, n_new) < _CLEAR * (n_old + n_new):
        return None
    return n_old > n_new
