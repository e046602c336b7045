"""Convert solutions in plain text to conversations in which programs compute, by executing the programs.

A writer, a model behind any OpenAI-style server, rewrites a solution so that Python programs do the computations; without a
writer, the solution itself must contain them. Every program is executed in a sandbox, and its real output becomes the tool
message. Source: the data synthesis of AgentMath (arXiv 2512.20745), reduced to rewriting, execution and the check of the answer.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome
from rstar_lab.rl.data.converters import ConversionReport
from rstar_lab.rl.data.lint import lint
from rstar_lab.rl.problems import Problem, ProblemError, read_problem
from rstar_lab.rl.renderers.conversations import Conversation, Message, tool_calls
from rstar_lab.rl.renderers.paper import CODE_TOOL, PaperRenderer
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.verify import last_boxed, same_answer

Writer = Callable[[str], Awaitable[str]]
Runner = Callable[[Sequence[Call]], Awaitable[list[CallResult]]]

SOLUTION_COLUMNS = ("solution", "generated_solution", "response", "output")
AT_ONCE = 32  # rows that are written and executed at the same time
_BLOCK_END = re.compile(r"^```[ \t]*$\n?", re.MULTILINE)
_BLOCK = re.compile(r"^```(\w*+)[^\n]*+\n(.*?)^```[ \t]*$\n?", re.DOTALL | re.MULTILINE)

REQUEST = """Rewrite the solution of a problem so that Python programs do its computations.

- Keep the reasoning, in your own words. Where the solution computes, enumerates or checks, write a program instead, in a block
  that starts with ```python and ends with ```.
- Each program runs alone: it imports and defines all it uses, reads no input, and prints its result.
- Write no output of a program. After a program, continue as if you had read its output.
- Use at least one program, and end with the answer in \\boxed{{}}.

Problem:
{question}

Solution:
{solution}
"""


async def add_tools(
    rows: Iterable[tuple[int, Any]],
    origin: str,
    report: ConversionReport,
    run: Runner,
    writer: Writer | None = None,
    *,
    fields: Mapping[str, str] | None = None,
    solution: str | None = None,
) -> AsyncIterator[Conversation]:
    """Yield the conversations of the rows whose programs run and lead to the answer; count the other rows in the report.

    Args:
        rows: (row number, row). A row has a question, a solution and optionally an answer; without one, the answer is that of the
            solution.
        origin: File name, used in the report.
        report: Gets the counts.
        run: Executes calls in a sandbox.
        writer: Returns the reply of a model to a request; None: the solutions contain programs.
        fields: Our field name -> column name, see `load_problems`.
        solution: Column of the solution. Default: the first of SOLUTION_COLUMNS that the row has.
    """

    async def one(number: int, row: Any) -> tuple[Conversation, bool] | tuple[str, str]:
        where = f"{origin} row {number}"
        try:
            problem, text = _read(row, where, fields or {}, solution)
            if writer is not None:
                text = await writer(REQUEST.format(question=problem.question, solution=text))
            conversation, confirmed = await _converted(problem, text, run, f"{report.source}-{number}", report.source)
        except (ValueError, ProblemError) as error:
            return str(error).removeprefix(f"{where}, ").removeprefix(f"{where}: "), where
        if findings := lint(conversation):
            return findings[0].rule, f"{where}: {findings[0]}"
        return conversation, confirmed

    waiting = iter(rows)
    while batch := list(islice(waiting, AT_ONCE)):
        for result in await asyncio.gather(*(one(number, row) for number, row in batch)):
            report.rows += 1
            if isinstance(result[0], Conversation):
                report.converted += 1
                report.unconfirmed += not result[1]
                yield result[0]
            else:
                report.refuse(result[0], str(result[1]))


def _read(row: Any, where: str, fields: Mapping[str, str], column: str | None) -> tuple[Problem, str]:
    """Return the problem that a row holds (with its answer) and the text of its solution. Raises ValueError or ProblemError."""
    problem = read_problem(row, where=where, fields=fields, default_id="row", default_source="", answers=False)
    columns = [column] if column else SOLUTION_COLUMNS
    text = next((row[name] for name in columns if isinstance(row.get(name), str) and row[name].strip()), None)
    if text is None:
        raise ValueError(f"no solution in a column {' or '.join(columns)}")
    answer = problem.answer or last_boxed(text)
    if not answer:
        raise ValueError("neither the row nor its solution has an answer")
    return problem.model_copy(update={"answer": answer}), re.sub(r"\r\n?", "\n", text)


def parts_of(text: str) -> list[tuple[str, str, str | None]]:
    """Split a solution into (text before, program, claimed output or None); the last part has the text at the end and no program.

    Args:
        text: Text with blocks ```python, each perhaps followed by a block ```output.
    """
    parts: list[tuple[str, str, str | None]] = []
    before, end = "", 0
    ends = [match.end() for match in _BLOCK_END.finditer(text)]
    for block in _BLOCK.finditer(text, 0, ends[-1] if ends else 0):  # every block is closed: the time is linear
        between, tag = text[end : block.start()], block[1].lower()
        if tag == "output" and parts and parts[-1][2] is None:
            parts[-1] = (*parts[-1][:2], block[2])
            before += between
        elif tag in ("python", "python3", "py"):
            parts.append(((before + between).strip(), block[2].strip("\n"), None))
            before = ""
        else:
            before += text[end : block.end()]
        end = block.end()
    return [*parts, ((before + text[end:]).strip(), "", None)]


async def _converted(problem: Problem, text: str, run: Runner, name: str, source: str) -> tuple[Conversation, bool]:
    """Return the conversation of a solution with programs, and whether a program prints its answer.

    Raises ValueError with the reason if it is not usable.
    """
    *steps, (conclusion, _, _) = parts_of(text)
    if not steps:
        raise ValueError("no program")
    answer = last_boxed(conclusion)
    if answer is None:
        raise ValueError("no answer in \\boxed{} after the last program")
    if not await asyncio.to_thread(same_answer, answer, problem.answer):
        raise ValueError("another answer than that of the row")
    calls = [Call(program, "", seed=0) for _, program, _ in steps]
    results = await run(calls)
    if any(result.outcome in INFRASTRUCTURE_FAILURES for result in results):
        results = await run(calls)
    messages = [Message(role="user", content=problem.question)]
    tool = CODE_TOOL["function"]["name"]
    for (reason, program, claimed), result in zip(steps, results, strict=True):
        if result.outcome is not Outcome.OK:
            raise ValueError(f"a program failed ({result.outcome})")
        if not result.stdout.strip():
            raise ValueError("a program prints nothing")
        if claimed is not None and claimed.split() != result.stdout.split():
            raise ValueError("a program prints another output than the solution says")
        call = tool_calls([(tool, {"code": program, "input": ""})], reason)
        messages += [
            Message(role="assistant", content=call),
            Message(role="tool", content=PaperRenderer.result_text(result)),
        ]
    final = f"<reason>{conclusion}</reason>\n<answer>\\boxed{{{answer}}}</answer>"
    messages.append(Message(role="assistant", content=final))
    word = re.compile(rf"(?<![\w.]){re.escape(answer)}(?!\.?\w)")
    last_lines = [result.stdout.strip().splitlines()[-1] for result in results]
    confirmed = any(word.search(result.stdout) for result in results) or any(
        [await asyncio.to_thread(same_answer, line, answer) for line in last_lines]
    )
    conversation = Conversation(conversation_id=name, source=source, messages=tuple(messages), tools=(CODE_TOOL,))
    return conversation, confirmed
