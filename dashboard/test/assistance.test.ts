import { CompletionContext } from "@codemirror/autocomplete";
import { yaml } from "@codemirror/lang-yaml";
import { EditorState } from "@codemirror/state";
import { expect, test } from "vitest";
import type { Schema } from "../src/lib/schema";
import { completions } from "../src/pages/submit/assistance";

const SCHEMA: Schema = {
  required: ["name"],
  properties: {
    name: { type: "string" },
    update: { properties: { codec: { enum: ["float32", "bfloat16"] } } },
  },
};

function at(text: string, explicit = false) {
  const state = EditorState.create({ doc: text, extensions: [yaml()] });
  return completions(SCHEMA, new CompletionContext(state, text.length, explicit));
}

test("completing a field replaces the typed text and adds a colon", () => {
  const result = at("name: x\nupdate:\n  co");
  expect(result?.from).toBe("name: x\nupdate:\n  ".length);
  expect(result?.options).toMatchObject([{ label: "codec", apply: "codec: " }]);
});

test("values are offered after their field", () => {
  expect(at("update:\n  codec: ")?.options.map((each) => each.label)).toEqual([
    "float32",
    "bfloat16",
  ]);
  expect(at("name: ")).toBeNull();
});

test("an empty line offers completions only on request", () => {
  expect(at("name: x\n")).toBeNull();
  expect(at("name: x\n", true)?.options.map((each) => each.label)).toEqual(["name", "update"]);
});
