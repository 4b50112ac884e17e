/** Lookups in a JSON schema for the help of the YAML editor. */

export type Schema = {
  $ref?: string;
  $defs?: Record<string, Schema>;
  anyOf?: Schema[];
  oneOf?: Schema[];
  properties?: Record<string, Schema>;
  required?: string[];
  description?: string;
  type?: string;
  enum?: unknown[];
  const?: unknown;
  default?: unknown;
  items?: Schema;
  examples?: unknown[];
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  exclusiveMaximum?: number;
};

export type Field = { name: string; required: boolean; help: string };

/** Cursor position: path of the parent, key of the value or null, and the text before it. */
export type Place = { path: string[]; key: string | null; typed: string };

const KEY = /^(\s*)(?:- )?([A-Za-z_][\w-]*):/;
const FLOW = /([A-Za-z_][\w-]*):\s*\{([^{}]*)$/;

/** Returns the fields that are allowed below a path. */
export function fieldsAt(schema: Schema, path: readonly string[]): Field[] {
  const fields = new Map<string, Field>();
  for (const form of formsAt(schema, path)) {
    for (const [name, field] of Object.entries(form.properties ?? {})) {
      if (fields.has(name)) continue;
      const required = form.required?.includes(name) ?? false;
      fields.set(name, { name, required, help: summary(schema, field) });
    }
  }
  return [...fields.values()];
}

/** Returns the values that a field can have, if they can be listed. */
export function valuesAt(schema: Schema, path: readonly string[]): string[] {
  const values = formsAt(schema, path).flatMap((form) => {
    if (form.enum) return form.enum;
    if (form.const !== undefined) return [form.const];
    if (form.type === "boolean") return [true, false];
    return form.examples ?? [];
  });
  return [...new Set(values.map(String))];
}

/** Returns the help text of a field. */
export function helpFor(schema: Schema, path: readonly string[]): string | null {
  const parent = formsAt(schema, path.slice(0, -1));
  const name = path.at(-1) ?? "";
  const field = parent.map((form) => form.properties?.[name]).find(Boolean);
  return field ? summary(schema, field) : null;
}

/** Returns all alternatives of a value, with references resolved. */
export function formsAt(schema: Schema, path: readonly string[]): Schema[] {
  let forms = formsOf(schema, schema);
  for (const part of path) {
    forms = forms.flatMap((form) => {
      const next = form.properties?.[part];
      return next ? formsOf(schema, next) : [];
    });
  }
  return forms;
}

function formsOf(root: Schema, schema: Schema): Schema[] {
  if (schema.$ref) {
    const target = root.$defs?.[schema.$ref.split("/").at(-1) ?? ""];
    return target ? formsOf(root, target) : [];
  }
  const choices = schema.anyOf ?? schema.oneOf;
  return choices ? choices.flatMap((each) => formsOf(root, each)) : [schema];
}

function summary(root: Schema, field: Schema): string {
  const forms = formsOf(root, field);
  const text = field.description ?? (forms.length === 1 ? forms[0]?.description : undefined);
  const parts = [
    text?.replaceAll("``", "").replaceAll("\n", " "),
    [...new Set(forms.map(kind).filter(Boolean))].join(" or "),
    field.default === undefined || field.default === null || typeof field.default === "object"
      ? ""
      : `default ${field.default}`,
  ];
  return parts.filter(Boolean).join("; ");
}

function kind(form: Schema): string {
  if (form.enum) return form.enum.join(", ");
  if (form.const !== undefined) return String(form.const);
  const low = form.minimum ?? form.exclusiveMinimum;
  const high = form.maximum ?? form.exclusiveMaximum;
  const word = form.type === "null" ? "" : (form.type ?? "");
  if (low === undefined && high === undefined) return word;
  if (high === undefined) return `${word} ${form.minimum === undefined ? "above" : "from"} ${low}`;
  return low === undefined ? `${word} up to ${high}` : `${word} from ${low} to ${high}`;
}

/** Returns the place at an offset, in block style or in braces on one line. */
export function placeAt(text: string, offset: number): Place {
  const start = text.lastIndexOf("\n", offset - 1) + 1;
  const before = text.slice(start, offset);
  const flow = FLOW.exec(before);
  const inner = flow ? (flow[2] ?? "").split(",").at(-1)?.trimStart() : before.trimStart();
  const indent = before.length - before.trimStart().length;
  const path = parents(text.slice(0, start), indent);
  if (flow?.[1]) path.push(flow[1]);
  const pair = /^(?:- )?([A-Za-z_][\w-]*):\s+(.*)$/.exec(inner ?? "");
  if (pair) return { path, key: pair[1] ?? null, typed: pair[2] ?? "" };
  return { path, key: null, typed: inner ?? "" };
}

/** Returns the parent fields, found by their smaller indentation. */
function parents(above: string, indent: number): string[] {
  const fields: string[] = [];
  let limit = indent;
  for (const line of above.split("\n").reverse()) {
    const match = KEY.exec(line);
    const own = match?.[1]?.length ?? limit;
    if (!match || own >= limit) continue;
    fields.unshift(match[2] ?? "");
    limit = own;
    if (limit === 0) break;
  }
  return fields;
}
