import { Article } from "./article.js";

// Draws the figures for a light or a dark page.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const figures = [...document.querySelectorAll(".figure")].map((box) => [box, JSON.parse(box.firstChild.textContent)]);
  const draw = () => {
    for (const [box, themes] of figures) {
      const shown = box.children[dark.matches ? 2 : 1];
      const { data, layout } = themes[dark.matches ? 1 : 0];
      if (!shown.hasChildNodes()) Plotly.newPlot(shown, data, layout, { responsive: true, displaylogo: false });
    }
  };
  dark.addEventListener("change", draw);
  draw();
})();

// Shows the selected trajectory; filters the list by text, correctness and tool errors.
(() => {
  const list = document.getElementById("list");
  if (!list) return; // the page of the paper's figures
  const shown = document.getElementById("shown");
  const search = document.getElementById("search");
  const filter = document.getElementById("filter");
  const count = document.getElementById("count");
  const items = [...list.children];
  const opened = items.map((item) => JSON.parse(document.getElementById(`trajectory-${item.dataset.number}`).textContent));
  const texts = items.map((item, number) => [item.textContent, ...opened[number].segments.map(({ text }) => text)].join(" ").toLowerCase());
  const article = new Article(scales);
  shown.replaceChildren(article.element);

  function show(item) {
    for (const other of items) other.firstChild.setAttribute("aria-current", String(other === item));
    article.show(opened[item.dataset.number]);
  }

  function matches(item, number) {
    const kind = filter.value;
    if (kind === "correct" && item.dataset.verdict !== "ok") return false;
    if (kind === "wrong" && item.dataset.verdict !== "bad") return false;
    if (kind === "errors" && item.dataset.errors !== "1") return false;
    return texts[number].includes(search.value.toLowerCase());
  }

  function update() {
    const visible = items.filter((item, number) => !(item.hidden = !matches(item, number)));
    count.textContent = `${visible.length} of ${items.length}`;
    if (visible.length && visible.every((item) => item.firstChild.getAttribute("aria-current") !== "true")) show(visible[0]);
  }

  list.addEventListener("click", (event) => {
    const item = event.target.closest("li");
    if (item) show(item);
  });
  list.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    const visible = items.filter((item) => !item.hidden);
    const next = visible[visible.indexOf(event.target.closest("li")) + (event.key === "ArrowDown" ? 1 : -1)];
    if (next) {
      next.firstChild.focus();
      show(next);
    }
    event.preventDefault();
  });
  search.addEventListener("input", update);
  filter.addEventListener("change", update);
  update();
})();
