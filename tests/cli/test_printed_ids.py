"""What the command says about the ids of users and items."""

from pathlib import Path

from tests.cli.programs import Evenrank
from tests.preprocess.build.id_logs import write_log


def test_the_rule_of_each_column_is_printed_with_both_figures(evenrank: Evenrank, here: Path) -> None:
    def printed(log: Path, out: str, *options: str) -> list[str]:
        columns = ("--user-column", "user", "--item-column", "item", "--timestamp-column", "time", "--split", "none")
        finished = evenrank("preprocess", "--dataset", "custom", "--events", log, *columns, "--out", out, *options)
        assert finished.returncode == 0, finished.stderr
        return [line for line in finished.stdout.splitlines() if line.startswith(("user_id:", "item_id:"))]

    log = write_log(here / "log.csv", [(1, 1000, 0), (2, 7, 1)])
    assert printed(log, "auto") == [
        "user_id: kept (2 distinct, largest 2)",
        "item_id: dense (2 distinct, largest 1,000), numbered 1 to 2 by first appearance",
    ]
    assert printed(log, "hash", "--ids", "item=hash:1,user=dense") == [
        "user_id: dense (2 distinct, largest 2), numbered 1 to 2 by first appearance",
        "item_id: hash:1 (2 distinct), 2 values share their id with another",
    ]
    later = write_log(here / "later.csv", [(1, 1000, 0), (1, 8, 1)])
    assert printed(later, "later", "--vocabulary", "auto") == [
        "user_id: kept (largest 1)",
        "item_id: dense (2 distinct, largest 1,000, 1 of them not in the earlier vocabulary), "
        "numbered 1 to 3 by first appearance",
    ]
