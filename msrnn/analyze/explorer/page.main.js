// Where the reader looks, and everything that follows from it: one state, one way to draw it.

const find = (id) => document.getElementById(id);

async function open() {
  const policies = await Promise.all(data.policies.map(async (about) => new Policy(about, await unpacked(about.after))));
  const heads = Math.max(...policies.map((policy) => policy.groups));
  const look = { step: T - 1, layer: -1, head: -1, token: undefined, fade: false, follow: true, shown: 0, ...hash() };
  const texts = policies.map((policy) => new Text(policy));
  const story = new Story(policies);
  const act = {
    onMap(x, y, event, down) {
      if (x === null) return point(undefined);
      if (down) move({ step: Math.floor(y * T) });
      point(Math.floor(x * T), event);
    },
    onStrip(x, y, event, down) {
      if (x === null) return point(undefined);
      const token = Math.floor(x * T);
      if (down) {
        move({ layer: Math.floor(y * L) });
        texts.forEach((text) => text.panel.hidden || text.show(token));
      }
      point(token, event);
    },
  };
  const maps = policies.map((policy) => new Maps(policy, act));
  let chosen = "", pinned = false, colours = null, drawn = null, frame = 0, timer = 0;

  /** Look elsewhere; everything is drawn once, in the next frame. */
  function move(change) {
    Object.assign(look, change);
    const within = (value, low, high) => Math.max(low, Math.min(high, value));
    look.step = within(look.step, 0, T - 1);
    look.layer = within(look.layer, -1, L - 1);
    look.head = within(look.head, -1, heads - 1);
    if ("step" in change) {
      look.fade = true; // at the end every token shows how long it was kept; at a step, what is left
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
    find("step-shown").textContent = `${number(look.step)} of ${number(T - 1)}`;
    find("layer-shown").textContent = look.layer < 0 ? "all" : data.layers[look.layer];
    find("head-shown").textContent = look.head < 0 ? "all" : look.head;
    const where = look.layer < 0 ? "all layers" : `layer ${data.layers[look.layer]}`;
    maps.forEach(({ policy, caption }) => {
      const head = policy.groups === 1 ? "" : look.head < 0 ? ", all heads" : `, head ${look.head}`;
      caption.textContent = where + head;
    });
    find("fade").setAttribute("aria-pressed", look.fade);
    find("follow").setAttribute("aria-pressed", look.follow);
  }

  /** A token to look at, until the pointer is elsewhere; a click holds on to it. */
  function point(token, pointer, pin = false) {
    if (pinned && !pin) return;
    pinned = pin && token !== undefined && (pointer ?? true);
    look.token = token;
    if (token === undefined) story.hide();
    else story.show(token, look, pointer);
    texts.forEach((text) => text.mark("focus", token));
    maps.forEach((map) => map.figure.hidden || map.drawMarks(look, colours));
    if (pin) remember();
  }

  function play(on = !timer) {
    cancelAnimationFrame(timer);
    timer = 0;
    find("play").textContent = on ? "❚❚" : "▶";
    if (!on) return;
    if (look.step >= T - 1) move({ step: 0 });
    const started = performance.now(), from = look.step >= T - 1 ? 0 : look.step, speed = Math.max(20, T / 40);
    const tick = (now) => {
      const step = Math.floor(from + ((now - started) / 1000) * speed);
      move({ step });
      timer = step < T - 1 ? requestAnimationFrame(tick) : 0;
      if (!timer) find("play").textContent = "▶";
    };
    timer = requestAnimationFrame(tick);
  }

  /** On a phone there is room for one policy. */
  function tab(index) {
    look.shown = index;
    const narrow = matchMedia(NARROW).matches;
    texts.forEach((text, i) => { text.panel.hidden = maps[i].figure.hidden = narrow && i !== index; });
    [...find("tabs").children].forEach((button, i) => button.setAttribute("aria-selected", i === index));
    drawn = null;
    move({});
  }

  let saving = 0;
  function remember() {
    clearTimeout(saving);
    const token = pinned ? `&token=${look.token}` : "";
    const theme = document.documentElement.dataset.theme ? `&theme=${document.documentElement.dataset.theme}` : "";
    saving = setTimeout(() => {
      history.replaceState(null, "", `#step=${look.step}&layer=${look.layer}&head=${look.head}&fade=${Number(look.fade)}${token}${theme}`);
    }, 400);
  }

  find("about").textContent = data.about;
  document.title = `${data.name} · which tokens stay`;
  Object.assign(find("step"), { max: T - 1 });
  Object.assign(find("layer"), { max: L - 1 });
  Object.assign(find("head"), { max: heads - 1 });
  find("head-label").hidden = heads === 1;
  find("main").dataset.panels = policies.length;
  find("maps").style.setProperty("--maps", policies.length);
  find("maps").before(...texts.map((text) => text.panel));
  find("maps").append(...maps.map((map) => map.figure));
  find("tabs").hidden = policies.length < 2;
  policies.forEach((policy, i) => {
    const button = element("button", "", policy.name);
    button.setAttribute("role", "tab");
    button.addEventListener("click", () => tab(i));
    find("tabs").append(button);
  });
  legend(policies[0].size);

  for (const name of ["step", "layer", "head"]) {
    find(name).addEventListener("input", (event) => { play(false); move({ [name]: Number(event.target.value) }); });
  }
  find("play").addEventListener("click", () => play());
  find("fade").addEventListener("click", () => move({ fade: !look.fade }));
  find("follow").addEventListener("click", () => move({ follow: !look.follow }));
  find("theme").addEventListener("click", () => theme());
  function theme() {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark" ||
      (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    drawn = null;
    move({});
  }
  const tokenOf = (event) => event.target.dataset?.token === undefined ? undefined : Number(event.target.dataset.token);
  for (const { body } of texts) {
    body.addEventListener("pointermove", (event) => event.pointerType === "touch" || point(tokenOf(event), event));
    body.addEventListener("pointerleave", () => point(undefined));
    body.addEventListener("click", (event) => point(tokenOf(event), event, true));
  }
  document.addEventListener("pointerdown", (event) => event.target.closest(".text, #controls, .plot") || point(undefined, null, true));
  addEventListener("keydown", (event) => keys(event));
  function keys(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const slider = event.target.type === "range", stride = event.shiftKey ? Math.max(2, Math.round(T / 32)) : 1;
    const press = event.target.tagName === "BUTTON" && event.key === " ";
    const actions = {
      ArrowLeft: () => move({ step: look.step - stride }), ArrowRight: () => move({ step: look.step + stride }),
      ArrowUp: () => move({ layer: look.layer - 1 }), ArrowDown: () => move({ layer: look.layer + 1 }),
      Home: () => move({ step: 0 }), End: () => move({ step: T - 1 }),
      ",": () => move({ head: look.head - 1 }), ".": () => move({ head: look.head + 1 }),
      " ": () => play(), Escape: () => point(undefined, null, true),
      f: () => move({ fade: !look.fade }), s: () => move({ follow: !look.follow }), d: () => theme(),
    };
    const native = slider && /^(Arrow|Home|End)/.test(event.key) && !event.shiftKey;
    if (!actions[event.key] || native || press) return;
    event.preventDefault();
    if (event.key !== " ") play(false);
    actions[event.key]();
  }
  const redraw = () => { drawn = null; tab(look.shown); };
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  if (look.theme) document.documentElement.dataset.theme = look.theme;
  tab(0);
  draw();
  if (look.token !== undefined) {
    texts[look.shown].show(look.token);
    const box = texts[look.shown].spans[look.token].getBoundingClientRect();
    point(look.token, { x: box.right, y: box.bottom }, true);
  }
  document.documentElement.dataset.ready = "yes";
}

/** What the address says of where to look. */
function hash() {
  const asked = new URLSearchParams(location.hash.slice(1)), found = {};
  for (const name of ["step", "layer", "head", "token", "fade"]) {
    if (/^-?\d+$/.test(asked.get(name) ?? "")) found[name] = Number(asked.get(name));
  }
  if ("fade" in found) found.fade = Boolean(found.fade);
  else if ("step" in found) found.fade = true;
  if (!(found.token >= 0 && found.token < T)) delete found.token;
  if (["light", "dark"].includes(asked.get("theme"))) found.theme = asked.get("theme");
  return found;
}

function legend(size) {
  const swatches = Array.from({ length: 8 }, (_, k) => {
    const from = shadeStart(k, size);
    return element("i", `k${k}`, k === 0 ? `< ${number(shadeStart(1, size))}` : `${number(from)}+`);
  });
  find("legend").append(element("span", "", "steps kept"), ...swatches,
    element("span", "", `a window would keep every token for ${number(size + 1)}`));
}

open();
