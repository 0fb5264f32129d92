// The page's address, such as #step=640&layer=16&head=0. Layers have the model's own numbers.

const ALL = "all";

/** The view that the address describes. A step past the end is the last step, an unknown layer or head is all. */
function viewFromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), found = {};
  const whole = (name) => (/^-?\d+$/.test(given.get(name) ?? "") ? Number(given.get(name)) : undefined);
  const step = whole("step"), token = whole("token"), fade = whole("fade");
  if (step !== undefined) found.step = Math.max(0, Math.min(T - 1, step));
  if (given.has("layer")) found.layer = data.layers.indexOf(whole("layer")); // -1: all
  if (given.has("head")) found.head = HEADS > 1 && whole("head") < HEADS ? Math.max(-1, whole("head")) : -1;
  if (token >= 0 && token < T) found.token = token;
  if (fade !== undefined || step !== undefined) found.fade = Boolean(fade ?? 1);
  if (["light", "dark"].includes(given.get("theme"))) found.theme = given.get("theme");
  return found;
}

function address({ step, layer, head, fade }, token) {
  const { theme } = document.documentElement.dataset;
  const parts = { step, layer: data.layers[layer] ?? ALL, head: head < 0 ? ALL : head, fade: Number(fade), token, theme };
  const known = Object.entries(parts).filter(([, value]) => value !== undefined);
  return `#${known.map(([name, value]) => `${name}=${value}`).join("&")}`;
}
