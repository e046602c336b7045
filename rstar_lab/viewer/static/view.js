/** The page of `rstar-lab view`: the notebook's widgets in tabs. Each widget gets a model with the interface of anywidget. */

const token = new URLSearchParams(location.search).get("token");
const at = (path) => `${path}?token=${encodeURIComponent(token)}`;
const tabs = [["rollouts", "Rollouts"], ["curves", "Curves"], ["runs", "Runs"], ["doctor", "Doctor"]];
const models = new Map(); // id of a widget to its model
const main = document.querySelector("main");

async function post(message) {
  try {
    const answer = await fetch(at("message"), { method: "POST", body: JSON.stringify(message) });
    if (!answer.ok) throw new Error(`the service answered ${answer.status}`);
  } catch (error) {
    document.getElementById("lost").hidden = false;
    throw error;
  }
}

class Model {
  constructor({ id, state }) {
    Object.assign(this, { id, state, changed: {}, handlers: new Map() });
    models.set(id, this);
  }

  get(name) {
    return this.state[name];
  }

  set(name, value) {
    if (JSON.stringify(this.state[name]) === JSON.stringify(value)) return;
    this.changed[name] = value;
    this.update({ [name]: value });
  }

  save_changes() {
    const state = this.changed;
    this.changed = {};
    if (Object.keys(state).length) post({ id: this.id, method: "update", state });
  }

  send(content) {
    post({ id: this.id, method: "custom", content });
  }

  on(event, handler) {
    this.handlers.set(event, [...(this.handlers.get(event) ?? []), handler]);
  }

  off(event, handler) {
    this.handlers.set(event, (this.handlers.get(event) ?? []).filter((other) => other !== handler));
  }

  emit(event, ...values) {
    for (const handler of this.handlers.get(event) ?? []) handler(...values);
  }

  update(state) {
    const changed = Object.entries(state).filter(([name, value]) => JSON.stringify(this.state[name]) !== JSON.stringify(value));
    Object.assign(this.state, state);
    for (const [name, value] of changed) this.emit(`change:${name}`, this, value);
  }

  /** Apply a message of the service. buffers: base64. */
  receive({ method, state, content, buffers }) {
    if (method === "update") this.update(state);
    if (method === "custom") this.emit("msg:custom", content, buffers.map((text) => new DataView(Uint8Array.from(atob(text), (char) => char.charCodeAt(0)).buffer)));
  }
}

function choose(name) {
  for (const button of document.querySelectorAll("nav button")) button.setAttribute("aria-pressed", String(button.value === name));
  for (const pane of main.children) pane.hidden = pane.dataset.tab !== name;
  if (name === "doctor") main.querySelector("iframe").src = at("doctor"); // computed when it is opened
}

async function start() {
  const events = new EventSource(at("events"));
  events.onmessage = ({ data }) => {
    const message = JSON.parse(data);
    if (message.method === "reload") location.reload();
    else models.get(message.id)?.receive(message);
  };
  await new Promise((resolve) => { events.onopen = resolve; });
  const { title, models: shown } = await (await fetch(at("models"))).json();
  document.getElementById("title").textContent = title;
  document.title = `${title} – rstar-lab view`;
  for (const [name, label] of tabs) {
    if (name !== "doctor" && !shown[name]) continue;
    const button = Object.assign(document.createElement("button"), { type: "button", value: name, textContent: label, onclick: () => choose(name) });
    document.querySelector("nav").append(button);
    const pane = document.createElement(name === "doctor" ? "iframe" : "section");
    pane.dataset.tab = name;
    pane.title = label;
    main.append(pane);
  }
  choose(["rollouts", "curves", "runs"].find((name) => shown[name]));
  await Promise.all(Object.entries(shown).map(async ([name, widget]) => {
    const model = new Model(widget);
    const { default: { initialize, render } } = await import(at(`./${name}.js`));
    initialize?.({ model });
    if (name === "rollouts") model.on("change:reveal", () => choose("rollouts")); // a click on a curve
    await render({ model, el: main.querySelector(`[data-tab=${name}]`) });
  }));
}

start();
