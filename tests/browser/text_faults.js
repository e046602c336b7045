() => {
  // A line for each fault in the texts of the open notebook, or of a page with a widget: text that is cut off where nobody
  // can scroll, text that covers another one, an output that is wider than its cell, and messages on standard error.
  const notebook = [...document.querySelectorAll('.jp-NotebookPanel')].find(panel => panel.getClientRects().length);
  const outputs = notebook ? notebook.querySelectorAll('.jp-OutputArea-output, .jp-MarkdownOutput') : [document.body];
  const faults = [];
  const scrolls = value => value === 'auto' || value === 'scroll';
  // The visible part of a box, null if there is none, and the element that cuts it off where nobody can scroll.
  const visible = (element, box, root) => {
    let { left, right, top, bottom } = box, cutter = null;
    for (let outer = element; outer && outer !== root.parentElement; outer = outer.parentElement) {
      const style = getComputedStyle(outer);
      if (style.visibility === 'hidden' || style.display === 'none' || Number(style.opacity) === 0) return { box: null };
      if (style.overflowX === 'visible' && style.overflowY === 'visible') continue;
      const frame = outer.getBoundingClientRect();
      const ellipsis = style.textOverflow === 'ellipsis' && !outer.matches('.widget-label');
      if (!cutter && style.overflowX === 'hidden' && !ellipsis && (left < frame.left - 2 || right > frame.right + 2)) cutter = outer;
      if (!cutter && outer.tagName === 'svg' && (top < frame.top - 2 || bottom > frame.bottom + 2)) cutter = outer;
      left = Math.max(left, frame.left); right = Math.min(right, frame.right);
      top = Math.max(top, frame.top); bottom = Math.min(bottom, frame.bottom);
      if (right - left < 3 || bottom - top < 3) return { box: null };
    }
    return { box: { left, right, top, bottom }, cutter };
  };
  // Texts of different layers may cover each other: a head that stays above a list, a menu.
  const layer = element => {
    for (let outer = element; outer; outer = outer.parentElement) {
      const style = getComputedStyle(outer);
      if (['sticky', 'fixed', 'absolute'].includes(style.position) && style.backgroundColor !== 'rgba(0, 0, 0, 0)') return outer;
    }
    return null;
  };
  const slanted = element => /rotate\((?!0|-?90)/.test(element.closest('text')?.getAttribute('transform') || '');
  const nameOf = element => element.className.baseVal ?? element.className;
  outputs.forEach((output, number) => {
    const where = `output ${number}`;
    if (output.dataset.mimeType === 'application/vnd.jupyter.stderr') faults.push(`${where}: ${output.textContent.slice(0, 300)}`);
    if (output.scrollWidth > output.clientWidth + 1 && !scrolls(getComputedStyle(output).overflowX))
      faults.push(`${where} is wider than its cell: ${output.scrollWidth} > ${output.clientWidth}: ${output.textContent.slice(0, 60)}`);
    const texts = [];
    const walker = document.createTreeWalker(output, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const element = node.parentElement, text = node.textContent.trim();
      if (!text || element.closest('style, script, option, .jp-mod-hidden, .MathJax, mjx-container')) continue;
      if (element.closest('details:not([open])') && !element.closest('summary')) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      for (const box of range.getClientRects()) {
        if (box.width < 2 || box.height < 2) continue;
        const found = visible(element, box, output);
        if (found.cutter) faults.push(`${where}: ${text.slice(0, 60)} is cut off by ${nameOf(found.cutter)}`);
        if (found.box && !slanted(element)) texts.push({ text: text.slice(0, 40), element, ...found.box });
      }
    }
    texts.sort((a, b) => a.top - b.top);
    texts.forEach((a, i) => {
      for (let j = i + 1; j < texts.length && texts[j].top < a.bottom - 3; j++) {
        const b = texts[j];
        if (a.element === b.element || Math.min(a.right, b.right) - Math.max(a.left, b.left) <= 3) continue;
        if (Math.min(a.bottom, b.bottom) - b.top <= 3 || layer(a.element) !== layer(b.element)) continue;
        faults.push(`${where}: ${a.text} and ${b.text} overlap`);
      }
    });
  });
  return [...new Set(faults)];
}
