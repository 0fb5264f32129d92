// Search in the text, across tokens; a line break matches a space, and case does not matter.

class Search {
  /** `go` is called with the first token of the selected hit. */
  constructor(texts, go) {
    Object.assign(this, { texts, go, hits: [], at: -1 });
    this.text = data.tokens.join("");
    this.ends = new Int32Array(T);
    data.tokens.reduce((end, piece, j) => (this.ends[j] = end + piece.length), 0);
    find("query").addEventListener("input", (event) => this.search(event.target.value));
    find("query").addEventListener("keydown", (event) => this.key(event));
    find("search").addEventListener("submit", (event) => { event.preventDefault(); this.turn(1); });
    find("previous").addEventListener("click", () => this.turn(-1));
    this.showCount();
  }

  key(event) {
    if (event.key === "Enter" && event.shiftKey) { event.preventDefault(); this.turn(-1); }
    if (event.key === "Escape") { event.target.value = ""; this.search(""); event.target.blur(); }
  }

  /** Mark every hit; Enter and the buttons go from one to the next. */
  search(query) {
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
    this.showCount();
  }

  turn(direction) {
    const count = this.hits.length;
    if (!count) return;
    this.markHit(this.at, "");
    this.at = this.at < 0 ? (direction > 0 ? 0 : count - 1) : (this.at + direction + count) % count;
    this.markHit(this.at, "now");
    this.showCount();
    this.go(this.hits[this.at][0]);
  }

  /** The token that contains the character at an index of the text. */
  tokenAt(index) {
    let low = 0, high = T - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > index) high = middle;
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

  showCount() {
    const count = this.hits.length, hasQuery = find("query").value.trim() !== "";
    const hits = count === 1 ? "1 hit" : count ? `${number(count)} hits` : "no hits";
    find("hits").textContent = this.at >= 0 ? `${number(this.at + 1)} of ${number(count)}` : hasQuery ? hits : "";
    find("previous").disabled = find("next").disabled = !count;
  }
}
