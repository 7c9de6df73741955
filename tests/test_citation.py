"""CITATION.cff is of the form that its readers expect, and of this version."""

from pathlib import Path

from ruamel.yaml import YAML

import cssm

ROOT = Path(__file__).resolve().parents[1]


def test_the_citation_is_complete_and_of_this_version():
    found = YAML(typ="safe").load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "version", "license", "type"} <= found.keys()
    assert found["version"] == cssm.__version__ and found["license"] == "Apache-2.0"
    authors = [author for part in (found, *found["references"]) for author in part["authors"]]
    assert authors and all(author.keys() & {"name", "family-names"} for author in authors)
