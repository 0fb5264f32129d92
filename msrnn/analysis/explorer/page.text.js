// The text of one policy: a span for each token, whose class is all that ever changes.

const NARROW = "(max-width: 60rem)"; // where there is room for one policy, and controls are at the bottom
const STATES = ["unread", "held", "f1", "f2", "f3", "f4"];
const CLASSES = STATES.flatMap((state) => [0, 1, 2, 3, 4, 5, 6, 7].map((k) => (k ? `${state} k${k}` : state)));
const WRAPPED = new Set(data.wrapped); // tokens whose line break only wraps a paragraph
const SINCE = [4, 32, 128]; // steps since a token was dropped, from which it fades further

/** A new element; its text is text, whatever it says. */
function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Whether a token is a word with the space before it, which is not shaded: it may end a line. */
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
      return span;
    });
    this.body = element("div", "text");
    this.stats = element("p", "stats");
    this.panel = element("article", "panel");
    this.head = element("div", "head");
    const title = element("h2", "", policy.name);
    title.append(" ", element("small", "", `${number(policy.size)} states in each layer`));
    this.head.append(title, this.stats);
    this.panel.append(this.head, this.body);
    this.fill();
  }

  /** Blocks end where lines do, so that the browser lays out, and finds the direction of, one at a time. */
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
    this.mark("now", step);
  }

  /** One token at a time has this mark; painting takes marks away, so it is set again. */
  mark(name, token) {
    const before = this[name];
    if (before !== undefined && before !== token) this.spans[before]?.classList.remove(name);
    this[name] = token;
    if (token !== undefined) this.spans[token].classList.add(name);
  }

  tell(step, other) {
    const { seen, recent, oldest } = this.policy.summary(step);
    const counts = [["sees ", number(seen), ` of ${number(step + 1)}`], ["", percent(recent), " recent"]];
    if (other) counts.push(["", percent(overlap(this.policy, other, step)), ` shared with ${other.name}`]);
    counts.push(["oldest ", number(oldest), ""]);
    this.stats.replaceChildren(...counts.flatMap(([before, count, after], i) => {
      const whole = element("span", "", before);
      whole.append(element("b", "", count), after);
      return i ? [" · ", whole] : [whole];
    }));
  }

  /** Into view, where it is out of it; and once more when what came into view has found its size. */
  show(token, again = true) {
    const box = this.spans[token].getBoundingClientRect(), [top, bottom] = this.room();
    if (box.top >= top && box.bottom <= bottom) return;
    scrollBy({ top: box.top - top - (bottom - top) * (matchMedia(NARROW).matches ? 0.2 : 0.6), behavior: "instant" });
    if (again) requestAnimationFrame(() => requestAnimationFrame(() => this.show(token, false)));
  }

  /** From where to where, down the window, nothing covers the text; on a phone the story may. */
  room() {
    const [top, bottom] = uncovered(), story = document.getElementById("story"), card = story.getBoundingClientRect();
    if (story.hidden || !matchMedia(NARROW).matches) return [top + 12, bottom - 20];
    return card.top < (top + bottom) / 2 ? [card.bottom + 12, bottom - 20] : [top + 12, card.top - 12];
  }
}

/** The part of the window between the bars at its edges, legend and counts included. */
function uncovered() {
  const bars = [document.getElementById("top"), document.querySelector(".panel:not([hidden]) .head")];
  const heights = bars.map((bar) => (getComputedStyle(bar).position === "sticky" ? bar.offsetHeight : 0));
  const controls = document.getElementById("controls").getBoundingClientRect();
  return [heights[0] + heights[1], matchMedia(NARROW).matches ? controls.top : innerHeight];
}
