// The page of `overnight serve` without a browser: the few parts of a document that its script uses. Reads {script, health, fields, press, found} as JSON
// from standard input, fills in the fields, presses a button, and writes what was asked, the texts that are then shown, and which parts are hidden.
const given = JSON.parse(require("fs").readFileSync(0, "utf8"));

class Element {
  constructor(id = "") { Object.assign(this, { id, value: "", textContent: "", className: "", hidden: false, disabled: false, style: {}, children: [], on: {} }); }
  appendChild(child) { this.children.push(child); return child; }
  replaceChildren() { this.children = []; }
  addEventListener(name, call) { this.on[name] = call; }
  shown() { return [this.textContent, ...this.children.flatMap((child) => child.shown())].filter(Boolean); }
}

const parts = {}, asked = [];
const part = (name) => parts[name] ??= new Element(name);
globalThis.document = {
  getElementById: part,
  querySelector: (selector) => part(selector.match(/^\[name=(\w+)\]$/)[1]),
  querySelectorAll: () => ["predict", "fill", "embed"].map(part),
  createElement: (name) => new Element(name),
};
globalThis.fetch = async (path, options) => {
  if (options) asked.push([path, JSON.parse(options.body)]);
  return { status: 200, statusText: "OK", json: async () => (path === "health" ? given.health : given.found) };
};

(async () => {
  (0, eval)(given.script);
  await new Promise(setImmediate);  // what is asked of /health is there
  for (const [id, text] of Object.entries(given.fields)) part(id).value = text;
  await part("form").on.submit({ preventDefault() {}, submitter: { name: given.press } });
  const hidden = Object.values(parts).filter((one) => one.hidden).map((one) => one.id);
  console.log(JSON.stringify({ asked, shown: part("answer").shown(), hidden }));
})();
