async ([modules, sheet, scales]) => {
  const { Transcript } = await import(URL.createObjectURL(new Blob([modules], { type: 'text/javascript' })));
  document.head.append(Object.assign(document.createElement('style'), { textContent: sheet }));
  const box = Object.assign(document.createElement('div'), { className: 'rl rl-app' });
  box.style.height = '800px';
  document.body.append(box);
  const transcript = new Transcript(scales, () => {});
  box.append(transcript.element);
  const count = 10000, words = ['the ', 'sum ', 'is ', 'x', ' = ', '12', '\n', 'therefore '];
  let seed = 1, at = 0;
  const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  const texts = Array.from({ length: count }, () => words[Math.floor(random() * 8)]);
  const starts = texts.map(text => (at += text.length) - text.length);
  const value = i => (i < count ? -Math.log(random()) : i < 3 * count ? Math.log(random()) : 1);
  const values = Float32Array.from({ length: 5 * count }, (_, i) => value(i));
  const opened = { row: {}, tokens: count, segments: [{ kind: 'reason', text: texts.join(''), turn: 1, starts, first: 0 }] };
  const frame = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  window.drawn = async () => { transcript.show(opened, values.buffer, 'entropy'); await frame(); };
  window.recoloured = async () => { transcript.paint(transcript.channel === 'entropy' ? 'log_prob' : 'entropy'); await frame(); };
  window.ranges = () => [...CSS.highlights.values()].reduce((sum, highlight) => sum + highlight.size, 0);
}
