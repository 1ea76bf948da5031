// Elements of a drawing.

const NAMESPACE = "http://www.w3.org/2000/svg";

/** An SVG element with these attributes. */
export function svg(name, attributes = {}) {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
