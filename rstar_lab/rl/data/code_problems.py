"""Read problems with hidden test cases in the public formats of APPS, TACO, CodeContests, LiveCodeBench, Codeforces and SYNTHETIC.

Each function takes a row and returns the fields of a problem, with `info` as the reward `tests` reads it
(`rstar_lab.rl.reward.hidden_tests`). A row that cannot be graded raises ValueError with the reason: no tests, files instead of
stdin, a checker, or outputs longer than a sandbox stores.
"""

import base64
import json
import pickletools
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rstar_lab.sandbox.limits import Limits
from rstar_lab.untrusted.files import long_integers, parse_json, parse_value, reading

Row = Mapping[str, Any]
MAX_TESTS_BYTES = 256 * 1024 * 1024  # of the compressed tests of one LiveCodeBench problem, decompressed
STDIO = "The program reads standard input and writes to standard output."


def apps(row: Row) -> dict[str, Any]:
    """Convert a row of APPS (arXiv 2105.09938) or TACO (arXiv 2312.14852): `question`, `starter_code`, and `input_output`, a JSON
    text {inputs, outputs, fn_name}."""
    if row.get("input_output") in (None, ""):  # as in a part of the test set of APPS
        raise ValueError("input_output is empty, so the problem has no tests")
    pairs = _json(row["input_output"], "input_output")
    if not isinstance(pairs, Mapping):
        raise ValueError("input_output is not an object")
    function = pairs.get("fn_name") or None
    inputs, outputs = pairs.get("inputs"), pairs.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("input_output has no lists of inputs and outputs of equal length")
    if function is None:
        tests = _tests(zip(map(_text, inputs), map(_text, outputs), strict=True))
    else:
        # The result of a call is wrapped in a list.
        wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
        results = [output[0] for output in outputs] if wrapped else outputs
        with long_integers():
            tests = _tests(zip(map(json.dumps, inputs), map(json.dumps, results), strict=True))
    return _problem(row, row.get("question"), tests, function, row.get("problem_id"))


def code_contests(row: Row) -> dict[str, Any]:
    """Convert a row of CodeContests (arXiv 2203.07814): `name`, `description`, and `public_tests`, `private_tests` and
    `generated_tests`, each {input: [...], output: [...]}."""
    if row.get("input_file") or row.get("output_file"):
        raise ValueError("the program reads or writes a file")
    pairs: list[tuple[str, str]] = []
    for name in ("public_tests", "private_tests", "generated_tests"):
        kind = _json(row[name], name) if row.get(name) else {}
        if not isinstance(kind, Mapping):
            raise ValueError(f"{name} is not an object")
        pairs += zip(map(_text, kind.get("input") or ()), map(_text, kind.get("output") or ()), strict=True)
    return _problem(row, row.get("description"), _tests(pairs), None, row.get("name"))


def livecodebench(row: Row) -> dict[str, Any]:
    """Convert a row of LiveCodeBench (arXiv 2403.07974): `question_content`, `starter_code`, and `public_test_cases` and
    `private_test_cases`, JSON texts [{input, output, testtype}]; the private ones may be compressed. The name of the function is in
    `metadata`."""
    cases = [*_cases(row.get("public_test_cases")), *_cases(row.get("private_test_cases"))]
    functional = {case.get("testtype") == "functional" for case in cases}
    if len(functional) > 1:
        raise ValueError("some tests call a function and others do not")
    function, pairs = None, [(_text(case.get("input")), _text(case.get("output"))) for case in cases]
    if True in functional:
        metadata = _json(row.get("metadata") or "{}", "metadata")
        function = metadata.get("func_name") if isinstance(metadata, Mapping) else None
        if not function:
            raise ValueError("metadata has no func_name")
        # An input has one argument per line.
        pairs = [
            (json.dumps([_json(line, "input") for line in given.split("\n") if line.strip()]), output)
            for given, output in pairs
        ]
    return _problem(row, row.get("question_content"), _tests(pairs), function, row.get("question_id"))


def codeforces(row: Row) -> dict[str, Any]:
    """Convert a row of Codeforces (open-r1/codeforces): `description`, `input_format`, `output_format`, `note`, and `examples` and
    `official_tests`, lists of {input, output}."""
    for reason, applies in (
        ("the program reads or writes a file", row.get("input_mode") not in (None, "", "stdio")),
        ("the program talks to another program", row.get("interaction_format")),
        ("several outputs are right, and its checker is not run", row.get("generated_checker")),
    ):
        if applies:
            raise ValueError(reason)
    examples = _cases(row.get("examples"))
    titles = {"description": "", "input_format": "Input:\n", "output_format": "Output:\n", "note": "Note:\n"}
    parts = [f"{title}{str(row[name]).strip()}" for name, title in titles.items() if row.get(name)]
    cases = [*examples, *_cases(row.get("official_tests"))]
    pairs = [(_text(case.get("input")), _text(case.get("output"))) for case in cases]
    parts += [f"Example input:\n{given}\nExample output:\n{output}" for given, output in pairs[: len(examples)]]
    return _problem(row, "\n\n".join(parts), _tests(pairs), None, row.get("id"))


def synthetic(row: Row) -> dict[str, Any]:
    """Convert a row of SYNTHETIC-1 or SYNTHETIC-2 (Prime Intellect): `prompt`, and `verification_info`, JSON or a Python literal with
    `test_cases`: {inputs, outputs}, or a list of {type, input, output, fn_name}."""
    info = row.get("verification_info")
    if isinstance(info, str):
        info = parse_value(info, "verification_info is neither JSON nor a Python literal")
    info = info if isinstance(info, Mapping) else {}
    cases = _json(info.get("test_cases"), "test_cases")
    if isinstance(cases, list) and all(isinstance(case, Mapping) for case in cases):
        names = {case.get("fn_name") if case.get("type") == "function_call" else None for case in cases}
        if len(names) > 1:
            raise ValueError("some tests call another function, or none")
        lists: dict[str, Any] = {f"{key}s": [case.get(key) for case in cases] for key in ("input", "output")}
        cases = lists | {"fn_name": next(iter(names), None)}
    if not isinstance(cases, Mapping):
        raise ValueError("verification_info has no test_cases")
    cases = {"fn_name": info.get("fn_name"), **cases}
    return apps({"question": row.get("prompt"), "problem_id": row.get("problem_id"), "input_output": cases})


def rstar_coder(row: Row) -> dict[str, Any]:
    """Convert a row of rStar-Coder (arXiv 2505.21297): `question`, `starter_code`, `func_name`, and lists `inputs` and `outputs`."""
    pairs = {"inputs": _json(row.get("inputs"), "inputs"), "outputs": _json(row.get("outputs"), "outputs")}
    pairs["fn_name"] = row.get("func_name")
    return apps({**row, "problem_id": row.get("question_id"), "input_output": pairs})


# A column that only the rows of one format have, and its converter.
FORMATS: dict[str, Callable[[Row], dict[str, Any]]] = {
    "input_output": apps,
    "verification_info": synthetic,
    "official_tests": codeforces,
    "private_test_cases": livecodebench,
    "private_tests": code_contests,
    "func_name": rstar_coder,
}


def converter_of(row: Row) -> Callable[[Row], dict[str, Any]] | None:
    """Return the function that converts rows with these columns; None if they have no hidden tests of a known format."""
    return next((convert for column, convert in FORMATS.items() if column in row), None)


def _problem(row: Row, question: Any, tests: list[dict[str, str]], function: str | None, name: Any) -> dict[str, Any]:
    if not isinstance(question, str) or not question.strip():
        raise ValueError("no question")
    starter = str(row.get("starter_code") or "").strip("\n")
    parts = [question.strip()]
    if function is None:
        parts.append(STDIO)
    elif not starter:
        parts.append(f"Write the function `{function}`.")
    if starter:
        parts.append(f"Complete this code:\n```python\n{starter}\n```")
    info: dict[str, Any] = {"tests": tests} | ({"function": function} if function else {})
    fields = {"question": "\n\n".join(parts), "info": info}
    return fields | ({"problem_id": str(name)} if name not in (None, "") else {})


def _tests(pairs: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Return the different tests whose output a sandbox can store. Raises ValueError without one, and if no program passes all."""
    limit = Limits().output_bytes // 4  # characters; one has at most four bytes
    pairs, outputs = list(dict.fromkeys(pairs)), dict[str, list[str]]()
    if any(outputs.setdefault(given.strip(), output.split()) != output.split() for given, output in pairs):
        raise ValueError("an input has two different outputs")
    tests = [{"input": given, "output": output} for given, output in pairs if len(output) < limit]
    if not any(test["output"].strip() for test in tests):
        raise ValueError("no tests with an output")
    return tests


def _text(value: Any) -> str:
    """Return an input or output as text. A list has one line per item; a missing input is empty."""
    if value is None:
        return ""
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    with long_integers():
        return str(value) if isinstance(value, str | bool) else json.dumps(value)


def _json(value: Any, name: str) -> Any:
    """Return a value that may be JSON text. Raises DataError."""
    return parse_json(value, name) if isinstance(value, str) else value


def _cases(value: Any) -> list[Mapping[str, Any]]:
    if isinstance(value, str) and value.strip() and value.lstrip()[0] not in "[{":
        value = _unpack(value)
    cases = _json(value or "[]", "test cases")
    if not isinstance(cases, list) or not all(isinstance(case, Mapping) for case in cases):
        raise ValueError("the test cases are not a list of objects")
    return cases


def _unpack(text: str) -> str:
    """Return compressed test cases: base64 of zlib of a pickled text. The pickle is parsed, never executed."""
    with reading("the test cases are neither JSON nor compressed"):
        unzip = zlib.decompressobj()
        data = unzip.decompress(base64.b64decode(text, validate=True), MAX_TESTS_BYTES)
        operations = [(code.name, value) for code, value, _ in pickletools.genops(data)]
    if unzip.unconsumed_tail:
        raise ValueError("the test cases are too large")
    texts = [
        value for name, value in operations if name in ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE")
    ]
    harmless = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}
    others = {name for name, _ in operations} - harmless
    if len(texts) != 1 or len(others) != 1:
        raise ValueError("the compressed test cases are not one text")
    return str(texts[0])
