// The list of conversations.

class List {
  /** `act` has what the buttons do: open, fork and remove, each with the name of a session. */
  constructor(texts, act) {
    Object.assign(this, { texts, act, sure: 0 });
  }

  show(infos, current) {
    const items = infos.map((info) => this.item(info, current));
    if (current?.begun && !infos.some(({ name }) => name === current.name)) items.unshift(this.fresh(current));
    find("list").replaceChildren(...items);
    find("no-list").hidden = infos.length > 0;
  }

  fresh(current) {
    const item = element("li", "current"), title = element("button", "open");
    title.type = "button";
    title.append(element("b", "", visible(current.title)), element("small", "", "not kept yet"));
    title.setAttribute("aria-current", "true");
    item.append(title);
    return item;
  }

  item(info, current) {
    const item = element("li"), open = element("button", "open"), is = info.name === current?.name;
    const title = this.texts.title(info) ?? (is ? current.title : info.name);
    const turns = info.turns === 1 ? "1 turn" : `${number(info.turns)} turns`;
    open.type = "button";
    open.append(element("b", "", visible(title)), element("small", "", `${turns} · ${number(info.tokens)} tokens · ${when(info.updated)}`));
    open.addEventListener("click", () => this.act.open(info.name));
    item.append(open);
    if (is) {
      item.className = "current";
      open.setAttribute("aria-current", "true");
      item.append(this.actions(info));
    }
    return item;
  }

  actions({ name }) {
    const row = element("div", "actions"), fork = element("button", "fork", "Fork"), remove = element("button", "delete", "Delete");
    fork.type = remove.type = "button";
    fork.title = "A second conversation that goes on from here";
    fork.addEventListener("click", () => this.act.fork(name));
    remove.addEventListener("click", () => {
      if (remove.dataset.sure) return void this.act.remove(name);
      remove.dataset.sure = "yes";
      remove.textContent = "Delete for good?";
      setTimeout(() => {
        delete remove.dataset.sure;
        remove.textContent = "Delete";
      }, 4000);
    });
    row.append(fork, remove);
    return row;
  }
}

function when(seconds) {
  const time = new Date(1000 * seconds), today = new Date().toDateString() === time.toDateString();
  return today
    ? time.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })
    : time.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}
