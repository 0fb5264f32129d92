// The text of one policy: a span for each token. Drawing changes only the class of a span.

const NARROW = "(max-width: 60rem)"; // screens that show one policy, with the controls at the bottom
const STATES = ["unread", "held", "f1", "f2", "f3", "f4"];
const CLASSES = STATES.flatMap((state) => [0, 1, 2, 3, 4, 5, 6, 7].map((k) => (k ? `${state} k${k}` : state)));
const WRAPPED = new Set(data.wrapped); // tokens whose line break only wraps a paragraph
const SINCE = [4, 32, 128]; // steps since a token was evicted, after which it fades further

/** A new element. Its text is set as text, never as markup. */
function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Whether a token is a word with a space before it; the space is not shaded, since it may end a line. */
const spaced = (piece) => /^ \S/.test(piece);

class Text {
  constructor(policy) {
    this.policy = policy;
    this.codes = new Uint8Array(T).fill(255);
    this.spans = data.tokens.map((piece, token) => {
      const span = element("span", "", spaced(piece) ? piece.slice(1) : piece);
      span.dataset.token = token;
      if (piece === "") span.dataset.is = "part";
      else if (/^\s*\n\s*$/.test(piece)) span.dataset.is = "newline";
      if (WRAPPED.has(token)) span.dataset.wrapped = "";
      if (token < data.protected) span.dataset.protected = "";
      return span;
    });
    this.body = element("div", "text");
    this.stats = element("p", "stats");
    this.panel = element("article", "panel");
    this.head = element("div", "head");
    const title = element("h2", "", policy.name);
    title.append(" ", element("small", "", `${number(policy.size)} KV rows in each layer`));
    this.head.append(title, this.stats);
    this.panel.append(this.head, this.body);
    this.fill();
  }

  /** Split the text into blocks that end with a line: the browser lays out each, and finds its direction, alone. */
  fill() {
    let block = null;
    for (const span of this.spans) {
      if (!block) {
        block = element("div", "block");
        block.dir = "auto";
        this.body.append(block);
      }
      if (spaced(data.tokens[span.dataset.token])) block.append(" ");
      block.append(span);
      if (span.textContent.includes("\n") && !("wrapped" in span.dataset) && block.childElementCount >= 24) block = null;
    }
  }

  state(token, step, fade) {
    if (token > step) return 0;
    if (!fade) return 1;
    const { held, rows } = this.policy;
    if (rows.length > 1) return held[token] > 0.75 ? 1 : held[token] > 0.5 ? 2 : held[token] > 0.25 ? 3 : held[token] > 0 ? 4 : 5;
    if (held[token] > 0) return 1;
    const since = step - this.policy.last(rows[0], token);
    return since <= SINCE[0] ? 2 : since <= SINCE[1] ? 3 : since <= SINCE[2] ? 4 : 5;
  }

  paint(step, fade) {
    const { shades } = this.policy;
    for (let j = 0; j < T; j++) {
      const state = this.state(j, step, fade);
      const code = state * 8 + (state === 0 || state === 5 ? 0 : shades[j]);
      if (code === this.codes[j]) continue;
      this.codes[j] = code;
      this.spans[j].className = CLASSES[code];
    }
    if (this.policy.bits) this.paintRecalled();
    this.mark("now", step);
  }

  /** Outline the tokens that some of the chosen layers have recalled. */
  paintRecalled() {
    const { back } = this.policy;
    this.spans.forEach((span, j) => {
      if ("recalled" in span.dataset === back[j] > 0) return;
      if (back[j] > 0) span.dataset.recalled = "";
      else delete span.dataset.recalled;
    });
  }

  /** Mark one token with a class. Painting removes marks, so it is set again. */
  mark(name, token) {
    const before = this[name];
    if (before !== undefined && before !== token) this.spans[before]?.classList.remove(name);
    this[name] = token;
    if (token !== undefined) this.spans[token].classList.add(name);
  }

  showCounts(step, other) {
    const { seen, recent, oldest, back } = this.policy.summary(step);
    const counts = [["sees ", number(seen), ` of ${number(step + 1)}`], ["", percent(recent), " recent"]];
    if (other) counts.push(["", percent(overlap(this.policy, other, step)), ` shared with ${other.name}`]);
    counts.push(["oldest ", number(oldest), ""]);
    if (this.policy.bits) counts.push(["recalls ", number(back), ""]);
    this.stats.replaceChildren(...counts.flatMap(([before, count, after], i) => {
      const whole = element("span", "", before);
      whole.append(element("b", "", count), after);
      return i ? [" · ", whole] : [whole];
    }));
  }

  /** Scroll a token into view; once more after the browser has laid out what came into view. */
  show(token, again = true) {
    const box = this.spans[token].getBoundingClientRect(), [top, bottom] = this.room();
    if (box.top >= top && box.bottom <= bottom) return;
    scrollBy({ top: box.top - top - (bottom - top) * (matchMedia(NARROW).matches ? 0.2 : 0.6), behavior: "instant" });
    if (again) requestAnimationFrame(() => requestAnimationFrame(() => this.show(token, false)));
  }

  /** The top and bottom of the part of the window where nothing covers the text; on a phone the token card may. */
  room() {
    const [top, bottom] = uncovered(), card = document.getElementById("token-card"), box = card.getBoundingClientRect();
    if (card.hidden || !matchMedia(NARROW).matches) return [top + 12, bottom - 20];
    return box.top < (top + bottom) / 2 ? [box.bottom + 12, bottom - 20] : [top + 12, box.top - 12];
  }
}

/** The top and bottom of the part of the window between the bars at its edges, with legend and counts. */
function uncovered() {
  const bars = [document.getElementById("top"), document.querySelector(".panel:not([hidden]) .head")];
  const heights = bars.map((bar) => (getComputedStyle(bar).position === "sticky" ? bar.offsetHeight : 0));
  const controls = document.getElementById("controls").getBoundingClientRect();
  return [heights[0] + heights[1], matchMedia(NARROW).matches ? controls.top : innerHeight];
}
