"""Tables in Markdown."""

from cssm.markdown import table


def test_columns_are_padded_and_aligned():
    assert table([("run", "n"), ("a", "1,000"), ("long", "2")]).splitlines() == [
        "| run  |     n |",
        "|------|------:|",
        "| a    | 1,000 |",
        "| long |     2 |",
    ]
    assert table([("n", "m"), ("1", "22")], left=0).splitlines() == ["| n |  m |", "|--:|---:|", "| 1 | 22 |"]
