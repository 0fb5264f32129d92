// Shades show how long a token is kept, on one scale for all policies that depends on the size and the text's length.

const SHADES = 8; // colours, --k0 to --k7
const STARTS = shadeStarts(Math.min(...data.policies.map((policy) => policy.size)), T);

/** The numbers of steps at which a new shade begins: in equal factors, from size / 8 to half of the text's length. */
function shadeStarts(size, length) {
  const low = Math.max(2, size / 8), high = Math.max(low, length / 2);
  const starts = Array.from({ length: SHADES - 1 }, (_, i) => rounded(low * (high / low) ** (i / (SHADES - 2))));
  return [...new Set(starts)].filter((start) => start <= length);
}

/** Round to two digits. */
function rounded(value) {
  const unit = 10 ** Math.max(0, Math.floor(Math.log10(value)) - 1);
  return Math.round(value / unit) * unit;
}

/** The colour of a token that is kept for this many steps. A short text has fewer shades; the last is always used. */
function shade(kept) {
  let k = 0;
  while (k < STARTS.length && kept >= STARTS[k]) k++;
  return colourOf(k);
}
const colourOf = (k) => (STARTS.length ? Math.round((k * (SHADES - 1)) / STARTS.length) : 0);

function legend() {
  const names = STARTS.map((start) => `${number(start)}+`);
  names.unshift(STARTS.length ? `< ${number(STARTS[0])}` : "1+");
  const swatches = names.map((name, k) => element("i", `swatch k${colourOf(k)}`, name));
  find("legend").append(element("span", "", "steps kept"), ...swatches);
  const about = [`Shades: steps kept, ${names.join(", ")}`];
  const marks = [["protected", "underlined", data.protected], ["recalled", "outlined", data.policies[0].recalled]];
  for (const [name, how, shown] of marks) {
    if (!shown) continue;
    const sample = element("span", "", name);
    sample.id = `legend-${name}`;
    find("legend").append(sample);
    about.push(`${how}: ${name}`);
  }
  find("legend").setAttribute("aria-label", about.join("; "));
}

/** The theme's colours, read from elements: [red, green, blue] for background and shades. */
function palette() {
  const samples = Array.from({ length: SHADES }, (_, k) => element("i", `swatch k${k}`));
  find("legend").append(...samples);
  const shades = samples.map((sample) => rgb(getComputedStyle(sample).backgroundColor));
  samples.forEach((sample) => sample.remove());
  return { sheet: rgb(getComputedStyle(document.querySelector(".plot")).backgroundColor), shades,
    ink: getComputedStyle(document.body).color, accent: getComputedStyle(find("play")).accentColor };
}
const rgb = (text) => text.match(/[\d.]+/g).slice(0, 3).map(Number);
