// The page: which conversation is shown, what is sent, and what is drawn.

async function chat() {
  const card = new TokenCard(), log = new Log(() => card.hide()), composer = new Composer(() => submit()), look = new Look(() => panel?.drawMap());
  let loaded = []; // conversations that were shown
  let model = null, texts = null, list = null, panel = null, current = null, infos = [], frame = 0;
  const settings = new Settings(() => start(), () => panel && forgetAll());

  /** Begin, once the server answers; again after another key was given. */
  async function start() {
    try {
      [model] = (await json("/v1/models")).data;
    } catch (problem) {
      return report(problem);
    }
    report(null);
    if (!panel) {
      texts = new Texts(model.id, () => settings.keep);
      const act = { open: choose, fork, remove, read, forget };
      list = new List(texts, Object.fromEntries(Object.entries(act).map(([name, does]) => [name, (about) => guarded(() => does(about))])));
      panel = new MemoryPanel(model, pointAtMap, scrollTo);
    }
    document.title = `${model.id} · a memory of fixed size`;
    find("about").textContent = `${model.id} · policy ${model.policy} · ${number(model.size)} KV rows in each layer`;
    settings.describe(model);
    await guarded(async () => {
      await refresh();
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

  /** Ask which sessions the server has, and compare them with what is here. */
  async function refresh() {
    texts.reload(); // before the list is asked for: a text may be older than the list, not newer
    infos = await allSessions();
    const was = current?.gone;
    for (const one of loaded) one.compare(infos);
    loaded = loaded.filter((one) => one === current || !one.moved);
    showList();
    if (current && current.gone !== was) await current.recall();
  }

  const showList = () => list.show(infos, current, loaded.filter(({ gone }) => gone));

  /** Show the conversation that the address names, or a new one. */
  async function visit() {
    const name = decodeURIComponent(location.hash.slice(1));
    if (name ? !(await open(name)) : !current) fresh();
  }

  function newName() {
    const time = new Date().toISOString().slice(0, 16).replace(/[-:]/g, "");
    return `chat-${time}-${randomHex()}`;
  }

  function made(name) {
    const conversation = new Conversation(name, model, texts);
    conversation.changed = () => conversation === current && draw();
    conversation.giveBack = (text) => (conversation === current ? composer.giveBack(text) : (conversation.draft = `${text}\n\n${conversation.draft}`.trim()));
    loaded.push(conversation);
    return conversation;
  }

  /** A new conversation; `text`: what stands in its box. */
  function fresh(text = "") {
    show(current && !current.begun && loaded.includes(current) ? current : made(newName()));
    composer.text ||= text;
  }

  /** Open an item of the list, if need be without the server. */
  async function choose(name) {
    let problem = null;
    await refresh().catch((error) => (problem = error));
    await open(name);
    if (problem) throw problem;
  }

  /** Show a session of the server, or what is here of one that is gone. Returns whether there is any. */
  async function open(name) {
    const info = infos.find((one) => one.name === name), old = loaded.find((one) => one.name === name && Boolean(info) !== one.gone);
    if (old && !old.moved) show(old);
    else if (info) await load(info, old);
    else {
      const kept = texts.orphans(infos).find((one) => one.name === name);
      if (!kept) return false;
      read(kept);
    }
    return true;
  }

  /** Show a session for the first time, or in place of what was here before it went on elsewhere. */
  async function load(info, old) {
    const conversation = made(info.name);
    conversation.open(info, texts.match(info), false);
    if (old) conversation.draft = old === current ? composer.text : old.draft;
    loaded = loaded.filter((one) => one !== old);
    show(conversation);
    await conversation.recall();
  }

  /** Show the text of a session that the server no longer has. */
  function read(kept) {
    let conversation = kept.conversation ?? loaded.find((one) => one.key === kept.key);
    if (!conversation) {
      conversation = made(kept.name);
      conversation.open(kept, kept, true);
      conversation.paint();
    }
    show(conversation);
  }

  function show(conversation) {
    if (current) current.draft = composer.text;
    current = conversation;
    composer.text = current.draft;
    log.show(current.begun ? current.element : welcome());
    history.replaceState(null, "", current.info ? `#${current.name}` : location.pathname);
    showList();
    look.drawer(false);
    draw();
    if (matchMedia("(hover: hover)").matches) composer.focus();
  }

  function welcome() {
    const whole = element("div", "welcome"), words = element("p");
    whole.append(element("h2", "", "Say something."), words);
    words.append("However long this conversation becomes, it takes ", element("b", "", inBytes(model.bytes)), ". The model holds ",
      element("b", "", `${number(model.size)} tokens`), " in each layer. Words fade as they are forgotten; old ones that it keeps are ",
      element("span", "sample s8 old", "marked"), ".");
    return whole;
  }

  /** Send what is in the box. */
  function submit() {
    const text = composer.text.trim();
    if (!text || !current || current.running) return;
    if (current.gone) return report(new Problem(`${find("gone-words").textContent} Start a new conversation to send this message.`));
    composer.text = "";
    guarded(() => send(current, text));
  }

  /** Send the message of a turn that does not count once more: the session is as it was before that turn. */
  async function retry(view) {
    if (current.running || current.gone) return;
    composer.takeOut(view.turn.user);
    composer.focus();
    await send(current, view.turn.user, view);
  }

  async function send(conversation, text, retried) {
    let counts = false, problem = null;
    conversation.busy = true;
    log.element.setAttribute("aria-busy", true);
    const { system, sampling, beginning } = settings, sent = conversation.send(text, { system, sampling, beginning }, retried);
    log.show(conversation.element);
    find("status").textContent = "The model reads.";
    try {
      counts = await sent;
    } catch (error) {
      problem = error;
    }
    try {
      problem = (await settled(conversation, counts)) ?? problem;
    } catch (error) {
      problem ??= error;
    }
    conversation.busy = false;
    conversation.changed();
    if (problem) throw problem;
  }

  /** After a turn, whether it counts or not: the list, the state, and the text. Returns a Problem that says more. */
  async function settled(conversation, counts) {
    const last = conversation.views.at(-1);
    find("status").textContent = counts ? `Answer: ${last.text} ${last.turn.note}` : "The message is back in the box.";
    if (conversation === current) {
      if (!conversation.begun) log.show(welcome());
      draw();
    }
    await refresh();
    if (conversation.gone) return counts ? null : new Problem("The server no longer has this conversation: the message was not sent.");
    if (conversation.moved) {
      if (conversation === current) await open(conversation.name);
      return new Problem("This conversation has gone on without this page. Read it, and send the message again if it is still needed.");
    }
    if (!counts) {
      if (conversation.info) conversation.keep();
      await conversation.recall();
    }
    if (conversation === current && conversation.info) history.replaceState(null, "", `#${conversation.name}`);
    showList();
    return texts.complaint();
  }

  async function fork(name) {
    const other = newName(), source = loaded.find((one) => one.name === name && !one.gone);
    await json(`/v1/sessions/${name}/fork`, { method: "POST", body: { to: other } });
    await refresh();
    const info = infos.find((one) => one.name === other);
    if (info && source) texts.keep(null, info, source.turns.filter((turn) => !turn.lost));
    await open(other);
  }

  /** Delete a session of the server, and its text. */
  async function remove(name) {
    const text = texts.match(infos.find((one) => one.name === name)), conversation = loaded.find((one) => one.name === name && !one.gone);
    try {
      await json(`/v1/sessions/${name}`, { method: "DELETE" });
      forget({ key: conversation?.key ?? text?.key ?? null, conversation });
    } finally {
      await refresh();
    }
  }

  /** Delete a text. */
  function forget({ key, conversation }) {
    if (key) texts.forget(key);
    loaded = loaded.filter((one) => one !== conversation && (!key || one.key !== key));
    leave();
  }

  function forgetAll() {
    for (const key of [...texts.all.keys()]) texts.forget(key);
    loaded = loaded.filter(({ running }) => running);
    for (const one of loaded) one.key = null;
    leave();
  }

  /** Show a new conversation if the one that is shown was deleted. */
  function leave() {
    if (loaded.includes(current)) showList();
    else fresh(composer.text);
  }

  async function copy(pressed, view) {
    await copyText(pressed.code ? pressed.code() : view.text);
    find("status").textContent = pressed.textContent = "Copied";
    setTimeout(() => (pressed.textContent = "Copy"), 2000);
  }

  /** Draw once in the next frame, however much has changed. */
  function draw() {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      panel.show(current.memory);
      composer.show(current);
      log.element.setAttribute("aria-busy", current.busy);
      current.element.classList.toggle("running", current.running !== null);
      current.element.classList.toggle("gone", current.gone);
      log.follow();
    });
  }

  function tokenOf({ target }) {
    const token = target.token ?? target.parentNode?.token; // or a part of it
    return current?.tokens.at[token?.positions[0]] === token ? token : undefined;
  }

  function pointAtMap(position, event) {
    const token = position === undefined ? undefined : current.tokens.at[position];
    card.show(current, token, event && { left: event.clientX, top: event.clientY - 12, bottom: event.clientY + 12 });
  }

  function scrollTo(position) {
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    current.tokens.at[position]?.node.scrollIntoView({ block: "center", behavior: calm ? "instant" : "smooth" });
  }

  function listen() {
    addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || settings.dialog.open) return;
      current?.stop();
      look.drawer(false);
      card.hide();
    });
    find("stop").addEventListener("click", () => { current.stop(); composer.focus(); });
    find("new").addEventListener("click", () => guarded(() => fresh()));
    find("start-new").addEventListener("click", () => guarded(() => fresh(composer.text)));
    new ResizeObserver(() => current && draw()).observe(log.element);
    find("problem").lastElementChild.addEventListener("click", () => report(null));
    log.element.addEventListener("pointermove", (event) => event.pointerType === "touch" || card.show(current, tokenOf(event)));
    log.element.addEventListener("pointerleave", () => card.hide());
    log.element.addEventListener("click", (event) => {
      const pressed = event.target.closest("button"), view = pressed?.closest(".turn")?.view;
      if (view) guarded(() => (pressed.matches(".copy, .copy-code") ? copy(pressed, view) : retry(view)));
      else card.show(current, tokenOf(event));
    });
    addEventListener("hashchange", () => panel && guarded(visit));
    document.addEventListener("visibilitychange", () => document.hidden || !current || follow().catch(report));
  }

  /** What has happened on the server while the page was not looked at. */
  async function follow() {
    await refresh();
    if (current.moved) await open(current.name);
  }

  listen();
  await start();
}

chat().catch((error) => {
  find("about").textContent = `This page needs a browser of 2024 or newer (${error.message}).`;
});
