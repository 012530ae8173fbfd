"""The table of docs/models.md is that of the tests."""

import pytest

from scripts import tested_models


def test_the_table_is_up_to_date(request: pytest.FixtureRequest) -> None:
    session = request.session
    options = session.config.option
    if options.markexpr or options.keyword or any("::" in one for one in session.config.args):
        pytest.skip("not all tests are selected")
    written = tested_models.PAGE.read_text("utf-8")
    new = tested_models.page(written, session.items)
    if new is None:
        pytest.skip("the tests that the table is of are not collected")
    if new != written:
        pytest.fail("docs/models.md is old: python -m scripts.tested_models writes it")
