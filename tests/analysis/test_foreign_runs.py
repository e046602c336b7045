"""A run folder from somebody else is data: reading, listing and annotating it runs nothing and writes nowhere else."""

import contextlib
import json
import os
import shutil
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.analysis_runs import make_run
from typer.testing import CliRunner

from rstar_lab.analysis import inspect, measure, open_runs, overview
from rstar_lab.analysis.inspector.notes import NOTES, VIEWS, read_notes, write_note
from rstar_lab.analysis.report import report_html
from rstar_lab.cli.command_line import app
from rstar_lab.common.errors import UserError
from rstar_lab.doctor import doctor
from rstar_lab.exchange.mcp_server import remote_tools
from rstar_lab.runs import RunReader, RunStoreError, RunWriter
from rstar_lab.runs.compact import compact
from rstar_lab.runs.files import atomic_write, lock_file, write_json
from rstar_lab.runs.lock import RunLock, is_locked

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("made"), "a", steps=2)


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "runs" / "a")


ESCAPES = [
    """(SELECT 1 AS "'") = 1) GROUP BY ALL; COPY (SELECT 'x') TO 'TARGET' (FORMAT csv); SELECT step, run_id, count(*) AS n FROM
    trajectories WHERE ((SELECT 1 AS "'") = 1""",
    "TRUE; COPY (SELECT 1) TO 'TARGET'",
    "traj_id IN (SELECT content FROM read_text('SECRET'))",
    "traj_id IN (FROM 'SECRET')",
    "traj_id IN (TABLE 'SECRET')",
    "EXISTS (SELECT 1 FROM read_csv_auto('SECRET'))",
    "EXISTS (SELECT 1 FROM glob('/*'))",
    "EXISTS (SELECT 1 FROM duckdb_settings())",
    "TRUE) OR (TRUE",
    "TRUE UNION SELECT 1",
]


@pytest.mark.parametrize("sql", ESCAPES)
def test_a_filter_reads_and_writes_no_other_file(run, tmp_path, sql):
    target, secret = tmp_path / "written.csv", tmp_path / "secret.txt"
    secret.write_text("secret")
    (run / "inside.txt").symlink_to(secret)
    inspector = inspect(run)
    for place in (secret, run / "inside.txt"):
        condition = sql.replace("TARGET", str(target)).replace("SECRET", str(place))
        inspector.filters = {"sql": condition}
        for read in (inspector.rows, lambda: inspector._page([], 0, 10, inspector.filters, {}, [])):
            with pytest.raises(UserError, match="filter sql"):
                read()
        with pytest.raises(UserError):
            open_runs(run).trajectories(condition)
    assert not target.exists()


@pytest.mark.parametrize(
    "query",
    [
        "COPY (SELECT 1) TO 'TARGET'",
        "SELECT 1; COPY (SELECT 1) TO 'TARGET'",
        "SELECT * FROM read_text('SECRET')",
        "SELECT * FROM 'SECRET'",
        "SELECT * FROM read_text('LINK')",
        "ATTACH 'TARGET'",
        "SET enable_external_access = true",
        "INSTALL httpfs",
        "SELECT * FROM read_text('http://127.0.0.1:9/x')",
        "SELECT * FROM frame",
    ],
)
def test_a_query_is_one_select_over_the_folders_of_the_runs(run, tmp_path, query):
    frame = open_runs(run).runs()  # not a table of the query
    target, secret, link = tmp_path / "t.csv", tmp_path / "secret.txt", run / "link.txt"
    secret.write_text("secret")
    link.symlink_to(secret)
    query = query.replace("TARGET", str(target)).replace("SECRET", str(secret)).replace("LINK", str(link))
    for ask in (open_runs(run).sql, open_runs(run).arrow):
        with pytest.raises((UserError, Exception), match=r"(?i)failed|error|denied|disabled|not exist"):
            ask(query)
    assert not target.exists() and len(frame) == 1


@pytest.mark.parametrize(
    "query",
    [
        "WITH x AS (COPY (SELECT 1) TO 'RUN/run.json') SELECT 1",
        "DESCRIBE WITH x AS (COPY (SELECT 1) TO 'RUN/new.csv') SELECT 1",
        "wItH/**/x AS (DELETE FROM rollup RETURNING step) FROM x",
        "WITH x AS (UPDATE rollup SET reward_mean = 1 RETURNING step) FROM x",
        "WITH x AS (INSERT INTO rollup FROM rollup RETURNING step) FROM x",
    ],
)
def test_a_query_changes_no_file_and_no_table(run, query):
    """DuckDB may write where it may read, and a WITH clause can hold more than SELECT."""
    runs = open_runs(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    table = runs.sql("SELECT * FROM rollup ORDER BY step")
    for ask in (runs.sql, runs.arrow, remote_tools(run.parent)["query"]):
        with pytest.raises(UserError, match="WITH clause"):
            ask(query.replace("RUN", str(run)))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert runs.sql("SELECT * FROM rollup ORDER BY step").equals(table)
    assert runs.sql("WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 3) FROM t").n.sum() == 6


def test_runs_behind_symbolic_links_are_read(run, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "a").symlink_to(run)
    runs = open_runs(tmp_path / "shared")
    assert runs.count() == 64
    make_run(tmp_path / "elsewhere", "b", steps=1)
    (tmp_path / "shared" / "b").symlink_to(tmp_path / "elsewhere" / "b")
    assert runs.count() == 96 and len(runs.sql("SELECT DISTINCT run_id FROM trajectories")) == 2


def test_notes_follow_no_symbolic_link(run, tmp_path):
    victim = tmp_path / "bashrc"
    victim.write_text("mine")
    for name in (f".{NOTES}.lock", f".{VIEWS}.lock", ".lock", f".{NOTES}.tmp", f".{VIEWS}.tmp"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(victim)
    traj_id = open_runs(run).trajectories(columns=["traj_id"]).traj_id[0]
    with pytest.raises(RunStoreError, match=r"cannot write .*lock"):
        write_note(run, traj_id, "$(id)", [])
    with pytest.raises(UserError):
        inspect(run).save_view("x")
    with pytest.raises(OSError):
        RunLock(run)
    assert not is_locked(run)
    (run / f".{NOTES}.lock").unlink()
    (run / NOTES).symlink_to(victim)
    victim.write_text("")
    write_note(run, traj_id, "$(id)", [])  # replaces the link
    assert victim.read_text() == "" and read_notes(run)[traj_id]["note"] == "$(id)" and not (run / NOTES).is_symlink()


def test_temporary_files_are_new_and_those_of_killed_writers_are_removed(tmp_path):
    path = tmp_path / "x.json"
    old = tmp_path / ".x.json.0123456789abcdef.tmp"
    old.write_text("half")
    os.utime(old, (1, 1))
    with atomic_write(path) as file:
        assert not old.exists()
        names = [each.name for each in tmp_path.iterdir()]
        assert len(names) == 1 and names[0].startswith(".x.json.") and len(names[0]) > 25
        write_json(path, {"a": 1})  # another writer does not remove the file of a living one
        file.write(b"[]")
    assert path.read_text() == "[]" and [each.name for each in tmp_path.iterdir()] == ["x.json"]


LINKS = [
    "checkpoints", "trajectories", "metrics.jsonl", "run.json", "rollup.parquet", ".lock", ".x.tmp", "calls/stage=rl",
]  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
def test_no_writer_follows_a_link_in_a_run_folder(run, tmp_path, name):
    """`checkpoints -> HOME` deleted the hidden files of HOME."""
    home = tmp_path / "home"
    (home / "stage=rl").mkdir(parents=True)
    files = [home / ".ssh" / "key", home / ".bashrc", home / "stage=rl" / ".netrc", home / "step=000009.parquet"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    link = run / name
    info = (run / "run.json").read_text()
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(home if link.suffix in ("", ".tmp") and name != ".lock" else files[1])
    if name == "run.json":
        files[1].write_text(info)
    before = {file: file.read_text() for file in files}
    with pytest.raises(RunStoreError, match=r"is a link or a pipe|regular file|cannot"):
        RunWriter.open(run.parent, "a", kind="train", recipe={}, seed=0)
    with contextlib.suppress(UserError, OSError):
        compact(run)
    assert {file: file.read_text() for file in files} == before and sorted(home.rglob("*"))
    assert {path.name for path in home.iterdir()} == {".ssh", ".bashrc", "stage=rl", "step=000009.parquet"}


def test_a_link_that_appears_while_a_run_is_written_is_not_followed(tmp_path):
    mine = tmp_path / "bashrc"
    mine.write_text("mine")
    with RunWriter.open(tmp_path, "a", kind="train", recipe={}, seed=0) as writer:
        (tmp_path / "a" / "metrics.jsonl").symlink_to(mine)
        with pytest.raises(RunStoreError, match=r"metrics\.jsonl"):
            writer.write_step("rl", 1, trajectories=[], calls=[], transcripts=[], metrics={})
    assert mine.read_text() == "mine"


def test_a_run_folder_that_another_user_has_linked_is_not_written(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "runs").mkdir()
    link = tmp_path / "runs" / "a"
    link.symlink_to(home)
    with RunWriter.open(tmp_path / "runs", "a", kind="train", recipe={}, seed=0):
        pass  # a link of one's own, for example to a larger disk
    if os.geteuid() == 0:
        os.lchown(link, 65534, 65534)
        with pytest.raises(RunStoreError, match="link of another user"):
            RunWriter.open(tmp_path / "runs", "a", kind="train", recipe={}, seed=0)


def test_a_run_with_the_links_of_weights_and_biases_resumes(run):
    (run / "wandb" / "offline-run-1").mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to("offline-run-1")
    with RunWriter.open(run.parent, "a", kind="train", recipe={}, seed=0):
        pass


def test_pipes_in_place_of_the_files_of_a_run_block_nobody(run):
    table = next((run / "trajectories").glob("stage=*/*.parquet"))
    for name in ("metrics.jsonl", "rollup.parquet", str(table.relative_to(run))):
        broken = shutil.copytree(run, run.parent / "broken")
        (broken / name).unlink(missing_ok=True)
        os.mkfifo(broken / name)
        reader = RunReader(broken)
        for read in (reader.metrics, reader.steps, reader.rollup, lambda reader=reader: reader.read("trajectories")):
            with contextlib.suppress(UserError):
                read()
        overview(run.parent)
        assert CliRunner().invoke(app, ["runs", "list", "--runs-dir", str(run.parent)]).exit_code == 0
        shutil.rmtree(broken)


def test_a_pipe_in_a_run_folder_blocks_nobody(run):
    for name in (".lock", f".{NOTES}.lock", NOTES, VIEWS, "tokens.json", "mirror.json"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert not is_locked(run)
    with pytest.raises(UserError):
        read_notes(run)
    with pytest.raises(UserError, match="not a regular file"):
        RunReader(run).vocabulary()
    with pytest.raises(RunStoreError), lock_file(run / f".{NOTES}.lock"):
        pass
    (run / "run.json").unlink()
    os.mkfifo(run / "run.json")
    with pytest.raises(UserError, match="not a regular file"):
        RunReader(run)


BROKEN = {
    "run_id": [5, "a[/foo]", "../x", "<img src=x>", "", None, "x\x1b[2J"],
    "kind": [5, None, []],
    "status": [5, "<b>", None],
    "created": [5, "yesterday", {}],
    "recipe": ["x", 5],
    "parent": ["x", 5],
    "attempts": ["x", 1.5, True, -1, 10**30],
    "seed": ["x"],
    "extra": ["x", 5],
    "result": ["x", 5],
    "error": [5, ["x"]],
    "schema_version": ["1", True, None],
}


@pytest.mark.parametrize("key, value", [(key, value) for key, values in BROKEN.items() for value in values])
def test_a_value_of_run_json_with_the_wrong_type_names_its_key(run, key, value):
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(info | {key: value}))
    with pytest.raises(UserError, match=key if key != "schema_version" else "schema version"):
        RunReader(run)


def break_run(folder, way):
    metrics = folder / "metrics.jsonl"
    file = next((folder / "trajectories").glob("stage=*/*.parquet"))
    match way:
        case "json":
            (folder / "run.json").write_text("{")
        case "deep":
            (folder / "run.json").write_text("[" * 100_000)
        case "id":
            (folder / "run.json").write_text(json.dumps(json.loads((folder / "run.json").read_text()) | {"run_id": 5}))
        case "step":
            metrics.write_text('{"stage": "one", "step": 99999999999}\n')
        case "stage":
            metrics.write_text('{"stage": ["x"], "step": 1}\n')
        case "metric":
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
            metrics.write_text("".join(json.dumps(line | {"step_s": "<b>", "mismatch": [1]}) + "\n" for line in lines))
        case "column":
            table = pq.read_table(file, partitioning=None)
            at = table.column_names.index("reward")
            pq.write_table(table.set_column(at, "reward", pa.array(["<img>"] * len(table))), file)
        case "rollup":
            (folder / "rollup.parquet").write_bytes(b"PAR1")
        case "mirror":
            (folder / "mirror.json").write_text('{"host": 5, "status": "<b>"}')
        case "nested":
            info = json.loads((folder / "run.json").read_text())
            for _ in range(150):
                info["recipe"] = {"rl": info["recipe"]}
            (folder / "run.json").write_text(json.dumps(info))
        case "range":
            file.rename(file.with_name("steps=000000-2147483647.parquet"))
        case "binary":
            (folder / "run.json").write_bytes(b"\xff\xfe\x00")
        case "holes":  # takes no disk, and all memory if it is read
            os.truncate(folder / "run.json", 2**42)
        case "hole":
            os.truncate(metrics, 2**42)
        case "rows":
            table = pq.ParquetFile(folder / "rollup.parquet").read()
            pq.write_table(pa.concat_tables([table] * 6000), folder / "rollup.parquet")
        case "checkpoint":
            (folder / "checkpoints" / "step=\u00b2").mkdir(parents=True)


WAYS = [
    "json", "deep", "id", "step", "stage", "metric", "column", "rollup", "mirror", "binary", "nested", "range", "holes", "hole", "rows",
    "checkpoint",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_one_broken_run_ends_no_list(run, way):
    root = run.parent
    broken = shutil.copytree(run, root / "broken")
    info = json.loads((broken / "run.json").read_text())
    (broken / "run.json").write_text(json.dumps(info | {"run_id": "broken", "status": "running"}))
    break_run(broken, way)
    listed = CliRunner().invoke(app, ["runs", "list", "--runs-dir", str(root)])
    assert listed.exit_code == 0 and "finished" in listed.output, listed.output
    rows = {row.run_id: row.state for row in overview(root).rows}
    assert rows["a"] == "finished" and len(rows) == 2
    unreadable = way in ("json", "deep", "id", "binary", "nested", "holes")
    with pytest.warns(UserWarning) if unreadable else contextlib.nullcontext():
        table = open_runs(root).runs()
    assert "a" in set(table.run_id) and table.set_index("run_id").status["a"] == "finished"


DAMAGED = (
    NOTES,
    *["metrics.jsonl", "rollup.parquet", "trajectories", "calls", "transcripts", "rewards.parquet", "mirror.json"],
)


@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize("name", DAMAGED)
def test_one_damaged_run_does_not_end_the_queries_of_the_others(run, name):
    root, bad = run.parent, make_run(run.parent, "bad", steps=1)
    file = next((bad / name).glob("stage=*/*.parquet"), bad / name)
    file.unlink(missing_ok=True)
    file.mkdir() if name == "mirror.json" else os.mkfifo(file)
    runs, inspector, tools = open_runs(root), inspect(root), SimpleNamespace(**remote_tools(root))
    assert "a" in set(runs.trajectories(columns=["run_id"]).run_id) and "a" in set(
        runs.calls(columns=["run_id"]).run_id
    )
    assert "a" in set(runs.steps().run_id) and runs.count({"noted": True}) == 0 and runs.rewards().empty
    assert "a" in set(runs.search("e", limit=1000).run_id)
    traj_id = runs.trajectories({"run_id": "a"}, columns=["traj_id"]).traj_id[0]
    assert len(runs.transcript(traj_id)) and len(inspector.rows()) and inspector.static_html()
    assert inspector._page([], 0, 10, inspector.filters, {}, [])["rows"]
    assert tools.describe_run("a")["steps"] == 2 and tools.transcript(traj_id)["messages"]
    assert "a" in {log.name for log in doctor(root).logs}
    if name in ("metrics.jsonl", "rollup.parquet", "trajectories"):
        with pytest.raises(UserError):  # the run that was asked for
            open_runs(bad).trajectories()


@pytest.mark.parametrize("value", ["x", {"a": 1}, [1], True, 10**30, "\ud800"])
def test_a_key_with_different_types_does_not_end_queries_of_other_runs(run, value):
    other = shutil.copytree(run, run.parent / "other")
    for folder, seed in ((run, 0.5), (other, value)):
        info = json.loads((folder / "run.json").read_text()) | {"run_id": folder.name, "recipe": {"rl": {"lr": seed}}}
        (folder / "run.json").write_text(json.dumps(info))
    lines = [json.loads(line) | {"step_s": value} for line in (other / "metrics.jsonl").read_text().splitlines()]
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = open_runs(run.parent)
    assert set(runs.sql("SELECT * FROM runs").run_id) == {"a", "other"}
    assert len(runs.sql("SELECT * FROM steps")) == 4


def test_texts_that_utf8_cannot_encode_do_not_end_lists_of_runs(run):
    info, text = json.loads((run / "run.json").read_text()), "a\ud800"
    changes = {"recipe": {"model": text, "label": text, text: text}, "error": text, "parent": {"run": text}}
    (run / "run.json").write_text(json.dumps(info | changes))
    lines = [json.loads(line) | {text: 1.0, "note": text} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = open_runs(run.parent)
    assert runs.runs()["recipe.label"][0] == "a\ufffd" and runs.steps()["a\ufffd"].tolist() == [1.0, 1.0]


def test_a_rollup_with_more_rows_than_steps_is_not_read(run):
    """A few bytes of a Parquet file can stand for billions of rows."""
    break_run(run, "rows")
    with pytest.raises(RunStoreError, match="rows for 2 steps"):
        RunReader(run).rollup()


def hostile_messages(text):
    return json.dumps([
        {"role": "user", "content": text}, {"role": f'x"><img src=x onerror="{text}">', "content": text},
        {"role": "assistant", "content": text}, {"role": "tool", "content": text, "tool": text, "outcome": text},
        {"role": 5, "content": {"a": text}}, {"role": "assistant", "content": None},
    ])  # fmt: skip


def test_the_role_of_a_message_is_never_markup(run):
    for file in (run / "transcripts").glob("stage=*/*.parquet"):
        table = pq.ParquetFile(file).read()
        hostile = pa.array([hostile_messages('x"><img src=x onerror=alert(1)>')] * len(table))
        for name in ("response_ids", "loss_mask", "engine_log_probs", "trainer_log_probs", "entropy"):
            at = table.column_names.index(name)
            table = table.set_column(at, table.schema.field(name), pa.nulls(len(table), table.schema.field(name).type))
        pq.write_table(table.set_column(table.column_names.index("messages"), "messages", hostile), file)
    runs = open_runs(run)
    traj_id = runs.trajectories(columns=["traj_id"]).traj_id[0]
    assert set(runs.transcript(traj_id).role) <= {"system", "user", "assistant", "tool", "environment", "other"}
    inspector = inspect(runs, selected=traj_id)
    for page in (inspector.static_html(), inspector.html(), report_html(run, sample=4)):
        assert "<img" not in page.replace("<img>", "") or "plotly" in page
        assert 'onerror="' not in page and "<img src=x" not in page
        assert "&lt;img src=x" in page or "\\u003cimg src=x" in page
    assert measure(runs, ["pass1"])["value"].notna().all()


def test_reports_allow_scripts_by_their_hash_only(run):
    page = report_html(run, sample=2)
    policy = page.split('http-equiv="Content-Security-Policy" content="')[1].split('"')[0]
    assert "unsafe" not in policy and "default-src 'none'" in policy and policy.count("'sha256-") == 4
    assert ' style="' not in page.replace('style=\\"', "")


# Interrupted between blocks of rows
ENDLESS = "(SELECT count(*) FROM trajectories a, trajectories b, trajectories c, trajectories d, trajectories e, trajectories f) > 0"


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_filter_that_never_ends_is_one_error(run, monkeypatch, in_memory):
    """The user's own queries have no limit."""
    inspector = inspect(run, ENDLESS)
    inspector.source.load() if in_memory else inspector.source.refresh()
    assert inspector.source.in_memory == in_memory
    monkeypatch.setattr("rstar_lab.analysis.queries.FILTER_S", 0.2)
    for read in (inspector.rows, lambda: inspector._page([], 0, 10, inspector.filters, {}, [])):
        with pytest.raises(UserError, match="ran longer than"):
            read()
    assert open_runs(run).sql("SELECT count(*) AS n FROM range(3000000)").n[0] == 3_000_000


def test_a_folder_in_which_no_run_can_be_read_is_one_error(run):
    (run / "run.json").write_text("{")
    with pytest.raises(UserError, match="no run can be read"):
        doctor(run.parent)
