// Tokens as spans: the text of each is set as text, never as markup. Painting changes only the class of a span.

const find = (id) => document.getElementById(id);
const number = (value) => Math.round(value).toLocaleString("en");
const percent = (value) => `${Math.round(100 * value)}%`;

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Show characters that would hide or reorder their neighbours by number; joiners belong to some scripts. */
function visible(text) {
  return text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (character) => {
    const code = character.codePointAt(0);
    if (character === "\n" || character === "\t" || code === 0x200c || code === 0x200d) return character;
    return code < 32 ? String.fromCodePoint(0x2400 + code) : `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  });
}

/** A token in a sentence about it, with white space as symbols. */
const shown = (piece) => visible(piece).replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "␣");

const SPACED = /^ \S/; // this space is not shaded, since it may end a line

/** Write the text of a token, in parts where its characters have other looks: class names, one for each. */
function writeToken(token, looks = []) {
  const skipped = SPACED.test(token.text) ? 1 : 0, look = looks.slice(skipped).join();
  if (token.look === look && token.written === token.text) return;
  Object.assign(token, { look, written: token.text });
  const parts = [];
  for (let from = skipped, to; from < token.text.length; from = to) {
    for (to = from + 1; to < token.text.length && looks[to] === looks[from];) to++;
    const text = visible(token.text.slice(from, to));
    parts.push(looks[from] ? element("md-part", looks[from], text) : text);
  }
  token.node.replaceChildren(...(token.text === "" ? ["·"] : parts));
}

const LEVELS = 8; // of fading; s0: forgotten, s8: held in every layer
const levelOf = (share) => (share <= 0 ? 0 : Math.max(1, Math.round(share * LEVELS)));

/** The tokens of a conversation at their positions. A character of several tokens is one span for all of them. */
class Tokens {
  constructor() {
    this.at = []; // by position: { node, positions, text, code }
    this.open = null; // a character whose last token is still to come
  }

  /** Add the next token, and return it; as a tick, if it belongs to the chat template. */
  add(position, piece, parent, asTick) {
    const own = this.open?.parent === parent && !asTick ? this.open : null;
    const token = own ?? { positions: [], text: "", code: -1, parent, node: element(asTick ? "i" : "span", asTick ? "tick" : "") };
    token.node.token = token;
    token.positions.push(position);
    token.text += piece;
    token.code = -1;
    this.at[position] = token;
    this.open = piece === "" && !asTick ? token : null;
    if (!own) parent.append(token.node);
    if (asTick) return token;
    writeToken(token);
    if (SPACED.test(token.text)) token.node.before(" ");
    return token;
  }

  /** Forget the tokens from a position on: the server has not kept them. */
  cut(position) {
    for (const token of new Set(this.at.slice(position))) token.node.className = `${token.node.className.split(" ")[0]} lost`;
    this.at.length = Math.min(this.at.length, position);
    this.open = null;
  }

  /** The share of the layers that hold a token; null if no state has read it yet. */
  share(token, memory) {
    const read = token.positions.filter((position) => position < memory.seen);
    return read.length ? read.reduce((sum, position) => sum + memory.share(position), 0) / read.length : null;
  }

  paint(memory, size) {
    let last = null;
    for (const token of this.at) {
      if (!token || token === last) continue;
      last = token;
      const share = this.share(token, memory), level = share === null ? LEVELS : levelOf(share);
      const old = share > 0 && token.positions.at(-1) < memory.seen - size;
      const safe = share > 0 && memory.protects(token.positions[0]), back = token.positions.some((position) => memory.recalled(position) > 0);
      const code = level * 8 + Number(old) * 4 + Number(safe) * 2 + Number(back);
      if (code === token.code) continue;
      token.code = code;
      token.node.className = `${token.node.localName === "i" ? "tick " : ""}s${level}${old ? " old" : ""}${safe ? " safe" : ""}${back ? " back" : ""}`;
    }
  }
}
