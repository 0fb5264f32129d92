// The card of a token: when it is read, when each policy evicts it, and which layers still keep it.

class TokenCard {
  constructor(policies) {
    this.policies = policies;
    this.card = document.getElementById("token-card");
  }

  hide() {
    this.card.hidden = true;
  }

  /** `anchor` returns the box of the token, or of the pointer in a map, in the window: the card must not cover it. */
  show(token, { step, layer, shown }, anchor) {
    const title = element("h3", "", visible(data.tokens[token]));
    const safe = token < data.protected ? " · protected" : "";
    title.append(" ", element("small", "", `token ${number(token)} · read at step ${number(token)}${safe}`));
    const policies = matchMedia(NARROW).matches ? [this.policies[shown]] : this.policies;
    this.card.replaceChildren(title, ...policies.flatMap((policy) => this.of(policy, token, step, layer)));
    this.card.hidden = false;
    this.place(anchor());
  }

  /** Place the card under or over the box, on a narrow screen at the bottom or the top; in a map beside the pointer. */
  place(box) {
    const narrow = matchMedia(NARROW).matches, gap = 10;
    const { width, height } = this.card.getBoundingClientRect(), [from, to] = uncovered();
    const low = from + 8, high = to - 8 - height; // for the card's own top
    if (box.bottom < from || box.top > to) return; // scrolled away: the card stays where it was
    const within = (value, least, most) => Math.max(least, Math.min(most, value));
    const under = box.bottom + gap, over = box.top - gap - height;
    let left = box.left - 24, top = narrow ? high : under;
    if (under > high) top = narrow ? low : over;
    if ((under > high && over < low) || (box.beside && !narrow)) {
      left = box.right + 18 + width > innerWidth - 8 ? box.left - 18 - width : box.right + 18;
      top = within(box.top, low, high);
    }
    this.card.style.left = `${within(left, 8, innerWidth - width - 8)}px`;
    this.card.style.top = `${top}px`;
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
    let recalling = 0;
    for (let l = 0; l < L; l++) recalling += policy.recalls(l, token, step);
    const back = recalling ? `, recalled in ${recalling}` : "";
    const now = token > step ? "not read yet" : `held in ${holding} of ${L} layers${back}`;
    return [element("h4", "", policy.name), element("p", "", this.evictions(policy, token)), bars, element("p", "", `bars: steps kept in each layer · at step ${number(step)} ${now}`)];
  }

  /** When the selected rows evict the token: one row at one step, several rows from a first to a last step. */
  evictions(policy, token) {
    const last = policy.rows.map((row) => policy.last(row, token)), steps = policy.life[token];
    const [first, final] = [Math.min(...last), Math.max(...last)];
    const after = `after ${number(steps)} ${Math.round(steps) === 1 ? "step" : "steps"}`;
    if (first >= T) return "never evicted";
    if (last.length === 1) return `evicted at step ${number(first)}, ${after}`;
    const held = last.filter((time) => time >= T).length;
    const end = held ? `never by ${held} of ${last.length}` : `last at step ${number(final)}`;
    return `first evicted at step ${number(first)}, ${end}; on average ${after}`;
  }
}

/** Show white space as symbols. */
function visible(piece) {
  if (piece === "") return "· (part of a character)";
  return piece.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "␣");
}
