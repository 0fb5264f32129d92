// Search: tokens whose text, together, is what was typed; a line break is a space, capitals do not matter.

class Search {
  /** `go` is called with the first token of the hit to look at. */
  constructor(texts, go) {
    Object.assign(this, { texts, go, hits: [], at: -1 });
    this.text = data.tokens.join("");
    this.ends = new Int32Array(T);
    data.tokens.reduce((end, piece, j) => (this.ends[j] = end + piece.length), 0);
    find("query").addEventListener("input", (event) => this.ask(event.target.value));
    find("query").addEventListener("keydown", (event) => this.key(event));
    find("search").addEventListener("submit", (event) => { event.preventDefault(); this.turn(1); });
    find("previous").addEventListener("click", () => this.turn(-1));
    this.tell();
  }

  key(event) {
    if (event.key === "Enter" && event.shiftKey) { event.preventDefault(); this.turn(-1); }
    if (event.key === "Escape") { event.target.value = ""; this.ask(""); event.target.blur(); }
  }

  /** Marks every hit; Enter and the buttons go to them. */
  ask(query) {
    this.mark(undefined);
    this.at = -1;
    this.hits = [];
    if (query.trim()) {
      const literal = query.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&").replace(/\s+/g, "\\s+");
      for (const { index, 0: found } of this.text.matchAll(new RegExp(literal, "giu"))) {
        this.hits.push([this.tokenAt(index), this.tokenAt(index + found.length - 1)]);
      }
    }
    this.mark("");
    this.tell();
  }

  turn(direction) {
    const count = this.hits.length;
    if (!count) return;
    this.markHit(this.at, "");
    this.at = this.at < 0 ? (direction > 0 ? 0 : count - 1) : (this.at + direction + count) % count;
    this.markHit(this.at, "now");
    this.tell();
    this.go(this.hits[this.at][0]);
  }

  /** The token that has the character at a place of the text. */
  tokenAt(place) {
    let low = 0, high = T - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > place) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  mark(value) {
    this.hits.forEach((_, i) => this.markHit(i, value));
  }

  markHit(i, value) {
    const [first, last] = this.hits[i] ?? [0, -1];
    for (const { spans } of this.texts) {
      for (let j = first; j <= last; j++) {
        if (value === undefined) delete spans[j].dataset.hit;
        else spans[j].dataset.hit = value;
      }
    }
  }

  tell() {
    const count = this.hits.length, asked = find("query").value.trim() !== "";
    const hits = count === 1 ? "1 hit" : count ? `${number(count)} hits` : "no hits";
    find("hits").textContent = this.at >= 0 ? `${number(this.at + 1)} of ${number(count)}` : asked ? hits : "";
    find("previous").disabled = find("next").disabled = !count;
  }
}
