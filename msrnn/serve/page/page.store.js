// What the browser keeps: settings, and the text of conversations, which the server does not have.

/** A storage of the browser; where it is switched off or full, values last as long as the page. */
class BrowserStore {
  constructor(open) {
    this.memory = new Map();
    try {
      this.storage = open();
    } catch {
      this.storage = null;
    }
  }

  get(name) { return this.memory.get(name) ?? this.storage?.getItem(name) ?? null; }

  set(name, text) {
    try {
      if (!this.storage) throw new Error("no storage");
      this.storage.setItem(name, text);
      this.memory.delete(name);
    } catch {
      this.memory.set(name, text);
    }
  }

  remove(name) {
    this.memory.delete(name);
    this.storage?.removeItem(name);
  }

  names() { return [...new Set([...this.memory.keys(), ...Object.keys(this.storage ?? {})])]; }
}

const local = new BrowserStore(() => localStorage), session = new BrowserStore(() => sessionStorage);

/** The texts of conversations, by the model and the session's name. */
class Texts {
  constructor(model) {
    this.prefix = `msrnn text ${model} `;
  }

  /** The turns of a session, if they are its own: a session of the same name may be another one by now. */
  turns(info) {
    const kept = this.parsed(info.name);
    if (!kept || kept.created !== info.created || kept.turns > info.turns) return [];
    return kept.turns === info.turns && kept.updated !== info.updated ? [] : kept.log;
  }

  title(info) { return this.turns(info)[0]?.user ?? null; }

  keep({ name, created, updated, turns }, log) {
    local.set(this.prefix + name, JSON.stringify({ created, updated, turns, log }));
  }

  forget(name) { local.remove(this.prefix + name); }

  /** Delete the texts of sessions that the server no longer has. */
  prune(names) {
    for (const found of local.names()) {
      if (found.startsWith(this.prefix) && !names.has(found.slice(this.prefix.length))) local.remove(found);
    }
  }

  forgetAll() { this.prune(new Set()); }

  parsed(name) {
    try {
      return JSON.parse(local.get(this.prefix + name));
    } catch {
      return null;
    }
  }
}
