import { fill, greet, h, hideStatic } from "./dom.js";

/** Cells of a row. The kernel escapes all text in them. */
function cells(html) {
  const template = document.createElement("template");
  template.innerHTML = `<table><tbody><tr>${html}</tr></tbody></table>`;
  return [...template.content.querySelector("tr").children];
}

export default {
  initialize({ model }) {
    return greet(model);
  },
  render({ model, el }) {
    hideStatic(el);
    const body = h("tbody");
    const known = new Map(); // run id -> { row, box, html }
    const choose = () => {
      model.set("selected", [...known].filter(([, { box }]) => box.checked).map(([id]) => id));
      model.save_changes();
    };
    const entryOf = (id) => {
      const box = h("input", { type: "checkbox", "aria-label": `show the curves of ${id}`, onchange: choose });
      const row = h("tr", { onclick: (event) => event.target !== box && (box.click(), undefined) }, h("td", {}, box));
      return { row, box, html: "" };
    };
    const update = () => {
      const rows = model.get("table_rows");
      for (const [id, html] of rows) {
        const entry = known.get(id) ?? entryOf(id);
        if (entry.html !== html) {
          entry.row.replaceChildren(entry.row.firstChild, ...cells(html));
          entry.html = html;
        }
        known.set(id, entry);
      }
      const ids = rows.map(([id]) => id);
      for (const id of known.keys()) if (!ids.includes(id)) known.delete(id);
      const wanted = ids.map((id) => known.get(id).row);
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
    const head = h("tr", {}, h("th", { scope: "col" }, "plot"), model.get("columns").map((name) => h("th", { scope: "col" }, name)));
    el.append(h("div", { class: "rl-overview", tabindex: 0, role: "region", "aria-label": "Runs" }, h("table", {}, h("thead", {}, head), body)));
    draw();
    model.on("change:table_rows", draw);
    model.on("change:selected", mark);
    return () => {
      model.off("change:table_rows", draw);
      model.off("change:selected", mark);
    };
  },
};
