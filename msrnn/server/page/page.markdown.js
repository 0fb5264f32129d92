// Markdown of answers, as a look of the text that is there: no character is hidden or added, and nothing becomes markup.

const LONGEST = 2000; // characters of a line that is looked at
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/, HEADING = /^#{1,6} +/, BULLET = /^\s*(?:[-*+]|\d{1,9}[.)]) +/, QUOTE = /^ {0,3}> ?/;
const INLINE = /(?<ticks>`+)(?<code>[^`]+)\k<ticks>(?!`)|\*\*(?<strong>(?=\S)[^*]*[^*\s])\*\*|(?<![\w*])\*(?<em>(?=\S)[^*]*[^*\s])\*(?!\*)/g;
const CALL = { begin: "<tool_call>", end: "</tool_call>" };

/** The looks of the parts of a line, and what the next line is within: null, or { kind, closes } of a block. */
class Line {
  constructor(text, block) {
    Object.assign(this, { looks: new Array(text.length).fill(""), block });
    if (block) this.continue(text);
    else this.begin(text);
  }

  set(from, to, look) { this.looks.fill(look, from, to); }

  continue(text) {
    const ends = this.block.closes(text);
    this.set(0, text.length, ends ? "mark code" : this.block.kind);
    if (ends) this.block = null;
  }

  begin(text) {
    const fence = FENCE.exec(text)?.[1];
    if (fence) {
      this.set(0, text.length, "mark code");
      this.block = { kind: "code", closes: (line) => line.trim().startsWith(fence) && FENCE.exec(line)?.[2].trim() === "" };
    } else if (text.trim().startsWith(CALL.begin)) {
      this.set(0, text.length, "code");
      if (!text.includes(CALL.end)) this.block = { kind: "code", closes: (line) => line.includes(CALL.end) };
    } else if (text.length <= LONGEST) {
      this.words(text);
    }
  }

  words(text) {
    const [mark] = HEADING.exec(text) ?? BULLET.exec(text) ?? QUOTE.exec(text) ?? [""];
    const base = HEADING.test(text) ? "heading" : QUOTE.test(text) ? "quote" : "";
    this.set(0, mark.length, "mark");
    this.set(mark.length, text.length, base);
    for (const { index, 0: whole, groups } of text.slice(mark.length).matchAll(INLINE)) {
      const [kind, inner] = ["code", "strong", "em"].map((name) => [name, groups[name]]).find(([, found]) => found);
      const from = mark.length + index, inside = (whole.length - inner.length) / 2;
      this.set(from, from + whole.length, "mark");
      this.set(from + inside, from + whole.length - inside, `${base} ${kind}`.trim());
    }
  }
}

/** The look of one answer, whose tokens come one by one. A line is looked at anew until it has ended. */
class Markdown {
  constructor() {
    Object.assign(this, { text: "", looks: [], tokens: [], begin: 0, block: null, codes: [] });
  }

  /** A token that is shown, with the end of its text, which is new. */
  add(token, piece) {
    if (this.tokens.at(-1)?.token !== token) this.tokens.push({ token, start: this.text.length });
    this.text += piece;
    const changed = this.begin;
    for (let end = this.text.indexOf("\n", this.begin); end >= 0; end = this.text.indexOf("\n", this.begin)) {
      this.take(this.look(end), end);
    }
    this.look(this.text.length);
    this.paint(changed);
  }

  look(end) {
    const line = new Line(this.text.slice(this.begin, end), this.block);
    this.looks.length = this.begin;
    for (const look of line.looks) this.looks.push(look);
    return line;
  }

  /** A line that has ended, and the break after it. */
  take({ block }, end) {
    this.looks.push(this.block && block ? block.kind : "");
    if (!this.block && block) this.codes.push({ start: this.begin, from: end + 1, to: null, button: null });
    if (this.block && !block) this.codes.at(-1).to = this.begin;
    Object.assign(this, { begin: end + 1, block });
  }

  paint(changed) {
    const first = this.tokens.findLastIndex(({ start }) => start <= changed);
    for (const { token, start } of this.tokens.slice(Math.max(0, first))) {
      writeToken(token, this.looks.slice(start, start + token.text.length));
    }
    const code = this.codes.at(-1);
    if (!code || code.button) return;
    code.button = button("copy-code", "Copy", "Copy this code");
    code.button.code = () => this.text.slice(code.from, code.to ?? this.text.length);
    const { token, start } = this.tokens.findLast(({ start }) => start <= code.start);
    if (start < code.start) token.node.after(code.button); // the token begins in a line above
    else token.node.before(code.button);
  }
}
