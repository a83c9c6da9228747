"""Run the main job offline on synthetic data; `make demo`."""

from pathlib import Path

from evenrank.cli.demo import demo

if __name__ == "__main__":
    demo(Path("out/demo"))
