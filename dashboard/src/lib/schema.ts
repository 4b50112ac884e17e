/** What a JSON schema says of the fields of a YAML file, as far as an editor needs it. */

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

export type Field = { name: string; required: boolean; says: string };

/** Where somebody types: behind which fields, whose value it is, and what of it is there. */
export type Place = { path: string[]; key: string | null; typed: string };

const KEY = /^(\s*)(?:- )?([A-Za-z_][\w-]*):/;
const FLOW = /([A-Za-z_][\w-]*):\s*\{([^{}]*)$/;

/** The fields that may stand below a path. */
export function fieldsAt(schema: Schema, path: readonly string[]): Field[] {
  const found = new Map<string, Field>();
  for (const form of formsAt(schema, path)) {
    for (const [name, field] of Object.entries(form.properties ?? {})) {
      if (found.has(name)) continue;
      const required = form.required?.includes(name) ?? false;
      found.set(name, { name, required, says: summary(schema, field) });
    }
  }
  return [...found.values()];
}

/** The values that a field may have, where they can be listed. */
export function valuesAt(schema: Schema, path: readonly string[]): string[] {
  const values = formsAt(schema, path).flatMap((form) => {
    if (form.enum) return form.enum;
    if (form.const !== undefined) return [form.const];
    if (form.type === "boolean") return [true, false];
    return form.examples ?? [];
  });
  return [...new Set(values.map(String))];
}

/** What is known of a field, on one line or more. */
export function described(schema: Schema, path: readonly string[]): string | null {
  const parent = formsAt(schema, path.slice(0, -1));
  const name = path.at(-1) ?? "";
  const field = parent.map((form) => form.properties?.[name]).find(Boolean);
  return field ? summary(schema, field) : null;
}

/** All forms that a value may have, references resolved. */
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

/** The place at an offset of a file in block style, or within braces on one line. */
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

/** The fields above that are less and less indented. */
function parents(above: string, indent: number): string[] {
  const found: string[] = [];
  let limit = indent;
  for (const line of above.split("\n").reverse()) {
    const match = KEY.exec(line);
    const own = match?.[1]?.length ?? limit;
    if (!match || own >= limit) continue;
    found.unshift(match[2] ?? "");
    limit = own;
    if (limit === 0) break;
  }
  return found;
}
