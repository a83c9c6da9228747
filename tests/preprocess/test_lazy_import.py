"""The package imports its modules at the first use of their names."""

import subprocess
import sys

SLOW = ("numba", "numpy", "polars", "pyarrow", "requests")


def test_importing_the_package_and_the_names_of_datasets_loads_nothing_slow() -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({SLOW}))\n"  # importing a module that is None raises ImportError
        "from evenrank.preprocess import DATASETS\n"
        "from evenrank.preprocess.sources.catalog import CATALOG, CUSTOM, SYNTHETIC\n"
        "assert DATASETS == (*CATALOG, SYNTHETIC, CUSTOM)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
