// Browsers start no workers for pages that are opened as files. There the script of a worker, which
// is that of the search, runs in a hidden frame instead. The plugin "offline" of MkDocs would load
// something of the kind from the net.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      (document.body || document.documentElement).appendChild(frame);
      const inside = frame.contentWindow;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          script.src = new URL(source, document.baseURI);
          script.onload = resolve;
          script.onerror = () => reject(new Error(`cannot load ${source}`));
          inside.document.head.appendChild(script);
        });
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = load(url);
      this.inside = inside;
    }
    postMessage(data) {
      const { MessageEvent: Event } = this.inside;
      this.loaded.then(() => this.inside.dispatchEvent(new Event("message", { data })));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
