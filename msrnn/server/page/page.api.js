// The server's API. Nothing else is asked.

/** An error of the server, or of the way to it, in words. */
class Problem extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    Object.assign(this, { status, code });
  }
}

const key = {
  name: "msrnn key", // never in localStorage: it ends with the tab
  get value() { return session.get(this.name) ?? ""; },
  set value(text) { text ? session.set(this.name, text) : session.remove(this.name); },
};

async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached. See whether it still runs, and try again.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let error = {};
  try {
    ({ error } = await response.json());
  } catch { /* a proxy may answer with something else */ }
  return inWords(response.status, error ?? {}, response.headers.get("Retry-After"));
}

function inWords(status, { message, code }, seconds) {
  const said = message ? `The server says: ${message}.` : `The server answers with error ${status}.`;
  const words = {
    401: key.value ? "The server does not accept this key." : "The server wants a key.",
    409: `This conversation is busy. ${said}`,
    413: "The message is too long for this server.",
    429: `The server is busy: too many requests wait already. Try again in ${seconds || "a few"} s.`,
  };
  return new Problem(words[status] ?? said, { status, code });
}

const json = async (path, options) => (await ask(path, options)).json();

/** The sessions of this key, those of all pages of the list. */
async function allSessions() {
  const found = new Map();
  for (let after = "", more = true; more; after = `&after=${[...found.keys()].at(-1)}`) {
    const page = await json(`/v1/sessions?limit=1000${after}`);
    for (const info of page.data) found.set(info.name, info); // one that was used meanwhile is on two pages
    more = page.has_more;
  }
  return [...found.values()];
}

/** The chunks of a streamed answer. A stream that ends without its last line has failed. */
async function* chunksOf(body, signal) {
  const response = await ask("/v1/chat/completions", { method: "POST", body: { ...body, stream: true }, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let value, done;
    try {
      ({ value, done } = await reader.read());
    } catch (error) {
      if (error.name === "AbortError") throw error;
      done = true;
    }
    if (done) throw new Problem("The connection ended before the answer did.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw inWords(chunk.error.code === "session_error" ? 409 : 500, chunk.error);
      yield chunk;
    }
  }
}
