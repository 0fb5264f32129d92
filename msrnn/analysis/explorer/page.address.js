// The page's address: where to look, such as #step=640&layer=16&head=0. Layers are the model's own numbers.

const ALL = "all";

/** What the address asks for; what it asks for in vain is left out, or is the nearest step. */
function hash() {
  const asked = new URLSearchParams(location.hash.slice(1)), found = {};
  const whole = (name) => (/^-?\d+$/.test(asked.get(name) ?? "") ? Number(asked.get(name)) : undefined);
  const step = whole("step"), token = whole("token"), fade = whole("fade");
  if (step !== undefined) found.step = Math.max(0, Math.min(T - 1, step));
  if (asked.has("layer")) found.layer = data.layers.indexOf(whole("layer")); // -1: all
  if (asked.has("head")) found.head = HEADS > 1 && whole("head") < HEADS ? Math.max(-1, whole("head")) : -1;
  if (token >= 0 && token < T) found.token = token;
  if (fade !== undefined || step !== undefined) found.fade = Boolean(fade ?? 1);
  if (["light", "dark"].includes(asked.get("theme"))) found.theme = asked.get("theme");
  return found;
}

function address({ step, layer, head, fade }, token) {
  const { theme } = document.documentElement.dataset;
  const parts = { step, layer: data.layers[layer] ?? ALL, head: head < 0 ? ALL : head, fade: Number(fade), token, theme };
  const given = Object.entries(parts).filter(([, value]) => value !== undefined);
  return `#${given.map(([name, value]) => `${name}=${value}`).join("&")}`;
}
