// The box that messages are written in.

class Composer {
  /** `onSend` is called when the reader sends what is in the box. */
  constructor(onSend) {
    this.box = find("message");
    this.box.addEventListener("input", () => this.grow());
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      onSend();
    });
    find("composer").addEventListener("submit", (event) => { event.preventDefault(); onSend(); });
  }

  get text() { return this.box.value; }

  set text(text) {
    this.box.value = text;
    this.grow();
  }

  focus() { this.box.focus(); }

  /** Put a message before what was typed meanwhile; the cursor stays where it is. */
  giveBack(text) {
    if (this.text.trim()) this.box.setRangeText(`${text}\n\n`, 0, 0, "preserve");
    else this.text = text;
    this.grow();
  }

  /** Take out a message that was given back, if it is still there. */
  takeOut(text) {
    if (this.text.startsWith(text)) this.text = this.text.slice(text.length).trimStart();
  }

  /** As high as its text, up to a third of the window. */
  grow() {
    this.box.style.height = "auto";
    this.box.style.height = `${this.box.scrollHeight + 2}px`;
  }

  /** What can be done with a conversation: send, or stop its answer, or neither because it is gone. */
  show({ running, gone, call }) {
    this.box.placeholder = call ? `Write what ${visible(call.name)} returns` : "Write a message";
    find("send").hidden = running !== null;
    find("send").disabled = gone;
    find("stop").hidden = running === null;
    find("stop").disabled = Boolean(running?.stopping);
    find("gone").hidden = !gone;
    if (gone) this.box.setAttribute("aria-describedby", "gone-words");
    else this.box.removeAttribute("aria-describedby");
  }
}
