"""Registering for the length of a test, because processes run many tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from evenrank.core.registry import Registry


@contextmanager
def restored(*registries: Registry[Any]) -> Iterator[None]:
    before = [(dict(registry._values), dict(registry._modules)) for registry in registries]
    try:
        yield
    finally:
        for registry, (values, modules) in zip(registries, before, strict=True):
            registry._values, registry._modules = values, modules
