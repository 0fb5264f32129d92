// Controls: sliders, buttons, keys and clicks on tokens.

const find = (id) => document.getElementById(id);

/** Fill the page: titles, the sliders' ranges, the panels of the policies. */
function fillPage(policies, texts, maps, tab) {
  find("about").textContent = data.about;
  document.title = `${data.name} · which tokens stay`;
  find("step").max = T - 1;
  find("layer").max = L - 1;
  find("head").max = HEADS - 1;
  find("head-label").hidden = HEADS === 1;
  find("main").dataset.panels = policies.length;
  find("maps").style.setProperty("--maps", policies.length);
  find("maps").before(...texts.map((text) => text.panel));
  find("maps").append(...maps.map((map) => map.figure));
  find("tabs").hidden = policies.length < 2;
  policies.forEach((policy, i) => {
    const button = element("button", "", policy.name);
    button.addEventListener("click", () => tab(i));
    find("tabs").append(button);
  });
  legend();
}

function listen({ look, texts, move, point, play, tab, redraw }) {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const fade = () => move({ fade: !look.fade, fadeChosen: true }), follow = () => move({ follow: !look.follow });
  function theme() {
    root.dataset.theme = (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark";
    redraw();
  }
  for (const name of ["step", "layer", "head"]) {
    find(name).addEventListener("input", (event) => { play(false); move({ [name]: Number(event.target.value) }); });
  }
  for (const [name, act] of Object.entries({ play: () => play(), fade, follow, theme })) find(name).addEventListener("click", act);
  for (const text of texts) {
    const { body } = text;
    body.addEventListener("pointermove", (event) => event.pointerType === "touch" || point(tokenOf(event), text));
    body.addEventListener("pointerleave", () => point(undefined));
    body.addEventListener("click", (event) => point(tokenOf(event), text, true));
  }
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest(".text, #controls, #bar, .plot")) point(undefined, null, true);
  });
  addEventListener("keydown", (event) => {
    const stride = event.shiftKey ? Math.max(2, Math.round(T / 32)) : 1;
    const actions = {
      ArrowLeft: () => move({ step: look.step - stride }), ArrowRight: () => move({ step: look.step + stride }),
      ArrowUp: () => move({ layer: look.layer - 1 }), ArrowDown: () => move({ layer: look.layer + 1 }),
      Home: () => move({ step: 0 }), End: () => move({ step: T - 1 }),
      ",": () => move({ head: look.head - 1 }), ".": () => move({ head: look.head + 1 }),
      " ": () => play(), Escape: () => point(undefined, null, true), f: fade, s: follow, d: theme,
      "/": () => find("query").focus(),
    };
    if (!actions[event.key] || isHandledElsewhere(event)) return;
    event.preventDefault();
    if (event.key !== " ") play(false);
    actions[event.key]();
  });
  addEventListener("resize", () => tab(look.shown));
  dark.addEventListener("change", redraw);
}

/** Whether a slider, a button or the browser handles the key itself. */
function isHandledElsewhere({ target, key, shiftKey, ctrlKey, metaKey, altKey }) {
  if (ctrlKey || metaKey || altKey || target.type === "search") return true;
  if (target.type === "range") return /^(Arrow|Home|End)/.test(key) && !shiftKey;
  return target.tagName === "BUTTON" && key === " ";
}

function tokenOf({ target }) {
  return target.dataset?.token === undefined ? undefined : Number(target.dataset.token);
}
