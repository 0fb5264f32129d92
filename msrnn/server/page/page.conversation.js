// A conversation: a session of the server, its turns and its tokens. Its element lives on while another one is shown.

const EVERY = 4; // generated tokens after which the server tells again what the state holds

class Conversation {
  constructor(name, model, texts) {
    Object.assign(this, { name, model, texts, views: [], draft: "" });
    this.running = null; // the answer that is under way
    this.busy = false; // until the list and the text are up to date as well
    this.info = null; // what the server's list says of the session
    this.key = null; // of the kept text
    this.count = 0; // finished turns
    this.unsettled = false; // whether the list has not shown the last one yet
    this.gone = false; // whether the server has the session no longer
    this.moved = false; // whether the session has turns that are not here
    this.memory = new Memory();
    this.tokens = new Tokens();
    this.element = element("div", "conversation");
    this.changed = () => {}; // called whenever something is to be drawn again
    this.giveBack = () => {}; // called with a message that was not answered
  }

  get turns() { return this.views.map(({ turn }) => turn); }

  /** The call that the next message answers; null where that is a message of the reader. */
  get call() { return this.turns.findLast((turn) => !turn.lost)?.calls?.at(-1) ?? null; }

  get begun() { return this.views.length > 0 || this.info !== null; }

  get title() { return this.views[0]?.turn.user ?? (this.info ? this.name : "New conversation"); }

  /** Show a session, or what the browser has kept of one that is gone. `text`: its text, if this browser knows it. */
  open(info, text, gone) {
    Object.assign(this, { info, gone, count: info.turns, key: text?.key ?? null });
    for (const turn of text?.log ?? []) this.append(turn);
    const missing = info.turns - this.turns.filter((turn) => !turn.lost).length;
    if (missing > 0) {
      const turns = missing === 1 ? "One turn was" : `${number(missing)} turns were`;
      this.element.append(element("p", "note soft", `${turns} read elsewhere, or not kept here: the server keeps the state, not the text.`));
    }
  }

  append(turn) {
    const view = new TurnView(this.tokens, turn);
    this.views.push(view);
    if (turn.lost && turn.pieces.length) this.fadeOut(view);
    this.element.append(view.element);
    return view;
  }

  drop(view) {
    this.views = this.views.filter((other) => other !== view);
    view.element.remove();
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
    if (this.info && !this.gone) this.memory.take(await json(`/v1/sessions/${this.name}/memory`), true);
    this.paint();
  }

  paint() {
    this.tokens.paint(this.memory, this.model.size);
    this.changed();
  }

  /** Compare with the server's list of sessions. */
  compare(infos) {
    if (this.running) return;
    const found = infos.find(({ name }) => name === this.name);
    const next = this.unsettled && found?.turns === this.count && (!this.info || found.created === this.info.created);
    if (next) this.settle(found);
    const same = found && (!this.info || continues(found, this.info));
    this.gone = !same && this.count > 0;
    this.moved = Boolean(same) && found.turns > this.count;
    if (this.gone && this.unsettled) this.settle({ name: this.name, created: null, updated: Date.now() / 1000, turns: this.count });
  }

  /** After a turn that counts. */
  settle(info) {
    this.unsettled = false;
    this.info = info;
    this.keep();
  }

  /** Keep the text, which only this browser has. */
  keep() { this.key = this.texts.keep(this.key, this.info, this.turns); }

  /** Send a message and show the answer as it comes, in place of a turn that is `retried`. Returns whether the turn counts.

   * Throws a Problem if anything but the reader has ended it. */
  async send(text, settings, retried) {
    const system = !this.count && settings.system ? [{ role: "system", content: settings.system }] : [];
    const { call } = this, message = call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: text };
    const messages = [...system, message], { role } = message;
    const view = this.append({ user: text, role, calls: [], start: 0, pieces: [], messages: null, answer: 0, note: "", lost: true }); // until its end
    const known = this.known, running = { control: new AbortController(), stopping: null, stopped: false, problem: null };
    this.running = running;
    this.changed();
    try {
      // With the number of turns, the server refuses to begin an empty session below an old text.
      const about = { session_id: this.name, session_turns: this.count, retention: EVERY, ...(this.count ? {} : settings.beginning) };
      await this.read(view, known, chunksOf({ model: this.model.id, messages, ...about, ...settings.sampling }, running.control.signal));
      view.turn.lost = false;
      this.count++;
      this.unsettled = true;
      if (retried) this.drop(retried);
    } catch (error) {
      const aborted = error.name === "AbortError", problem = aborted ? running.problem : error;
      this.lose(view, aborted ? "Stopped: this turn is not remembered." : "This turn is not remembered.");
      if (problem) throw problem;
    } finally {
      this.running = null;
    }
    return !view.turn.lost;
  }

  async read(view, known, chunks) {
    let begun = false, reason = null;
    for await (const chunk of chunks) {
      const choice = chunk.choices[0], told = choice?.retention;
      reason = choice?.finish_reason ?? reason;
      addCalls(view.turn.calls, choice?.delta?.tool_calls);
      if (!told) continue;
      if (!begun) this.begin(view.turn, told, known);
      else view.turn.pieces.push(...told.pieces);
      this.memory.take(told, !begun);
      if (begun) told.pieces.forEach((piece, i) => view.add(told.start + i, piece));
      else view.place();
      begun = true;
      this.paint();
    }
    if (reason === "cancelled") throw new Problem("The answer was cancelled before it began.");
    await this.running.stopping;
    const count = number(view.turn.pieces.length - (view.turn.answer - view.turn.start));
    view.end(reason === "length" ? `Cut at ${count} tokens.` : this.running.stopped ? `Stopped at ${count} tokens.` : "");
  }

  /** The first tokens of a turn; the last one of an answer that was cut is sent again, and is shown once. */
  begin(turn, told, known) {
    const again = Math.max(0, known - told.start);
    Object.assign(turn, { start: told.start + again, pieces: told.pieces.slice(again), messages: told.messages, answer: told.answer });
  }

  /** A turn that does not count: what there is of its answer stays on the page, and the message can be sent again. */
  lose(view, note) {
    if (view.turn.pieces.length > 0) {
      this.fadeOut(view);
      view.end(note);
    } else {
      this.drop(view);
    }
    this.giveBack(view.turn.user);
  }

  /** End the answer as it stands, and the turn counts. Before its first token there is nothing to keep: then cancel it. */
  stop() {
    if (!this.running || this.running.stopping) return;
    this.running.stopping = this.askToStop(this.running);
    this.changed();
  }

  async askToStop(running) {
    if (!this.views.at(-1).turn.pieces.length) return void running.control.abort();
    try {
      ({ stopped: running.stopped } = await json(`/v1/sessions/${this.name}/stop`, { method: "POST" }));
    } catch (problem) {
      running.problem = new Problem(`The answer was stopped, but the server could not keep it. ${problem.message}`, problem);
      running.control.abort();
    }
  }
}
