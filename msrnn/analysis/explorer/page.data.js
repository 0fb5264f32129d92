// The page's data: eviction times, in steps. A row is one group of heads of one layer that evicts on its own.

const data = JSON.parse(document.getElementById("data").textContent);
const T = data.tokens.length;
const L = data.layers.length;
const HEADS = Math.max(...data.policies.map((policy) => policy.groups));

async function inflated(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Eviction times from deflated data: how many steps each token stays after its own, all low bytes, then all high. */
async function unpacked(text) {
  const bytes = await inflated(text);
  const count = bytes.length / 2;
  const times = new Int32Array(count);
  for (let i = 0; i < count; i++) times[i] = (i % T) + bytes[i] + 256 * bytes[count + i];
  return times;
}

/**
 * One policy's eviction times, [L, G, T] in one array; T for a token that is never evicted. `bits` has a bit for each
 * block of tokens, layer and token: whether a KV head of the layer has recalled it; null: nothing is recalled.
 */
class Policy {
  constructor(about, times, bits) {
    Object.assign(this, about);
    this.times = times;
    this.bits = bits;
    this.back = new Float32Array(T);
    this.life = new Float32Array(T);
    this.held = new Float32Array(T);
    this.shades = new Uint8Array(T);
    this.rows = [];
  }

  /** Select rows: all, or those of a layer, of a head, or of both. */
  choose(layer, head) {
    const single = this.groups === 1;
    this.rows = [];
    for (let l = 0; l < L; l++) {
      for (let g = 0; g < this.groups; g++) {
        if ((layer < 0 || l === layer) && (single || head < 0 || g === head)) this.rows.push(l * this.groups + g);
      }
    }
    this.layers = layer < 0 ? Array.from({ length: L }, (_, l) => l) : [layer];
    this.life.fill(0);
    for (const row of this.rows) for (let j = 0; j < T; j++) this.life[j] += this.kept(row, j);
    for (let j = 0; j < T; j++) {
      this.life[j] /= this.rows.length;
      this.shades[j] = shade(this.life[j]);
    }
  }

  last(row, token) {
    return this.times[row * T + token];
  }

  kept(row, token) {
    return Math.min(this.last(row, token), T - 1) - token + 1;
  }

  /** Compute `held`: the share of the selected rows that see each token at a step. */
  look(step) {
    this.held.fill(0);
    const share = 1 / this.rows.length;
    for (const row of this.rows) {
      const start = row * T;
      for (let j = 0; j <= step; j++) if (this.times[start + j] >= step) this.held[j] += share;
    }
    if (!this.bits) return;
    this.back.fill(0);
    for (const layer of this.layers) for (let j = 0; j <= step; j++) this.back[j] += this.recalls(layer, j, step) / this.layers.length;
  }

  /** Whether some KV head of a layer has recalled a token for the block of tokens that a step is in. */
  recalls(layer, token, step) {
    if (!this.bits) return 0;
    const bit = (Math.floor(step / data.every) * L + layer) * T + token; // below 2 ** 30
    return (this.bits[bit >> 3] >> (bit & 7)) & 1;
  }

  /** The share of a layer's heads that see a token at a step. */
  heldBy(layer, token, step) {
    if (token > step) return 0;
    let count = 0;
    for (let g = 0; g < this.groups; g++) count += this.last(layer * this.groups + g, token) >= step;
    return count / this.groups;
  }

  /** Means over the selected rows, at the step of the last `look`. */
  summary(step) {
    let seen = 0, recent = 0, oldest = step, back = 0;
    for (let j = 0; j <= step; j++) back += this.back[j];
    for (let j = step; j >= 0; j--) {
      if (this.held[j] <= 0) continue;
      seen += this.held[j];
      if (j >= step - this.size) recent += this.held[j];
      oldest = j;
    }
    return { seen, recent: recent / seen, oldest, back };
  }
}

/** Of the tokens that two policies see, the share that both see. */
function overlap(one, other, step) {
  let both = 0, all = 0;
  for (let j = 0; j <= step; j++) {
    both += Math.min(one.held[j], other.held[j]);
    all += one.held[j] + other.held[j];
  }
  return (2 * both) / all;
}

const number = (value) => Math.round(value).toLocaleString("en");
const percent = (value) => `${Math.round(100 * value)}%`;
