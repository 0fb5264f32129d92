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

  /** Returns whether the value outlasts the page. */
  set(name, text) {
    try {
      if (!this.storage) throw new Error("no storage");
      this.storage.setItem(name, text);
      this.memory.delete(name);
      return true;
    } catch {
      this.memory.set(name, text);
      return false;
    }
  }

  remove(name) {
    this.memory.delete(name);
    this.storage?.removeItem(name);
  }

  names() { return [...new Set([...this.memory.keys(), ...Object.keys(this.storage ?? {})])]; }
}

const local = new BrowserStore(() => localStorage), session = new BrowserStore(() => sessionStorage);

/** Whether a session of the server is the one of a kept text, at the same turn or further on. */
const continues = (info, kept) => info.name === kept.name && info.created === kept.created
  && (info.turns > kept.turns || (info.turns === kept.turns && info.updated === kept.updated));

/** The texts of this model's conversations. They are the only copy: nothing but the reader's wish deletes one. */
class Texts {
  /** `keeps()` tells whether the reader wants texts to be kept. */
  constructor(model, keeps) {
    Object.assign(this, { model, keeps, prefix: `msrnn text ${model} `, full: false, told: false });
    this.reload();
  }

  /** Read what the browser has: another tab may have added to it. */
  reload() {
    const keys = local.names().filter((key) => key.startsWith(this.prefix));
    this.all = new Map(keys.map((key) => [key, this.parsed(key)]).filter(([, kept]) => kept));
  }

  parsed(key) {
    const rest = key.slice(this.prefix.length);
    try {
      const kept = JSON.parse(local.get(key)), old = kept.model === undefined && !rest.includes(" "); // once, a name was the key
      return Array.isArray(kept.log) && (old || kept.model === this.model) ? { name: rest, ...kept, key } : null;
    } catch {
      return null;
    }
  }

  /** The text of a session, as far as this browser knows it. */
  match(info) { return [...this.all.values()].filter((kept) => continues(info, kept)).sort((a, b) => b.turns - a.turns)[0]; }

  /** Texts whose session is not in the server's list; the one that was used last comes first. */
  orphans(infos) {
    const found = [...this.all.values()].filter((kept) => !infos.some((info) => continues(info, kept)));
    return found.sort((a, b) => b.updated - a.updated);
  }

  /** Keep a text under its key, or under a new one: a session of the same name may be another one by now. */
  keep(key, { name, created, updated, turns }, log) {
    if (!this.keeps()) return key;
    const kept = { model: this.model, name, created, updated, turns, log };
    const under = key ?? `${this.prefix}${name} ${randomHex()}`;
    this.full = !local.set(under, JSON.stringify(kept));
    this.all.set(under, { ...kept, key: under });
    return under;
  }

  /** A Problem, once, if a text lasts as long as the page only. */
  complaint() {
    if (!this.full || this.told) return null;
    this.told = true;
    return new Problem("The browser's storage is full or switched off: texts end with this page. Delete texts of other conversations.");
  }

  forget(key) {
    local.remove(key);
    this.all.delete(key);
  }
}

const randomHex = () => [...crypto.getRandomValues(new Uint8Array(4))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
