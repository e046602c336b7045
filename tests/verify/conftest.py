import pytest

from rstar_lab.verify import warm_up


@pytest.fixture(scope="module")
def warm():
    """Start the workers first: on a busy machine importing sympy alone can take the 5 s of one answer."""
    warm_up()
