/** Elements, numbers and talk with the kernel. Nothing here or elsewhere parses markup: text becomes text nodes. */

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const missing = "–";

export function show(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return missing;
  if (value === true) return "yes";
  if (value === false) return "no";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const text = Math.abs(value) < 0.001 || Math.abs(value) >= 1e5 ? value.toExponential(1) : Number(value.toPrecision(digits)).toString();
  return text.replace("-", "−");
}

export const correct = (row) => (row.reward ?? 0) > 0;

const ours = new Set(["sandbox_error", "queue_timeout"]);
export const outcomeClass = (outcome) => (!outcome ? "unknown" : outcome === "ok" ? "ok" : ours.has(outcome) ? "ours" : "bad");

export function verdict(row) {
  if (row.kept === null || row.kept === undefined) return "no verdict recorded";
  const word = row.kept ? "kept" : "dropped";
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

/** Handlers of a field that acts when the reader leaves it or presses Enter. */
export const committed = (act) => ({ onchange: act, onkeydown: (event) => event.key === "Enter" && act(event) });

/** Questions to the kernel. An answer that does not come within `patience` ms is an error the user can act on. */
export function connect(model, patience = 30000) {
  const waiting = new Map();
  let next = 0;
  const hear = (message, buffers) => {
    const asked = waiting.get(message?.id);
    if (!asked) return;
    waiting.delete(message.id);
    clearTimeout(asked.timer);
    if ("error" in message) asked.reject(new Error(message.error));
    else asked.resolve([message.result, buffers]);
  };
  model.on("msg:custom", hear);
  return {
    ask(op, question = {}) {
      return new Promise((resolve, reject) => {
        const id = `${op}-${(next += 1)}`;
        const timer = setTimeout(() => {
          waiting.delete(id);
          reject(new Error("The kernel does not answer: it is busy, or it was restarted. Run the cell again to reattach."));
        }, patience);
        waiting.set(id, { resolve, reject, timer });
        model.send({ ...question, id, op });
      });
    },
    close() {
      model.off("msg:custom", hear);
      for (const { timer } of waiting.values()) clearTimeout(timer);
      waiting.clear();
    },
  };
}

/** Say hello, and say so if no welcome comes: then this model cannot hear the kernel, and a fresh one takes over. */
export function greet(model) {
  let tries = 0;
  const stop = () => {
    clearInterval(timer);
    model.off("msg:custom", hear);
  };
  const hear = (message) => message?.op === "welcome" && stop();
  model.on("msg:custom", hear);
  const timer = setInterval(() => {
    if ((tries += 1) > 10) return stop();
    try {
      return model.send({ op: "deaf" });
    } catch {
      return stop(); // the kernel was restarted: nobody is there to hear
    }
  }, 4000);
  model.send({ op: "hello" });
  return stop;
}

/** Hide the static form that the notebook shows until the widget is there. */
export function hideStatic(el) {
  requestAnimationFrame(() => {
    const before = el.closest(".jp-OutputArea-child")?.previousElementSibling;
    if (before?.querySelector(".rl-page, .js-plotly-plot, .jp-RenderedPlotly")) before.style.display = "none";
  });
}
