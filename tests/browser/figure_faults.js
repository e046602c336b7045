() => {
  const box = document.querySelector(".js-plotly-plot");
  const faults = [], frame = box.querySelector(".main-svg").getBoundingClientRect();
  const ticks = {};
  for (const text of box.querySelectorAll(".xtick text, .ytick text")) {
    const axis = [...text.closest("[class*=tick]").classList].join(" ");
    const panel = text.closest(".subplot, [class*=yaxislayer], [class*=xaxislayer]");
    (ticks[`${panel?.getAttribute("class")} ${axis}`] ??= []).push(text.textContent);
  }
  for (const [axis, texts] of Object.entries(ticks))
    if (new Set(texts).size < texts.length) faults.push(`${axis}: equal ticks ${texts.join(" | ")}`);
  const shown = [...box.querySelectorAll(".main-svg text")].filter((text) => text.textContent.trim() && text.getClientRects().length);
  const boxes = shown.map((text) => ({ text: text.textContent.slice(0, 40), part: text.closest("g[class]")?.getAttribute("class"),
    slanted: /rotate\((?!0|-?90)/.test(text.getAttribute("transform") ?? ""), ...text.getBoundingClientRect().toJSON() }));
  boxes.forEach((a, i) => {
    if (a.left < frame.left - 2 || a.right > frame.right + 2 || a.top < frame.top - 2 || a.bottom > frame.bottom + 2)
      faults.push(`${a.text} is cut off`);
    for (const b of boxes.slice(i + 1)) {
      if (a.slanted || b.slanted) continue;
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 3 && down > 4) faults.push(`${a.text} (${a.part}) and ${b.text} (${b.part}) overlap`);
    }
  });
  return [...new Set(faults)];
}
