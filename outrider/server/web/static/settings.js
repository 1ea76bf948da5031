// The settings form: its values as a request body, kept by the store; the API key, kept for the tab.

const KEY = "outrider-api-key";
const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
]; // fields of the request by the same names; empty: the server's own
const MAX_STOPS = 4;

export class Settings {
  constructor(form, store) {
    this.form = form;
    this.field = form.elements;
    this.store = store;
    this.#restore(store.settings());
    this.field.key.value = readKey(); // for this tab only, gone when it closes
    this.field.key.addEventListener("change", () => keepKey(this.key));
    form.addEventListener("change", () => this.store.saveSettings(this.#kept()));
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", (event) => {
      event.preventDefault();
      for (const element of this.#keptFields()) element.value = element.defaultValue ?? "";
      this.field.drafter.value = "";
      this.store.saveSettings({});
    });
    this.field.stop.addEventListener("input", () => this.#checkStops());
  }

  get key() {
    return this.field.key.value.trim();
  }

  get model() {
    return this.field.model.value;
  }

  /** Whether nothing is to be drafted. */
  get off() {
    return this.field.drafter.value === "none";
  }

  get maxTokens() {
    return this.field.max_tokens.valueAsNumber;
  }

  /** The first field that holds something out of range, or null. */
  wrong() {
    this.#checkStops();
    return [...this.form.elements].find((element) => !element.checkValidity()) ?? null;
  }

  /** Messages, before these, that the settings ask for. */
  system() {
    const content = this.field.system.value.trim();
    return content ? [{ role: "system", content }] : [];
  }

  /** The sampling part of a request. A random seed where none is given, so that every answer can be repeated. */
  sampling() {
    const given = NUMBERS.filter((name) => this.field[name].value !== "");
    const stops = this.#stops();
    return {
      model: this.model || undefined, // the server's own until its models are known
      ...Object.fromEntries(given.map((name) => [name, this.field[name].valueAsNumber])),
      ...(stops.length ? { stop: stops } : {}),
      max_completion_tokens: this.maxTokens,
      seed: this.field.seed.value === "" ? randomSeed() : this.field.seed.valueAsNumber,
    };
  }

  /** How to draft. */
  speculation(off = this.off) {
    const length = this.field.draft_length.value;
    return off ? { off: true } : { off: false, ...(length === "" ? {} : { max_tokens: Number(length) }) };
  }

  /** Offers the server's models and drafter; keeps what was chosen where it is still there. */
  offer(models) {
    const chosen = this.field.model.value || this.store.settings().model;
    this.field.model.replaceChildren(...models.map((model) => new Option(model.id, model.id)));
    if (models.some((model) => model.id === chosen)) this.field.model.value = chosen;
    const [{ drafter, max_draft_tokens: most }] = models;
    this.field.drafter.options[0].text = drafter ?? "the engine's";
    if (most) {
      this.field.draft_length.max = most;
      this.field.draft_length.placeholder = `up to ${most}`;
    }
  }

  #stops() {
    return this.field.stop.value.split("\n").filter((line) => line !== "");
  }

  #checkStops() {
    const many = this.#stops().length > MAX_STOPS;
    this.field.stop.setCustomValidity(many ? `At most ${MAX_STOPS} lines.` : "");
  }

  #keptFields() {
    return [...this.form.elements].filter((element) => element.name && element.name !== "key" && element.name !== "model");
  }

  #kept() {
    return Object.fromEntries([...this.#keptFields(), this.field.model].map((element) => [element.name, element.value]));
  }

  #restore(values) {
    for (const element of this.#keptFields()) {
      if (typeof values[element.name] === "string") element.value = values[element.name];
    }
  }
}

/** The key of this tab; empty where the browser forbids storage. */
function readKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

function keepKey(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // storage is forbidden: the form still holds the key
  }
}

export function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}
