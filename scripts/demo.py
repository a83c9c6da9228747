"""Run the whole pipeline offline on synthetic data; the same as `make demo`."""

from pathlib import Path

from evenrank.cli.demo import demo

if __name__ == "__main__":
    demo(Path("out/demo"))
