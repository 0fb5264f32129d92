// Axes: numbers beside a plot, at the row or column that they name.

/** At most `most` round numbers below `count`, each with its position on the axis as a share of its length. */
function ticks(count, most) {
  let unit = 1;
  for (let i = 0; Math.ceil(count / unit) > most; i++) unit *= i % 3 === 1 ? 2.5 : 2; // 1, 2, 5, 10, 20, 50, …
  return Array.from({ length: Math.ceil(count / unit) }, (_, i) => [(i * unit + 0.5) / count, i * unit]);
}

/** A horizontal ("x") or vertical ("y") axis, hidden from screen readers: they read the plot's label. */
function axis(direction, name, marks) {
  const made = element("div", `axis ${direction}`), labels = marks.map(([, value]) => number(value));
  made.setAttribute("aria-hidden", "true");
  const scale = element("div", "scale");
  if (direction === "y") scale.style.width = `${Math.max(...labels.map((label) => label.length)) + 1}ch`;
  marks.forEach(([share], i) => {
    const mark = element("span", "", direction === "x" && i === 0 ? `${name} ${labels[i]}` : labels[i]);
    mark.style[direction === "x" ? "left" : "top"] = `${100 * share}%`;
    scale.append(mark);
  });
  if (direction === "y") made.append(element("b", "", name));
  made.append(scale);
  return made;
}
