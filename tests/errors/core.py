import math
from typing import Any

from evenrank import dataloader as of
from evenrank import training
from evenrank.core.errors import ConfigError, DataError
from evenrank.core.optional_imports import check_releases
from evenrank.core.registry import Registry
from evenrank.core.storage import locate
from tests.core.test_optional_imports import installed
from tests.core.test_registry import make_tools
from tests.core.test_settings import Options
from tests.errors.scene import Row


def named(call: Any, line: str) -> Row:
    return Row(lambda _: call(make_tools()), ConfigError, line)


def located(url: str, line: str) -> Row:
    return Row(lambda _: locate(url), DataError, line)


def released(found: Any, line: str) -> Row:
    return Row(lambda _: check_releases(found), ConfigError, line)


def option(line: str, **options: Any) -> Row:
    return Row(lambda _: Options(**options), ConfigError, f"Options: {line}")


def argument(line: str, call: Any) -> Row:
    return Row(lambda _: call("False"), ConfigError, f"{line}, got 'False'...")


NONE: Registry[int] = Registry("tool", expected="", accepts=bool)
PIP, NO_NAME = "pip install --no-deps", "the name of a registered tool must be a string, got "
FOR_CUDA = "torch 2.13.0+cpu was built for the CPU, and fbgemm-gpu 1.8.0 for CUDA"
SAME = "fbgemm-gpu 1.8.0 and fbgemm-gpu-cpu 1.8.0 are both installed, and overwrite each other's files"
OTHER = f"torch 2.13.0 needs fbgemm-gpu 1.8 and torchrec 1.8, found 1.9.0 and 1.8.0; run {PIP} "
CPU, OLD = installed("2.13.0+cpu", "1.8.0", "1.8.0"), installed("2.10.0+cpu", "1.5.0", "1.5.1", "fbgemm-gpu-cpu")
BOTH = installed("2.13.0", "1.8.0", "1.8.0") | {"fbgemm-gpu-cpu": "1.8.0"}
RANGE = "torch 2.10.0+cpu is installed, and evenrank works with torch 2.11 to 2.14"

ALONE: Any = {"rank": 0, "world_size": 1}
CONFIG = of.LoaderConfig(batch_size=1)
ROWS = [
    named(lambda tools: tools["hoe"], "no tool is called 'hoe'; known are saw, axe"),
    named(lambda tools: tools.check(["saw"]), "no tool is called ['saw']; known are saw, axe"),
    named(lambda _: NONE.check("saw"), "no tool is called 'saw'; known are none"),
    named(lambda tools: tools.register("hoe")(3), "the tool 'hoe' must be a function, got 3"),
    named(lambda tools: tools.register(len), f"{NO_NAME}<built-in...; pass..."),
    named(lambda tools: tools.register(""), f"{NO_NAME}''..."),
    located("s3://key:h1d/den@bucket/out", "s3://bucket/out cannot be opened: its credentials have characters..."),
    located("s3://k:h1dden@bucket/out?token=h1dden", "s3://bucket/out cannot be opened: Unexpected query parameter..."),
    located("s3://key:h1dden@bu cket/out", "s3://bu cket/out cannot be opened: ..."),
    located("foo://user:h1dden@host/x", "foo://host/x cannot be opened: Unrecognized filesystem type in URI..."),
    located("s3://key:secret@?region=x", "s3:// names no bucket; write s3://BUCKET/PATH"),
    released(installed("2.13.0", "1.9.0", "1.8.0"), f"{OTHER}fbgemm-gpu==1.8.0 torchrec==1.8.0"),
    released(OLD, f"{RANGE}; run pip install torch==2.14.1 (CPU build: docs/...), then {PIP} fbgemm-gpu-cpu==1.9.0..."),
    released(CPU, f"{FOR_CUDA}; run pip uninstall -y fbgemm-gpu, then {PIP} fbgemm-gpu-cpu==1.8.0"),
    released(BOTH, f"{SAME}; run pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu, then {PIP} fbgemm-gpu==1.8.0 (CUDA)..."),
    option("name must be one of thread, process, got 'tread'; did you mean thread?", name="tread"),
    option("share must be at least 0 and below 1, got 1", share=1),
    option("share must be at least 0 and below 1, got nan", share=math.nan),
    option("stride=2 has no effect without window; give both, or leave it out", stride=2),
    option("port=80 applies to name='process', not to name='thread'; leave it out", port=80),
    option("log=True applies to options other than name='thread', not to name='thread'; leave it out", log=True),
    option("weights['a'] must be above 0 and finite, got inf", weights={"a": math.inf}),
    option("window must be at least 1, got an integer of 167 bits", window=-(10**50)),
    argument("...rank must be of type int", lambda x: of.build_loader("x", CONFIG, rank=x, world_size=2)),
    argument("...shuffle must be of type bool", lambda x: of.ElasticSampler(8, batch_size=1, shuffle=x, **ALONE)),
    argument("...max_length must be of type int | None", lambda x: of.jagged(max_length=x)),
    argument("...speed must be of type float", lambda x: of.Replay([], speed=x)),
    argument("...writers must be of type Callable[...", lambda x: training.StepTimer(x)),
    argument("...min_free_gib must be of type float", lambda x: training.MemoryWatch("cuda", min_free_gib=x)),
    argument("...ks must be ...", lambda x: training.RankingMetrics(x)),
]
