from collections.abc import Callable
from functools import partial

import pytest

from evenrank.core.errors import ConfigError
from evenrank.core.registry import Registry


def make_tools() -> Registry[Callable[[], int]]:
    tools: Registry[Callable[[], int]] = Registry("tool", expected="a function", accepts=callable)

    def saw() -> int:
        return 1

    assert tools.register("saw")(saw) is saw  # a decorated function stays what it is
    tools.register("axe")(lambda: 2)
    return tools


def test_implementations_are_found_by_name_in_the_order_of_registration_and_each_has_one_owner() -> None:
    tools = make_tools()
    another = {"tools": tools, "partial": partial, "__name__": "another"}
    assert (list(tools), len(tools), tools["saw"](), tools["axe"]()) == (["saw", "axe"], 2, 1, 2)
    names: list[object] = ["axe", "hoe", []]
    assert [name in tools for name in names] == [True, False, False]
    with pytest.raises(ConfigError, match=r"^another cannot register the tool 'saw', which tests.* has registered, as"):
        exec("tools.register('saw')(partial(int, 3))", another)
    tools.register("saw")(partial(int, 3))  # as a cell of a notebook does that runs again
    assert (list(tools), tools["saw"]()) == (["saw", "axe"], 3)
    tools.unregister("saw")
    assert "saw" not in tools
    exec("tools.register('saw')(partial(int, 3))", another)
    assert list(tools) == ["axe", "saw"]
    with pytest.raises(ConfigError, match=r"^tests.* cannot register the tool 'saw', which another has registered"):
        tools.register("saw")(int)
