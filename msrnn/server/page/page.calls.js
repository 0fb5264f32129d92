// Calls of tools: what the server has found in an answer, and the reader's answers to them. All of it is text.

/** The functions in a text of the settings, as requests have them; null if it is no list of them. */
function parseTools(text) {
  try {
    const found = JSON.parse(text.trim() || "[]");
    const right = (tool) => tool?.type === "function" && typeof tool.function?.name === "string";
    return Array.isArray(found) && found.every(right) ? found : null;
  } catch {
    return null;
  }
}

/** Add the calls of a chunk to those of an answer; the arguments may come in parts. */
function addCalls(calls, deltas) {
  for (const { index, id = "", function: { name = "", arguments: text = "" } } of deltas ?? []) {
    const call = (calls[index] ??= { id: "", name: "", arguments: "" });
    call.id += id;
    call.name += name;
    call.arguments += text;
  }
}

/** A call on the page: its name, and its arguments as indented JSON. */
function callElement(call) {
  let text = call.arguments;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch { /* as the model wrote it */ }
  const whole = element("div", "call"), head = element("p", "soft", "Calls ");
  head.append(element("b", "", visible(call.name)));
  whole.append(head, element("pre", "", visible(text)));
  return whole;
}
