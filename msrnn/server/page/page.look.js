// The look of the page: its theme, fading, and the drawer with the list.

class Look {
  /** `onTheme` is called when colours change. */
  constructor(onTheme) {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)"), kept = local.get("msrnn theme");
    if (kept === "light" || kept === "dark") root.dataset.theme = kept;
    dark.addEventListener("change", onTheme);
    find("theme").addEventListener("click", () => {
      root.dataset.theme = (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark";
      local.set("msrnn theme", root.dataset.theme);
      onTheme();
    });
    find("fade").addEventListener("click", () => {
      const fades = find("fade").getAttribute("aria-pressed") !== "true";
      find("fade").setAttribute("aria-pressed", fades);
      find("log").classList.toggle("plain", !fades);
    });
    find("open-list").addEventListener("click", () => this.drawer(!find("conversations").classList.contains("open")));
    document.addEventListener("pointerdown", ({ target }) => target.closest("#conversations, #open-list") || this.drawer(false));
  }

  /** In a narrow window, the list is a drawer. */
  drawer(open) {
    find("conversations").classList.toggle("open", open);
    find("open-list").setAttribute("aria-expanded", open);
    if (open) find("new").focus();
  }
}
