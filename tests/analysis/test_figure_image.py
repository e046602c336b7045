"""Images of figures: a browser that fails costs a picture, never the run."""

import time

import pandas as pd
import plotly.graph_objects as go
import psutil
import pytest

from rstar_lab.analysis import figure_image
from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.inspector.link import LinkedFigure
from rstar_lab.runs import RunStoreError


@pytest.fixture
def renderer(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    renderer = figure_image._Renderer()
    monkeypatch.setattr(figure_image, "_RENDERER", renderer)
    yield renderer
    if renderer._connection is not None:
        renderer._connection.close()
        renderer._process.wait(20)


BROWSERS = {"ends at once": "exit 1", "never answers": "exec sleep 1000", "is no program": None}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BROWSERS)
def test_a_browser_that_does_not_start_is_tried_once(renderer, monkeypatch, tmp_path, kind):
    browser = tmp_path / "browser"
    if BROWSERS[kind]:
        browser.write_text(f"#!/bin/sh\n{BROWSERS[kind]}\n")
        browser.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(browser))
    monkeypatch.setattr(figure_image, "LIMIT_S", 4.0)
    figure = Figure(go.Figure(go.Scatter(y=[0.5] * 200_000)), pd.DataFrame({"y": [1, 2]}))  # more than a pipe holds
    bundle = LinkedFigure(figure, None).static_bundle()
    assert "image/svg+xml" not in bundle and "<table" in bundle["text/html"]
    assert not psutil.pid_exists(renderer._process.pid)
    began, process = time.monotonic(), renderer._process
    with pytest.raises(RunStoreError, match="install Chromium"):
        figure.save(tmp_path / "figure.png")
    assert renderer._process is process and time.monotonic() - began < 5


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "suspend"])
def test_a_browser_that_dies_in_the_middle_costs_one_picture(renderer, monkeypatch, how):
    figure = go.Figure(go.Scatter(y=[1, 2]))
    assert LinkedFigure(figure, None).static_bundle()["image/svg+xml"].startswith("<svg")
    monkeypatch.setattr(figure_image, "LIMIT_S", 4.0)
    browser = psutil.Process(renderer._process.pid).children(recursive=True)
    for process in browser:
        getattr(process, how)()
    assert browser and "image/svg+xml" not in LinkedFigure(figure, None).static_bundle()
    assert psutil.wait_procs(browser, 10)[1] == []


@pytest.mark.slow
def test_images_have_the_size_that_was_asked_for(renderer, tmp_path):
    figure = Figure(go.Figure(go.Scatter(y=[1, 2])), pd.DataFrame({"y": [1, 2]}))
    for suffix, start in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<svg")):
        assert figure.save(tmp_path / f"figure{suffix}", width=500, height=300).read_bytes().startswith(start)
    assert b'width="500" height="300"' in (tmp_path / "figure.svg").read_bytes()
