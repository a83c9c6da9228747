from tests.errors.scene import Row

ROWS: list[Row] = []
