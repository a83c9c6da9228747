from collections.abc import Callable

import pytest

from evenrank.core.errors import ConfigError
from evenrank.core.registry import Registry


def _tools() -> Registry[Callable[[], int]]:
    tools: Registry[Callable[[], int]] = Registry("tool", expected="a function", accepts=callable)

    @tools.register("saw")
    def saw() -> int:
        return 1

    @tools.register("axe")
    def axe() -> int:
        return 2

    assert saw() == 1  # a decorated function stays what it is
    return tools


def test_implementations_are_found_by_name_in_the_order_of_registration() -> None:
    tools = _tools()
    assert list(tools) == ["saw", "axe"]
    assert len(tools) == 2
    assert (tools["saw"](), tools["axe"]()) == (1, 2)
    assert "axe" in tools
    assert "hoe" not in tools
    assert [] not in tools


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"^no tool is called 'hoe'; known are saw, axe$"):
        _tools()["hoe"]
    with pytest.raises(ConfigError, match=r"^no tool is called \['saw'\]; known are saw, axe$"):
        _tools().check(["saw"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no tool is called 'saw'; known are none"):
        Registry[int]("tool", expected="an integer", accepts=bool).check("saw")


def test_a_name_can_be_taken_once() -> None:
    tools = _tools()
    with pytest.raises(
        ConfigError, match=r"the tool 'saw' is registered already, as <function .*; choose another name"
    ):
        tools.register("saw")(lambda: 3)
    assert tools["saw"]() == 1


def test_something_of_another_kind_is_refused() -> None:
    tools = _tools()
    with pytest.raises(ConfigError, match="the tool 'hoe' must be a function, got 3"):
        tools.register("hoe")(3)  # type: ignore[arg-type]
    assert "hoe" not in tools


def test_a_decorator_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the name of a registered tool must be a string, got <function .*; pass"):
        _tools().register(lambda: 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the name of a registered tool must be a string, got ''"):
        _tools().register("")
