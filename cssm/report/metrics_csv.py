"""metrics.csv: the steps and evaluations of a run as a table, for spreadsheets and data frames."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KINDS = ("step", "eval")


def save_csv(events: Sequence[dict[str, Any]], path: Path) -> Path:
    """A row for each logged step and each evaluation, in their order, with a column for everything that any of them
    tells; what a row does not tell is empty. events: as events.read_events gives them.
    """
    rows = [{"event": "", "split": "", **event} for event in events if event["event"] in KINDS]
    columns = list(dict.fromkeys(name for row in rows for name in row if name != "schema"))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path
