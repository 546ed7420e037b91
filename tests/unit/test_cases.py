"""Every kind of failure from the field that this package answers for has a test that carries its number.

The numbers are in the tests' names (`test_c24_...`); docs/doctor.md says in words what each of them is.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCTOR = TESTS.parent / "docs" / "doctor.md"
CASES = (1, 2, 3, 4, 5, 7, 15, 16, 17, 18, 19, 22, 23, 24, 25, 26, 32, 33, 34, 35)


def named() -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for numbers in re.findall(r"^def test_((?:c\d\d_)+)", path.read_text(), re.M):
            for number in re.findall(r"c(\d\d)_", numbers):
                found.setdefault(int(number), set()).add(path.name)
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_case_has_a_test(case: int) -> None:
    assert named().get(case), f"no test is called test_c{case:02d}_..."


def test_the_files_that_the_documentation_names_exist() -> None:
    table = DOCTOR.read_text().split("## Cases and their tests")[1]
    files = set(re.findall(r"(?:tests/\w+/)?test_[\w*]+\.py", table))
    assert len(files) > 10
    for name in files:
        assert list(TESTS.parent.glob(name if "/" in name else f"tests/unit/{name}")), name
