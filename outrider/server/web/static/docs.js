// The page at /docs: the routes and schemas of /openapi.json as tables. Nothing comes from elsewhere.

const KEY = "outrider-api-key"; // as in settings.js
const LIMITS = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", maxLength: "length ≤", maxItems: "items ≤" };
const at = (id) => document.getElementById(id);

function element(name, ...content) {
  const made = document.createElement(name);
  made.append(...content);
  return made;
}

/** A schema in a few words: nodes and strings, with links to the schemas it names. */
function words(schema) {
  if (schema === true || schema === undefined) return ["anything"];
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    const link = element("a", name);
    link.href = `#schema-${encodeURIComponent(name)}`;
    return [link];
  }
  const kinds = schema.anyOf ?? schema.oneOf;
  if (kinds && !schema.properties) return kinds.flatMap((kind, i) => [...(i ? [" or "] : []), ...words(kind)]);
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" or ")];
  if (schema.type === "array") return ["list of ", ...words(schema.items), limits(schema)];
  if (typeof schema.additionalProperties === "object") return ["object of ", ...words(schema.additionalProperties)];
  return [(schema.type ?? "anything") + limits(schema)];
}

function limits(schema) {
  const found = Object.entries(LIMITS).filter(([name]) => name in schema);
  return found.length ? ` (${found.map(([name, sign]) => `${sign} ${schema[name]}`).join(", ")})` : "";
}

function table(rows) {
  const body = element("tbody");
  for (const [name, content, about] of rows) {
    const cell = element("td", ...content);
    if (about) cell.append(element("div", about));
    const head = element("th", name);
    head.scope = "row";
    body.append(element("tr", head, cell));
  }
  return element("table", body);
}

/** The schemas of a body, by its media types. */
function bodies(content) {
  return Object.entries(content ?? {}).flatMap(([type, { schema, itemSchema }], i) => [
    ...(i ? ["; "] : []), `${type}: `, ...words(schema ?? itemSchema),
  ]);
}

function route(path, method, operation) {
  const parameters = (operation.parameters ?? []).map((each) => [each.name, words(each.schema), `in the ${each.in}`]);
  const sent = operation.requestBody ? [["body", bodies(operation.requestBody.content)]] : [];
  const answers = Object.entries(operation.responses).map(([status, answer]) => [
    status, bodies(answer.content), answer.description,
  ]);
  const title = element("h2", `${method.toUpperCase()} ${path}`);
  return element("article", title, element("p", operation.description ?? ""), table([...parameters, ...sent, ...answers]));
}

function schema(name, given) {
  const title = element("h2", name);
  title.id = `schema-${encodeURIComponent(name)}`;
  const required = new Set(given.required);
  const rows = Object.entries(given.properties ?? {}).map(([field, each]) => [
    field, [...words(each), required.has(field) ? ", required" : ""], each.description,
  ]);
  return element("article", title, element("p", given.description ?? ""), rows.length ? table(rows) : "");
}

function show({ info, paths, components }) {
  at("title").textContent = `${info.title} ${info.version}: the API`;
  const routes = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => route(path, method, operation)));
  at("routes").replaceChildren(...routes);
  at("schemas").replaceChildren(...Object.entries(components.schemas).map(([name, each]) => schema(name, each)));
}

async function load() {
  const key = sessionStorage.getItem(KEY);
  at("status").textContent = "Loading";
  try {
    const response = await fetch("/openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
    at("locked").hidden = response.status !== 401;
    if (response.ok) show(await response.json());
    at("status").textContent = response.ok ? "" : (await response.json()).error.message;
  } catch (error) {
    at("status").textContent = `The server cannot be reached (${error.message}).`;
  }
}

at("locked").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value.trim());
  load();
});
load();
