"""The files of examples/cluster and the page about them, by the parsers of the programs that they start."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from ray.scripts.scripts import cli as ray_cli
from torch.distributed.run import get_args_parser

from evenrank.cli.preprocess import check_options, preprocess_command
from evenrank.cli.warmup import warmup_command
from tests.pages import ROOT, code_of, page, section

FOLDER = ROOT / "examples" / "cluster"
DOCUMENTS: list[dict[str, Any]] = [*yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())]


def _named(kind: str) -> dict[str, Any]:
    return {each["metadata"]["name"]: each["spec"] for each in DOCUMENTS if each["kind"] == kind}


JOBS = _named("Job")


def _shell_of(job: str) -> str:
    (container,) = JOBS[job]["template"]["spec"]["containers"]
    *shell, script = container["command"]
    assert shell == ["bash", "-euc"]
    return str(script)


SCRIPTS = {
    "page": "".join(code_of(section(page("how-to/own-data.md"), "On a cluster"), "bash")),
    "sbatch": (FOLDER / "preprocess_and_train.sbatch").read_text(),
    **{job: _shell_of(job) for job in JOBS},
}
PREPROCESS, RAY, TORCHRUN = ("evenrank", "preprocess"), ("ray", "start"), ("torchrun",)
CALLS = {"page": {PREPROCESS, RAY}, "sbatch": {PREPROCESS, RAY, TORCHRUN}, "preprocess": {PREPROCESS, RAY}}
CALLS["train"] = {TORCHRUN}


def test_kubernetes_accepts_the_objects_and_they_fit_together() -> None:
    for document, release in itertools.product(DOCUMENTS, ("1.33", "1.37")):
        assert kubernetes_validate.validate(document, release, strict=True) == release
    claims, services = [*_named("PersistentVolumeClaim")], _named("Service")
    assert services.keys() == JOBS.keys()
    for name, job in JOBS.items():
        selected = {"clusterIP": "None", "selector": {"batch.kubernetes.io/job-name": name}}
        assert services[name].items() >= selected.items()  # headless: gives pods names
        pod = job["template"]["spec"]
        assert pod["subdomain"] == name
        assert f"{name}-0.{name}" in SCRIPTS[name]
        (container,) = pod["containers"]
        assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]
        claimed = [each["persistentVolumeClaim"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
        assert [each["claimName"] for each in claimed] == (claims if name == "preprocess" else [])


def _commands(script: str, program: str, *subcommands: str) -> Iterator[list[str]]:
    """Yield the arguments of each call of a program, with lists and numbers in place of variables."""
    for name, values in re.findall(r"^(\w+)=\((.*)\)$", script, re.M):
        script = script.replace(f'"${{{name}[@]}}"', values)
    for line in re.sub(r"\\\n\s*", "", script).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words = [
            re.sub(r"^\$(port|SLURM_NNODES|SLURM_GPUS_ON_NODE|JOB_COMPLETION_INDEX)$", "1", word) for word in lexer
        ]
        for place, pair in enumerate(itertools.pairwise(words), start=1):
            if pair[0] == program and (pair[1] in subcommands or not subcommands):
                yield [*itertools.takewhile(lambda word: word not in (";", "&", "||"), words[place:])]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_valid_and_their_options_and_imports_exist(name: str) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for checker in (["bash", "-n"], [str(shellcheck), "--shell", "bash", "-"])[: 1 if name == "page" else 2]:
        run = subprocess.run(checker, input=SCRIPTS[name], capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
    assert {program for program in (PREPROCESS, RAY, TORCHRUN) if [*_commands(SCRIPTS[name], *program)]} == CALLS[name]
    app = typer.Typer()
    app.command("preprocess")(preprocess_command)
    app.command("warmup")(warmup_command)
    evenrank: Any = typer.main.get_command(app)
    for command, *arguments in _commands(SCRIPTS[name], "evenrank", *evenrank.commands):
        context = evenrank.commands[command].make_context(command, arguments)
        if command == "preprocess":
            assert context.params["engine"] == "ray"
            check_options(context)
    for command, *arguments in _commands(SCRIPTS[name], "ray", "start", "stop"):
        ray_cli.commands[command].make_context(command, arguments)
    for arguments in _commands(SCRIPTS[name], "torchrun"):
        assert get_args_parser().parse_args(arguments).training_script_args[0] == "--data"
