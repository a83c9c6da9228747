import ast
import re

from scripts.error_messages import ROOT, all_messages, as_markdown, find_messages

SOURCE = """
REMEDY = "preprocess it again"
LIMIT = 3

def check(path, values, error):
    if values.size > LIMIT:
        raise DataError(f"{path} has {len(values)} values, more than {LIMIT}; {REMEDY}")
    message = f"{path}: `{values.name}` cannot be read"
    if values:
        raise DataError(message) from error
    raise KeyError("not an error of the package")

def made(path):
    return ConfigError(f"{path} is " "empty, " + "give another")
"""
FOUND = [
    ("DataError", "a.py", "{path} has … values, more than 3; preprocess it again"),
    ("DataError", "a.py", "{path}: `{name}` cannot be read"),
    ("ConfigError", "a.py", "{path} is empty, give another"),
]


def test_messages_are_found_wherever_an_error_is_made_and_the_page_explains_those_that_exist() -> None:
    found = list(find_messages(ast.parse(SOURCE), "a.py", {}))
    assert [(message.error, message.path, message.text) for message in found] == FOUND
    text = as_markdown(found[:2])
    assert f"\n`a.py`\n\n- `{FOUND[0][2]}`\n" in text
    assert f"\n- `` {FOUND[1][2]} ``\n" in text
    page = (ROOT / "docs" / "reference" / "troubleshooting.md").read_text()
    sections = re.findall(r"^### (.*)\n\n`(.*)`$", page, re.M)
    assert len(sections) >= 10
    pieces = (piece for message in all_messages(ROOT) for piece in re.split(r"\{\w*\}|…", message.text))
    parts = [piece for piece in pieces if len(piece) >= 8]
    unknown = [heading for heading, example in sections if not any(part in example for part in parts)]
    # PyTorch's own, and one that is made of several pieces.
    assert unknown == ["Watchdog caught collective operation timeout", "the loss of rank 1 is NaN"]
