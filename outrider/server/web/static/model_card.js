// What the server says about its model, in words. `cardRows` has no DOM.

import { make } from "./dom.js";

/** Label and value of each fact of a model of /v1/models; those that the server does not tell are left out. */
export function cardRows(model) {
  const rows = [
    ["Name", model.id],
    ["Weights", model.weight_bytes ? `${bytes(model.weight_bytes)} on disk` : ""],
    ["Format", model.number_format],
    ["Context", model.max_model_len ? `${model.max_model_len.toLocaleString("en")} tokens` : ""],
    ["Device", model.device],
    ["Cache", model.cache_tokens ? `${model.cache_tokens.toLocaleString("en")} tokens` : ""],
    ["Memory", model.memory],
    ["Drafter", model.drafter],
    ["Draft length", model.max_draft_tokens ? `up to ${model.max_draft_tokens} tokens` : ""],
    ["Engine", model.engine],
    ["Replicas", model.replicas?.all > 1 ? `${model.replicas.usable} of ${model.replicas.all}` : ""],
    ...Object.entries(model.missing ?? {}).map(([name, why]) => [`No ${name}`, why]),
    ...Object.entries(model.different ?? {}),
  ];
  return rows.filter(([, value]) => value);
}

export function showCard(element, model) {
  element.replaceChildren(
    ...cardRows(model).map(([label, value]) => {
      const row = make("div");
      row.append(make("dt", "", label), make("dd", "", value));
      return row;
    }),
  );
}

/** A size in MB or GB. */
export function bytes(count) {
  return count >= 1e9 ? `${(count / 1e9).toFixed(1)} GB` : `${Math.round(count / 1e6)} MB`;
}
