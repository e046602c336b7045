"""The true answer of a solution, as data sets write them, and answers that no response can meet."""

import json

import pytest

from rstar_lab.rl.data.lint import lint_problems
from rstar_lab.verify import readable
from rstar_lab.verify.gold import final_answer

SOLUTIONS = [
    # GSM8K
    ("She sells 16 - 3 = <<16-3=13>>13.\n#### 1,018", "1,018"), ("a #### 12\n", "12"), ("w\n#### 5 \n \n", "5"),
    ("a <<3*4=12>>12\n#### 1,234", "1,234"), ("36", "36"), ("w\n#### -7.5", "-7.5"), ("w\n#### 12\n#### 13", "13"),
    # MetaMathQA
    ("w\n#### 5\nThe answer is: 5", "5"), ("w\n#### A\nThe answer is: A", "A"), ("w\n#### 1/2\nThe answer is: 1/2", "1/2"),
    ("so $\\boxed{\\frac{3}{4}}$. The answer is: $\\frac{3}{4}$", "\\frac{3}{4}"), ("It is five.\nThe answer is: 5", "5"),
    ("w\n#### 1,234\nThe answer is: 1,234", "1,234"),
    # text after the mark
    ("w\n#### 5\n\nNote: checked.", "5"), ("w\n#### 5\n</s>", "5"), ("w\n#### 5</s>", "5"), ("w #### 5\nmore", "5"),
    ("w\n#### 5\n(5 apples)", "5"), ("w\n#### 5<|im_end|>\n<|endoftext|>", "5"), ("#### 5\nso \\boxed{6}", "6"),
    ("\\boxed{2}, no:\n#### 5\nchecked", "5"),
    # boxes: MATH, NuminaMath
    ("so $x=\\boxed{\\frac{1}{2}}$, thus \\boxed{4.5e33} ergs", "4.5e33"), ("$\\frac{1}{2}$", "$\\frac{1}{2}$"),
    ("So $x=1/2$ or $x=2$. Our answer is $\\boxed 2$.", "2"), ("Thus it is \\fbox{7}.", "7"),
    ("It is \\boxed{-\\frac{1}{2}} as asked in \\boxed{}.", "-\\frac{1}{2}"),
    ("The roots are $\\boxed{3}$ and $\\boxed{5}$.", "3, 5"), ("#### Answer: \\boxed{5}", "5"),
    # headings
    ("#### Step 1\nAdd.\n#### Final answer\n\\boxed{5}", "5"), ("##### Step\n\\boxed{5}", "5"), ("\\boxed{5}\n#### Remarks", "5"),
    ("#### Step 1\nAdd 2.\n\nSo \\boxed{5}. #### Remarks\nnone", "5"), ("#### 1. Add\nso \\boxed{5}.\n#### 2. Check\nok", "5"),
    # lists in text: Skywork-OR1
    ('["18"]', "18"), ('["\\\\frac{1}{2}"]', "\\frac{1}{2}"), ('["\\frac{1}{2}"]', "\\frac{1}{2}"), ("['70']", "70"),
    ('["3", "5"]', "3, 5"), ('["(1,2)"]', "(1,2)"), ('["x=3"]', "x=3"), ('["\\\\sqrt{2}"]', "\\sqrt{2}"), ('["A"]', "A"),
    ("['\\\\pi']", "\\pi"), ('["\\nu"]', "\\nu"), ('["\\u221a2"]', "√2"), ('["\\\\boxed{3}"]', "3"), ("[1,2]", "[1,2]"),
    ('["a", 3]', "a, 3"), ("['\\sqrt2']", "\\sqrt2"),
]  # fmt: skip


@pytest.mark.parametrize(("solution", "answer"), SOLUTIONS)
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
    assert not readable("5 m/s " * 330)  # nested too deeply for the parser
    assert "line break" in found[1] and "placeholder" in found[4]
