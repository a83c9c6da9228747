from rendering.markdown_tables import table


def test_columns_are_aligned_and_bars_in_cells_escaped() -> None:
    assert table(("run", "ms", "MFU"), [("a|b", "1.5", "30%"), ("c", "2", "-")]) == (
        "| run | ms | MFU |\n| --- | ---: | ---: |\n| a\\|b | 1.5 | 30% |\n| c | 2 | - |\n"
    )
    assert table(("run", "lengths", "ms"), [], left=2).splitlines()[1] == "| --- | --- | ---: |"
    assert table(("ms",), [], left=0).splitlines()[1] == "| ---: |"
