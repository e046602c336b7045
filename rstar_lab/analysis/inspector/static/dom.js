/** Helpers for elements, number formats and messages to the kernel. Text is only ever inserted as text nodes. */

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  return fill(element, children);
}

/** Replace the children of an element; null, undefined and false are skipped. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** The last parts of a path, after "…/" if it has more. */
export function pathEnd(path, count) {
  const parts = path.split("/");
  return parts.length > count ? `…/${parts.slice(-count).join("/")}` : path;
}

/** A bar between two panes of an element. Dragging it sets the width of the first pane, --rl-split. */
export function splitter() {
  return h("div", { class: "rl-split", "aria-hidden": "true", onpointerdown: ({ target, pointerId }) => {
    const panes = target.parentElement;
    const box = panes.getBoundingClientRect();
    const move = (at) => panes.style.setProperty("--rl-split", `${Math.max(15, Math.min(75, ((at.clientX - box.left) / box.width) * 100))}%`);
    target.setPointerCapture(pointerId);
    target.addEventListener("pointermove", move);
    target.addEventListener("pointerup", () => target.removeEventListener("pointermove", move), { once: true });
  } });
}

/** Replace control characters and direction marks by visible ones. The kernel does so too, except in ids. */
export const visible = (text) => String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
  (char) => (char < " " ? String.fromCharCode(0x2400 + char.charCodeAt(0)) : char === "\u007f" ? "␡" : char < "\u00a0" ? "\ufffd" : "◆"));

const missing = "–";

/** Format a value for display. */
export function show(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return missing;
  if (value === true) return "yes";
  if (value === false) return "no";
  if (typeof value !== "number") return visible(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const text = Math.abs(value) < 0.001 || Math.abs(value) >= 1e5 ? value.toExponential(1) : Number(value.toPrecision(digits)).toString();
  return text.replace("-", "−");
}

/** A number with its noun: "1 call", "1,000 calls". */
export const counted = (number, noun) => `${show(number)} ${noun}${number === 1 ? "" : "s"}`;

/** What a reward says: {state, mark, text}. A rollout without a reward is neither right nor wrong; a reward of the user's
 *  own function (correct is null) says nothing about the answer. */
export function verdict(row) {
  if (typeof row.reward !== "number") return { state: "none", mark: "–", text: "not scored" };
  const good = row.reward > 0;
  const text = row.correct === null ? `reward ${show(row.reward)}` : good ? "correct" : "wrong";
  return { state: good ? "ok" : "bad", mark: good ? "✓" : "✗", text };
}

/** The verdict as an element. full: with its text. */
export const verdictMark = (row, full = false) => {
  const { state, mark, text } = verdict(row);
  const props = { class: { ok: "rl-right", bad: "rl-wrong", none: "rl-faint" }[state] };
  return full ? h("span", props, `${mark} ${text}`) : h("span", { ...props, role: "img", "aria-label": text, title: text }, mark);
};

/** How many of the rollouts are correct, as text. Rollouts without a reward are counted apart. */
export function solvedOf(rows) {
  const scored = rows.filter((row) => verdict(row).state !== "none");
  const unscored = rows.length - scored.length;
  if (!scored.length) return `${counted(rows.length, "rollout")}, not scored`;
  const word = scored.every((row) => row.correct === null) ? "with a reward above 0" : "correct";
  return `${scored.filter((row) => row.reward > 0).length} of ${scored.length} ${word}${unscored ? `, ${unscored} not scored` : ""}`;
}

const infrastructure = new Set(["sandbox_error", "queue_timeout"]);
export const outcomeClass = (outcome) => (!outcome ? "unknown" : outcome === "ok" ? "ok" : infrastructure.has(outcome) ? "ours" : "bad");

/** Whether RoC kept the rollout, and why not if it did not. */
export function rocStatus(row, siblings = []) {
  if (row.stage === "fork") return `from the start of turn ${row.step}`;
  if (row.kept === null || row.kept === undefined) return ""; // evaluations and imports select nothing
  if (!row.kept && siblings.length > 1 && !siblings.some((sibling) => sibling.kept)) {
    const equal = siblings.every((sibling) => sibling.reward === siblings[0].reward);
    return equal ? `dropped: all ${siblings.length} rewards of the group are equal` : "dropped: the selected rollouts of the group have equal rewards";
  }
  const word = row.kept ? "kept" : "dropped by RoC";
  if (row.p_err === null || row.p_err === undefined || row.p_format === null || row.p_format === undefined) return word;
  return `${word}; penalty ${show(row.p_err + row.p_format)} = tool errors ${show(row.p_err)} + format ${show(row.p_format)}`;
}

export function debounce(wait, action) {
  let timer;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), wait);
  };
}

/** Handlers of a field that acts when it loses focus or Enter is pressed. */
export const committed = (act) => ({ onchange: act, onkeydown: (event) => event.key === "Enter" && act(event) });

export const disconnected = "The kernel was restarted or stopped. Run this cell again to reconnect.";

export const silent = "The kernel does not respond. Wait until it is idle; if it was restarted, run this cell again.";

/** Requests to the kernel. busy(level): 1 while a request waits for longer than 0.4 s, 2 for longer than 30 s or its own
 *  `wait`, 0 otherwise. A late response is as good as an early one. */
export function connect(model, busy = () => {}) {
  const waiting = new Map();
  let next = 0;
  const report = () => busy(Math.max(0, ...[...waiting.values()].map(({ level }) => level)));
  const settle = (id) => {
    const request = waiting.get(id);
    waiting.delete(id);
    clearTimeout(request?.slow);
    clearInterval(request?.timer);
    if (request?.level) report();
    return request;
  };
  const receive = (message, buffers) => {
    const request = settle(message?.id);
    if (!request) return;
    if ("error" in message) request.reject(new Error(message.error));
    else request.resolve([message.result, buffers]);
  };
  model.on("msg:custom", receive);
  return {
    ask(op, values = {}, wait = 30000) {
      return new Promise((resolve, reject) => {
        const id = `${op}-${(next += 1)}`;
        const request = { resolve, reject, level: 0 };
        const send = () => {
          try {
            model.send({ ...values, id, op });
          } catch {
            settle(id);
            reject(new Error(disconnected));
          }
        };
        const late = (level) => {
          request.level = level;
          report();
          if (level === 2 && op === "start") send(); // a kernel that was starting may not have received it
        };
        waiting.set(id, Object.assign(request, { slow: setTimeout(() => late(1), 400), timer: setInterval(() => late(2), wait) }));
        send();
      });
    },
    close() {
      model.off("msg:custom", receive);
      for (const id of [...waiting.keys()]) settle(id);
    },
  };
}

/** Send "hello" to the kernel. If no "welcome" arrives, this model does not receive messages: ask for a new one. */
export function greet(model) {
  let tries = 0;
  const stop = () => {
    clearInterval(timer);
    model.off("msg:custom", receive);
  };
  const receive = (message) => message?.op === "welcome" && stop();
  model.on("msg:custom", receive);
  const timer = setInterval(() => {
    if ((tries += 1) > 10) return stop();
    try {
      return model.send({ op: "deaf" });
    } catch {
      return stop(); // the kernel was restarted
    }
  }, 4000);
  model.send({ op: "hello" });
  return stop;
}

/** Hide the static output that precedes the widget: one output, or one per figure and one of the list. */
export function hideStatic(el, count = 1) {
  requestAnimationFrame(() => {
    let before = el.closest(".jp-OutputArea-child")?.previousElementSibling;
    for (let i = 0; i < count && before; i += 1, before = before.previousElementSibling) {
      if (before.querySelector(".rl-page, .js-plotly-plot, .jp-RenderedPlotly, .jp-RenderedSVG, .jp-RenderedHTMLCommon")) before.style.display = "none";
    }
  });
}
