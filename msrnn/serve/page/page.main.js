// The page: which conversation is shown, what is sent, and what is drawn.

async function chat() {
  const conversations = new Map(), log = find("log"), message = find("message"), card = find("token-card");
  let model = null, texts = null, list = null, panel = null, current = null, infos = [], frame = 0, sticks = true;
  const settings = new Settings(() => start());

  /** Begin, once the server answers; again after another key was given. */
  async function start() {
    try {
      [model] = (await json("/v1/models")).data;
    } catch (problem) {
      return report(problem);
    }
    report(null);
    if (!panel) {
      texts = new Texts(model.id);
      list = new List(texts, { open: (name) => guarded(() => open(name)), fork: (name) => guarded(() => fork(name)), remove: (name) => guarded(() => remove(name)) });
      panel = new MemoryPanel(model, pointAtMap, scrollTo);
    }
    document.title = `${model.id} · a memory of fixed size`;
    find("about").textContent = `${model.id} · policy ${model.policy} · ${number(model.size)} states in each layer`;
    settings.describe(model);
    await guarded(async () => {
      await refresh();
      texts.prune(new Set(infos.map(({ name }) => name)));
      await visit();
    });
    document.documentElement.dataset.ready = "yes";
  }

  /** Do something that asks the server; what goes wrong is said. */
  async function guarded(act) {
    try {
      report(null);
      await act();
    } catch (problem) {
      report(problem);
    }
  }

  function report(problem) {
    find("problem").hidden = !problem;
    if (!problem) return;
    find("problem").firstElementChild.textContent = problem instanceof Problem ? problem.message : `This page has an error: ${problem.message}.`;
    if (problem.status === 401) settings.open(problem.message);
  }

  async function refresh() {
    infos = (await json("/v1/sessions")).data;
    list.show(infos, current);
  }

  /** Show the conversation that the address names, or a new one. */
  async function visit() {
    const name = decodeURIComponent(location.hash.slice(1));
    if (infos.some((info) => info.name === name)) await open(name);
    else if (!current || name) fresh();
  }

  function newName() {
    const time = new Date().toISOString().slice(0, 16).replace(/[-:]/g, "");
    return `chat-${time}-${[...crypto.getRandomValues(new Uint8Array(4))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
  }

  function made(name) {
    const conversation = new Conversation(name, model, texts);
    conversation.changed = () => conversation === current && draw();
    conversations.set(name, conversation);
    return conversation;
  }

  function fresh() {
    show(current && !current.begun ? current : made(newName()));
  }

  async function open(name) {
    const info = infos.find((one) => one.name === name);
    let conversation = conversations.get(name);
    if (conversation && !conversation.running && info && conversation.info?.updated !== info.updated) {
      conversations.delete(name); // it went on elsewhere
      conversation = null;
    }
    if (!conversation) {
      conversation = made(name);
      await conversation.open(info);
    }
    show(conversation);
  }

  function show(conversation) {
    if (current) current.draft = message.value;
    current = conversation;
    message.value = current.draft;
    grow();
    log.replaceChildren(current.begun ? current.element : welcome());
    history.replaceState(null, "", current.info ? `#${current.name}` : location.pathname);
    list.show(infos, current);
    drawer(false);
    sticks = true;
    draw();
    if (matchMedia("(hover: hover)").matches) message.focus();
  }

  function welcome() {
    const whole = element("div", "welcome"), words = element("p");
    whole.append(element("h2", "", "Say something."), words);
    words.append("However long this conversation becomes, it takes ", element("b", "", inBytes(model.bytes)), ". The model holds ",
      element("b", "", `${number(model.size)} tokens`), " in each layer. Words fade as they are forgotten; old ones that it keeps are ",
      element("span", "sample s8 old", "marked"), ".");
    return whole;
  }

  async function send() {
    const text = message.value.trim(), conversation = current;
    if (!text || !conversation || conversation.running) return;
    message.value = conversation.draft = "";
    grow();
    sticks = true;
    await guarded(async () => {
      const { system, sampling } = settings, sent = conversation.send(text, { system, sampling });
      log.replaceChildren(conversation.element);
      find("status").textContent = "The model reads.";
      try {
        await sent;
      } finally {
        await settled(conversation);
      }
    });
  }

  /** After a turn, whether it counts or not: the list, the state, and the text that this browser keeps. */
  async function settled(conversation) {
    const last = conversation.turns.at(-1), lost = !last || last.lost;
    find("status").textContent = lost ? last?.note ?? "" : `Answer: ${last.pieces.slice(last.answer - last.start).join("")}`;
    if (conversation === current) {
      message.value ||= conversation.draft;
      if (!conversation.begun) log.replaceChildren(welcome());
      grow();
      draw();
    }
    await refresh();
    conversation.settle(infos.find(({ name }) => name === conversation.name), settings.keep);
    if (lost) await conversation.recall();
    if (conversation !== current) return;
    if (conversation.info) history.replaceState(null, "", `#${conversation.name}`);
    list.show(infos, current);
  }

  async function fork(name) {
    const other = newName(), source = conversations.get(name);
    await json(`/v1/sessions/${name}/fork`, { method: "POST", body: { to: other } });
    await refresh();
    const info = infos.find((one) => one.name === other);
    if (info && source && settings.keep) texts.keep(info, source.turns.filter((turn) => !turn.lost));
    await open(other);
  }

  async function remove(name) {
    await json(`/v1/sessions/${name}`, { method: "DELETE" });
    texts.forget(name);
    conversations.delete(name);
    await refresh();
    if (current.name === name) fresh();
  }

  /** Draw once in the next frame, however much has changed. */
  function draw() {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      panel.show(current.memory);
      const running = current.running !== null;
      find("send").hidden = running;
      find("stop").hidden = !running;
      log.setAttribute("aria-busy", running);
      current.element.classList.toggle("running", running);
      if (sticks) log.scrollTop = log.scrollHeight;
    });
  }

  /** The message's field is as high as its text, up to a third of the window. */
  function grow() {
    message.style.height = "auto";
    message.style.height = `${message.scrollHeight + 2}px`;
  }

  function drawer(open) {
    find("conversations").classList.toggle("open", open);
    find("open-list").setAttribute("aria-expanded", open);
    if (open) find("new").focus();
  }

  /** The card of a token: its text, its position, and how much of the model still holds it. */
  function point(token, place) {
    for (const marked of document.querySelectorAll(".focus")) marked.classList.remove("focus");
    card.hidden = !token;
    if (!token) return;
    token.node.classList.add("focus");
    const share = current.tokens.share(token, current.memory), [first] = token.positions, last = token.positions.at(-1);
    const held = share === null ? "not read yet" : share === 0 ? "forgotten" : `held in ${percent(share)} of the layers`;
    const name = first === last ? `token ${number(first)}` : `tokens ${number(first)} to ${number(last)}`;
    card.replaceChildren(element("b", "", shown(token.text) || "a part of a character"), element("span", "", `${name} · ${held}`));
    const { width, height } = card.getBoundingClientRect(), box = place ?? token.node.getBoundingClientRect();
    const top = box.bottom + 8 + height > innerHeight ? box.top - 8 - height : box.bottom + 8;
    card.style.left = `${Math.max(8, Math.min(innerWidth - width - 8, box.left - 12))}px`;
    card.style.top = `${Math.max(8, top)}px`;
  }

  const tokenOf = ({ target }) => (current?.tokens.at[target.token?.positions[0]] === target.token ? target.token : undefined);

  function pointAtMap(position, event) {
    const token = position === undefined ? undefined : current.tokens.at[position];
    point(token, event && { left: event.clientX, top: event.clientY - 12, bottom: event.clientY + 12 });
  }

  function scrollTo(position) {
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    current.tokens.at[position]?.node.scrollIntoView({ block: "center", behavior: calm ? "instant" : "smooth" });
  }

  function theme() {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = (root.dataset.theme ?? (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
    local.set("msrnn theme", root.dataset.theme);
    panel?.drawMap();
  }

  function listen() {
    find("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
    message.addEventListener("input", grow);
    message.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send();
    });
    addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || settings.dialog.open) return;
      current?.stop();
      drawer(false);
      point(undefined);
    });
    find("stop").addEventListener("click", () => { current.stop(); message.focus(); });
    find("new").addEventListener("click", () => guarded(fresh));
    find("open-list").addEventListener("click", () => drawer(!find("conversations").classList.contains("open")));
    document.addEventListener("pointerdown", ({ target }) => target.closest("#conversations, #open-list") || drawer(false));
    new ResizeObserver(() => current && draw()).observe(log);
    find("theme").addEventListener("click", theme);
    find("fade").addEventListener("click", () => {
      const fades = find("fade").getAttribute("aria-pressed") !== "true";
      find("fade").setAttribute("aria-pressed", fades);
      log.classList.toggle("plain", !fades);
    });
    find("problem").lastElementChild.addEventListener("click", () => report(null));
    log.addEventListener("scroll", () => { sticks = log.scrollHeight - log.scrollTop - log.clientHeight < 60; point(undefined); }, { passive: true });
    log.addEventListener("pointermove", (event) => event.pointerType === "touch" || point(tokenOf(event)));
    log.addEventListener("pointerleave", () => point(undefined));
    log.addEventListener("click", (event) => point(tokenOf(event)));
    addEventListener("hashchange", () => panel && guarded(visit));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => panel?.drawMap());
    settings.changed = () => settings.keep || texts?.forgetAll();
    const kept = local.get("msrnn theme");
    if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
  }

  listen();
  await start();
}

chat().catch((error) => {
  find("about").textContent = `This page needs a browser of 2024 or newer (${error.message}).`;
});
