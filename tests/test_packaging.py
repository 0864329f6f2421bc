"""What is shipped: licences of what comes with it, and that no package is left out."""

import re
from importlib import metadata
from pathlib import Path

import pytest
import tomli

from tests.licences import EXTRAS, licence_of, needed

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/reference/licences.md"
# Licences that would oblige whoever ships this in a product of theirs to publish its source.
OBLIGING = re.compile(r"\b(?:A?GPL|GNU (?:Affero )?General|SSPL|BUSL|CC-BY-NC)", re.IGNORECASE)


def listed() -> dict[str, str]:
    rows = re.findall(r"^\| (\S+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    return dict(rows[1:])


@pytest.mark.parametrize("package", list(needed(EXTRAS)), ids=lambda p: p.metadata["Name"])
def test_every_package_is_listed_with_a_licence_that_obliges_nobody(
    package: metadata.Distribution,
) -> None:
    name = package.metadata["Name"]
    assert name in listed(), "run: cog -r docs/reference/licences.md"
    for licence in {listed()[name], licence_of(package)}:  # other versions say it in other words
        choices = re.split(r" OR | or ", licence)
        assert any(not OBLIGING.search(choice) for choice in choices), licence
    assert listed()[name].strip(), f"{name} doesn't say what licence it has"


def test_every_package_of_ours_is_typed_and_shipped() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())
    shipped = project["tool"]["setuptools"]["package-data"]
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages == set(shipped)
    for package in packages:
        assert "py.typed" in shipped[package]
        assert (ROOT / package / "py.typed").is_file()
        for folder in (ROOT / package).rglob("*"):
            if folder.is_dir() and any(folder.glob("*.py")):
                assert (folder / "__init__.py").is_file(), folder
