from typing import Any

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.optional_imports import check_releases
from evenrank.core.registry import Registry
from evenrank.core.storage import locate
from tests.core.test_optional_imports import installed
from tests.core.test_registry import make_tools
from tests.errors.scene import Row

_RUN = "run pip install --no-deps"
_BOTH: Any = installed("2.13.0", "1.8.0", "1.8.0") | {"fbgemm-gpu-cpu": "1.8.0"}

ROWS = [
    Row(lambda _: make_tools()["hoe"], ConfigError, "no tool is called 'hoe'; known are saw, axe"),
    Row(lambda _: make_tools().unregister("hoe"), ConfigError, "no tool is called 'hoe'; known are saw, axe"),
    Row(lambda _: make_tools().check(["saw"]), ConfigError, "no tool is called ['saw']; known are saw, axe"),  # type: ignore[arg-type]
    Row(
        lambda _: Registry[int]("tool", expected="", accepts=bool).check("saw"),
        ConfigError,
        "no tool is called 'saw'; known are none",
    ),
    Row(lambda _: make_tools().register("hoe")(3), ConfigError, "the tool 'hoe' must be a function, got 3"),  # type: ignore[arg-type]
    Row(
        lambda _: make_tools().register(len),  # type: ignore[arg-type]
        ConfigError,
        "the name of a registered tool must be a string, got <built-in function len>; pass...",
    ),
    Row(lambda _: make_tools().register(""), ConfigError, "the name of a registered tool must be a string, got ''..."),
    Row(
        lambda _: locate("s3://key:h1d/den@bucket/out"),
        DataError,
        "s3://bucket/out cannot be opened: its credentials have characters...",
    ),
    Row(
        lambda _: locate("s3://key:h1dden@bucket/out?token=h1dden"),
        DataError,
        "s3://bucket/out cannot be opened: Unexpected query parameter...",
    ),
    Row(lambda _: locate("s3://key:h1dden@bu cket/out"), DataError, "s3://bu cket/out cannot be opened: ..."),
    Row(
        lambda _: locate("foo://user:h1dden@host/x"),
        DataError,
        "foo://host/x cannot be opened: Unrecognized filesystem type in URI...",
    ),
    Row(lambda _: locate("s3://"), DataError, "s3:// names no bucket; write s3://BUCKET/PATH"),
    Row(lambda _: locate("s3://key:secret@?region=x"), DataError, "s3:// names no bucket; write s3://BUCKET/PATH"),
    Row(
        lambda _: check_releases(installed("2.13.0", "1.9.0", "1.8.0")),
        ConfigError,
        "torch 2.13.0 needs fbgemm-gpu 1.8 and torchrec 1.8, found 1.9.0 and 1.8.0; "
        f"{_RUN} fbgemm-gpu==1.8.0 torchrec==1.8.0",
    ),
    Row(
        lambda _: check_releases(installed("2.14.1+cpu", "1.9.0", "1.8.0", "fbgemm-gpu-cpu")),
        ConfigError,
        "torch 2.14.1+cpu needs fbgemm-gpu-cpu 1.9 and torchrec 1.9, found 1.9.0 and 1.8.0; "
        f"{_RUN} fbgemm-gpu-cpu==1.9.0 torchrec==1.9.2",
    ),
    Row(
        lambda _: check_releases(installed("2.10.0+cpu", "1.5.0", "1.5.1", "fbgemm-gpu-cpu")),
        ConfigError,
        "torch 2.10.0+cpu is installed, and evenrank works with torch 2.11 to 2.14; run pip install torch==2.14.1 (CPU "
        "build: docs/how-to/install.md), then pip install --no-deps fbgemm-gpu-cpu==1.9.0 torchrec==1.9.2",
    ),
    Row(
        lambda _: check_releases(installed("2.13.0+cpu", "1.8.0", "1.8.0")),
        ConfigError,
        "torch 2.13.0+cpu was built for the CPU, and fbgemm-gpu 1.8.0 for CUDA; run pip uninstall -y fbgemm-gpu, then "
        "pip install --no-deps fbgemm-gpu-cpu==1.8.0",
    ),
    Row(
        lambda _: check_releases(_BOTH),
        ConfigError,
        "fbgemm-gpu 1.8.0 and fbgemm-gpu-cpu 1.8.0 are both installed, and overwrite each other's files; run pip "
        "uninstall -y fbgemm-gpu fbgemm-gpu-cpu, then pip install --no-deps fbgemm-gpu==1.8.0 (CUDA) or "
        "fbgemm-gpu-cpu==1.8.0 (CPU)",
    ),
]
