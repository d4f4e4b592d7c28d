"""Files of records: a line of JSON for each answer, from which a run goes on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_records(records: Path | None) -> list[dict[str, Any]]:
    """The records of a file; none without the file."""
    if records is None or not records.exists():
        return []
    return [json.loads(text) for text in records.read_text().splitlines()]


def add_record(records: Path | None, record: Mapping[str, Any]) -> None:
    """Adds a record to a file, if there is one to add to."""
    if records is None:
        return
    with records.open("a") as file:
        file.write(json.dumps(record) + "\n")
