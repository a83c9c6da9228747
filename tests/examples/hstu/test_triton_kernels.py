"""The logic of the kernels, without a GPU: Triton interprets them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("interpreted_kernels.py")
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_interpreted_kernels_agree_with_the_padded_reference() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path])}
    result = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    errors = [float(line) for line in result.stdout.split()]
    assert len(errors) == 2 * 3  # attentions, batches
    assert max(errors) < 1e-6
