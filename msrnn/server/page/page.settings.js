// Settings: kept in this browser, except for the key.

// Where the model states no temperature, the server's is 1, at which small models talk nonsense.
const OWN_TEMPERATURE = 0.7;
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const KEPT = ["system", "tools", "protect", "size", ...NUMBERS];

class Settings {
  /** `onKey` is called when there is another key, `onForget` to delete all kept texts. */
  constructor(onKey, onForget) {
    this.dialog = find("settings");
    this.form = this.dialog.querySelector("form");
    const fields = this.form.elements, kept = this.parsed();
    for (const name of KEPT) fields[name].value = kept[name] ?? "";
    fields.tools.addEventListener("input", () => this.checkTools());
    this.checkTools();
    fields.keep.checked = kept.keep ?? true;
    this.own = {}; // values of this page for fields that are empty
    fields.key.value = key.value;
    this.form.addEventListener("change", () => this.save());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.dialog.close();
    });
    this.dialog.addEventListener("close", () => {
      const changed = fields.key.value !== key.value;
      key.value = fields.key.value.trim();
      if (changed) onKey();
    });
    find("open-settings").addEventListener("click", () => this.open());
    find("forget-all").append(sureButton("forget", "Delete all kept texts", onForget));
  }

  checkTools() {
    const { tools } = this.form.elements;
    tools.setCustomValidity(parseTools(tools.value) ? "" : "Must be a JSON list of functions, as in OpenAI's API");
  }

  parsed() {
    try {
      return JSON.parse(local.get("msrnn settings")) ?? {};
    } catch {
      return {};
    }
  }

  save() {
    const fields = this.form.elements, kept = { keep: fields.keep.checked };
    for (const name of KEPT) if (fields[name].checkValidity()) kept[name] = fields[name].value;
    local.set("msrnn settings", JSON.stringify(kept));
  }

  open(keyProblem = "") {
    find("key-problem").textContent = keyProblem;
    find("key-problem").hidden = !keyProblem;
    if (!this.dialog.open) this.dialog.showModal();
    if (keyProblem) this.form.elements.key.focus();
  }

  get system() { return this.form.elements.system.value.trim(); }

  /** Fields of the request that begins a conversation. */
  get beginning() {
    const { size } = this.form.elements;
    return size.value !== "" && size.checkValidity() ? { size: Number(size.value) } : {};
  }

  get keep() { return this.form.elements.keep.checked; }

  /** Fields of a request; an empty one is left to the server, unless this page has a value of its own. */
  get sampling() {
    const found = { ...this.own }, { protect, tools: text } = this.form.elements, tools = parseTools(text.value);
    if (protect.value) found.protect = protect.value;
    if (tools?.length) Object.assign(found, { tools, parallel_tool_calls: false }); // the next message answers one call
    for (const name of NUMBERS) {
      const field = this.form.elements[name];
      if (field.value !== "" && field.checkValidity()) found[name] = Number(field.value);
    }
    return found;
  }

  /** What the server has decided. */
  describe(model) {
    const stated = model.stated_defaults.includes("temperature");
    this.own = stated ? {} : { temperature: OWN_TEMPERATURE };
    const start = { ...model.defaults, ...this.own }, { temperature, top_p, max_tokens, size } = this.form.elements;
    [size.placeholder, size.max] = [model.size, model.size];
    temperature.placeholder = start.temperature;
    top_p.placeholder = start.top_p;
    max_tokens.placeholder = model.max_tokens;
    const whose = stated ? "from the model" : "of this page, since the model states none";
    const rows = { Model: model.id, Policy: model.policy, Size: `${number(model.size)} KV rows in each layer`,
      Positions: model.positions, "A conversation": `${number(model.bytes)} bytes, at any length`,
      "Empty fields": `temperature ${start.temperature} (${whose}), top-p ${start.top_p}, ${number(model.max_tokens)} tokens` };
    find("server").replaceChildren(...Object.entries(rows).map(([name, value]) => {
      const row = element("div");
      row.append(element("dt", "", name), element("dd", "", value));
      return row;
    }));
  }
}
