"""What is tested is admitted."""

from pathlib import Path

from packaging.version import Version

from scripts import newest

PROJECT = """
[project]
dependencies = ["Plain>=1.2"]
[project.optional-dependencies]
one = ["bounded>=2,<3", "exact==4.1"]
two = ["plain>=1.5", "bounded>=2.1", "elsewhere>=9"]
"""


def test_bounds_of_all_extras_count(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "constraints.txt").write_text(
        "# tested\nplain==1.9\nBounded==2.4 # why\nexact==4.1\n"
    )
    required = newest.requirements(tmp_path / "pyproject.toml")
    tested = newest.pinned(tmp_path / "constraints.txt")
    assert tested == {"plain": Version("1.9"), "bounded": Version("2.4"), "exact": Version("4.1")}
    assert newest.admits(required["bounded"], Version("2.9"))
    assert not newest.admits(required["bounded"], Version("3.0"))
    assert not newest.admits(required["plain"], Version("1.3"))


def test_what_is_tested_is_admitted() -> None:
    required = newest.requirements()
    for name, version in newest.pinned().items():
        assert newest.admits(required.get(name, ()), version), f"{name} {version}"
