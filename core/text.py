"""Text of unknown origin, such as labels, names of files and messages, made safe to print."""

import re

# Control characters, which terminals obey; those that change the direction of the text around them, or are invisible
# line ends; and halves of surrogate pairs, in which Python keeps bytes of file names that are not UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def escape_controls(text: str, *, keep: str = "") -> str:
    r"""Replace each character that is not printed as itself by its escape sequence, as in `\x1b[31m`.

    Args:
        text: any text.
        keep: characters to leave as they are, such as a newline.

    """
    return _UNPRINTABLE.sub(
        lambda match: match[0] if match[0] in keep else match[0].encode("unicode_escape").decode(), text
    )
