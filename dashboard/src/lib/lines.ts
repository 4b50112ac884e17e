import { isMap, LineCounter, parseDocument } from "yaml";

/** The line, from 0, on which a field such as `update.alpha` stands; where it misses, its parent's. */
export function lineOf(text: string, field: string): number {
  const counter = new LineCounter();
  const document = parseDocument(text, { lineCounter: counter });
  let node: unknown = document.contents;
  let line = 0;
  for (const part of field.split(".")) {
    if (!isMap(node)) break;
    const pair = node.items.find((each) => String(each.key) === part);
    if (!pair) break;
    const start = (pair.key as { range?: [number, number, number] }).range?.[0] ?? 0;
    line = counter.linePos(start).line - 1;
    node = pair.value;
  }
  return line;
}
