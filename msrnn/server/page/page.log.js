// The part of the page that shows a conversation, and scrolls with its answers.

class Log {
  /** `onScroll` is called when the text moves. */
  constructor(onScroll) {
    this.element = find("log");
    this.stick();
    this.element.addEventListener("scroll", () => { this.scrolled(); onScroll(); }, { passive: true });
  }

  show(whole) {
    this.element.replaceChildren(whole);
    this.stick();
  }

  /** Go to the end with the next call of `follow`, and stay there. */
  stick() { Object.assign(this, { sticks: true, top: 0 }); }

  follow() {
    const { element } = this;
    if (this.sticks) element.scrollTop = element.scrollHeight;
    this.top = element.scrollTop;
  }

  /** Only a reader who scrolls up stops following; the text may have grown since it was scrolled. */
  scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    if (scrollHeight - scrollTop - clientHeight < 60) this.sticks = true;
    else if (scrollTop < this.top) this.sticks = false;
    this.top = scrollTop;
  }
}
