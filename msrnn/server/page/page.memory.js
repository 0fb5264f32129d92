// What the state of a conversation holds, and the panel that shows it.

class Memory {
  constructor() {
    this.clear();
  }

  clear() {
    Object.assign(this, { shares: new Map(), recalls: new Map(), ranges: [], seen: 0, used: 0, slots: 0, bytes: 0, full: 0 });
  }

  share(position) { return this.shares.get(position) ?? 0; }

  /** The share of the KV heads that have recalled a token. */
  recalled(position) { return this.recalls.get(position) ?? 0; }

  /** Whether a token is never evicted. */
  protects(position) { return this.ranges.some(([begin, end]) => begin <= position && position < end); }

  /** Take over what the server tells; `whole`: of all tokens, otherwise of those that have changed. */
  take(told, whole) {
    if (!told.held) return;
    if (whole) this.shares.clear();
    for (const [position, share] of told.held) {
      if (share > 0) this.shares.set(position, share);
      else this.shares.delete(position);
    }
    this.recalls = new Map(told.recalled ?? []);
    Object.assign(this, { ranges: told.protected ?? [], seen: told.seen, used: told.used, slots: told.slots, bytes: told.bytes, full: told.full_bytes });
  }

  counts() {
    let all = 0;
    for (const share of this.shares.values()) all += share >= 1;
    return { all, some: this.shares.size - all, forgotten: this.seen - this.shares.size };
  }
}

function inBytes(count) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (count >= 1000 && power < units.length - 1) [count, power] = [count / 1000, power + 1];
  return `${power && count < 100 ? count.toPrecision(3) : number(count)} ${units[power]}`;
}

class MemoryPanel {
  /** `onPoint(position)` is called with what the pointer is on in the map, `onPick` with what is clicked. */
  constructor(model, onPoint, onPick) {
    this.model = model;
    this.canvas = find("map");
    this.memory = new Memory();
    find("legend-size").textContent = number(model.size);
    find("legend-recall").hidden = !model.recall;
    const at = ({ clientX }) => {
      const { left, width } = this.canvas.getBoundingClientRect();
      return Math.min(this.memory.seen - 1, Math.floor(((clientX - left) / width) * this.memory.seen));
    };
    this.canvas.addEventListener("pointermove", (event) => this.memory.seen && onPoint(at(event), event));
    this.canvas.addEventListener("pointerleave", () => onPoint(undefined));
    this.canvas.addEventListener("click", (event) => this.memory.seen && onPick(at(event)));
    find("unfold").addEventListener("click", () => {
      const open = find("unfold").getAttribute("aria-expanded") !== "true";
      find("unfold").setAttribute("aria-expanded", open);
      find("memory").classList.toggle("unfolded", open);
      this.show(this.memory);
    });
    new ResizeObserver(() => this.drawMap()).observe(this.canvas);
  }

  show(memory) {
    this.memory = memory;
    const { size, bytes } = this.model, share = memory.slots ? memory.used / memory.slots : 0;
    const { all, some, forgotten } = memory.counts(), used = number(share * size);
    const gauge = find("gauge");
    gauge.firstElementChild.style.width = `${100 * share}%`;
    gauge.setAttribute("aria-valuemax", size);
    gauge.setAttribute("aria-valuenow", Math.round(share * size));
    gauge.setAttribute("aria-valuetext", `${used} of ${number(size)} KV rows in each layer`);
    this.line(used, memory);
    const texts = { seen: memory.seen, "held-all": all, "held-some": some, forgotten };
    for (const [id, count] of Object.entries(texts)) find(id).textContent = number(count);
    const most = Math.max(bytes, memory.full);
    find("bytes-state").textContent = inBytes(bytes);
    find("bytes-full").textContent = inBytes(memory.full);
    find("bar-state").style.width = `${(100 * bytes) / most}%`;
    find("bar-full").style.width = `${(100 * memory.full) / most}%`;
    find("map-first").textContent = memory.seen ? "first token" : "";
    find("map-last").textContent = memory.seen ? `token ${number(memory.seen - 1)}` : "";
    this.drawMap();
  }

  line(used, memory) {
    const parts = [[used, ` of ${number(this.model.size)} KV rows`, " in each layer"],
      [number(memory.seen), memory.seen === 1 ? " token read" : " tokens read", ""], [inBytes(this.model.bytes), " held", ""]];
    find("use").replaceChildren(...parts.map(([count, after, more]) => {
      const part = element("span");
      part.append(element("b", "", count), after, element("small", "", more));
      return part;
    }));
  }

  /** A column for each token, or the mean of the tokens that share a pixel; its height is the share of layers. */
  drawMap() {
    const { canvas, memory } = this, ratio = devicePixelRatio || 1;
    const width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
    if (!width || !height) return;
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const draw = canvas.getContext("2d"), columns = Math.min(width, memory.seen);
    draw.clearRect(0, 0, width, height);
    if (!columns) return;
    const sums = new Float64Array(columns), counts = new Float64Array(columns);
    for (let position = 0; position < memory.seen; position++) counts[Math.floor((position * columns) / memory.seen)]++;
    for (const [position, share] of memory.shares) sums[Math.floor((position * columns) / memory.seen)] += share;
    const colours = this.colours(), gap = width / columns > 5 * ratio ? ratio : 0;
    for (let column = 0; column < columns; column++) {
      const share = sums[column] / counts[column], tall = share * (height - 3 * ratio);
      const left = Math.floor((column * width) / columns), right = Math.floor(((column + 1) * width) / columns);
      draw.fillStyle = colours[share > 0 ? Math.min(7, 2 + Math.floor(share * 5.999)) : 0];
      draw.fillRect(left, height - Math.max(tall, ratio), Math.max(1, right - left - gap), Math.max(tall, ratio));
    }
  }

  colours() {
    const probe = element("i");
    find("memory").append(probe);
    const colours = Array.from({ length: 8 }, (_, k) => {
      probe.style.color = k ? `var(--k${k})` : "var(--line)";
      return getComputedStyle(probe).color;
    });
    probe.remove();
    return colours;
  }
}
