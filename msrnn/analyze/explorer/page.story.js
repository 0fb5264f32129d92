// A token's story: when it was read, when each policy dropped it, and which layers still hold it.

class Story {
  constructor(policies) {
    this.policies = policies;
    this.card = document.getElementById("story");
  }

  hide() {
    this.card.hidden = true;
  }

  /** Beside the pointer where there is room; a phone has its own place for it. */
  show(token, { step, layer, shown }, pointer) {
    const title = element("h3", "", visible(data.tokens[token]));
    title.append(" ", element("small", "", `token ${number(token)} · read at step ${number(token)}`));
    const narrow = matchMedia(NARROW).matches, told = narrow ? [this.policies[shown]] : this.policies;
    this.card.replaceChildren(title, ...told.flatMap((policy) => this.of(policy, token, step, layer)));
    this.card.hidden = false;
    if (!pointer || narrow) {
      this.card.style.left = this.card.style.top = "";
      return;
    }
    const { width, height } = this.card.getBoundingClientRect();
    const left = pointer.x + 18 + width > innerWidth - 8 ? pointer.x - width - 18 : pointer.x + 18;
    const top = Math.min(pointer.y + 16, innerHeight - height - 8);
    this.card.style.left = `${Math.max(8, left)}px`;
    this.card.style.top = `${Math.max(8, top)}px`;
  }

  of(policy, token, step, layer) {
    const bars = element("div", "bars");
    let holding = 0;
    for (let l = 0; l < L; l++) {
      const held = policy.heldBy(l, token, step), bar = element("i", held > 0 ? "held" : "");
      holding += held > 0;
      let kept = 0;
      for (let g = 0; g < policy.groups; g++) kept += policy.kept(l * policy.groups + g, token) / policy.groups;
      bar.style.height = `${100 * Math.sqrt(kept / (T - token))}%`;
      if (held > 0 && held < 1) bar.style.opacity = 0.4 + 0.6 * held;
      if (l === layer) bar.classList.add("chosen");
      bars.append(bar);
    }
    const now = token > step ? "not read yet" : `held in ${holding} of ${L} layers`;
    return [element("h4", "", policy.name), element("p", "", this.fate(policy, token)), bars, element("p", "", `bars: steps kept in each layer · at step ${number(step)} ${now}`)];
  }

  /** Of the chosen rows: one has a last step, many have the first and the last of them. */
  fate(policy, token) {
    const last = policy.rows.map((row) => policy.last(row, token)), steps = policy.life[token];
    const [first, final] = [Math.min(...last), Math.max(...last)];
    const after = `after ${number(steps)} ${Math.round(steps) === 1 ? "step" : "steps"}`;
    if (first >= T) return "never dropped";
    if (last.length === 1) return `dropped at step ${number(first)}, ${after}`;
    const held = last.filter((time) => time >= T).length;
    const end = held ? `never by ${held} of ${last.length}` : `last at step ${number(final)}`;
    return `first dropped at step ${number(first)}, ${end}; on average ${after}`;
  }
}

/** White space that can be seen. */
function visible(piece) {
  if (piece === "") return "· (part of a character)";
  return piece.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "␣");
}
