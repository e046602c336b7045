"""SQL text of others (filters, saved views, queries of assistants) reads the tables of the runs only, and ends within its limits."""

import json
import shutil
import time
from types import SimpleNamespace

import psutil
import pytest
from helpers.analysis_runs import make_run
from helpers.cases import read_cases

from rstar_lab.analysis import inspect, open_runs
from rstar_lab.analysis.inspector.notes import VIEWS
from rstar_lab.common.errors import UserError
from rstar_lab.exchange import tool_process
from rstar_lab.exchange.mcp_server import remote_tools
from rstar_lab.exchange.tool_process import ToolProcess

pytest.importorskip("mcp")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("made"), "a", steps=2)


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "runs" / "a")


def tools(run):
    return SimpleNamespace(**remote_tools(run.parent))


@pytest.fixture(scope="module")
def asked(made):
    return tools(made)


# How a run folder can point elsewhere: the path of a link in it, and what the link replaces.
LINKS = ["calls", "transcripts/stage=one", "trajectories/stage=one/step=000001.parquet", "unknown", "checkpoints"]


@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("target", ["home", "/", "home/.ssh/id", "other/a"])
def test_a_link_in_a_run_folder_never_widens_what_sql_reads(run, tmp_path, name, target):
    secret = tmp_path / "home" / ".ssh" / "id"
    secret.parent.mkdir(parents=True)
    secret.write_text("PRIVATE KEY")
    make_run(tmp_path / "other", "a", steps=2)  # files of the same names in another folder of the user
    link = run / name
    link.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(link) if link.is_dir() else link.unlink(missing_ok=True)
    inside = name if target.startswith("other") else ""
    link.symlink_to(tmp_path / target / inside)
    by_run, by_folder = open_runs(run), open_runs(run.parent)
    for place in (secret, link / ".ssh" / "id", link, "/etc/hostname", tmp_path / "other" / "a" / "rollup.parquet"):
        for read in ("read_text", "read_blob", "read_csv", "read_parquet", "glob", "parquet_metadata"):
            for ask in (by_run.sql, by_folder.arrow):
                with pytest.raises((UserError, OSError), match=r"(?i)disabled|denied|cannot|damaged|outside|failed"):
                    ask(f"SELECT * FROM {read}('{place}'), trajectories LIMIT 1")


@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize("level", ["calls", "transcripts", "trajectories"])
def test_the_rows_of_another_run_are_not_read_through_a_link(run, tmp_path, level):
    private = make_run(tmp_path / "private", "a", steps=2)
    shutil.rmtree(run / level)
    (run / level).symlink_to(private / level)
    with pytest.raises(UserError, match="outside of its run folder, because of a link"):
        open_runs(run).sql(f"SELECT * FROM {level}")
    with pytest.raises(UserError, match="outside of its run folder"):
        inspect(run).rows(), open_runs(run).calls(), open_runs(run).search("a"), open_runs(run).transcript("a")


def nest(function, depth, text="'x'"):
    for _ in range(depth):
        text = function(text)
    return text


def again(expression):
    return lambda inside: f"(SELECT {expression} FROM (SELECT {inside} AS a))"


# Expressions whose value grows with every call, or that take any time: none is on the list of functions that was forbidden before.
GROWING = {
    **read_cases(__file__, "foreign_sql.yaml")["refused"],
    "hex": f"length({nest('hex({})'.format, 29)}) > 0",
    "bin": f"length({nest('bin({})'.format, 10)}) > 0",
    "concat": f"length({nest(again('concat(a, a)'), 29)}) > 0",
    "||": f"length({nest(again('a || a'), 20)}) > 0",
    "list_concat": f"len({nest(again('list_concat(a, a)'), 27, '[1]')}) > 0",
    "+ of lists": f"len({nest(again('a + a'), 20, '[1]')}) > 0",
    "aliases": "exists(SELECT [1] AS a, " + ", ".join(f"a{i - 1 or ''} + a{i - 1 or ''} AS a{i}" for i in range(1, 40)) + ")",
    "list": f"{nest(again('[a, a]'), 20)}::VARCHAR > ''",
    "struct": f"{nest(again('{{x: a, y: a}}'), 20)}::VARCHAR > ''",
    "replace": f"length({nest(lambda text: f'replace({text}, ' + repr('x') + ', ' + repr('x' * 10) + ')', 9)}) > 0",
    "regexp_replace": f"length(regexp_replace(answer, 'x', '{'x' * 1000}', 'g')) > 0",
    "url_encode": f"length({nest('url_encode({})'.format, 20)}) > 0",
    "json": f"length(to_json({nest('json_array({0}, {0})'.format, 4)})::VARCHAR) > 0",
    "nesting": "(" * 900 + "1" + ")" * 900 + " + 1 = 1" + " + 1" * 90,
    "length": "reward IN (" + "1," * 150_000 + "1)",
}  # fmt: skip


@pytest.mark.parametrize("name", GROWING)
def test_text_that_could_take_all_time_or_memory_is_refused_at_once(made, asked, name):
    sql, runs = GROWING[name], open_runs(made)
    before, began = psutil.Process().memory_info().rss, time.monotonic()
    for ask in (
        runs.count,
        runs.calls,
        lambda where: runs.trajectories({"any": [{"sql": where}]}),
        lambda where: inspect(made, where).rows(),
        lambda where: asked.rollouts(where=where),
        lambda where: asked.rollouts(order_by=where),
        lambda where: asked.curves(["a"], ["pass1"], where={"sql": where}),
    ):
        with pytest.raises(UserError):
            ask(sql)
    assert psutil.Process().memory_info().rss - before < 2**29 and time.monotonic() - began < 60


HONEST = [
    "run_id = 'a' AND step > 0 AND errors >= 0 OR correct",
    "list_contains(outcomes, 'timeout') OR len(outcomes) >= 0",
    "traj_id IN (SELECT traj_id FROM calls WHERE run_s >= 0) OR true",
    "answer LIKE '%1%' OR lower(answer) = 'x' OR regexp_matches(answer, '^[0-9]{1,3}$') OR true",
    "round(reward, 1) BETWEEN -1 AND 1 AND CASE WHEN kept THEN 1 ELSE 0 END >= 0",
    "exists(SELECT * FROM calls WHERE calls.traj_id = trajectories.traj_id) OR coalesce(advantage, 0)::DOUBLE > -9",
    "group_id IN (SELECT group_id FROM trajectories GROUP BY group_id HAVING avg(reward) BETWEEN 0 AND 1)",
    "stop_reason IN ('answer', 'x') OR outcomes[1] IS NULL OR metrics['x'] > 1 OR true",
]


@pytest.mark.parametrize("sql", HONEST)
def test_honest_filters_are_accepted(made, sql):
    assert open_runs(made).count(sql) == len(inspect(made, sql).rows(1000)) > 0


QUERIES = [
    "DESCRIBE trajectories",
    "WITH a AS (SELECT step, median(reward) AS m FROM trajectories GROUP BY 1) SELECT * FROM a ORDER BY 1",
    "SELECT unnest(outcomes) AS outcome, count(*) OVER () FROM trajectories",
    "SELECT o, count(*) FROM trajectories, unnest(outcomes) AS x(o) GROUP BY 1",
    "SELECT * EXCLUDE (r) FROM (SELECT *, row_number() OVER (PARTITION BY step ORDER BY reward) r FROM trajectories) WHERE r = 1",
    "SELECT t.traj_id, left(messages, 9) FROM trajectories t JOIN transcripts USING (traj_id) LIMIT 3",
    "SELECT step FROM steps UNION ALL SELECT step FROM rollup",
    "SELECT run_id, count(DISTINCT problem_id), count(*) FILTER (WHERE kept) FROM trajectories GROUP BY 1",
]


def test_honest_queries_of_assistants_are_answered(asked):
    for sql in QUERIES:
        assert asked.query(sql)["rows"], sql
    assert asked.rollouts(order_by="reward DESC, length(answer), step -- a comment", limit=2)["total"] == 64


FOREIGN_SOURCES = [
    "read_text('SECRETS')", "read_json_auto('SECRETS')", "glob('/**')", "duckdb_settings()", "duckdb_secrets()", "sniff_csv('SECRETS')",
    "parquet_metadata('SECRETS')", "query('SELECT 1')", "query_table('runs')", "json_execute_serialized_sql('x')", "'SECRETS'", "frame",
    "information_schema.tables", "pragma_database_list()", "range(3)", "duckdb_views", "summary('x')",
]  # fmt: skip


def test_assistants_read_nothing_but_the_tables(run):
    secrets = run.parent / ".jobs" / "j" / "secrets.json"
    secrets.parent.mkdir(parents=True)
    secrets.write_text('{"HF_TOKEN": "hf_SECRET"}')
    asked = tools(run)
    for source in FOREIGN_SOURCES:
        source = source.replace("SECRETS", str(secrets))
        nested = f"SELECT 1 FROM runs WHERE exists(SELECT * FROM {source})"
        for sql in (f"SELECT * FROM {source}", nested, f"DESCRIBE SELECT * FROM {source}"):
            with pytest.raises(UserError, match=r"cannot be read|not supported"):
                asked.query(sql)
        with pytest.raises(UserError):
            asked.rollouts(order_by=f"(SELECT max(content) FROM {source})")


@pytest.mark.slow
def test_a_query_ends_at_its_limit_and_below_its_memory(run, monkeypatch):
    monkeypatch.setattr("rstar_lab.exchange.mcp_server.QUERY_S", 2.0)
    monkeypatch.setattr(tool_process, "MEMORY", 2**30)
    asked = tools(run)
    tables = ", ".join(f"trajectories t{i}" for i in range(9))
    for value in ("count(*)", "median(t0.step + t1.step)", "list(t0.answer)"):
        began = time.monotonic()
        with pytest.raises(UserError, match=r"(?i)ran longer than 2 s|needs more time or memory|out of memory"):
            asked.query(f"SELECT {value} FROM {tables}")
        assert time.monotonic() - began < 60
    assert asked.query("SELECT 1 AS one")["rows"] == [{"one": 1}]


def test_a_call_that_cannot_be_interrupted_ends_its_process(run):
    process = ToolProcess(run.parent, query_s=30, call_s=0.2)
    for _ in range(2):
        with pytest.raises(UserError, match="needs more time or memory"):
            process.call("diagnose", {"run_id": "a"})
    assert process._process is None


SQL_VIEWS = [
    {"filters": {"sql": "step = 1"}},
    {"scope": {"label": "x", "filter": {"sql": "step = 1"}}},
    {"filters": {"any": [{"step": 1}, {"any": ["step = 1"]}]}},
]


@pytest.mark.parametrize("parts", SQL_VIEWS)
def test_saved_views_hold_typed_filters_and_no_sql(run, parts):
    view = {"filters": {}, "scope": {}, "sort": [], "columns": []} | parts
    typed = {"filters": {"step": 1}, "scope": {}, "sort": [], "columns": []}
    (run / VIEWS).write_text(json.dumps({"sql": view, "typed": typed}))
    inspector = inspect(run)
    assert list(inspector._views([])) == ["typed"] and set(inspector.views) == {"sql", "typed"}
    with pytest.raises(UserError, match="contains an SQL condition"):
        inspector.show_view("sql")
    inspector.show_view("typed")
    assert set(inspector.rows().step) == {1}
    with pytest.raises(UserError, match="contains an SQL condition"):
        inspector._save_view([], "again", view)
    assert list(json.loads((run / VIEWS).read_text())) == ["sql", "typed"]
