// The map of one policy (steps down, tokens across), and below it the strip of the current step (layers down).

/** 256 colours from the background through the shades, each as a number of four bytes. */
function ramp({ sheet, shades }) {
  const stops = [sheet, ...shades.slice(2)], bytes = new Uint8ClampedArray(4 * 256).fill(255);
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
    for (let c = 0; c < 3; c++) bytes[4 * i + c] = stops[low][c] + (stops[low + 1][c] - stops[low][c]) * (at - low);
  }
  return new Uint32Array(bytes.buffer);
}

/** The pixel in which each token begins, the number of tokens in each pixel, and the last pixel before it with one. */
const grids = new Map();
function grid(pixels) {
  if (!grids.has(pixels)) {
    const of = Uint16Array.from({ length: T + 1 }, (_, j) => Math.floor((j * pixels) / T));
    const count = new Uint16Array(pixels), from = new Uint16Array(pixels);
    for (let j = 0; j < T; j++) count[of[j]]++;
    for (let x = 1; x < pixels; x++) from[x] = count[x] ? x : from[x - 1];
    grids.set(pixels, { of, count, from });
  }
  return grids.get(pixels);
}

class Maps {
  constructor(policy, act) {
    this.policy = policy;
    this.figure = element("figure");
    const caption = element("figcaption");
    this.caption = element("span");
    caption.append(element("b", "", policy.name), this.caption);
    this.map = this.plot("map", "Steps down, tokens across");
    this.strip = this.plot("strip", "Layers down, tokens across, at this step");
    this.moment = element("p", "moment");
    const chart = element("div", "chart"), tokens = ticks(T, 6), steps = ticks(T, 6);
    const layers = ticks(L, 4).map(([share, l]) => [share, data.layers[l]]);
    chart.append(axis("y", "step (tokens read)", steps), this.map.box, axis("x", "token", tokens));
    chart.append(this.moment, axis("y", "layer", layers), this.strip.box, axis("x", "token", tokens));
    this.figure.append(caption, chart);
    this.listen(this.map.box, act.onMap);
    this.listen(this.strip.box, act.onStrip);
  }

  plot(name, label) {
    const box = element("div", `plot ${name}`), below = element("canvas"), above = element("canvas");
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", `${this.policy.name}: ${label}`);
    box.append(below, above);
    return { box, below, above };
  }

  /** Call `onPointer` with the pointer's position, as shares of width and height, and whether it is down. */
  listen(box, onPointer) {
    const at = (event) => {
      const { left, top, width, height } = box.getBoundingClientRect();
      const inside = (share) => Math.max(0, Math.min(1 - 1e-9, share));
      return [inside((event.clientX - left) / width), inside((event.clientY - top) / height), event];
    };
    box.addEventListener("pointerdown", (event) => { box.setPointerCapture(event.pointerId); onPointer(...at(event), true); });
    box.addEventListener("pointermove", (event) => onPointer(...at(event), event.buttons > 0));
    box.addEventListener("pointerleave", () => onPointer(null));
  }

  /** Draw which steps see which tokens: a pixel's colour is the share of its pairs that see. */
  drawMap(colours) {
    const { width, height } = this.map.below, { policy } = this, across = grid(width), down = grid(height);
    const change = new Int32Array((height + 1) * width);
    for (const row of policy.rows) {
      for (let j = 0, i = row * T; j < T; j++, i++) {
        const top = down.of[j], bottom = Math.max(top + 1, down.of[Math.min(policy.times[i] + 1, T)]);
        change[top * width + across.of[j]]++;
        change[bottom * width + across.of[j]]--;
      }
    }
    const { image, pixels } = this.image(width, height), seen = new Int32Array(width);
    for (let y = 0, i = 0; y < height; y++) {
      for (let x = 0; x < width; x++, i++) {
        seen[x] += change[i];
        const from = across.from[x];
        pixels[i] = seen[from] ? colours[(255 * Math.sqrt(seen[from] / (across.count[from] * policy.rows.length))) | 0] : colours[0];
      }
    }
    this.map.below.getContext("2d").putImageData(image, 0, 0);
  }

  drawStrip(step, colours) {
    const { width, height } = this.strip.below, { image, pixels } = this.image(width, height);
    const { times, groups } = this.policy, { of, count, from } = grid(width), seen = new Uint32Array(width);
    for (let l = 0; l < L; l++) {
      seen.fill(0);
      for (let g = 0; g < groups; g++) {
        const start = (l * groups + g) * T;
        for (let j = 0; j <= step; j++) if (times[start + j] >= step) seen[of[j]]++;
      }
      const top = Math.floor((l * height) / L) * width, bottom = Math.floor(((l + 1) * height) / L) * width;
      for (let x = 0; x < width; x++) pixels[top + x] = colours[(255 * seen[from[x]] / (count[from[x]] * groups)) | 0];
      for (let y = top + width; y < bottom; y += width) pixels.copyWithin(y, top, top + width);
    }
    this.strip.below.getContext("2d").putImageData(image, 0, 0);
  }

  image(width, height) {
    const image = new ImageData(width, height);
    return { image, pixels: new Uint32Array(image.data.buffer) };
  }

  /** Draw the current step, the steps after it, the highlighted token, and the selected layer. */
  drawMarks({ step, layer, token }, { ink, accent, sheet }) {
    const { width, height } = this.map.below, map = this.map.above.getContext("2d");
    const x = (j) => ((j + 0.5) * width) / T, y = (t) => ((t + 0.5) * height) / T, thin = Math.max(1, devicePixelRatio);
    map.clearRect(0, 0, width, height);
    map.fillStyle = `rgb(${sheet.join(" ")} / .72)`;
    map.fillRect(0, y(step), width, height);
    map.fillStyle = accent;
    map.fillRect(0, y(step) - thin / 2, width, thin);
    if (token !== undefined) {
      const last = Math.max(...this.policy.rows.map((row) => Math.min(this.policy.last(row, token), T - 1)));
      map.fillStyle = ink;
      map.globalAlpha = 0.25;
      map.fillRect(x(token) - thin / 2, 0, thin, height);
      map.globalAlpha = 1;
      map.fillRect(x(token) - thin, y(token), 2 * thin, Math.max(2 * thin, y(last) - y(token)));
    }
    this.drawStripMarks(layer, token, ink, thin);
  }

  drawStripMarks(layer, token, ink, thin) {
    const { width, height } = this.strip.below, strip = this.strip.above.getContext("2d");
    strip.clearRect(0, 0, width, height);
    strip.strokeStyle = strip.fillStyle = ink;
    strip.lineWidth = thin;
    if (layer >= 0) strip.strokeRect(thin / 2, (layer * height) / L, width - thin, height / L);
    if (token !== undefined) strip.fillRect(((token + 0.5) * width) / T - thin / 2, 0, thin, height);
  }

  /** Size the canvases in device pixels. */
  measure() {
    for (const { box, below, above } of [this.map, this.strip]) {
      const width = Math.max(1, Math.round(box.clientWidth * devicePixelRatio));
      const height = Math.max(1, Math.round(box.clientHeight * devicePixelRatio));
      for (const canvas of [below, above]) Object.assign(canvas, { width, height });
    }
  }
}
