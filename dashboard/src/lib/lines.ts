import { isMap, LineCounter, parseDocument } from "yaml";

/** Returns the line, from 0, of a field such as `update.alpha`, or that of its closest parent. */
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
