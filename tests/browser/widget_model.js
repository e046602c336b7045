(state) => {
  // An anywidget model: traits and messages of the kernel arrive by `deliver`, changes and messages leave by `kernel_*`. As in
  // JupyterLab, the kernel echoes every change, and until the echo of its last change has come the page keeps its own value.
  const handlers = new Map();
  const emit = (event, ...values) => [...(handlers.get(event) ?? [])].forEach((handler) => handler(...values));
  let changed = {};
  const unconfirmed = new Map();
  const model = {
    get: (name) => state[name],
    set: (name, value) => {
      if (JSON.stringify(state[name]) === JSON.stringify(value)) return;
      state[name] = changed[name] = value;
      emit(`change:${name}`);
      emit("change");
    },
    save_changes: () => {
      const sent = changed;
      changed = {};
      for (const name of Object.keys(sent)) unconfirmed.set(name, (unconfirmed.get(name) ?? 0) + 1);
      if (Object.keys(sent).length) window.kernel_set(JSON.stringify(sent));
    },
    on: (event, handler) => handlers.set(event, [...(handlers.get(event) ?? []), handler]),
    off: (event, handler) => handlers.set(event, (handlers.get(event) ?? []).filter((each) => each !== handler)),
    send: (message) => window.kernel_message(JSON.stringify(message)),
  };
  const bytes = (text) => { const raw = Uint8Array.from(atob(text), (char) => char.charCodeAt(0)); return new DataView(raw.buffer); };
  window.deliver = (changes, echoes, messages) => {
    for (const name of echoes) unconfirmed.set(name, unconfirmed.get(name) - 1);
    for (const [name, value] of Object.entries(changes)) {
      if (unconfirmed.get(name) || name in changed) continue;
      if (JSON.stringify(state[name]) === JSON.stringify(value)) continue;
      state[name] = value;
      emit(`change:${name}`);
    }
    for (const [content, buffers] of messages) emit("msg:custom", content, buffers.map(bytes));
  };
  window.disconnect = () => {
    model.save_changes = model.send = () => { throw new Error("the comm is closed"); };
    emit("comm_live_update");
  };
  const parts = new Map();
  let next = 0;
  window.part = (number, text, last) => {
    const part = parts.get(number) ?? { text: "", last: false };
    parts.set(number, { text: part.text + text, last });
    if (parts.get(next)?.last) setTimeout(deliverNext, 0);
  };
  const deliverNext = () => {
    for (; parts.get(next)?.last; next += 1) {
      const delivery = JSON.parse(parts.get(next).text);
      parts.delete(next);
      window.deliver(...delivery);
    }
  };
  return model;
}
