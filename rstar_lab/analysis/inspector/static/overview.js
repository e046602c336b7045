import { fill, greet, h, hideStatic } from "./dom.js";

/** A cell: text, and optionally a title and a line. Text is only ever inserted as a text node. */
function cell({ text, title, points }) {
  return h("td", { title: title || null }, points ? line(points) : null, text);
}

/** Compare the texts of two cells: numbers by value, others by alphabet; missing values are last in both directions. */
function compare(a, b, down) {
  if (!a || !b) return (a ? 0 : 1) - (b ? 0 : 1);
  const [x, y] = [a, b].map((text) => Number(text.replaceAll(/[,%]/g, "").replace("−", "-")));
  const order = Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
  return down ? -order : order;
}

function line(points) {
  const element = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const svg = element("svg", { width: 80, height: 20, viewBox: "0 0 80 20", "aria-hidden": "true" });
  svg.append(element("polyline", { points, fill: "none", stroke: "currentColor", "stroke-width": "1.3" }));
  return svg;
}

export default {
  initialize({ model }) {
    return greet(model);
  },
  render({ model, el }) {
    hideStatic(el);
    const body = h("tbody");
    const known = new Map(); // run id -> { row, box, fold, drawn }
    const folded = new Set(); // ids of the runs whose evaluations and forks are hidden
    const choose = () => {
      model.set("selected", [...known].filter(([, { box }]) => box.checked).map(([id]) => id));
      model.save_changes();
    };
    const entryOf = (id) => {
      const box = h("input", { type: "checkbox", "aria-label": `show the curves of ${id}`, onchange: choose });
      const fold = h("button", { type: "button", class: "rl-fold", onclick: (event) => {
        event.stopPropagation();
        if (!folded.delete(id)) folded.add(id);
        update();
      } });
      const row = h("tr", { onclick: (event) => event.target !== box && (box.click(), undefined) }, h("td", {}, box));
      return { row, box, fold, drawn: "" };
    };
    const update = () => {
      const rows = model.get("table_rows");
      const grouped = !order && !search.value;
      const below = new Map();
      for (const [, [{ under }]] of rows) if (under) below.set(under, (below.get(under) ?? 0) + 1);
      for (const [id, cells] of rows) {
        const entry = known.get(id) ?? entryOf(id);
        const drawn = JSON.stringify(cells);
        if (entry.drawn !== drawn) {
          entry.row.replaceChildren(entry.row.firstChild, ...cells.map(cell));
          entry.row.children[1].prepend(entry.fold);
          entry.drawn = drawn;
        }
        const open = !folded.has(id);
        entry.row.classList.toggle("rl-under", grouped && Boolean(cells[0].under));
        entry.fold.hidden = !grouped || !below.has(id);
        entry.fold.textContent = !below.has(id) ? "" : open ? "▾" : `▸ ${below.get(id)}`;
        entry.fold.setAttribute("aria-expanded", open);
        entry.fold.setAttribute("aria-label", `evaluations and forks of ${id}: ${below.get(id)}`);
        known.set(id, entry);
      }
      const ids = rows.map(([id]) => id);
      for (const id of known.keys()) if (!ids.includes(id)) known.delete(id);
      const shown = rows.filter(([, cells]) => (!grouped || !folded.has(cells[0].under))
        && cells.some(({ text }) => text.toLowerCase().includes(search.value.toLowerCase())));
      if (order) shown.sort(([, a], [, b]) => compare(a[order.column].text, b[order.column].text, order.down));
      const wanted = shown.map(([id]) => known.get(id).row);
      // Rows are moved only if the order changed, so that the focus stays.
      if (wanted.length !== body.children.length || wanted.some((row, place) => body.children[place] !== row)) fill(body, wanted);
    };
    const mark = () => {
      for (const [id, { row, box }] of known) {
        box.checked = model.get("selected").includes(id);
        row.classList.toggle("rl-chosen", box.checked);
      }
    };
    const draw = () => (update(), mark());
    let order = null; // { column, down }; null: newest first
    const sort = (column) => {
      order = order?.column !== column ? { column, down: true } : order.down ? { column, down: false } : null;
      head.querySelectorAll("th").forEach((cell, place) => cell.setAttribute("aria-sort", order?.column !== place - 1 ? "none" : order.down ? "descending" : "ascending"));
      update();
    };
    const search = h("input", { type: "search", placeholder: "Filter runs", "aria-label": "Filter runs", oninput: () => update() });
    const head = h("tr", {}, h("th", { scope: "col" }, "plot"), model.get("columns").map((name, column) =>
      h("th", { scope: "col" }, h("button", { type: "button", title: `Sort by ${name}`, onclick: () => sort(column) }, name))));
    el.append(search, h("div", { class: "rl-overview", tabindex: 0, role: "region", "aria-label": "Runs" }, h("table", {}, h("thead", {}, head), body)));
    draw();
    model.on("change:table_rows", draw);
    model.on("change:selected", mark);
    return () => {
      model.off("change:table_rows", draw);
      model.off("change:selected", mark);
    };
  },
};
