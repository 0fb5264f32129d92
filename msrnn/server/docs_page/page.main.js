// The page: one section for each endpoint of the description. All texts are set as texts, never as HTML.

const find = (id) => document.getElementById(id);
const HEADS = ["field", "must be", "default", "meaning"];

function element(tag, text = "", ...children) {
  const made = document.createElement(tag);
  made.textContent = text;
  made.append(...children);
  return made;
}

/** A method and a path. */
function address(tag, method, path) {
  const made = element(tag, "", element("span", method), element("code", path));
  made.firstChild.className = "method";
  return made;
}

/** A table of rows of texts; the first column is code. */
function table(heads, rows) {
  const head = element("tr", "", ...heads.map((text) => element("th", text)));
  const lines = rows.map(([first, ...others]) =>
    element("tr", "", element("td", "", element("code", first)), ...others.map((text) => element("td", text))));
  const box = element("div", "", element("table", "", element("thead", "", head), element("tbody", "", ...lines)));
  box.className = "fields";
  return box;
}

const asJson = (value) => (value === undefined ? "" : JSON.stringify(value));

/** What a schema says of its fields: those that can be used, and those that may only have some values. */
function fields(schema) {
  const required = new Set(schema.required ?? []), used = [], others = [];
  const first = ([name]) => (required.has(name) ? 0 : 1);
  for (const [name, field] of Object.entries(schema.properties).sort((a, b) => first(a) - first(b))) {
    const preset = required.has(name) ? "required" : asJson(field.default);
    (field["x-unused"] ? others : used).push([name, field["x-must"], preset, field.description ?? ""]);
  }
  const parts = [table(HEADS, used)];
  if (others.length) {
    const summary = element("summary", "Fields that are not supported, and accepted with some values");
    parts.push(element("details", "", summary, table(HEADS, others)));
  }
  return parts;
}

/** The names of the schemas that a part of the description refers to. */
function references(part) {
  return [...JSON.stringify(part).matchAll(/"#\/components\/schemas\/(\w+)"/g)].map((match) => match[1]);
}

/** A request that works, as a command for a POSIX shell. */
function curl(method, path, operation) {
  const words = ["curl"], example = operation.requestBody?.content["application/json"].example;
  if (method !== "get" && !example) words.push("-X", method.toUpperCase());
  for (const { name, example } of operation.parameters ?? []) path = path.replace(`{${name}}`, example);
  words.push(location.origin + path);
  if (operation.security) words.push('-H "Authorization: Bearer $KEY"');
  if (!example) return words.join(" ");
  const body = JSON.stringify(example).replaceAll("'", "'\\''");
  return [words.join(" "), '-H "Content-Type: application/json"', `-d '${body}'`].join(" \\\n  ");
}

function section(method, path, operation, schemas) {
  const made = element("section", "", address("h2", method, path), element("p", operation.summary));
  made.id = method + path;
  if (operation.parameters) {
    const rows = operation.parameters.map(({ name, schema, required, description }) =>
      [name, schema["x-must"], required ? "required" : asJson(schema.default), description]);
    made.append(element("h3", "In the address"), table(HEADS, rows));
  }
  if (operation.requestBody) {
    const [name] = references(operation.requestBody);
    made.append(element("h3", "In the body, as JSON; null counts as not given"), ...fields(schemas[name]));
    const parts = new Set(references(schemas[name]).flatMap((part) => [part, ...references(schemas[part])]));
    for (const part of parts) made.append(element("h3", part), ...fields(schemas[part]));
  }
  const replies = Object.entries(operation.responses).map(([status, reply]) => [status, reply.description]);
  made.append(element("h3", "Example"), element("pre", curl(method, path, operation)));
  made.append(element("h3", "Replies"), table(["status", "meaning"], replies));
  return made;
}

async function start() {
  const reply = await fetch("openapi.json");
  if (!reply.ok) throw new Error(`the server answers ${reply.status}`);
  const { info, paths, components } = await reply.json();
  find("title").textContent = document.title = `${info.title}, version ${info.version}`;
  if (components.securitySchemes) find("keys").textContent = "Requests to /v1 need a key.";
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const made = section(method, path, operation, components.schemas), link = address("a", method, path);
      link.href = `#${encodeURIComponent(made.id)}`;
      find("endpoints").append(made);
      find("contents").append(link);
    }
  }
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => {
  find("problem").hidden = false;
  find("problem").textContent = `The description cannot be loaded: ${error.message}`;
});
