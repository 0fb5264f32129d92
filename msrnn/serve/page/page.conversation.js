// A conversation: a session of the server, its turns and its tokens. Its element lives on while another one is shown.

const EVERY = 4; // generated tokens after which the server tells again what the state holds
const ROLES = { system: "System", user: "You", assistant: "Answer" };

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

/** One turn on the page. `turn` is what is kept of it: the pieces of its tokens, and where its messages are. */
class TurnView {
  constructor(tokens, turn) {
    Object.assign(this, { tokens, turn, element: element("article", "turn") });
    this.answer = messageElements("assistant");
    this.note = element("p", "note soft");
    if (turn.pieces.length) this.place();
    else this.wait();
  }

  /** Until the server has read the message, it is plain text. */
  wait() {
    const user = messageElements("user");
    user.body.append(element("span", "", visible(this.turn.user)));
    this.note.textContent = "reading …";
    this.element.replaceChildren(user.whole, this.note);
  }

  place() {
    const { turn } = this, messages = turn.messages ?? [{ role: "user", start: turn.start, stop: turn.answer }];
    this.parts = messages.map((message) => ({ ...message, ...messageElements(message.role) }));
    this.element.replaceChildren(...this.parts.map(({ whole }) => whole), this.answer.whole, this.note);
    this.note.textContent = turn.note ?? "";
    turn.pieces.forEach((piece, i) => this.add(turn.start + i, piece));
  }

  /** A token goes into the message that it belongs to, or becomes a tick before the next one. */
  add(position, piece) {
    const next = position >= this.turn.answer ? null : this.parts.find(({ stop }) => position < stop);
    if (position >= this.turn.answer) this.tokens.add(position, piece, this.answer.body, false);
    else if (next && position >= next.start) this.tokens.add(position, piece, next.body, false);
    else this.tokens.add(position, piece, (next ?? this.answer).ticks, true);
  }

  end(note) {
    this.turn.note = this.note.textContent = note;
  }
}

class Conversation {
  constructor(name, model, texts) {
    Object.assign(this, { name, model, texts, info: null, turns: [], running: null, draft: "" });
    this.memory = new Memory();
    this.tokens = new Tokens();
    this.element = element("div", "conversation");
    this.changed = () => {}; // called whenever something is to be drawn again
  }

  get begun() { return this.turns.length > 0 || this.info !== null; }

  get title() { return this.turns[0]?.user ?? (this.info ? this.name : "New conversation"); }

  /** Show a session that the server has: its text, as far as this browser knows it, and what the state holds. */
  async open(info) {
    this.info = info;
    for (const turn of this.texts.turns(info)) this.append(turn);
    const missing = info.turns - this.turns.filter((turn) => !turn.lost).length;
    if (missing > 0) {
      const turns = missing === 1 ? "One turn was" : `${number(missing)} turns were`;
      this.element.append(element("p", "note soft", `${turns} read elsewhere: the server keeps the state, not the text.`));
    }
    await this.recall();
  }

  append(turn) {
    this.turns.push(turn);
    const view = new TurnView(this.tokens, turn);
    if (turn.lost && turn.pieces.length) this.fadeOut(view);
    this.element.append(view.element);
    return view;
  }

  /** Its tokens are not of the state: the next turn has their positions. */
  fadeOut(view) {
    this.tokens.cut(this.known);
    view.element.classList.add("lost");
  }

  /** Positions whose tokens are known from turns that count. */
  get known() {
    const last = this.turns.findLast((turn) => !turn.lost && turn.pieces.length);
    return last ? last.start + last.pieces.length : 0;
  }

  /** Ask the server what the state holds after the last turn that counts. */
  async recall() {
    this.memory.clear();
    if (this.info) this.memory.take(await json(`/v1/sessions/${this.name}/memory`), true);
    this.paint();
  }

  paint() {
    this.tokens.paint(this.memory, this.model.size);
    this.changed();
  }

  /** Send a message and show the answer as it comes. Throws a Problem if the turn does not count. */
  async send(text, settings) {
    const system = !this.begun && settings.system ? [{ role: "system", content: settings.system }] : [];
    const messages = [...system, { role: "user", content: text }];
    const view = this.append({ user: text, start: 0, pieces: [], messages: null, answer: 0, note: "", lost: true }); // until its end
    const known = this.known;
    this.running = new AbortController();
    this.changed();
    try {
      const body = { model: this.model.id, messages, session_id: this.name, retention: EVERY, ...settings.sampling };
      await this.read(view, known, chunksOf(body, this.running.signal));
      view.turn.lost = false;
    } catch (error) {
      if (error.name !== "AbortError") {
        this.lose(view, "This turn is not remembered.");
        throw error;
      }
      this.lose(view, "Stopped: this turn is not remembered.");
    } finally {
      this.running = null;
    }
  }

  async read(view, known, chunks) {
    let begun = false, reason = null;
    for await (const chunk of chunks) {
      const choice = chunk.choices[0], told = choice?.retention;
      reason = choice?.finish_reason ?? reason;
      if (!told) continue;
      if (!begun) this.begin(view.turn, told, known);
      else view.turn.pieces.push(...told.pieces);
      this.memory.take(told, !begun);
      if (begun) told.pieces.forEach((piece, i) => view.add(told.start + i, piece));
      else view.place();
      begun = true;
      this.paint();
    }
    const count = view.turn.pieces.length - (view.turn.answer - view.turn.start);
    view.end(reason === "length" ? `Cut at ${number(count)} tokens.` : "");
  }

  /** The first tokens of a turn; the last one of an answer that was cut is sent again, and is shown once. */
  begin(turn, told, known) {
    const again = Math.max(0, known - told.start);
    Object.assign(turn, { start: told.start + again, pieces: told.pieces.slice(again), messages: told.messages, answer: told.answer });
  }

  /** A turn that does not count: what there is of its answer stays on the page; without any, the message can be sent again. */
  lose(view, note) {
    if (view.turn.pieces.length > 0) {
      this.fadeOut(view);
      view.end(note);
    } else {
      this.turns.pop();
      view.element.remove();
      this.draft ||= view.turn.user;
    }
  }

  /** After a turn: what the server's list says of the session, and the text, which only this browser has. */
  settle(info, keep) {
    this.info = info ?? null;
    if (info && keep) this.texts.keep(info, this.turns);
  }

  stop() { this.running?.abort(); }
}
