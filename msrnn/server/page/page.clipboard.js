// Copying text.

/** Copy a text. Browsers have `navigator.clipboard` for HTTPS and localhost only; elsewhere, a selected field is copied. */
async function copyText(text) {
  try {
    return await navigator.clipboard.writeText(text);
  } catch { /* it is missing, or not allowed */ }
  const field = element("textarea", "unseen"), focused = document.activeElement;
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  if (!copied) throw new Problem("The browser does not allow copying. Select the text, and copy it with the keyboard.");
}
