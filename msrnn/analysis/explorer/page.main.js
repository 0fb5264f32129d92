// The page's state (`look`) and the one function that draws it.

async function explore() {
  const policies = await Promise.all(data.policies.map(async (about) =>
    new Policy(about, await unpacked(about.after), about.recalled && await inflated(about.recalled))));
  const look = { step: T - 1, layer: -1, head: -1, token: undefined, fade: false, follow: true, shown: 0 };
  const texts = policies.map((policy) => new Text(policy));
  const card = new TokenCard(policies);
  const act = {
    onMap(x, y, event, down) {
      if (x === null) return point(undefined);
      if (down) move({ step: Math.floor(y * T) });
      point(Math.floor(x * T), pointerBox(event));
    },
    onStrip(x, y, event, down) {
      if (x === null) return point(undefined);
      const token = Math.floor(x * T);
      if (down) {
        move({ layer: Math.floor(y * L) });
        texts.forEach((text) => text.panel.hidden || text.show(token));
      }
      point(token, pointerBox(event));
    },
  };
  const maps = policies.map((policy) => new Maps(policy, act));
  /** Functions that return where a token of a text is, or the pointer in a map; called again after scrolling. */
  const tokenBox = (token, text) => () => (text.panel.hidden ? texts[look.shown] : text).spans[token].getBoundingClientRect();
  const pointerBox = ({ clientX: x, clientY: y }) => () => ({ left: x, right: x, top: y - 16, bottom: y + 16, beside: true });
  let chosen = "", pinned = false, colours = null, drawn = null, frame = 0, timer = 0;

  /** Change the state; the page is drawn once, in the next frame. */
  function move(change) {
    Object.assign(look, change);
    const within = (value, low, high) => Math.max(low, Math.min(high, value));
    look.step = within(look.step, 0, T - 1);
    look.layer = within(look.layer, -1, L - 1);
    look.head = within(look.head, -1, HEADS - 1);
    if ("step" in change) {
      look.fade ||= !look.fadeChosen; // at first no token is faded; moving the step fades evicted tokens
      look.scroll = look.follow;
    }
    frame ||= requestAnimationFrame(draw);
  }

  function draw() {
    cancelAnimationFrame(frame);
    frame = 0;
    const rows = `${look.layer}/${look.head}`, all = !drawn;
    if (all) {
      colours = palette();
      drawn = ramp(colours);
      maps.forEach((map) => map.measure());
    }
    if (rows !== chosen) policies.forEach((policy) => policy.choose(look.layer, look.head));
    policies.forEach((policy) => policy.look(look.step));
    policies.forEach((policy, i) => {
      texts[i].paint(look.step, look.fade);
      texts[i].mark("focus", look.token);
      texts[i].showCounts(look.step, policies[1 - i]);
      if (maps[i].figure.hidden) return;
      if (all || rows !== chosen) maps[i].drawMap(drawn);
      maps[i].drawStrip(look.step, drawn);
      maps[i].drawMarks(look, colours);
    });
    chosen = rows;
    label();
    if (look.scroll) texts[look.shown].show(look.step);
    look.scroll = false;
    if (pinned) card.show(look.token, look, pinned);
    saveAddress();
  }

  function label() {
    for (const name of ["step", "layer", "head"]) find(name).value = look[name];
    const shown = {
      step: `${number(look.step)} of ${number(T - 1)}`,
      layer: look.layer < 0 ? ALL : String(data.layers[look.layer]),
      head: look.head < 0 ? ALL : String(look.head),
    };
    for (const [name, text] of Object.entries(shown)) {
      find(`${name}-shown`).textContent = text;
      find(name).setAttribute("aria-valuetext", text);
    }
    const where = look.layer < 0 ? "all layers" : `layer ${data.layers[look.layer]}`;
    maps.forEach(({ policy, caption, moment }) => {
      const head = policy.groups === 1 ? "" : look.head < 0 ? ", all heads" : `, head ${look.head}`;
      caption.textContent = where + head;
      moment.textContent = `held at step ${number(look.step)}, by layer`;
    });
    find("fade").setAttribute("aria-pressed", look.fade);
    find("follow").setAttribute("aria-pressed", look.follow);
  }

  /** Highlight a token while the pointer is on it; a click pins it. */
  function point(token, anchor, pin = false) {
    if (pinned && !pin) return;
    pinned = pin && token !== undefined && anchor;
    look.token = token;
    if (token === undefined) card.hide();
    else card.show(token, look, anchor);
    texts.forEach((text) => text.mark("focus", token));
    maps.forEach((map) => map.figure.hidden || map.drawMarks(look, colours));
    if (pin) saveAddress();
  }

  /** Scroll to a token and pin it. */
  function go(token) {
    const text = texts[look.shown];
    text.show(token);
    point(token, tokenBox(token, text), true);
  }

  function play(on = !timer) {
    cancelAnimationFrame(timer);
    timer = 0;
    const button = (playing) => {
      find("play").textContent = playing ? "❚❚" : "▶";
      find("play").setAttribute("aria-label", playing ? "Pause" : "Play");
    };
    button(on);
    if (!on) return;
    if (look.step >= T - 1) move({ step: 0 });
    const started = performance.now(), from = look.step, speed = Math.max(20, T / 40);
    const tick = (now) => {
      const step = Math.floor(from + ((now - started) / 1000) * speed);
      move({ step });
      timer = step < T - 1 ? requestAnimationFrame(tick) : 0;
      if (!timer) button(false);
    };
    timer = requestAnimationFrame(tick);
  }

  /** Select a policy: on a narrow screen only one is shown. */
  function tab(index) {
    look.shown = index;
    const narrow = matchMedia(NARROW).matches;
    texts.forEach((text, i) => { text.panel.hidden = maps[i].figure.hidden = narrow && i !== index; });
    [...find("tabs").children].forEach((button, i) => button.setAttribute("aria-pressed", i === index));
    redraw();
  }

  /** Draw everything again, after a change of colours or sizes. */
  function redraw() {
    drawn = null;
    move({});
  }

  let saving = 0;
  function saveAddress() {
    clearTimeout(saving);
    saving = setTimeout(() => history.replaceState(null, "", address(look, pinned ? look.token : undefined)), 200);
  }

  /** Show what the address describes, when the page opens and when its address changes. */
  async function visit() {
    const { theme, token, ...given } = viewFromAddress();
    if (theme) document.documentElement.dataset.theme = theme;
    Object.assign(look, given);
    look.scroll = look.follow && token === undefined && look.step < T - 1;
    redraw();
    for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame); // until the layout is final
    if (token !== undefined) go(token);
  }

  fillPage(policies, texts, maps, tab);
  listen({ look, texts, move, point: (token, text, pin) => point(token, text && tokenBox(token, text), pin), play, tab, redraw });
  new Search(texts, go);
  addEventListener("hashchange", visit);
  addEventListener("scroll", () => pinned && card.place(pinned()), { passive: true });
  new ResizeObserver(() => document.documentElement.style.setProperty("--top", `${find("top").offsetHeight}px`)).observe(find("top"));
  tab(0);
  await visit();
  document.documentElement.dataset.ready = "yes";
}

explore().catch((error) => {
  find("about").textContent = `This page needs a browser of 2024 or newer (${error.message}).`;
});
