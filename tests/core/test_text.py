import sys
import unicodedata

from evenrank.core.errors import escape_controls


def test_text_without_controls_is_kept() -> None:
    for text in ("", "Zoë [/x] $\\frac{", "日本語", "👩\u200d🔬", "a\\x1b"):
        assert escape_controls(text) == text


def test_controls_are_escaped_visibly() -> None:
    assert escape_controls("\x1b[31m\x00\t\n\x7f\x9b\u202e\udcff") == r"\x1b[31m\x00\t\n\x7f\x9b\u202e\udcff"
    assert escape_controls("a\nb\tc", keep="\n") == "a\nb\\tc"


def test_no_control_character_and_no_surrogate_is_left() -> None:
    text = escape_controls("".join(map(chr, range(sys.maxunicode + 1))))
    assert not {unicodedata.category(character) for character in text} & {"Cc", "Cs", "Zl", "Zp"}
    assert not {unicodedata.bidirectional(character) for character in text} & {
        *("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    }
    text.encode()
