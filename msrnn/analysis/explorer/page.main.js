// Where the reader looks, and everything that follows from it: one state, one way to draw it.

async function explore() {
  const policies = await Promise.all(data.policies.map(async (about) => new Policy(about, await unpacked(about.after))));
  const look = { step: T - 1, layer: -1, head: -1, token: undefined, fade: false, follow: true, shown: 0 };
  const texts = policies.map((policy) => new Text(policy));
  const story = new Story(policies);
  const act = {
    onMap(x, y, event, down) {
      if (x === null) return point(undefined);
      if (down) move({ step: Math.floor(y * T) });
      point(Math.floor(x * T), besides(event));
    },
    onStrip(x, y, event, down) {
      if (x === null) return point(undefined);
      const token = Math.floor(x * T);
      if (down) {
        move({ layer: Math.floor(y * L) });
        texts.forEach((text) => text.panel.hidden || text.show(token));
      }
      point(token, besides(event));
    },
  };
  const maps = policies.map((policy) => new Maps(policy, act));
  /** Where a token is in one of the texts, or the pointer in a map: asked again when something has moved. */
  const inText = (token, text) => () => (text.panel.hidden ? texts[look.shown] : text).spans[token].getBoundingClientRect();
  const besides = ({ clientX: x, clientY: y }) => () => ({ left: x, right: x, top: y - 16, bottom: y + 16, beside: true });
  let chosen = "", pinned = false, colours = null, drawn = null, frame = 0, timer = 0;

  /** Look elsewhere; everything is drawn once, in the next frame. */
  function move(change) {
    Object.assign(look, change);
    const within = (value, low, high) => Math.max(low, Math.min(high, value));
    look.step = within(look.step, 0, T - 1);
    look.layer = within(look.layer, -1, L - 1);
    look.head = within(look.head, -1, HEADS - 1);
    if ("step" in change) {
      look.fade ||= !look.asked; // at first every token shows how long it is kept; at a step, what is left of it
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
      texts[i].tell(look.step, policies[1 - i]);
      if (maps[i].figure.hidden) return;
      if (all || rows !== chosen) maps[i].drawMap(drawn);
      maps[i].drawStrip(look.step, drawn);
      maps[i].drawMarks(look, colours);
    });
    chosen = rows;
    label();
    if (look.scroll) texts[look.shown].show(look.step);
    look.scroll = false;
    if (pinned) story.show(look.token, look, pinned);
    remember();
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

  /** A token to look at, until the pointer is elsewhere; a click holds on to it. */
  function point(token, anchor, pin = false) {
    if (pinned && !pin) return;
    pinned = pin && token !== undefined && anchor;
    look.token = token;
    if (token === undefined) story.hide();
    else story.show(token, look, anchor);
    texts.forEach((text) => text.mark("focus", token));
    maps.forEach((map) => map.figure.hidden || map.drawMarks(look, colours));
    if (pin) remember();
  }

  /** To a token in the text, and hold on to it. */
  function go(token) {
    const text = texts[look.shown];
    text.show(token);
    point(token, inText(token, text), true);
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

  /** On a phone there is room for one policy. */
  function tab(index) {
    look.shown = index;
    const narrow = matchMedia(NARROW).matches;
    texts.forEach((text, i) => { text.panel.hidden = maps[i].figure.hidden = narrow && i !== index; });
    [...find("tabs").children].forEach((button, i) => button.setAttribute("aria-pressed", i === index));
    redraw();
  }

  /** Everything, in colours and sizes that may have changed. */
  function redraw() {
    drawn = null;
    move({});
  }

  let saving = 0;
  function remember() {
    clearTimeout(saving);
    saving = setTimeout(() => history.replaceState(null, "", address(look, pinned ? look.token : undefined)), 200);
  }

  /** To where the address says, when the page opens and when the address is changed by hand or by a link. */
  async function visit() {
    const { theme, token, ...asked } = hash();
    if (theme) document.documentElement.dataset.theme = theme;
    Object.assign(look, asked);
    look.scroll = look.follow && token === undefined && look.step < T - 1;
    redraw();
    for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame); // until what is in view lies where it will be
    if (token !== undefined) go(token);
  }

  furnish(policies, texts, maps, tab);
  listen({ look, texts, move, point: (token, text, pin) => point(token, text && inText(token, text), pin), play, tab, redraw });
  new Search(texts, go);
  addEventListener("hashchange", visit);
  addEventListener("scroll", () => pinned && story.place(pinned()), { passive: true });
  new ResizeObserver(() => document.documentElement.style.setProperty("--top", `${find("top").offsetHeight}px`)).observe(find("top"));
  tab(0);
  await visit();
  document.documentElement.dataset.ready = "yes";
}

explore().catch((error) => {
  find("about").textContent = `This page needs a browser of 2024 or newer (${error.message}).`;
});
