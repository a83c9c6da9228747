"""An extension of Griffe, which reads the sources for the reference: it shows the values of shared defaults.

Arguments of `Balancer`, `BalanceConfig` and `partition` have defaults such as `DEFAULTS.partition.strategy`, of which a
reader of the reference would see the last word alone.
"""

from typing import Any

from griffe import Attribute, Class, Expr, Extension, Function, Module, Object

_PREFIX = "DEFAULTS."
_SETTINGS = "dataloader.balance.settings"


class SharedDefaults(Extension):
    """Replaces `DEFAULTS.a.b` by the default value of the field b of the record that the field a holds."""

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Visit all that can have a default. Griffe calls this before it makes the `__init__` of dataclasses."""
        self._visit(pkg["dataloader.balance"], pkg[_SETTINGS])

    def _visit(self, parent: Object, settings: Module) -> None:
        for member in parent.members.values():
            if member.is_alias:
                continue
            if isinstance(member, Function):
                for parameter in member.parameters:
                    parameter.default = _value(parameter.default, settings)
            elif isinstance(member, Attribute):
                member.value = _value(member.value, settings)
            elif isinstance(member, Module | Class):
                self._visit(member, settings)


def _value(default: str | Expr | None, settings: Module) -> str | Expr | None:
    if not str(default).startswith(_PREFIX):
        return default
    record = settings["BalancerSettings"]
    *path, name = str(default).removeprefix(_PREFIX).split(".")
    for field in path:
        record = settings[str(record[field].annotation)]
    value: str | Expr | None = record[name].value
    return value
