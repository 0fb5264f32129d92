// The card of a token: its text, its position, and how much of the model still holds it.

class TokenCard {
  constructor() {
    this.element = find("token-card");
  }

  hide() { this.show(null); }

  /** Show the card of a conversation's token beside it, or beside a `place`; without a token, hide the card. */
  show(conversation, token, place) {
    for (const marked of document.querySelectorAll(".focus")) marked.classList.remove("focus");
    this.element.hidden = !token;
    if (!token) return;
    token.node.classList.add("focus");
    const share = conversation.tokens.share(token, conversation.memory), [first] = token.positions, last = token.positions.at(-1);
    const safe = conversation.memory.protects(first) ? ", protected" : "";
    const back = Math.max(...token.positions.map((position) => conversation.memory.recalled(position)));
    const recalled = back > 0 ? `, recalled by ${percent(back)} of the heads` : "";
    const held = share === null ? "not read yet" : share === 0 ? "forgotten" : `held in ${percent(share)} of the layers${safe}`;
    const name = first === last ? `token ${number(first)}` : `tokens ${number(first)} to ${number(last)}`;
    this.element.replaceChildren(element("b", "", shown(token.text) || "a part of a character"),
      element("span", "", conversation.gone ? name : `${name} · ${held}${recalled}`));
    this.move(place ?? token.node.getBoundingClientRect());
  }

  move({ left, top, bottom }) {
    const { width, height } = this.element.getBoundingClientRect();
    const above = bottom + 8 + height > innerHeight;
    this.element.style.left = `${Math.max(8, Math.min(innerWidth - width - 8, left - 12))}px`;
    this.element.style.top = `${Math.max(8, above ? top - 8 - height : bottom + 8)}px`;
  }
}
