// The list of conversations.

class List {
  /** `act` has what the buttons do: open, fork and remove of a session; read and forget of a text without one. */
  constructor(texts, act) {
    Object.assign(this, { texts, act });
  }

  /** Sessions of the server, then conversations that are only here: kept texts, and those of this page that are `gone`. */
  show(infos, current, gone) {
    const items = infos.map((info) => this.item(info, current));
    const unkept = gone.filter(({ key }) => key === null);
    const texts = this.texts.orphans(infos).map((kept) => [kept.log[0]?.user ?? kept.name, kept, kept.key === current?.key]);
    for (const one of unkept) texts.unshift([one.title, { ...one.info, conversation: one }, one === current]);
    items.push(...texts.map(([title, kept, is]) => this.goneItem(title, kept, is)));
    const fresh = current?.begun && !current.gone && !infos.some(({ name }) => name === current.name);
    if (fresh) items.unshift(this.entry(current.title, "not kept yet", true));
    find("list").replaceChildren(...items);
    find("no-list").hidden = items.length > 0;
  }

  entry(title, about, current, open = () => {}) {
    const item = element("li", current ? "current" : ""), opener = button("open", "");
    opener.append(element("b", "", visible(title)), element("small", "", about));
    opener.addEventListener("click", open);
    if (current) opener.setAttribute("aria-current", "true");
    item.append(opener);
    return item;
  }

  item(info, current) {
    const is = info.name === current?.name && !current.gone, { name } = info;
    const title = this.texts.match(info)?.log[0]?.user ?? (is ? current.title : name);
    const item = this.entry(title, `${turnsOf(info)} · ${number(info.tokens)} tokens · ${when(info.updated)}`, is, () => this.act.open(name));
    if (!is) return item;
    const row = element("div", "actions"), fork = button("fork", "Fork");
    fork.title = "A second conversation that continues from here";
    fork.addEventListener("click", () => this.act.fork(name));
    row.append(fork, sureButton("delete", "Delete", () => this.act.remove(name)));
    item.append(row);
    return item;
  }

  goneItem(title, kept, is) {
    const item = this.entry(title, `${turnsOf(kept)} · ${when(kept.updated)}`, is, () => this.act.read(kept));
    item.classList.add("gone");
    item.querySelector("small").before(element("em", "", "no longer on the server"));
    const row = element("div", "actions");
    row.append(sureButton("delete", "Delete text", () => this.act.forget(kept)));
    if (is) item.append(row);
    return item;
  }
}

/** A button that asks once more before it deletes something. */
function sureButton(className, text, act) {
  const made = button(className, text);
  made.addEventListener("click", () => {
    if (made.dataset.sure) return void act();
    made.dataset.sure = "yes";
    made.textContent = "Delete for good?";
    setTimeout(() => {
      delete made.dataset.sure;
      made.textContent = text;
    }, 4000);
  });
  return made;
}

const turnsOf = ({ turns }) => (turns === 1 ? "1 turn" : `${number(turns)} turns`);

function when(seconds) {
  const time = new Date(1000 * seconds), today = new Date().toDateString() === time.toDateString();
  return today
    ? time.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })
    : time.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}
