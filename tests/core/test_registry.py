from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from evenrank.core.errors import ConfigError
from evenrank.core.registry import Registry


def _tools() -> Registry[Callable[[], int]]:
    tools: Registry[Callable[[], int]] = Registry("tool", expected="a function", accepts=callable)

    def saw() -> int:
        return 1

    assert tools.register("saw")(saw) is saw  # a decorated function stays what it is
    tools.register("axe")(lambda: 2)
    return tools


def _register_elsewhere(tools: Registry[Callable[[], int]]) -> None:
    exec("tools.register('saw')(partial(int, 3))", {"tools": tools, "partial": partial, "__name__": "another"})


def test_implementations_are_found_by_name_in_the_order_of_registration() -> None:
    tools = _tools()
    assert list(tools) == ["saw", "axe"]
    assert len(tools) == 2
    assert (tools["saw"](), tools["axe"]()) == (1, 2)
    names: list[object] = ["axe", "hoe", []]
    assert [name in tools for name in names] == [True, False, False]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda tools: tools["hoe"], r"^no tool is called 'hoe'; known are saw, axe$"),
        (lambda tools: tools.check(["saw"]), r"^no tool is called \['saw'\]; known are saw, axe$"),
        (lambda tools: Registry[int]("tool", expected="", accepts=bool).check("saw"), "called 'saw'; known are none"),
        (
            _register_elsewhere,
            r"^another cannot register the tool 'saw', which tests.* has registered, as <function .*; ch",
        ),
        (lambda tools: tools.register("hoe")(3), "the tool 'hoe' must be a function, got 3"),
        (lambda tools: tools.register(len), "the name of a registered tool must be a string, got <built-in .*; pass"),
        (lambda tools: tools.unregister("hoe"), "no tool is called 'hoe'; known are saw, axe"),
        (lambda tools: tools.register(""), "the name of a registered tool must be a string, got ''"),
    ],
)
def test_wrong_names_and_implementations_change_nothing(call: Callable[[Any], object], message: str) -> None:
    tools = _tools()
    with pytest.raises(ConfigError, match=message):
        call(tools)
    assert list(tools) == ["saw", "axe"]
    assert tools["saw"]() == 1


def test_a_module_may_replace_its_own_implementation_and_an_unregistered_name_is_free() -> None:
    tools = _tools()
    tools.register("saw")(partial(int, 3))  # as a cell of a notebook does that runs again
    assert list(tools) == ["saw", "axe"]
    assert tools["saw"]() == 3
    tools.unregister("saw")
    assert "saw" not in tools
    _register_elsewhere(tools)
    assert list(tools) == ["axe", "saw"]
    with pytest.raises(ConfigError, match=r"^tests.* cannot register the tool 'saw', which another has registered"):
        tools.register("saw")(int)
