"""The true answer of a solution, as data sets write them, and answers that no response can meet."""

import json

import pytest
from helpers.cases import read_cases

from rstar_lab.rl.data.lint import lint_problems
from rstar_lab.verify import readable
from rstar_lab.verify.gold import final_answer


@pytest.mark.parametrize(("solution", "answer"), read_cases(__file__)["solutions"])
def test_final_answer_of_a_solution(solution, answer):
    assert final_answer(solution) == answer


FAULTS = {
    "Add 2 and 3.\nThen it is five": "line break", "#### Step 1, so 5": "is not read", "5 #### 6 ####": "is not read",
    "proof": "placeholder", "notfound": "placeholder", "first we add, then we see that it is the same": "is not read",
}  # fmt: skip


def test_lint_names_answers_that_no_response_can_meet(tmp_path):
    good = ["5", "\\frac12", "yes", "(1,2)"]
    rows = [{"question": f"q{n}?", "answer": answer} for n, answer in enumerate([*FAULTS, *good])]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {finding.row: finding.text for finding in lint_problems(path)}
    assert found.keys() == set(range(1, len(FAULTS) + 1))
    assert not readable("5 #### 6") and not readable("a = 1\nb") and readable("\\begin{pmatrix}1\n\\\\2\\end{pmatrix}")
    assert not readable("(" * 50 + "5" + ")" * 50)  # nested too deeply for the parser
    assert "line break" in found[1] and "placeholder" in found[4]
