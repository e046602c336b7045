"""A run in which every text is hostile: in every column of every table, in every message, in run.json and in the notes."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from helpers.analysis_runs import make_run
from rstar_lab.runs.schema import LEVELS

MARK = "window.hacked=(window.hacked||0)+1"
TEXTS = (
    f'"><img src=x onerror="{MARK}"><svg onload="{MARK}">',
    f"</script><script>{MARK}</script></style></template></textarea><iframe srcdoc='<script>parent.{MARK}</script>'>",
    f"javascript:{MARK}//\"'`onmouseover=\"{MARK}\" autofocus onfocus=\"{MARK}\"",
    f'<a href="javascript:{MARK}">x</a><b onclick="{MARK}">y</b><style>*{{display:none!important}}</style>',
    "\u202egnp.exe\u202c \x1b[31mred\x1b[0m \x1b]52;c;aGk=\x07 \x00 \x85 \u200f \U0001d54f ﷽ 😀 ${1+1} {{7*7}} %s [bold]",
    '<form action="http://127.0.0.1:9/"><input name=q></form><meta http-equiv="refresh" content="0;url=http://127.0.0.1:9/">'
    '<link rel=stylesheet href="http://127.0.0.1:9/x.css"><object data="http://127.0.0.1:9/o">',
)  # fmt: skip
LONG = 10 * 2**20
# Columns that join the tables, or that the writer of the store checks.
_KEYS = {"run_id", "stage", "traj_id"}


def hostile(number: int) -> str:
    return TEXTS[number % len(TEXTS)]


def make_hostile_run(runs_dir: Path, long_text: bool = True) -> Path:
    """Write a run and replace every text in it. One message of the last step has 10 MB."""
    folder = make_run(runs_dir, "hostile", steps=3, problems=2, size=4)
    ids: dict[str, str] = {}
    for level, schema in LEVELS.items():
        for file in sorted((folder / level).glob("stage=*/*.parquet")):
            table = pq.ParquetFile(file).read()
            for name in schema.names:
                at, values = table.column_names.index(name), table[name].to_pylist()
                if name == "traj_id":
                    new = [ids.setdefault(value, f"{hostile(len(ids))}{value}") for value in values]
                elif name == "messages":
                    new = [_messages(number) for number in range(len(values))]
                elif pa.types.is_string(schema.field(name).type) and name not in _KEYS:
                    new = [f"{hostile(number)}{number % 3}" for number in range(len(values))]
                elif name == "outcomes":
                    new = [[hostile(number)] for number in range(len(values))]
                elif name == "metrics":
                    new = [[(hostile(number), float(number))] for number in range(len(values))]
                elif pa.types.is_list(schema.field(name).type):
                    new = [None] * len(values)  # no tokens: the text of the messages is shown
                else:
                    continue
                table = table.set_column(at, schema.field(name), pa.array(new, schema.field(name).type))
            if level == "transcripts" and long_text and file.name.startswith("step=000003"):
                table = _with_long_text(table)
            pq.write_table(table, file)
    info = json.loads((folder / "run.json").read_text())
    text = hostile(0) + hostile(4)
    info |= {
        "recipe": {"model": text, text: {text: text}, "label": text, "rl": {"method": {"roc": {"rule": text}}}},
        "error": text,
        "commit": text,
    }
    info |= {
        "parent": {"run": text, "step": text},
        "versions": {text: text},
        "hardware": {"host": text},
        "extra": {text: text},
    }
    (folder / "run.json").write_text(json.dumps(info))
    lines = [
        json.loads(line) | {text: text, "mismatch": 0.5} for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    note = {"traj_id": next(iter(ids.values())), "note": text, "tags": [text], "time": text}
    (folder / "notes.jsonl").write_text(json.dumps(note) + "\n")
    view = {"filters": {}, "scope": {"label": text, "filter": {}}, "sort": [], "columns": []}
    (folder / "views.json").write_text(json.dumps({text: view}))
    return folder


def _messages(number: int) -> str:
    text = hostile(number)
    call = json.dumps({"name": text, "arguments": {"code": text, text: text}})
    return json.dumps([
        {"role": "system", "content": text}, {"role": "user", "content": text}, {"role": text, "content": text},
        {"role": "assistant", "content": f"<think>{text}</think>{text}<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": text, "tool": text, "outcome": text},
        {"role": "environment", "content": text}, {"role": 5, "content": {text: text}},
        {"role": "assistant", "content": f"<tool_call>{text}</tool_call>", "generate_s": text, "policy_versions": text},
        {"role": "assistant", "content": f"<answer>{text}</answer>"},
    ])  # fmt: skip


def _with_long_text(table: pa.Table) -> pa.Table:
    messages = table["messages"].to_pylist()
    part = hostile(0)
    content = part * (LONG // len(part))
    long = [{"role": role, "content": content} for role in ("tool", "assistant")]
    messages[0] = json.dumps([{"role": "user", "content": "long"}, *long])
    return table.set_column(table.column_names.index("messages"), table.schema.field("messages"), pa.array(messages))
