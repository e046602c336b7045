r"""Answer verification: extract the final answer of a response and compare it with the true answer.

`verify(response_text, answer)` returns whether they are equal. Importing this package loads no sympy.

Source of the default rule: rStar2-Agent, section 2: the reward is 1 exactly if the boxed answer inside the answer tags
equals the true answer.
"""
# ruff: noqa: F401  the names are the exports

from typing import TYPE_CHECKING

from rstar_lab.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from rstar_lab.verify.comparison import Undecided, compare, readable, same_answer, verify, verify_many
    from rstar_lab.verify.extraction import ANSWER_FORMATS, AnswerFormat, extract_answer, last_boxed, last_number

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
