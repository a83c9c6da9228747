import subprocess
from pathlib import Path

import pytest

from scripts.try_dockerfile import run_stage

pytestmark = pytest.mark.processes

DOCKERFILE = """\
# A comment.
ARG IMAGE=debian
FROM ${IMAGE} AS build
ARG WORD=default
ENV PLACE=/opt/place \\
    OTHER="two words"
WORKDIR /src
RUN mkdir -p "$PLACE" \\
    && echo "${WORD} ${OTHER}" > /opt/place/words
COPY a.txt b.txt ./
RUN cat a.txt b.txt >> "$PLACE/words"

FROM ${IMAGE}
RUN false
"""


def test_the_commands_of_its_first_stage_run_below_the_folder(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")
    (root := tmp_path / "root").mkdir()
    run_stage(DOCKERFILE, context=tmp_path, root=root, arguments={"WORD": "given"})
    assert (root / "opt" / "place" / "words").read_text() == "given two words\na\nb\n"
    with pytest.raises(subprocess.CalledProcessError):
        run_stage("FROM a\nRUN exit 3\nADD x y\n", context=tmp_path, root=tmp_path, arguments={})
    with pytest.raises(ValueError, match="ADD is not an instruction that this script runs"):
        run_stage("FROM a\nADD x y\n", context=tmp_path, root=tmp_path, arguments={})
