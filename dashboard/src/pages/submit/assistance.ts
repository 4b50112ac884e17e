import type { Completion, CompletionContext, CompletionResult } from "@codemirror/autocomplete";
import { yamlLanguage } from "@codemirror/lang-yaml";
import type { Extension } from "@codemirror/state";
import { hoverTooltip } from "@codemirror/view";
import { fieldsAt, helpFor, placeAt, type Schema, valuesAt } from "../../lib/schema";

/** Extension that completes fields and values and shows help on hover, once the schema is loaded. */
export function assistance(currentSchema: () => Schema | undefined): Extension {
  return [
    yamlLanguage.data.of({
      autocomplete: (context: CompletionContext) => {
        const schema = currentSchema();
        return schema ? completions(schema, context) : null;
      },
    }),
    hoverTooltip((view, at) => {
      const schema = currentSchema();
      if (!schema) return null;
      const text = view.state.doc.toString();
      const line = view.state.doc.lineAt(at);
      const name = /^\s*(?:- )?([A-Za-z_][\w-]*):/.exec(line.text);
      const from = line.from + (name?.[0].search(/\S/) ?? 0);
      const to = line.from + (name?.[0].length ?? 1) - 1;
      if (!name?.[1] || at < from || at > to) return null;
      const help = helpFor(schema, [...placeAt(text, from).path, name[1]]);
      return help ? { pos: from, end: to, create: () => ({ dom: tooltip(help) }) } : null;
    }),
  ];
}

export function completions(schema: Schema, context: CompletionContext): CompletionResult | null {
  const { path, key, typed } = placeAt(context.state.doc.toString(), context.pos);
  if (!typed && !context.explicit && key === null) return null;
  const options = key === null ? fields(schema, path) : values(schema, [...path, key]);
  return options.length
    ? { from: context.pos - typed.length, options, validFor: /^[\w.-]*$/ }
    : null;
}

function fields(schema: Schema, path: string[]): Completion[] {
  return fieldsAt(schema, path).map(({ name, required, help }) => ({
    label: name,
    apply: `${name}: `,
    type: "property",
    info: help || undefined,
    boost: required ? 1 : 0,
  }));
}

function values(schema: Schema, path: string[]): Completion[] {
  return valuesAt(schema, path).map((label) => ({ label, type: "constant" }));
}

function tooltip(text: string): HTMLElement {
  const dom = document.createElement("div");
  dom.textContent = text;
  dom.style.cssText = "max-width: 42ch; padding: 6px 10px; font-size: 12px;";
  return dom;
}
