// A turn of a conversation: a message, and the answer to it.

const ROLES = { system: "System", user: "You", assistant: "Answer", tool: "Tool" };

/** The elements of one message: ticks for the tokens of the chat template before it, and its text. */
function messageElements(role) {
  const whole = element("section", `message ${role}`), head = element("h3", "", ROLES[role] ?? role);
  const ticks = element("span", "ticks"), body = element("div", "body");
  ticks.setAttribute("aria-hidden", "true"); // the template's tokens are no words
  body.dir = "auto";
  head.append(ticks);
  whole.append(head, body);
  return { whole, ticks, body };
}

function button(className, text, label) {
  const made = element("button", className, text);
  made.type = "button";
  if (label) made.ariaLabel = made.title = label;
  return made;
}

/** One turn on the page. `turn` is what is kept of it: the pieces of its tokens, and where its messages are. */
class TurnView {
  constructor(tokens, turn) {
    Object.assign(this, { tokens, turn, element: element("article", "turn") });
    this.element.view = this;
    this.answer = messageElements("assistant");
    this.note = element("p", "note soft");
    this.foot = element("div", "foot");
    this.foot.append(button("copy", "Copy", "Copy this answer"), button("retry", "Retry", "Retry: send this message again"), this.note);
    if (turn.pieces.length) this.place();
    else this.wait();
  }

  /** Until the server has read the message, it is plain text. */
  wait() {
    const user = messageElements(this.turn.role ?? "user");
    user.body.append(element("span", "", visible(this.turn.user)));
    this.note.textContent = "reading …";
    this.element.replaceChildren(user.whole, this.note);
  }

  place() {
    const { turn } = this, messages = turn.messages ?? [{ role: turn.role ?? "user", start: turn.start, stop: turn.answer }];
    this.parts = messages.map((message) => ({ ...message, ...messageElements(message.role) }));
    this.foot.append(this.note);
    this.element.replaceChildren(...this.parts.map(({ whole }) => whole), this.answer.whole, this.foot);
    this.note.textContent = turn.note ?? "";
    this.markdown = new Markdown();
    turn.pieces.forEach((piece, i) => this.add(turn.start + i, piece));
    this.showCalls();
  }

  /** Show the calls that the server has found in the answer, below it. */
  showCalls() {
    this.answer.whole.querySelectorAll(".call").forEach((old) => old.remove());
    this.answer.whole.append(...(this.turn.calls ?? []).map(callElement));
  }

  /** A token goes into the message that it belongs to, or becomes a tick before the next one. */
  add(position, piece) {
    const next = position >= this.turn.answer ? null : this.parts.find(({ stop }) => position < stop);
    if (position >= this.turn.answer) this.markdown.add(this.tokens.add(position, piece, this.answer.body, false), piece);
    else if (next && position >= next.start) this.tokens.add(position, piece, next.body, false);
    else this.tokens.add(position, piece, (next ?? this.answer).ticks, true);
  }

  end(note) {
    this.turn.note = this.note.textContent = note;
    this.showCalls();
  }

  /** The answer as the model wrote it. */
  get text() { return this.turn.pieces.slice(this.turn.answer - this.turn.start).join(""); }
}
