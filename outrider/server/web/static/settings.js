// The settings form: its values as a request body, and the API key.

const KEY = "outrider-api-key";

export class Settings {
  constructor(form) {
    this.form = form;
    this.field = form.elements;
    this.field.key.value = sessionStorage.getItem(KEY) ?? ""; // for this tab only, gone when it closes
    this.field.key.addEventListener("change", () => this.#keep(this.field.key.value));
  }

  get key() {
    return this.field.key.value.trim();
  }

  get system() {
    return this.field.system.value.trim();
  }

  /** The first field that holds something out of range, or null. */
  wrong() {
    return [...this.form.elements].find((element) => !element.checkValidity()) ?? null;
  }

  /** The sampling part of a request. A random seed where none is given, so that every answer can be repeated. */
  sampling() {
    return {
      model: this.field.model.value || undefined, // the server's own until its models are known
      temperature: this.field.temperature.valueAsNumber,
      top_p: this.field.top_p.valueAsNumber,
      max_completion_tokens: this.field.max_tokens.valueAsNumber,
      seed: this.field.seed.value === "" ? randomSeed() : this.field.seed.valueAsNumber,
    };
  }

  /** Offers these models; keeps the chosen one where it is still there. */
  offer(models) {
    const chosen = this.field.model.value;
    this.field.model.replaceChildren(...models.map((model) => new Option(model.id, model.id)));
    if (models.some((model) => model.id === chosen)) this.field.model.value = chosen;
  }

  #keep(key) {
    if (key.trim()) sessionStorage.setItem(KEY, key.trim());
    else sessionStorage.removeItem(KEY);
  }
}

export function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}
