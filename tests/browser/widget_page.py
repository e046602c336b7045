"""Show a widget in a plain page: its browser code runs in Chromium, its kernel side in this process.

Faster than JupyterLab, and independent of the layout of a notebook's page. The transport between both is the only part that
is not the real one.
"""

import base64
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WAIT_S = 240.0  # upper bound for a busy machine
ADDRESS = "http://widget.localhost/"
_OTHERS = ("layout", "comm", "tabbable", "tooltip")  # traits of every widget
_PAGE = """<!doctype html><html><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data: blob:; connect-src blob:;
script-src 'unsafe-inline' 'unsafe-eval' blob:; style-src 'unsafe-inline'">
<style>body { margin: 0; background: Canvas; color-scheme: light dark; }</style></head><body><div id="host"></div></body></html>"""

_MODEL = (Path(__file__).parent / "widget_model.js").read_text()
_PART = 2**19  # characters; Playwright needs quadratic time for a longer argument


class WidgetPage:
    """A page with one widget. errors: page errors and console errors. requests: URLs that the page asked for."""

    def __init__(self, browser: Any, widget: Any, size: tuple[int, int] = (1400, 900), scheme: str = "light") -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        self.page.set_default_timeout(WAIT_S * 1000)
        self.page.on("pageerror", lambda error: self.errors.append(f"{error}\n{getattr(error, 'stack', '')}"))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.expose_function("kernel_message", self._message)
        self.page.expose_function("kernel_set", self._set)
        # A page with an address, so that it has a sessionStorage.
        self.page.route(ADDRESS, lambda route: route.fulfill(body=_PAGE, content_type="text/html"))
        self.page.goto(ADDRESS)
        self.requests.clear()
        self.page.add_style_tag(content=str(getattr(widget, "_css", " ")))
        self.show(widget)

    def show(self, widget: Any) -> None:
        """Show a widget instead of the last one, as after a restart of the kernel."""
        self.widget = widget
        self._messages, self._numbers = [], itertools.count()
        widget.send = self._collect  # instead of the comm of a notebook
        own = [name for name in widget.keys if not name.startswith("_") and name not in _OTHERS]
        state = {name: getattr(widget, name) for name in own}
        self._known = json.loads(json.dumps(state, default=str))
        self.page.evaluate(
            """async ([make, state, code]) => {
              const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
              const { default: widget } = await import(url);
              window.closeWidget?.();
              document.getElementById("host").replaceChildren();
              const model = window.model = eval(make)(state);
              await widget.initialize?.({ model });
              window.closeWidget = await widget.render({ model, el: document.getElementById("host") });
            }""",
            [_MODEL, self._known, str(widget._esm)],
        )

    def disconnect(self) -> None:
        """Close the connection to the kernel, as a restart does."""
        self.page.evaluate("() => window.disconnect()")

    def _collect(self, content: Any, buffers: Any = ()) -> None:
        self._messages.append([content, [base64.b64encode(bytes(buffer)).decode() for buffer in buffers or ()]])

    def _message(self, text: str) -> None:
        self.widget._handle_custom_msg(json.loads(text), [])
        self._deliver()

    def _set(self, text: str) -> None:
        values = json.loads(text)
        for name, value in values.items():
            setattr(self.widget, name, value)
        self._deliver(echoes=list(values))

    def _deliver(self, echoes: Sequence[str] = ()) -> None:
        now = {name: json.loads(json.dumps(getattr(self.widget, name), default=str)) for name in self._known}
        changes = {name: value for name, value in now.items() if value != self._known[name] or name in echoes}
        self._known |= changes
        messages, self._messages = self._messages, []
        # Numbered, because other deliveries start meanwhile.
        text, number = json.dumps([changes, echoes, messages]), next(self._numbers)
        for at in range(0, len(text), _PART):
            self.page.evaluate(
                "([number, text, last]) => window.part(number, text, last)",
                [number, text[at : at + _PART], at + _PART >= len(text)],
            )

    def sync(self) -> None:
        """Send changes that Python made to the page."""
        self._deliver()

    def wait(self, expression: str, timeout_s: float = WAIT_S) -> None:
        self.page.wait_for_function(expression, timeout=timeout_s * 1000)

    def close(self) -> None:
        clipped = clipped_controls(self.page)
        self.page.close()
        assert not clipped, clipped


def clipped_controls(page: Any) -> list[str]:
    """Return our visible controls that are under 16 pixels or, except in what scrolls sideways, outside of the window."""
    return page.evaluate("""() => [...document.querySelectorAll("[class*='rl-'] :is(button, input, select)")].filter((item) => {
      const box = item.getBoundingClientRect();
      if (!item.checkVisibility() || !box.width || item.type === "radio") return false;
      let above = item.parentElement;
      while (above && !["auto", "scroll"].includes(getComputedStyle(above).overflowX)) above = above.parentElement;
      const outside = box.left < 0 || box.right > innerWidth + 1;
      return Math.min(box.height, box.width) < 16 || (outside && !(above?.scrollWidth > above?.clientWidth));
    }).map((item) => item.outerHTML.slice(0, 120))""")
