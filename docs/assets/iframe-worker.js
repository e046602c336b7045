// Runs the search in a hidden frame when the site is opened as files: browsers allow no worker there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = this.inner = frame.contentWindow;
      const script = `<script src="${String(url).replaceAll('"', "%22")}"><\/script>`;
      inner.document.open();
      inner.document.write(`<html><body><script>postMessage = (data) => parent.postMessage(data, "*");<\/script>${script}</body></html>`);
      inner.document.close();
      this.ready = new Promise((resolve) => { frame.onload = resolve; });
      addEventListener("message", ({ source, data }) => {
        if (source !== inner) return;
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
