// What the page knows, and questions to it. Times are steps; rows are the heads of layers that forget on their own.

const data = JSON.parse(document.getElementById("data").textContent);
const T = data.tokens.length;
const L = data.layers.length;
const HEADS = Math.max(...data.policies.map((policy) => policy.groups));

/** Steps from a token's birth to its last, as the low bytes of all and then the high ones, deflated. */
async function unpacked(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = bytes.length / 2;
  const times = new Int32Array(count);
  for (let i = 0; i < count; i++) times[i] = (i % T) + bytes[i] + 256 * bytes[count + i];
  return times;
}

/** One policy's eviction times, [L, G, T] in one array; T where a token is never dropped. */
class Policy {
  constructor(about, times) {
    Object.assign(this, about);
    this.times = times;
    this.life = new Float32Array(T);
    this.held = new Float32Array(T);
    this.shades = new Uint8Array(T);
    this.rows = [];
  }

  /** The rows that are looked at: all, or those of a layer, of a head, or of both. */
  choose(layer, head) {
    const single = this.groups === 1;
    this.rows = [];
    for (let l = 0; l < L; l++) {
      for (let g = 0; g < this.groups; g++) {
        if ((layer < 0 || l === layer) && (single || head < 0 || g === head)) this.rows.push(l * this.groups + g);
      }
    }
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

  /** Into `held`: the share of the chosen rows that see each token at a step. */
  look(step) {
    this.held.fill(0);
    const share = 1 / this.rows.length;
    for (const row of this.rows) {
      const start = row * T;
      for (let j = 0; j <= step; j++) if (this.times[start + j] >= step) this.held[j] += share;
    }
  }

  /** A layer's share of heads that see a token at a step. */
  heldBy(layer, token, step) {
    if (token > step) return 0;
    let count = 0;
    for (let g = 0; g < this.groups; g++) count += this.last(layer * this.groups + g, token) >= step;
    return count / this.groups;
  }

  /** Means over the chosen rows at the step last looked at. */
  summary(step) {
    let seen = 0, recent = 0, oldest = step;
    for (let j = step; j >= 0; j--) {
      if (this.held[j] <= 0) continue;
      seen += this.held[j];
      if (j >= step - this.size) recent += this.held[j];
      oldest = j;
    }
    return { seen, recent: recent / seen, oldest };
  }
}

/** Of what two policies see, the share that both see. */
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
