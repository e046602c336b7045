"""Tests of labels by a model: an HTTP server with the OpenAI chat interface, and agreement with labels by hand."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pandas as pd
import pytest

from rstar_lab.analysis import failed_rollouts, failure_labels, hand_labels, label_agreement, label_rollouts, open_runs
from rstar_lab.analysis.inspector.notes import write_note
from rstar_lab.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden" / "runs" / "tiny_fast-rl"
LABELS = {"code error": "a tool call failed", "reasoning": "the reasoning is wrong"}


class Endpoint(BaseHTTPRequestHandler):
    """Labels a transcript by whether it contains an error. Model "vague" replies with a sentence."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers.get("Authorization"), body))
        prompt = body["messages"][0]["content"]
        status = self.server.failures(prompt, sum(b == body for *_, b in self.server.requests))
        if status:
            self.send_error(status, "overloaded")
            return
        reply = "**Code error**." if "Error" in prompt.split("<transcript>")[1] else "reasoning"
        status, answer = (
            200,
            {"choices": [{"message": {"content": "I think so" if body["model"] == "vague" else reply}}]},
        )
        if body["model"] not in ("judge", "vague"):
            status, answer = 404, {"error": {"message": f"model {body['model']} does not exist"}}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.requests = []
    server.failures = lambda prompt, count: 0  # HTTP status of the count-th request with a prompt; 0: it is answered
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_model_labels_rollouts_and_is_compared_with_tags_by_hand(endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    runs = open_runs(GOLDEN)
    found = failed_rollouts(runs, {"step": 1})
    found = pd.concat([found[found.outcome == "exception"].head(3), found[found.outcome == ""].head(3)])
    url = f"http://127.0.0.1:{endpoint.server_port}/v1/"
    labelled = label_rollouts(runs, found, LABELS, url=url, model="judge", key_variable="JUDGE_KEY", limit=5)
    assert list(labelled.label) == ["code error"] * 3 + ["reasoning"] * 2
    path, key, body = endpoint.requests[0]
    assert (path, key, len(endpoint.requests)) == ("/v1/chat/completions", "Bearer secret", 5)
    assert body["temperature"] == 0 and "- reasoning: the reasoning is wrong" in body["messages"][0]["content"]

    ids = list(labelled.traj_id)
    hand = dict(zip(ids, ["code error", "code error", "reasoning", "reasoning", "reasoning"], strict=True))
    result = label_agreement(labelled, hand | {"other": "reasoning"})
    # Two labels: observed 4/5; chance 2/5 * 3/5 + 3/5 * 2/5 = 12/25.
    assert (result.n, result.agreement, result.unlabelled) == (5, 0.8, 0)
    assert result.kappa == pytest.approx((4 / 5 - 12 / 25) / (1 - 12 / 25))
    assert 0 < result.low < 0.8 < result.high < 1
    assert result.confusion.loc["reasoning", "code error"] == 1 and result.confusion.to_numpy().sum() == 5

    vague = label_rollouts(runs, found, LABELS, url=url, model="vague", limit=2)
    assert vague.label.isna().all() and endpoint.requests[-1][1] is None
    with pytest.raises(UserError, match="no rollout has both a hand label and a model label"):
        label_agreement(vague, hand)
    with pytest.raises(UserError, match=r"answered 404.*model missing does not exist"):
        label_rollouts(runs, found, LABELS, url=url, model="missing", limit=1)


def test_labels_are_kept_if_the_endpoint_fails_for_some_rollouts(endpoint, monkeypatch, caplog):
    monkeypatch.setattr(failure_labels, "PAUSE_S", 0.001)
    runs = open_runs(GOLDEN)
    found = failed_rollouts(runs, {"step": 1}).head(12)
    url = f"http://127.0.0.1:{endpoint.server_port}/v1"

    def label(**more):
        endpoint.requests.clear()
        return label_rollouts(runs, found, LABELS, url=url, model="judge", concurrency=1, **more)

    expected = list(label().label)
    endpoint.failures = lambda prompt, count: 503 if count < 3 else 0
    assert list(label().label) == expected and len(endpoint.requests) == 3 * 12

    lost = set(found.traj_id[5:7])
    texts = {failure_labels._text(runs, traj_id) for traj_id in lost}
    endpoint.failures = lambda prompt, count: 429 if any(text in prompt for text in texts) else 0
    labelled = label()
    assert set(labelled.traj_id[labelled.label_error.notna()]) == lost
    assert list(labelled.label[labelled.label_error.isna()]) == [*expected[:5], *expected[7:]]
    assert labelled.label_error[5].startswith(f"{url}/chat/completions answered 429")
    assert "no reply for 2 of 12 rollouts" in caplog.text and all(traj_id in caplog.text for traj_id in lost)

    # The endpoint ends after one rollout: the others are not sent for ever.
    endpoint.failures = lambda prompt, count: 400 * (len(endpoint.requests) > 1)
    labelled = label()
    assert labelled.label.notna().tolist() == [True] + [False] * 11 and len(endpoint.requests) == 9
    assert labelled.label_error.iloc[-1] == "not sent: 8 requests in a row had failed"


def test_tags_of_the_inspector_are_labels_by_hand(tmp_path):
    folder = tmp_path / "runs" / GOLDEN.name
    folder.parent.mkdir()
    folder.mkdir()
    for path in GOLDEN.iterdir():
        (folder / path.name).symlink_to(path)
    runs = open_runs(folder)
    first, second = runs.trajectories(columns=["traj_id"]).traj_id[:2]
    write_note(folder, first, "", ["reasoning", "to discuss"])
    write_note(folder, second, "a note", [])
    assert hand_labels(runs, LABELS) == {first: "reasoning"}
    write_note(folder, second, "", list(LABELS))
    with pytest.raises(UserError, match="has the tags code error, reasoning; keep one"):
        hand_labels(runs, LABELS)


def test_an_endpoint_that_is_not_reachable_is_named(monkeypatch):
    monkeypatch.setattr(failure_labels, "PAUSE_S", 0.001)
    runs = open_runs(GOLDEN)
    found = runs.trajectories(columns=["traj_id"]).head(1)
    with pytest.raises(UserError, match=r"http://127.0.0.1:9/v1/chat/completions: no usable reply"):
        label_rollouts(runs, found, LABELS, url="http://127.0.0.1:9/v1", model="judge")
    with pytest.raises(UserError, match="not an http address"):
        label_rollouts(runs, found, LABELS, url="file:///etc", model="judge")
